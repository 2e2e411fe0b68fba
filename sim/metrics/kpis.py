"""How the engine was used, and what bound it: the values of the engine's metrics in `batchsim.metrics.table`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from batchsim.base.units import NS_PER_S
from batchsim.drive.fleet.fleet_plan import HELD
from batchsim.kernel.record import FINISHED, MISSING
from batchsim.metrics.host_lane import ends_before_ns, host_waits_ns
from batchsim.metrics.point_inputs import FleetInputs, PointInputs, between

PAD_BOUND_SHARE = 1 / 3
"""From this share of padded token rows on, `padding` is named instead of a kernel term: our choice, half of the useful
rows again is more than any kernel term could win back."""

LOAD_QUEUED_SHARE = 0.1
"""Below this share of the requests' time spent in the queue, only the load bounds the engine: our choice."""

_STEP_BOUNDS = {
    "weights": "weights",
    "kv_reads": "KV reads",
    "matmul": "matmul",
    "attention": "matmul",  # arithmetic too
    "swap": "swap",
    "host": "host",
    "draft": "drafting",
    "other": "",  # constants, or a cost that is stated and not explained
}
_QUEUE_BOUNDS = {
    "no_slot": "slots",
    "batch_running": "slots",  # nobody joins a running batch: all its rows are taken
    "kv_blocks": "KV",
    "preemption": "KV",
    "in_flight": "KV",  # preempted
    "swap_in_first": "KV",
    "token_budget": "token budget",
    "batch_window": "batch window",
}


def engine_kpis(inputs: PointInputs, cohort: NDArray[np.bool_], span_ns: tuple[int, int]) -> dict[str, float | None]:
    """The metrics of the engine, and of replicas where there are several, by name; None where one is not defined."""
    steps, requests = inputs.records.step_columns, inputs.records.requests[cohort]
    start, end = span_ns
    starts, ends = steps["start_ns"], steps["start_ns"] + steps["duration_ns"]
    alone_ns = np.maximum(starts, ends_before_ns(inputs.records))
    busy_ns = np.clip(np.minimum(ends, end) - np.maximum(alone_ns, start), 0, None)
    inside = (starts >= start) & (starts < end)
    num_steps = int(inside.sum())
    blocks = inputs.blocks_of_steps
    used = blocks - steps["free_blocks"]
    utilisation = used / blocks

    def total(*names: str) -> int:
        return sum(int(steps[name][inside].sum()) for name in names)

    useful, padded = total("num_prefill_tokens", "num_decode_tokens"), total("pad_prefill_tokens", "pad_decode_rows")
    slots = inputs.max_num_seqs
    terms, duration_ns = inputs.cost_terms, np.maximum(ends - alone_ns, 0)[inside]
    return {
        "slot_occupancy": None if slots is None else _mean(steps["num_running"] / slots, busy_ns),
        "pad_share": _ratio(padded, useful + padded),
        "kv_utilisation_mean": _mean(utilisation, busy_ns),
        "kv_utilisation_p99": _quantile(utilisation, busy_ns, 0.99),
        "kv_utilisation_peak": float(utilisation[inside].max()) if num_steps else None,
        "kv_fragmentation": _fragmentation(inputs, used, busy_ns),
        "preemption_rate": _ratio(int(requests["num_preemptions"].sum()), len(requests)),
        "recomputed_tokens": float(requests["recomputed_tokens"].sum()),
        "prefix_hit_rate": _hit_rate(requests) if inputs.has_prefix_cache else None,
        "swapped_blocks": float(total("swap_blocks")),
        "engine_busy_share": _ratio(int(busy_ns.sum()), inputs.engine_ns(span_ns)),
        **_host_kpis(inputs, span_ns),
        "mfu": _use(terms, "flops", inside, inputs.peak_of_steps("peak_flops"), duration_ns),
        "mbu": _use(terms, "bytes", inside, inputs.peak_of_steps("memory_bandwidth"), duration_ns),
        **_energy_kpis(inputs, busy_ns, span_ns),
        "mean_batch": _ratio(total("num_decode", "num_chunks"), num_steps),
        **_draft_kpis(total("num_decode"), total("num_decode_tokens"), total("num_accepted_tokens"), useful),
        "num_steps": float(num_steps),
        **({} if inputs.fleet is None else _fleet_kpis(inputs.fleet, requests, span_ns)),
    }


def _host_kpis(inputs: PointInputs, span_ns: tuple[int, int]) -> dict[str, float | None]:
    """The metrics that only engines ahead of results have, by name; None without any."""
    records = inputs.records
    if not len(records.lanes):
        return {"host_bound_share": None, "wasted_tokens": None}
    starts = records.step_columns["start_ns"]
    waited_ns = np.minimum(starts, span_ns[1]) - np.maximum(starts - host_waits_ns(records), span_ns[0])
    inside = (starts >= span_ns[0]) & (starts < span_ns[1])
    return {
        "host_bound_share": _ratio(int(np.maximum(waited_ns, 0).sum()), inputs.engine_ns(span_ns)),
        "wasted_tokens": float(records.lanes["wasted_tokens"][inside].sum()),
    }


def _energy_kpis(inputs: PointInputs, busy_ns: NDArray[np.int64], span_ns: tuple[int, int]) -> dict[str, float | None]:
    """The metrics of energy while steps run, by name; None where their power is not known."""
    if inputs.step_watts is None:
        return {"power_w": None, "energy_j_per_output_token": None}
    requests = inputs.records.requests
    done = (requests["outcome"] == FINISHED) & between(requests["delivered_ns"], span_ns)
    joules = float(inputs.step_watts @ busy_ns) / NS_PER_S
    return {
        "power_w": _ratio(joules, float(busy_ns.sum()) / NS_PER_S),
        "energy_j_per_output_token": _ratio(joules, int(requests["output_tokens"][done].sum())),
    }


