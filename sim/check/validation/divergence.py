"""The first step at which a simulated and a live run of one workload differ in what they schedule, and why.

Step k of one run is compared with step k of the other: which requests were admitted and preempted, how many sequences
decoded, how many prompt tokens were computed. Until the first difference both schedulers got the same requests, but at
other times: most often a request had arrived before a step on one side and not yet on the other, because step times had
drifted apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchsim.base.units import format_duration
from batchsim.kernel.record import MISSING, PREEMPTED, PREFILL, RECOMPUTE, SWAPPED, Records

_WORK = (
    "num_decode",
    "num_decode_tokens",
    "num_chunks",
    "num_prefill_tokens",
    "num_sampled_chunks",
    "pad_prefill_tokens",
    "pad_prefill_rows",
    "pad_decode_rows",
    "num_preempted",
    "swap_blocks",
    "context_tokens",
    "num_passes",
    "num_wide_passes",
)
_CAME, _LOST = (PREFILL, RECOMPUTE), (PREEMPTED, SWAPPED)


@dataclass(frozen=True)
class Scheduled:
    """The work that one run scheduled in one step; `admitted` and `preempted` are request ids."""

    start_ns: int
    decodes: int
    chunks: int
    prefill_tokens: int
    admitted: tuple[int, ...]
    preempted: tuple[int, ...]

    def __str__(self) -> str:
        parts = [f"{self.decodes} decoding"] if self.decodes else []
        parts += [f"{self.prefill_tokens} prompt tokens in chunks: {self.chunks}"] if self.chunks else []
        parts += [f"lets in {_listed(self.admitted)}"] if self.admitted else []
        parts += [f"preempts {_listed(self.preempted)}"] if self.preempted else []
        return ", ".join(parts) or "nothing"


@dataclass(frozen=True)
class Divergence:
    """The first step (from 0) that differs. `cause`: `drafts`, `arrival`, `finish`, `memory`, `end` or `time rule`.

    `drift_ns`: how much later the live run began that step. `request` and `arrival_ns` are of the request that explains
    the difference, if one does; `text` says all of it in words. `simulated` or `live` is None for a run that has ended.
    """

    step: int
    cause: str
    text: str
    request: int | None
    arrival_ns: int | None
    drift_ns: int | None
    simulated: Scheduled | None
    live: Scheduled | None


def first_divergence(simulated: Records, live: Records) -> Divergence | None:
    """The first step at which `live` scheduled something else than `simulated`; None if all steps are equal."""
    ours, theirs = _Side(simulated), _Side(live)
    shared = min(len(ours.starts), len(theirs.starts))
    differs = np.zeros(shared, bool)
    for name in _WORK:
        differs |= simulated.steps[name][:shared] != live.steps[name][:shared]
    changes = {k for side, other in ((ours, theirs), (theirs, ours)) for k in side.changed_unlike(other)}
    unequal = [int(np.flatnonzero(differs)[0])] if differs.any() else []
    step = min([*unequal, *(k for k in changes if k < shared)], default=shared)
    if step == shared:
        if len(ours.starts) == len(theirs.starts):
            return None
        longer = "the simulation" if len(ours.starts) > shared else "the live run"
        text = f"equal for {shared} steps, then only {longer} goes on"
        return Divergence(step, "end", text, None, None, None, ours.at(step), theirs.at(step))
    return _explain(step, ours, theirs)


class _Side:
    """One of the two runs, step by step."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.starts = records.steps["start_ns"]
        self.entered_ns = records.requests["arrival_ns"] + records.requests["lag_ns"]
        self.admitted = self._by_step(_CAME)
        self.preempted = self._by_step(_LOST)

    def _by_step(self, kinds: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
        """Ids of the requests that changed to one of the states `kinds`, by the step that changed them.

        A change is recorded when the scheduler is asked; the step begins then or a little later.
        """
        rows = self.records.states
        rows = rows[np.isin(rows["state"], kinds)]
        steps = np.searchsorted(self.starts, rows["time_ns"], side="left")
        requests: dict[int, list[int]] = {}
        for step, request in zip(steps.tolist(), rows["request_id"].tolist(), strict=True):
            requests.setdefault(step, []).append(request)
        return {step: tuple(sorted(ids)) for step, ids in requests.items()}

    def changed_unlike(self, other: _Side) -> list[int]:
        """Steps in which this run admitted or preempted other requests than `other` did."""
        return [k for k, ids in self.admitted.items() if other.admitted.get(k) != ids] + [
            k for k, ids in self.preempted.items() if other.preempted.get(k) != ids
        ]

    def at(self, step: int) -> Scheduled | None:
        if step >= len(self.starts):
            return None
        row = self.records.steps[step]
        return Scheduled(
            int(row["start_ns"]),
            int(row["num_decode"]),
            int(row["num_chunks"]),
            int(row["num_prefill_tokens"]),
            self.admitted.get(step, ()),
            self.preempted.get(step, ()),
        )

    def end_before(self, step: int) -> int:
        """End of the step before `step`, ns; 0 before the first."""
        before = self.records.steps[step - 1] if step else None
        return 0 if before is None else int(before["start_ns"] + before["duration_ns"])

    def ended_by(self, ns: int) -> NDArray[np.int64]:
        """Ids of the requests that had ended at time `ns`."""
        requests = self.records.requests
        ended = requests["ended_ns"]
        return requests["request_id"][(ended != MISSING) & (ended <= ns)]


def _explain(step: int, ours: _Side, theirs: _Side) -> Divergence:
    """The reason why step `step`, which both runs have, differs."""
    simulated, live = ours.at(step), theirs.at(step)
    assert simulated is not None and live is not None
    drift_ns = live.start_ns - simulated.start_ns
    times = f"step {step} began at {_at(simulated.start_ns)} simulated and {_at(live.start_ns)} live"
    times += f" ({format_duration(abs(drift_ns))} {'later' if drift_ns > 0 else 'earlier'})" if drift_ns else ""
    text = f"simulated: {simulated}; live: {live}"
    request = arrival_ns = None
    ended = set(ours.ended_by(simulated.start_ns).tolist()) ^ set(theirs.ended_by(live.start_ns).tolist())
    row = _came_between(step, ours, theirs)
    if (words := _unlike_drafts(step, ours, theirs)) is not None:
        cause, why = "drafts", words
    elif row is not None:
        cause = "arrival"
        request = int(ours.records.requests["request_id"][row])
        arrival_ns = int(ours.records.requests["arrival_ns"][row])
        in_time = "the simulation" if ours.entered_ns[row] <= simulated.start_ns else "the live run"
        why = f"request {request} arrived at {_at(arrival_ns)}, in time for {in_time} alone"
        lag_ns = int(theirs.entered_ns[row]) - arrival_ns
        why += f" (live it was handed over {format_duration(lag_ns)} late)" if lag_ns else ""
    elif ended:
        cause, request = "finish", min(ended)
        why = f"request {request} had ended on one side only"
    elif simulated.preempted != live.preempted or _free(ours, step) != _free(theirs, step):
        cause = "memory"
        why = f"KV blocks free: {_free(ours, step)} simulated, {_free(theirs, step)} live"
    else:
        cause, why = "time rule", "both knew the same requests: a rule of the policy that looks at the time"
    return Divergence(step, cause, f"{times}; {why}. {text}", request, arrival_ns, drift_ns, simulated, live)


def _unlike_drafts(step: int, ours: _Side, theirs: _Side) -> str | None:
    """How many drafts were found or right, where that was not the same on both sides up to `step`; else None."""
    simulated, live = ours.records.steps[: step + 1], theirs.records.steps[: step + 1]
    same_decodes = simulated["num_decode"][-1] == live["num_decode"][-1]
    if same_decodes and simulated["num_decode_tokens"][-1] != live["num_decode_tokens"][-1]:
        supposed, measured = (rows["num_decode_tokens"][-1] - rows["num_decode"][-1] for rows in (simulated, live))
        return f"drafts in it: {supposed} simulated, {measured} live"
    supposed, measured = (rows["num_accepted_tokens"][:-1] for rows in (simulated, live))
    if np.array_equal(supposed, measured):
        return None
    return f"draft tokens accepted before it: {supposed.sum()} simulated, {measured.sum()} live"


def _came_between(step: int, ours: _Side, theirs: _Side) -> int | None:
    """The row of the request that arrived in time for the step in one run alone; None without one.

    Of several, requests that one run alone admitted come first, then the earliest arrival. Live the scheduler is asked
    a little before the step starts, and does not know a request that came between the two.
    """
    requests, simulated, live = ours.records.requests, ours.at(step), theirs.at(step)
    assert simulated is not None and live is not None
    unlike = np.isin(requests["request_id"], list(set(simulated.admitted) ^ set(live.admitted)))
    known_here, known_there = ours.entered_ns <= simulated.start_ns, theirs.entered_ns <= live.start_ns
    as_it_began = unlike & known_there & (theirs.entered_ns > theirs.end_before(step))
    rows = np.flatnonzero((known_here != known_there) | as_it_began)
    if not len(rows):
        return None
    telling = rows[unlike[rows]]
    chosen = telling if len(telling) else rows
    return int(chosen[np.argmin(requests["arrival_ns"][chosen])])


def _free(side: _Side, step: int) -> int:
    return int(side.records.steps["free_blocks"][step])


def _at(ns: int) -> str:
    return f"{ns / 1e9:.6f} s"


def _listed(ids: tuple[int, ...], most: int = 6) -> str:
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return ", ".join(map(str, ids[:most])) + more
