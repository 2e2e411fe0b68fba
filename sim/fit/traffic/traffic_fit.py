"""A recorded trace as random traffic: the `workload` of a scenario that needs no trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from batchsim.base.errors import TraceError
from batchsim.base.units import NS_PER_S
from batchsim.fit.traffic.arrival_fit import ArrivalFit, fit_arrivals
from batchsim.fit.traffic.length_fit import fit_lengths
from batchsim.fit.traffic.load_file import cap_above
from batchsim.fit.traffic.session_fit import SessionFit, fit_sessions
from batchsim.workload.lengths import PairLengths, StepLengths
from batchsim.workload.traces.trace_rows import Ints, TraceRows
from batchsim.workload.workload_config import TrafficClass, WorkloadConfig


@dataclass(frozen=True)
class TrafficFit:
    """The fit to `rows`: `arrivals`, the likeliest of each law, the chosen one first, and `workload`.

    `first` are the rows whose times were fitted: the first of each session, or all; `prompt_tokens` is what each row's
    prompt adds to those before it in its session. `notes` lists properties of the trace that the fit lacks.
    """

    rows: TraceRows
    first: Ints
    prompt_tokens: Ints
    arrivals: tuple[ArrivalFit, ...]
    workload: WorkloadConfig
    notes: tuple[str, ...]


def fit_traffic(rows: TraceRows, tell: Callable[[str], None] | None = None) -> TrafficFit:
    """The traffic fitted to the rows of a trace. TraceError where it has no times, or too few rows."""
    if rows.arrival_ns is None:
        raise TraceError(f"{rows.source}: has no arrival times to fit. Use its lengths: lengths: {{kind: trace}}.")
    notes: list[str] = []
    sessions: SessionFit | None = None
    if rows.linked:
        sessions, notes = fit_sessions(rows)
    first = np.arange(len(rows)) if sessions is None else sessions.first
    starts_ns = rows.arrival_ns[first]
    try:
        fits, arrival_notes = fit_arrivals(starts_ns - starts_ns[0], tell)
    except TraceError as error:
        raise TraceError(f"{rows.source}: {error}") from None
    prompt_tokens = rows.prompt_tokens if sessions is None else sessions.own_tokens
    classes, lengths = _lengths(rows, prompt_tokens)
    process = fits[0].process
    workload = WorkloadConfig(
        arrivals=replace(process, mean_rate=_digits(process.mean_rate * len(rows) / len(first))),  # type: ignore[arg-type]
        output_cap=cap_above(int(rows.output_tokens.max())),
        lengths=lengths,
        duration=int(math.ceil(int(rows.arrival_ns[-1]) / NS_PER_S) * NS_PER_S),
        classes=classes,
        sessions=None if sessions is None else sessions.sessions,
    )
    notes += [*rows.notes, *arrival_notes, *(sessions.notes if sessions else ()), *_left_out(rows)]
    return TrafficFit(rows, first, prompt_tokens, tuple(fits), workload, tuple(notes))


def _lengths(rows: TraceRows, prompt_tokens: Ints) -> tuple[dict[str, TrafficClass], PairLengths | StepLengths | None]:
    """The law of lengths of each class of the rows, or that of all rows where they have no classes."""
    assert rows.arrival_ns is not None, "checked before"
    counts = rows.class_counts
    if not counts:
        return {}, fit_lengths(prompt_tokens, rows.output_tokens, rows.arrival_ns)
    codes, names = rows.labels["request_class"], rows.texts["request_class"]
    priorities = rows.labels.get("priority")
    classes: dict[str, TrafficClass] = {}
    for name, count in sorted(counts.items()):
        in_class = codes == names.index(name)
        # One priority a class: that of most of its rows.
        priority = 0 if priorities is None else int(np.bincount(priorities[in_class] - priorities.min()).argmax())
        priority += 0 if priorities is None else int(priorities.min())
        lengths = fit_lengths(prompt_tokens[in_class], rows.output_tokens[in_class], rows.arrival_ns[in_class])
        classes[name] = TrafficClass(share=count / len(rows), priority=priority, lengths=lengths)
    return classes, None


def _left_out(rows: TraceRows) -> list[str]:
    """Notes on properties of the rows that the fit lacks."""
    notes: list[str] = []
    if rows.hash_ids is not None:
        notes.append(
            f"prompts share {100 * rows.hash_ids.reused_share:.1f} % of their units with earlier rows, which the fit"
            " does not: add shared_prefix, or replay the trace, where a prefix cache counts"
        )
    labels = [name for name in ("tenant", "deadline", "task") if name in rows.labels]
    if labels:
        notes.append(f"{' and '.join(labels)} of the rows are not in the fit")
    return notes


def _digits(value: float) -> float:
    return float(f"{value:.6g}")
