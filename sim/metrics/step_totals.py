"""What the steps of engines add up to within a span: all that the metrics of engines ask of them.

Totals of several engines add up, so that they can be taken engine by engine, and the steps be forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from batchsim.base.units import NS_PER_S
from batchsim.kernel.record import Records
from batchsim.metrics.host_lane import ends_before_ns, host_waits_ns

Weighted = tuple[NDArray[np.float64], NDArray[np.int64]]
"""Values, and the ns for which each held."""

_COUNTED = ("num_prefill_tokens", "num_decode_tokens", "pad_prefill_tokens", "pad_decode_rows", "swap_blocks")
_COUNTED += ("num_decode", "num_chunks", "num_accepted_tokens")
DUMMIES = "dummy_steps"
"""Among `counts`: steps of padding alone, which ranks that step together run for the others."""
_READ = {*_COUNTED, "start_ns", "duration_ns", "free_blocks", "num_running", "context_tokens", "cached_tokens"}
_PEAKS = {"flops": "peak_flops", "bytes": "memory_bandwidth"}
"""{term of a cost model's work: the property of a GPU that bounds it}."""


@dataclass(frozen=True)
class StepFacts:
    """What is known of the engines of steps: one number for one engine, else one a step; None where it is not known.

    As the fields of PointInputs with these names; `num_blocks` is the size of the KV pool that a step ran with.
    """

    num_blocks: int | NDArray[np.int64]
    block_size: int
    max_num_seqs: int | None = None
    terms: Mapping[str, NDArray[np.float64]] | None = None
    watts: NDArray[np.float64] | None = None
    idle_watts: float | NDArray[np.float64] | None = None
    peak_flops: float | NDArray[np.float64] | None = None
    memory_bandwidth: float | NDArray[np.float64] | None = None


@dataclass(frozen=True)
class StepTotals:
    """Sums over the steps that start in a span, or over the time of steps within it (`busy_ns`).

    `counts` are sums of columns. `slots_ns` and `utilisation_ns` are shares of the slots and of the KV blocks in use,
    times busy ns; `utilisation` the shares themselves; `fragmentation_ns` and `known_ns` are of the steps that say how
    full their blocks are. `joules` is the energy of the time of steps, `idle_joules` what the GPUs at rest would have
    drawn in it. `work` is that of the cost model's terms, `could` the most that the time had allowed.
    `host_ns` is how long no step ran for the host's sake before these steps, `waited_ns` the same within the span.
    """

    num_steps: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    busy_ns: int = 0
    slots_ns: float = 0.0
    utilisation_ns: float = 0.0
    utilisation: Weighted = (np.empty(0), np.empty(0, np.int64))
    utilisation_peak: float | None = None
    fragmentation_ns: float = 0.0
    known_ns: int = 0
    is_cached: bool = False
    joules: float | None = None
    idle_joules: float | None = None
    work: Mapping[str, float] | None = None
    could: Mapping[str, float | None] = field(default_factory=dict)
    is_ahead: bool = False
    host_ns: int = 0
    waited_ns: int = 0
    wasted_tokens: int = 0

    def count(self, *names: str) -> int:
        """The sum of some of `counts`."""
        return sum(self.counts.get(name, 0) for name in names)

    def packed(self) -> StepTotals:
        """These totals with each value of `utilisation` once."""
        values, at = np.unique(self.utilisation[0], return_inverse=True)
        weights = np.zeros(len(values), np.int64)
        np.add.at(weights, at, self.utilisation[1])
        return replace(self, utilisation=(values, weights))


def step_totals(records: Records, facts: StepFacts, span_ns: tuple[int, int], behind: int = 0) -> StepTotals:
    """The totals of the steps of `records` within the span, but for the first `behind` of them, which are those of a
    piece before."""
    (start, end), own_steps, ahead = span_ns, slice(behind, None), len(records.lanes) > 0
    steps = {name: records.step_columns[name][own_steps] for name in _READ}
    starts, ends = steps["start_ns"], steps["start_ns"] + steps["duration_ns"]
    alone_ns = np.maximum(starts, ends_before_ns(records)[own_steps])
    busy_ns = np.clip(np.minimum(ends, end) - np.maximum(alone_ns, start), 0, None)
    inside = (starts >= start) & (starts < end)
    num_steps = int(inside.sum())
    dummies = (steps["num_decode"] == 0) & (steps["num_chunks"] == 0) & (steps["pad_decode_rows"] > 0)
    used = facts.num_blocks - steps["free_blocks"]
    utilisation = used / facts.num_blocks
    known = (steps["num_chunks"] == 0) & (steps["num_decode"] > 0) & (steps["num_decode"] == steps["num_running"])
    tokens = (steps["context_tokens"] + steps["num_decode"])[known]  # the step's own tokens have their room already
    room = used[known].astype(np.int64) * facts.block_size
    terms = None if facts.terms is None else {name: values[own_steps] for name, values in facts.terms.items()}
    waits_ns = host_waits_ns(records)[own_steps] if ahead else np.zeros(0, np.int64)
    waited_ns = np.minimum(starts, end) - np.maximum(starts - waits_ns, start) if ahead else waits_ns
    return StepTotals(
        num_steps=num_steps,
        counts={name: int(steps[name][inside].sum()) for name in _COUNTED} | {DUMMIES: int((dummies & inside).sum())},
        busy_ns=int(busy_ns.sum()),
        slots_ns=0.0
        if facts.max_num_seqs is None
        else float((steps["num_running"] / facts.max_num_seqs * busy_ns).sum()),
        utilisation_ns=float((utilisation * busy_ns).sum()),
        utilisation=_weighted(used, facts.num_blocks, utilisation, busy_ns),
        utilisation_peak=float(utilisation[inside].max()) if num_steps else None,
        fragmentation_ns=float(((1 - tokens / np.maximum(room, 1)) * busy_ns[known]).sum()),
        known_ns=int(busy_ns[known].sum()),
        is_cached=bool(steps["cached_tokens"].any()),
        joules=None if facts.watts is None else float(facts.watts[own_steps] @ busy_ns) / NS_PER_S,
        idle_joules=_idle_joules(facts, own_steps, busy_ns),
        work=None if terms is None else {name: float(np.sum(values[inside])) for name, values in terms.items()},
        could=_could(facts, inside, np.maximum(ends - alone_ns, 0)[inside]),
        is_ahead=ahead,
        host_ns=int(waits_ns[inside].sum()) if ahead else 0,
        waited_ns=int(np.maximum(waited_ns, 0).sum()),
        wasted_tokens=int(records.lanes["wasted_tokens"][own_steps][inside].sum()) if ahead else 0,
    )


def _weighted(
    used: NDArray[np.int64], blocks: int | NDArray[np.int64], share: NDArray[np.float64], ns: NDArray[np.int64]
) -> Weighted:
    """The shares of a pool of `blocks` that were `used`, and for how long: each value once, where the pool is one."""
    if isinstance(blocks, np.ndarray) or not len(used):
        return share, ns
    least = used.min()
    held_ns = np.bincount(used - least, ns)
    values = np.flatnonzero(held_ns)
    return (values + least) / blocks, held_ns[values].astype(np.int64)


def _idle_joules(facts: StepFacts, own_steps: slice, busy_ns: NDArray[np.int64]) -> float | None:
    """J that the GPUs of the steps would draw in the time of these steps if they rested."""
    watts = facts.idle_watts
    if isinstance(watts, np.ndarray):
        return float(watts[own_steps] @ busy_ns) / NS_PER_S
    return None if watts is None else watts * (int(busy_ns.sum()) / NS_PER_S)


def _could(facts: StepFacts, inside: NDArray[np.bool_], duration_ns: NDArray[np.int64]) -> dict[str, float | None]:
    """The most work that the steps inside had time for, by term; None where a peak is not known."""
    most: dict[str, float | None] = {}
    for term, peak in _PEAKS.items():
        per_s = getattr(facts, peak)
        if isinstance(per_s, np.ndarray):
            most[term] = float(per_s[inside] @ duration_ns) / NS_PER_S
        else:
            most[term] = None if per_s is None else per_s * (int(duration_ns.sum()) / NS_PER_S)
    return most


def summed(parts: Iterable[StepTotals]) -> StepTotals:
    """The totals of several engines, of each replica or of all. What one of them does not know is not known."""
    each = list(parts)
    works = [part.work for part in each]
    known = [work for work in works if work is not None]
    names = [name for name in (known[0] if known else {}) if all(name in work for work in known)]
    peaks = [part.utilisation_peak for part in each if part.utilisation_peak is not None]
    return StepTotals(
        num_steps=sum(part.num_steps for part in each),
        counts={name: sum(part.count(name) for part in each) for name in _COUNTED},
        busy_ns=sum(part.busy_ns for part in each),
        slots_ns=sum(part.slots_ns for part in each),
        utilisation_ns=sum(part.utilisation_ns for part in each),
        utilisation=(
            np.concatenate([np.empty(0), *(part.utilisation[0] for part in each)]),
            np.concatenate([np.empty(0, np.int64), *(part.utilisation[1] for part in each)]),
        ),
        utilisation_peak=max(peaks, default=None),
        fragmentation_ns=sum(part.fragmentation_ns for part in each),
        known_ns=sum(part.known_ns for part in each),
        is_cached=any(part.is_cached for part in each),
        joules=_sum_known([part.joules for part in each], of_none=0.0),
        idle_joules=_sum_known([part.idle_joules for part in each], of_none=0.0),
        work=None if len(known) < len(works) else {name: sum(work[name] for work in known) for name in names},
        could={term: _sum_known([part.could.get(term) for part in each]) for term in _PEAKS},
        is_ahead=any(part.is_ahead for part in each),
        host_ns=sum(part.host_ns for part in each),
        waited_ns=sum(part.waited_ns for part in each),
        wasted_tokens=sum(part.wasted_tokens for part in each),
    )


def _sum_known(values: list[float | None], of_none: float | None = None) -> float | None:
    known = [value for value in values if value is not None]
    return (sum(known) if known else of_none) if len(known) == len(values) else None
