"""Measured files of other engines beside simulations of their requests: errors, shift of the load, where they part.

The figures of both sides come from one function, `MeasuredRequests.figures`. Several files of the same run are its
repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from batchsim.base.units import NS_PER_S, format_duration
from batchsim.check.measured.client_faults import in_flight
from batchsim.check.measured.run import FIGURES, MISSING, OF, RATES, MeasuredRequests, MeasuredRun
from batchsim.check.validation.comparison import Comparison, MetricError, Parting
from batchsim.check.validation.cost_ends import cost_ends
from batchsim.check.validation.load_shift import load_shifts
from batchsim.check.validation.replay import Replay, replay, simulated_requests
from batchsim.metrics.stability import is_unstable
from batchsim.scenario.config import PolicySpec
from batchsim.scenario.point import Run
from batchsim.scenario.setup import Setup

PARTED = 0.10
"""Share by which a latency of one request must differ for it to have parted."""
PARTED_NS = 1_000_000
"""And by how many ns: clocks and networks are no better. TTFT must differ by more than the step that was running."""
FLIGHT = 0.05
"""Share by which the mean number in flight must differ for it to be the cause."""
SHIFTED = ("ttft_mean_s", "tpot_mean_s", "e2e_mean_s")
FEWEST_USERS = 20
"""Users of a closed loop below which a share more or less of them is none."""
_BEYOND = 20  # observations beyond a percentile below which it is chance


def compare(setup: Setup, spec: PolicySpec, runs: Sequence[MeasuredRun], *, shift: bool = True) -> Comparison:
    """`runs`, repeats of one, beside their simulations under `spec`. MeasuredError where one cannot be replayed."""
    replays = tuple(replay(setup, run) for run in runs)
    played = [one.simulate(spec) for one in replays]
    simulated = tuple(map(simulated_requests, played))
    first = replays[0]

    def at_factor(factor: float) -> tuple[dict[str, float | None], bool]:
        others = [replace(one, setup=one.setup.stretched(factor)).simulate(spec) for one in replays]
        means = _means(replays, [simulated_requests(other) for other in others])
        return means, is_unstable(others[0].records.requests, others[0].window_ns)

    ends = cost_ends(setup.cost_error, at_factor) if first.open else {}
    means = _means(replays, simulated)
    played_runs = [one.run for one in replays]
    count = sum(map(len, simulated))
    errors = tuple(
        MetricError.of(name, means[name], played_runs, few=_is_few(name, count), ends=ends) for name in FIGURES
    )
    targets = {one.name: one.live for one in errors if one.name in SHIFTED and one.live is not None}
    scales = first.open or (first.run.client.arrivals == "closed" and (first.limit or 0) >= FEWEST_USERS)
    shifts: dict[str, float | None] = {}
    if shift and scales and targets:
        shifts = load_shifts(lambda at: _figures(first, simulated_requests(first.simulate(spec, at))), 1.0, targets)
    return Comparison(
        policy=spec.name,
        part=first.run.part,
        runs=tuple(played_runs),
        simulated=simulated,
        errors=errors,
        shifts=shifts,
        cost_error=setup.cost_error,
        grows=first.open and is_unstable(played[0].records.requests, played[0].window_ns),
        parting=parting(first, played[0]),
        notes=_notes(replays, simulated),
    )


def _is_few(name: str, count: int) -> bool:
    """Whether the figure is a percentile that fewer than _BEYOND of `count` requests lie beyond."""
    percent = next((percent for of, percent in OF.items() if percent and f"_{of}_" in name), None)
    return percent is not None and count * (100 - percent) < _BEYOND * 100


def _notes(replays: Sequence[Replay], simulated: Sequence[MeasuredRequests]) -> tuple[str, ...]:
    """What is to be known of the files and of the replay, each line once."""
    notes = [note for one in replays for note in (*one.run.notes, *one.notes)]
    lost = sum(one.unfinished(requests) for one, requests in zip(replays, simulated, strict=True))
    notes += [f"in simulation {lost:,} requests did not finish: their latencies are no figures"] if lost else []
    return tuple(dict.fromkeys(notes))


def _figures(one: Replay, simulated: MeasuredRequests) -> dict[str, float | None]:
    """The simulation's figures over the requests of the measured figures, each latency over the requests measured with
    it."""
    measured = one.run.requests
    figures = simulated.figures()
    if measured is not None and len(one.index) == len(simulated):
        measured = measured.picked(one.index)
        both = replace(simulated, ok=simulated.ok & measured.ok)
        latencies_ns = {
            name: np.where(getattr(measured, name) < 0, MISSING, getattr(simulated, name))
            for name in ("ttft_ns", "e2e_ns")
        }
        latencies, rates = replace(both, **latencies_ns).figures(), both.figures()
        figures = latencies | {name: rates[name] for name in RATES if name in rates}
    return {name: figures.get(name) for name in FIGURES}


def _means(replays: Sequence[Replay], simulated: Sequence[MeasuredRequests]) -> dict[str, float | None]:
    """The simulations' figures, means over repeats; None where one lacks it."""
    repeats = [_figures(one, requests) for one, requests in zip(replays, simulated, strict=True)]
    columns = {name: [figures[name] for figures in repeats] for name in FIGURES}
    return {name: None if None in values else float(np.mean(values)) for name, values in columns.items()}  # type: ignore[arg-type]


