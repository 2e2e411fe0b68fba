"""How the engine was used, and what bound it: the values of the engine's metrics in `batchsim.metrics.table`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from batchsim.base.units import NS_PER_S
from batchsim.drive.fleet.fleet_plan import HELD
from batchsim.kernel.offload import LOAD, LOAD_QUEUE, LOADED
from batchsim.kernel.record import FINISHED, MISSING
from batchsim.metrics.point_inputs import FleetInputs, PointInputs, between
from batchsim.metrics.step_totals import DUMMIES, StepFacts, StepTotals, step_totals
from batchsim.workload.offline import OfflineLog

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
    "batch_running": "slots",  # no request joins a running batch: all its rows are taken
    "kv_blocks": "KV",
    "preemption": "KV",
    "in_flight": "KV",  # preempted
    "swap_in_first": "KV",
    "token_budget": "token budget",
    "prefill_interval": "prefill interval",
    "kv_storing": "KV loads",
    "kv_disk": "KV loads",
    LOAD_QUEUE: "KV loads",
    LOAD: "KV loads",
    LOADED: "KV loads",
    "batch_window": "batch window",
}


def totals_of(inputs: PointInputs, span_ns: tuple[int, int]) -> StepTotals:
    """What the steps add up to within the span: as they were digested, or from their rows."""
    if inputs.digest is not None:
        return inputs.digest.steps
    facts = StepFacts(
        num_blocks=inputs.blocks_of_steps,
        block_size=inputs.block_size,
        max_num_seqs=inputs.max_num_seqs,
        terms=inputs.cost_terms,
        watts=inputs.step_watts,
        idle_watts=inputs.peak_of_steps("idle_watts"),
        peak_flops=inputs.peak_of_steps("peak_flops"),
        memory_bandwidth=inputs.peak_of_steps("memory_bandwidth"),
    )
    return step_totals(inputs.records, facts, span_ns)


def engine_kpis(
    inputs: PointInputs, steps: StepTotals, cohort: NDArray[np.bool_], span_ns: tuple[int, int]
) -> dict[str, float | None]:
    """The metrics of the engine, and of replicas where there are several, by name; None where one is not defined.

    `steps` are the totals of the steps within the span."""
    requests = inputs.records.requests[cohort]
    useful = steps.count("num_prefill_tokens", "num_decode_tokens")
    padded = steps.count("pad_prefill_tokens", "pad_decode_rows")
    return {
        "slot_occupancy": None if inputs.max_num_seqs is None else _ratio(steps.slots_ns, steps.busy_ns),
        "pad_share": _ratio(padded, useful + padded),
        "kv_utilisation_mean": _ratio(steps.utilisation_ns, steps.busy_ns),
        "kv_utilisation_p99": _quantile(*steps.utilisation, 0.99),
        "kv_utilisation_peak": steps.utilisation_peak,
        "kv_fragmentation": None if steps.is_cached else _ratio(steps.fragmentation_ns, steps.known_ns),
        "preemptions": float(requests["num_preemptions"].sum()),
        "preemption_rate": _ratio(int(requests["num_preemptions"].sum()), len(requests)),
        "recomputed_tokens": float(requests["recomputed_tokens"].sum()),
        "prefix_hit_rate": _hit_rate(requests) if inputs.has_prefix_cache else None,
        **({} if inputs.turn is None else _hits_by_turn(requests, inputs.turn[cohort], inputs.has_prefix_cache)),
        "swapped_blocks": float(steps.count("swap_blocks")),
        "engine_busy_share": _ratio(steps.busy_ns, inputs.engine_ns(span_ns)),
        "host_bound_share": _ratio(steps.waited_ns, inputs.engine_ns(span_ns)) if steps.is_ahead else None,
        "wasted_tokens": float(steps.wasted_tokens) if steps.is_ahead else None,
        "mfu": _use(steps, "flops"),
        "mbu": _use(steps, "bytes"),
        **_energy_kpis(inputs, steps, span_ns),
        "mean_batch": _ratio(steps.count("num_decode", "num_chunks"), steps.num_steps),
        **_draft_kpis(
            steps.count("num_decode"), steps.count("num_decode_tokens"), steps.count("num_accepted_tokens"), useful
        ),
        "num_steps": float(steps.num_steps),
        **({} if inputs.fleet is None else _fleet_kpis(inputs.fleet, requests, span_ns)),
        **({} if inputs.fleet is None or not inputs.fleet.are_ranks else {"idle_rank_share": _idle_share(steps)}),
    }


def _energy_kpis(inputs: PointInputs, steps: StepTotals, span_ns: tuple[int, int]) -> dict[str, float | None]:
    """The metrics of energy, by name: while steps run, and of the whole span with what GPUs draw between steps; None
    where that power is not known."""
    requests, joules = inputs.records.requests, steps.joules
    done = (requests["outcome"] == FINISHED) & between(requests["delivered_ns"], span_ns)
    tokens, resting = int(requests["output_tokens"][done].sum()), inputs.idle_joules(span_ns)
    whole = None
    if joules is not None and resting is not None and steps.idle_joules is not None:
        whole = resting - steps.idle_joules + joules
    return {
        "power_w": None if joules is None else _ratio(joules, float(steps.busy_ns) / NS_PER_S),
        "energy_j_per_output_token": None if joules is None else _ratio(joules, tokens),
        "energy_j": whole,
        "mean_power_w": None if whole is None else _ratio(whole, (span_ns[1] - span_ns[0]) / NS_PER_S),
        "energy_with_idle_j_per_output_token": None if whole is None else _ratio(whole, tokens),
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


def _idle_share(steps: StepTotals) -> float | None:
    """The share of the steps that are dummies of ranks; None without any step."""
    return _ratio(steps.count(DUMMIES), steps.num_steps)


def bound_by(steps: StepTotals, values: Mapping[str, float | None], part_ns: Mapping[str, int]) -> str:
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
    step_bound = _step_bound(steps, values)
    return f"{step_bound}, {held_by}" if step_bound else held_by


def _step_bound(steps: StepTotals, values: Mapping[str, float | None]) -> str:
    """What took the largest share of the steps' time, and of the time that an engine ahead waited for its host; ""
    where the cost model does not explain it."""
    if (values["pad_share"] or 0) >= PAD_BOUND_SHARE:
        return "padding"
    if steps.work is None:
        return ""
    shares = dict.fromkeys(_STEP_BOUNDS.values(), 0.0)
    for term, name in _STEP_BOUNDS.items():
        shares[name] += steps.work.get(term, 0.0)
    shares["host"] += float(steps.host_ns)
    return max(shares, key=lambda name: shares[name])


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _hit_rate(requests: NDArray[np.void]) -> float | None:
    """Tokens found in the prefix cache over the tokens that all admissions needed; None without admissions."""
    admitted = requests[requests["scheduled_ns"] != MISSING]
    cached, first = int(admitted["cached_tokens_all"].sum()), int(admitted["cached_tokens"].sum())
    needed = int(admitted["prompt_tokens"].sum()) + int(admitted["recomputed_tokens"].sum()) + cached - first
    return _ratio(cached, needed)


def _hits_by_turn(requests: NDArray[np.void], turn: NDArray[np.int64], cached: bool) -> dict[str, float | None]:
    """`prefix_hit_rate` of the requests that are the first, second, third and later turns of their sessions."""
    kinds = {"1": turn == 0, "2": turn == 1, "3": turn == 2, "4_on": turn > 2}
    return {
        f"prefix_hit_rate_turn_{name}": _hit_rate(requests[of_turn]) if cached else None
        for name, of_turn in kinds.items()
    }


def _quantile(values: NDArray[np.float64], weights: NDArray[np.int64], share: float) -> float | None:
    """The smallest value not exceeded for that share of the weights."""
    if not weights.sum():
        return None
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(below, share * below[-1])]])


def _use(steps: StepTotals, name: str) -> float | None:
    """Work done / (peak × time); None where the cost model does not count it."""
    could = steps.could.get(name)
    if steps.work is None or name not in steps.work or could is None or not steps.num_steps:
        return None
    return steps.work[name] / could


def offline_kpis(log: OfflineLog) -> dict[str, float | None]:
    """The metrics of offline jobs by name; times are None where no request was done."""
    pieces = log.pieces
    done = [piece for piece in pieces if piece.outcome == "done"]
    expired = sum(piece.outcome == "expired" for piece in pieces)
    start_ns = min((job.config.at for job in log.jobs), default=0)
    seconds = (max(piece.done_ns for piece in done) - start_ns) / NS_PER_S if done else None
    return {
        "offline_requests": float(len(pieces)),
        "offline_done_share": len(done) / len(pieces) if pieces else None,
        "offline_expired_share": expired / len(pieces) if pieces else None,
        "offline_makespan_s": seconds,
        "offline_tokens_per_s": sum(piece.made for piece in done) / seconds if seconds else None,
        "offline_aborts": float(sum(piece.aborts for piece in pieces)),
        "offline_prefilled_again_tokens": float(log.prefilled_again_tokens),
    }