def _draft_kpis(decodes: int, rows: int, accepted: int, computed: int) -> dict[str, float | None]:
    """The metrics of draft tokens, by name; None without any. `computed`: tokens of all kinds, padding aside."""
    if rows == decodes:
        return {"acceptance_length": None, "rejected_share": None}
    return {
        "acceptance_length": _ratio(decodes + accepted, decodes),
        "rejected_share": _ratio(rows - decodes - accepted, computed),
    }


def _fleet_kpis(fleet: FleetInputs, requests: NDArray[np.void], span_ns: tuple[int, int]) -> dict[str, float | None]:
    """The metrics that only several replicas have, by name."""
    held_ns = int(fleet.replica_ns(span_ns, HELD).sum())
    starts = {max(span.start_ns, span_ns[0]) for span in fleet.spans}
    at_once = [sum(span.start_ns <= at < span.end_ns for span in fleet.spans) for at in starts if at < span_ns[1]]
    return {
        "replica_seconds": held_ns / NS_PER_S,
        "num_replicas_mean": _ratio(held_ns, span_ns[1] - span_ns[0]),
        "num_replicas_max": float(max(at_once)) if at_once else None,
        "retries": float(requests["num_retries"].sum()),
    }


def bound_by(
    inputs: PointInputs, values: Mapping[str, float | None], part_ns: Mapping[str, int], span_ns: tuple[int, int]
) -> str:
    """What bound the run, in a word or two. `load`: its requests hardly queued, more could have come; `nothing ended`:
    none of the cohort finished.

    Else what took most of the steps' time (`padding, weights, KV reads, matmul, host, swap`; left out without cost
    terms) and the reason for which the cohort's finished requests queued longest (`slots, KV, token budget, ...`).
    """
    queued: Counter[str] = Counter()
    for part, ns in part_ns.items():
        name, _, reason = part.partition(":")
        if name == "queued" and ns:
            queued[_QUEUE_BOUNDS.get(reason, reason.replace("_", " "))] += ns
    if not sum(part_ns.values()):
        return "nothing ended"
    if sum(queued.values()) <= LOAD_QUEUED_SHARE * sum(part_ns.values()):
        return "load"
    held_by = queued.most_common(1)[0][0]
    step_bound = _step_bound(inputs, values, span_ns)
    return f"{step_bound}, {held_by}" if step_bound else held_by


def _step_bound(inputs: PointInputs, values: Mapping[str, float | None], span_ns: tuple[int, int]) -> str:
    """What took the largest share of the steps' time, and of the time that an engine ahead waited for its host; ""
    where the cost model does not explain it."""
    if (values["pad_share"] or 0) >= PAD_BOUND_SHARE:
        return "padding"
    if inputs.cost_terms is None:
        return ""
    starts = inputs.records.step_columns["start_ns"]
    inside = (starts >= span_ns[0]) & (starts < span_ns[1])
    shares = dict.fromkeys(_STEP_BOUNDS.values(), 0.0)
    for term, name in _STEP_BOUNDS.items():
        if term in inputs.cost_terms:
            shares[name] += float(np.sum(inputs.cost_terms[term][inside]))
    shares["host"] += float(host_waits_ns(inputs.records)[inside].sum())
    return max(shares, key=lambda name: shares[name])


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _hit_rate(requests: NDArray[np.void]) -> float | None:
    """Tokens found in the prefix cache over the tokens that all admissions needed; None where nobody was admitted."""
    admitted = requests[requests["scheduled_ns"] != MISSING]
    found, first = int(admitted["cached_tokens_all"].sum()), int(admitted["cached_tokens"].sum())
    needed = int(admitted["prompt_tokens"].sum()) + int(admitted["recomputed_tokens"].sum()) + found - first
    return _ratio(found, needed)


def _mean(values: NDArray[np.float64], weights: NDArray[np.int64]) -> float | None:
    total = weights.sum()
    return float((values * weights).sum() / total) if total else None


def _quantile(values: NDArray[np.float64], weights: NDArray[np.int64], share: float) -> float | None:
    """The smallest value not exceeded for that share of the weights."""
    if not weights.sum():
        return None
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(below, share * below[-1])]])


def _fragmentation(inputs: PointInputs, used: NDArray[np.int64], busy_ns: NDArray[np.int64]) -> float | None:
    steps = inputs.records.step_columns
    if steps["cached_tokens"].any():
        return None
    known = (steps["num_chunks"] == 0) & (steps["num_decode"] > 0) & (steps["num_decode"] == steps["num_running"])
    tokens = (steps["context_tokens"] + steps["num_decode"])[known]  # the step's own tokens have their room already
    room = used[known].astype(np.int64) * inputs.block_size
    return _mean(1 - tokens / np.maximum(room, 1), busy_ns[known])


def _use(
    terms: Mapping[str, NDArray[np.float64]] | None,
    name: str,
    inside: NDArray[np.bool_],
    peak_per_s: float | NDArray[np.float64] | None,
    duration_ns: NDArray[np.int64],
) -> float | None:
    """Work done / (peak × time); None where the cost model does not count it."""
    if terms is None or name not in terms or peak_per_s is None or not len(duration_ns):
        return None
    if isinstance(peak_per_s, np.ndarray):
        could = float(peak_per_s[inside] @ duration_ns) / NS_PER_S
    else:
        could = peak_per_s * (int(duration_ns.sum()) / NS_PER_S)
    return float(np.sum(terms[name][inside])) / could
