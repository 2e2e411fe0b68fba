"""Changes of the load of a trace: rescaled, or spread over a coarse clock's tick."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from batchsim.base.errors import TraceError
from batchsim.base.units import MAX_TIME_NS, format_duration
from batchsim.workload.traces.random_stream import random_stream
from batchsim.workload.traces.trace_config import RateScale
from batchsim.workload.traces.trace_rows import Ints, TraceRows

_MAX_ROWS = 10**8  # 24 bytes each: as much as a machine's memory holds


def rescale(rows: TraceRows, scale: RateScale, seed: int) -> TraceRows:
    """`rows` at `scale.factor` times the mean rate, with a note; `seed` matters for `thin` and `copies` only.

    The rows kept at a lower factor by these two are among those kept at a higher one. TraceError where the trace has
    no times, or nothing to scale.
    """
    arrival_ns = _times(rows, "rate_scale")
    if scale.by == "compress" and scale.factor == 1:
        return rows
    if scale.by == "compress":
        _period_ns(rows, arrival_ns, "compressed")
        note = f"every gap divided by {scale.factor:g}"
        _check_span(rows, int(arrival_ns[-1]) / scale.factor)
        scaled = replace(rows, arrival_ns=np.rint(arrival_ns / scale.factor).astype(np.int64))
    elif scale.by == "overlay":
        scaled, note = _overlay(rows, arrival_ns, int(scale.factor))
    elif scale.by == "copies":
        scaled, note = _copies(rows, arrival_ns, scale, seed)
    else:
        kept = np.flatnonzero(random_stream(seed, "trace thin").random(len(rows)) < scale.factor)
        if not len(kept):
            raise TraceError(
                f"{rows.source}: thinned by {scale.factor:g}, none of {len(rows):,} rows is left. Raise it."
            )
        note = f"{len(kept):,} of {len(rows):,} rows kept at random"
        scaled = _picked(rows, arrival_ns, kept)
    return replace(scaled, notes=(*rows.notes, f"rate × {scale.factor:g} by {scale.by}: {note}"))


def _overlay(rows: TraceRows, arrival_ns: Ints, copies: int) -> tuple[TraceRows, str]:
    """Copies of the trace, each shifted by its part of the period and wrapped around, so none runs in step."""
    period_ns = _period_ns(rows, arrival_ns, "overlaid")
    _check_count(rows, copies * len(rows))
    shifts_ns = [period_ns * copy // copies for copy in range(copies)]
    times = np.concatenate([(arrival_ns + shift) % period_ns for shift in shifts_ns])
    order = np.argsort(times, kind="stable")
    scaled = _picked(rows, times, order, order % len(rows), order // len(rows))
    apart = ", prompts shared inside a copy only" if rows.hash_ids is not None and copies > 1 else ""
    return scaled, f"{copies} copies, each shifted {format_duration(period_ns / copies)} from the one before{apart}"


def _copies(rows: TraceRows, arrival_ns: Ints, scale: RateScale, seed: int) -> tuple[TraceRows, str]:
    """Groups of `together` equal copies, each group moved by its own time; of the last one a random share of rows."""
    assert scale.shift is not None, "checked by the config"
    period_ns = _period_ns(rows, arrival_ns, "laid over each other")
    groups = scale.factor / scale.together
    whole, count = int(groups), math.ceil(groups)
    _check_count(rows, count * scale.together * len(rows))
    moves = random_stream(seed, "trace copies").random(count) * 2 - 1
    moves_ns = np.rint(moves * scale.shift).astype(np.int64)
    source = [np.arange(len(rows))] * whole
    if count > whole:
        kept = random_stream(seed, "trace copies share", block=whole).random(len(rows)) < groups - whole
        source.append(np.flatnonzero(kept))
    times = np.concatenate([(arrival_ns[s] + move) % period_ns for s, move in zip(source, moves_ns, strict=True)])
    group = np.repeat(np.arange(count), [len(s) for s in source])
    if not len(times):
        raise TraceError(f"{rows.source}: {scale.factor:g} of {len(rows):,} rows is none. Raise rate_scale.factor.")
    order = np.repeat(np.argsort(times, kind="stable"), scale.together)
    copies = group[order] * scale.together + np.tile(np.arange(scale.together), len(times))
    scaled = _picked(rows, times, order, np.concatenate(source)[order], copies)
    in_step = f", {scale.together} each in step" if scale.together > 1 else ""
    return scaled, f"{groups:g} copies{in_step}, each moved by up to {format_duration(scale.shift)} either way"


def spread(rows: TraceRows, jitter_ns: int, seed: int) -> TraceRows:
    """`rows` with arrivals spread uniformly over `[0, jitter_ns)` after their recorded times; their order is kept.

    A coarse clock hides where in its tick a row arrived, alone in it or not, so every row is moved. Draws are sorted
    together with the ticks: rows of one tick stay in file order.
    """
    arrival_ns = _times(rows, "jitter")
    draws_ns = random_stream(seed, "trace jitter").integers(0, jitter_ns, len(rows))
    moved = np.sort(arrival_ns + draws_ns)
    note = f"jitter: every arrival moved later by up to {format_duration(jitter_ns)}, order kept"
    return replace(rows, arrival_ns=moved - moved[0], notes=(*rows.notes, note))


def _check_span(rows: TraceRows, span_ns: float) -> None:
    if span_ns >= MAX_TIME_NS:
        raise TraceError(
            f"{rows.source}: scaled, it would last {format_duration(span_ns)}, more than the"
            f" {format_duration(MAX_TIME_NS)} that times can hold. Ask for less."
        )


def _check_count(rows: TraceRows, count: int) -> None:
    if count > _MAX_ROWS:
        raise TraceError(f"{rows.source}: {count:,} rows asked, at most {_MAX_ROWS:,} are made. Ask for fewer.")


def _times(rows: TraceRows, what: str) -> Ints:
    if rows.arrival_ns is None:
        raise TraceError(f"{rows.source}: has no arrival times for {what}. Drop it, or use another trace.")
    return rows.arrival_ns


def _period_ns(rows: TraceRows, arrival_ns: Ints, done: str) -> int:
    """The period in ns of a repeated trace: its span and a mean gap, so that rounds join at the mean rate."""
    span_ns = int(arrival_ns[-1] - arrival_ns[0])
    if span_ns == 0:
        raise TraceError(
            f"{rows.source}: all {len(rows):,} rows arrive at once; they cannot be {done}. Drop rate_scale."
        )
    return span_ns + max(1, round(span_ns / (len(rows) - 1)))


def _picked(
    rows: TraceRows, times: Ints, order: Ints, source: Ints | None = None, copies: Ints | None = None
) -> TraceRows:
    """The rows `source` (`order` itself by default) at `times[order]`, counted from the first."""
    arrival_ns = times[order]
    return rows.picked(order if source is None else source, arrival_ns - arrival_ns[0], copies)