def parting(one: Replay, played: Run) -> Parting | None:
    """The first request whose TTFT or TPOT parts by PARTED; None where none does, or requests are not known."""
    measured = one.run.requests
    if measured is None:
        return None
    measured, simulated = measured.picked(one.index), simulated_requests(played)
    partings: list[tuple[int, str]] = []
    for latency in ("ttft", "tpot"):
        simulated_s, measured_s = simulated.latency_s(latency), measured.latency_s(latency)
        whole = np.maximum(measured.output_tokens - 1, 1) if latency == "tpot" else 1
        off = np.abs(simulated_s - measured_s)
        blurred_s = PARTED_NS / NS_PER_S if latency == "tpot" else _running_step_s(played, simulated)
        parted = np.flatnonzero((measured_s > 0) & (off > PARTED * measured_s) & (off * whole > blurred_s))
        if len(parted):
            partings.append((int(parted[0]), latency))
    if not partings:
        return None
    row, latency = min(partings, key=lambda one: one[0])  # of one request TTFT comes first
    return _explained(one, played, measured, simulated, row, latency)


def _running_step_s(played: Run, simulated: MeasuredRequests) -> NDArray[np.float64]:
    """How long the step took that ran when each request was sent: whether it came before or after is chance."""
    assert simulated.sent_ns is not None, "of a simulation"
    steps = played.records.steps
    at = np.searchsorted(steps["start_ns"], simulated.sent_ns, "right") - 1
    ends_ns = (steps["start_ns"] + steps["duration_ns"])[at]
    running = (at >= 0) & (ends_ns > simulated.sent_ns)
    return np.maximum(np.where(running, steps["duration_ns"][at], 0), PARTED_NS) / NS_PER_S


def _explained(
    one: Replay, played: Run, measured: MeasuredRequests, simulated: MeasuredRequests, row: int, latency: str
) -> Parting:
    """The parting at request `row` of both sides, with its cause."""
    request = np.sort(played.records.requests, order="request_id")[row]
    here, there = (float(side.latency_s(latency)[row]) for side in (simulated, measured))
    others = [_in_flight(side, row, latency) for side in (measured, simulated)]
    waited_ns = int(request["scheduled_ns"] - request["arrival_ns"])
    prompt_ns = int(request["first_token_ns"] - request["scheduled_ns"])
    preempted = int(request["num_preemptions"])
    sent_ns = 0 if measured.sent_ns is None else int(measured.sent_ns[row])
    when = "when it was sent" if latency == "ttft" else "while it decoded"
    unlike = others[0] is not None and others[1] is not None and abs(others[1] - others[0]) > FLIGHT * others[0]
    if preempted:
        cause, why = "preempted", f"in simulation it was preempted ({preempted}), for want of KV blocks"
    elif unlike:
        flight = f"{others[0]:.3g} requests in flight {when} measured, {others[1]:.3g} simulated"
        cause, why = "load", f"{flight}: small differences before have added up"
    elif latency == "ttft" and waited_ns > prompt_ns:
        cause, why = "queue", f"in simulation it waited {format_duration(waited_ns)} until it was scheduled"
    elif latency == "ttft":
        cause, why = "prompt", f"simulated steps of its prompt took {format_duration(prompt_ns)}: their times are off"
    else:
        cause, why = "decode", "simulated decode steps are off"
    cached = int(request["cached_tokens"])
    of_it = f"{int(request['prompt_tokens']):,} prompt tokens" + (
        f", {cached:,} of them cached in simulation" * bool(cached)
    )
    number = int(one.index[row])
    text = (
        f"request {number} (sent at {sent_ns / NS_PER_S:.3f} s, {of_it}): {latency.upper()} {there:.4g} s measured,"
        f" {here:.4g} s simulated ({100 * (here / there - 1):+.0f} %); {why}"
    )
    if not unlike and others[0] is not None:
        text += f"; {others[0]:.3g} in flight {when} on both sides"
    return Parting(number, sent_ns / NS_PER_S, latency, there, here, cause, text)


def _in_flight(side: MeasuredRequests, row: int, latency: str) -> float | None:
    """The number of requests in flight when `row` was sent, for its TPOT the mean from its first token to its last;
    None where sendings are not known."""
    if side.sent_ns is None:
        return None
    sent_ns = int(side.sent_ns[row])
    if latency == "ttft":
        return float(in_flight(side)[row])
    start_ns, end_ns = sent_ns + int(side.ttft_ns[row]), sent_ns + int(side.e2e_ns[row])
    ends_ns = np.where(side.ok & (side.e2e_ns >= 0), side.sent_ns + side.e2e_ns, side.sent_ns)
    shared = np.clip(np.minimum(ends_ns, end_ns) - np.maximum(side.sent_ns, start_ns), 0, None)
    return float(shared.sum()) / max(end_ns - start_ns, 1)
