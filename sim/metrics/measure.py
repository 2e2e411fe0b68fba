"""The values of the metrics in `batchsim.metrics.table`: latencies, counts and rates here, those of the engine in
`kpis`, parts of a request's life in `attribution`, gaps between tokens in `gaps`, growth of the queue in `stability`.

Latencies are of the cohort's finished requests, and `uncompleted_share` says how many are missing from them;
objectives, `slo_margin` and `in_slo` are over all offered ones (`slo`). Of every class of traffic, ttft, tpot, e2e and
`in_slo` are also given apart. A percentile with fewer than 20 observations beyond it is listed in `weak_percentiles`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchsim.base.units import NS_PER_S
from batchsim.kernel.record import FINISHED, HANDED_OVER, OUTCOME_NAMES, PRUNED, UNFINISHED, Records
from batchsim.metrics.adapters import adapter_kpis
from batchsim.metrics.attribution import PARTS, part_times
from batchsim.metrics.gaps import token_gaps
from batchsim.metrics.intervals import half_width
from batchsim.metrics.kpis import bound_by, engine_kpis, offline_kpis, totals_of
from batchsim.metrics.latencies import LATENCIES, MAKESPAN, TASK_E2E, judged_ns, values_ns
from batchsim.metrics.point_inputs import PointInputs, between, makespan, of_class, span_of
from batchsim.metrics.rollouts import makespan_ns, rollout_kpis
from batchsim.metrics.sleeping import sleep_kpis
from batchsim.metrics.slo import Sample, Slo, rank
from batchsim.metrics.stability import is_too_short, is_unstable
from batchsim.metrics.table import PART_NEEDS
from batchsim.metrics.tasks import TaskLives, task_lives
from batchsim.metrics.tiers import tier_kpis
from batchsim.metrics.warmup import mser5

PERCENTILES = (50, 90, 95, 99)
FEW_BEYOND = 20  # fewer observations beyond a percentile than this and it is marked `~`

Ns = NDArray[np.float64]
_LAST_OUTCOMES = {code: name for code, name in OUTCOME_NAMES.items() if code not in (HANDED_OVER, PRUNED)}


@dataclass(frozen=True)
class Measured:
    """One run's metrics by name; None where one is not defined, never 0 instead.

    `weak_percentiles`: the names of percentiles with fewer than FEW_BEYOND observations beyond, too few to trust.
    `reasons`: outcome -> reason -> requests.
    """

    values: dict[str, float | None]
    weak_percentiles: frozenset[str]
    reasons: dict[str, dict[str, int]]
    unstable: bool
    bound_by: str


@dataclass(frozen=True)
class Combined:
    """The seeds of one point. `mean` is None where any seed has no value: the mean of the others would flatter.

    `half_width` is that of the t-interval over seeds; None with one seed or without a mean.
    """

    mean: dict[str, float | None]
    half_width: dict[str, float | None]
    weak_percentiles: frozenset[str]
    reasons: dict[str, dict[str, int]]
    unstable: bool
    bound_by: str
    num_seeds: int


def measure(inputs: PointInputs) -> Measured:
    """Every metric of one run."""
    records = inputs.records
    requests = records.requests
    begun = between(requests["sent_ns"], inputs.window_ns)
    cohort = begun & (requests["outcome"] != PRUNED)
    done = cohort & (requests["outcome"] == FINISHED)
    latencies = latencies_ns(inputs)
    gaps, counts = _gaps(inputs, done) if inputs.streams else (np.array([]), None)
    values: dict[str, float | None] = {}
    weak_percentiles: set[str] = set()
    for name in LATENCIES:
        observed, weights = (gaps, counts) if name == "itl" else (latencies[name][done], None)
        known = ~np.isnan(observed)
        _summarise(name, observed[known], weights, values, weak_percentiles)
    span_ns = span_of(inputs, cohort)
    values |= _counts(requests, cohort, inputs.num_missing)
    values |= _rates(inputs, cohort, span_ns, latencies["tpot"][done])
    tasks = None if inputs.task_of is None else task_lives(inputs)
    values |= _objectives(inputs, cohort, latencies, span_ns, tasks)
    for name in inputs.class_names:
        in_class = done & of_class(records, name)
        for latency in ("ttft", "tpot", "e2e"):
            observed = latencies[latency][in_class]
            _summarise(latency, observed[~np.isnan(observed)], None, values, weak_percentiles, f"[{name}]")
    steps = totals_of(inputs, span_ns)
    values |= engine_kpis(inputs, steps, cohort, span_ns)
    if tasks is not None:
        e2e_ns = tasks.e2e_ns[begun[tasks.first]]
        undone = np.isinf(e2e_ns)
        _summarise(TASK_E2E, e2e_ns[~undone], None, values, weak_percentiles)
        values["tasks"] = float(len(e2e_ns))
        values["pruned"] = float((requests["outcome"] == PRUNED).sum())
        values["tasks_undone_share"] = float(undone.mean()) if len(e2e_ns) else None
    if inputs.rollout is not None:
        values |= rollout_kpis(inputs, inputs.rollout)
    if inputs.offline is not None:
        values |= offline_kpis(inputs.offline)
    if inputs.adapters is not None:
        values |= adapter_kpis(inputs.adapters, cohort)
    if inputs.tiers is not None:
        values |= tier_kpis(inputs.tiers, requests, cohort)
    if inputs.fleet is not None and inputs.fleet.sleeps and inputs.records.replicas is not None:
        values |= sleep_kpis(inputs.fleet, inputs.records.requests, inputs.records.replicas, cohort, span_ns)
    part_ns = _time_by_part(inputs, done)
    values |= _shares(inputs, part_ns)
    judged = not (inputs.all_at_once or inputs.closed_loop)
    unstable = judged and is_unstable(*inputs.demand)
    too_short = judged and is_too_short(*inputs.demand)
    values["too_short"] = float(too_short)
    steady = inputs.stationary and not (unstable or too_short)
    values["warmup_needed_s"] = _warmup_needed_s(requests, latencies["ttft"]) if steady else None
    return Measured(
        values,
        frozenset(weak_percentiles),
        _reasons(records, inputs.num_missing),
        unstable,
        bound_by(steps, values, part_ns),
    )


def measured_of(result: dict[str, Any]) -> Measured:
    """What was measured of a point, from what its point.json holds."""
    names = ("values", "few", "reasons", "unstable", "bound_by")
    values, few, reasons, unstable, bound_by = (result[name] for name in names)
    return Measured(values, frozenset(few), reasons, unstable, bound_by)


def combine(seeds: Iterable[Measured]) -> Combined:
    """Mean and 95 % t-interval over the runs of one point; unstable if most of them are."""
    runs = list(seeds)
    mean: dict[str, float | None] = {}
    widths: dict[str, float | None] = {}
    for name in runs[0].values:
        known = [value for run in runs if (value := run.values[name]) is not None]
        complete = len(known) == len(runs)
        mean[name] = float(np.mean(known)) if complete else None
        widths[name] = half_width(known) if complete and len(runs) > 1 else None
    reasons: dict[str, Counter[str]] = {}
    for run in runs:
        for outcome, counted in run.reasons.items():
            reasons.setdefault(outcome, Counter()).update(counted)
    return Combined(
        mean=mean,
        half_width=widths,
        weak_percentiles=frozenset().union(*(run.weak_percentiles for run in runs)),
        reasons={outcome: dict(counted) for outcome, counted in reasons.items()},
        unstable=2 * sum(run.unstable for run in runs) > len(runs),
        bound_by=Counter(run.bound_by for run in runs).most_common(1)[0][0],
        num_seeds=len(runs),
    )


def percentile(observed: Ns, percent: float, weights: NDArray[np.int64] | None = None) -> tuple[float, int]:
    """The smallest observation that at least `percent` of them do not exceed, and how many lie beyond it."""
    return percentiles(observed, (percent,), weights)[0]


def percentiles(
    observed: Ns, percents: Sequence[float], weights: NDArray[np.int64] | None = None
) -> list[tuple[float, int]]:
    """`percentile` at each of `percents`. `weights` are how often each observation occurred, once without."""
    order = np.argsort(observed)
    below = np.arange(1, len(observed) + 1) if weights is None else np.cumsum(weights[order])
    count = int(below[-1])
    positions = [rank(percent / 100, count) for percent in percents]
    at = order[np.searchsorted(below, positions)]
    return [(float(value), count - position) for value, position in zip(observed[at], positions, strict=True)]


def latencies_ns(inputs: PointInputs) -> dict[str, Ns]:
    """By latency, the ns of every request; NaN where it did not finish or the latency is not defined for it."""
    r = inputs.records.requests
    finished = r["outcome"] == FINISHED
    defined = {name: finished & (inputs.streams or not latency.streamed) for name, latency in LATENCIES.items()}
    return {name: np.where(defined[name], values, np.nan) for name, values in values_ns(r).items()}


def _gaps(inputs: PointInputs, wanted: NDArray[np.bool_]) -> tuple[Ns, NDArray[np.int64]]:
    """The gaps between tokens of the `wanted` requests, finished ones of the cohort, and how often each occurs."""
    if inputs.digest is None:
        return token_gaps(inputs.records, wanted)
    return inputs.digest.gaps


def _summarise(
    name: str,
    observed: Ns,
    weights: NDArray[np.int64] | None,
    values: dict[str, float | None],
    weak_percentiles: set[str],
    of: str = "",
) -> None:
    """Adds mean and percentiles in seconds to `values`, None without observations, by names that end with `of`.

    Names of percentiles with fewer than FEW_BEYOND observations beyond are added to `weak_percentiles`.
    """
    keys = [f"{name}_p{percent}_s{of}" for percent in PERCENTILES]
    values |= dict.fromkeys((f"{name}_mean_s{of}", *keys))
    if not len(observed):
        return
    values[f"{name}_mean_s{of}"] = float(np.average(observed, weights=weights)) / NS_PER_S
    for key, (value_ns, beyond) in zip(keys, percentiles(observed, PERCENTILES, weights), strict=True):
        values[key] = value_ns / NS_PER_S
        if beyond < FEW_BEYOND:
            weak_percentiles.add(key)


def _counts(requests: NDArray[np.void], cohort: NDArray[np.bool_], missing: int) -> dict[str, float | None]:
    """Requests of the whole run by outcome, which sum to `submitted`; and the incomplete ones of the cohort.

    `submitted` holds all requests offered, those the run never let in (`missing`) being `unfinished`.
    """
    counted = np.bincount(requests["outcome"], minlength=len(OUTCOME_NAMES))
    counted[UNFINISHED] += missing
    offered = int(cohort.sum()) + missing
    done = int((cohort & (requests["outcome"] == FINISHED)).sum())
    return {
        "submitted": float(counted.sum()),
        **{name: float(counted[code]) for code, name in _LAST_OUTCOMES.items()},
        "cohort": float(offered),
        "uncompleted_share": 1 - done / offered if offered else None,
    }


def _rates(
    inputs: PointInputs, cohort: NDArray[np.bool_], span_ns: tuple[int, int], tpot: Ns
) -> dict[str, float | None]:
    """Rates per second: requests of the cohort offered; requests and tokens completed inside the span; as users see.

    `user_tokens_per_s_p50` is 1 / median tpot: the pace of a response once it has begun.
    """
    requests = inputs.records.requests
    done = requests[(requests["outcome"] == FINISHED) & between(requests["delivered_ns"], span_ns)]
    seconds = (span_ns[1] - span_ns[0]) / NS_PER_S

    def per_s(count: int) -> float | None:
        return float(count) / seconds if seconds else None

    output_tokens = per_s(done["output_tokens"].sum())
    first_ns, last_ns = makespan(inputs.records, cohort)
    completed = int((cohort & (requests["outcome"] == FINISHED)).sum())
    known = tpot[~np.isnan(tpot)]
    median_ns = percentile(known, 50)[0] if len(known) else 0.0
    return {
        "offered_rps": None if inputs.all_at_once else per_s(cohort.sum() + inputs.num_missing),
        "throughput_rps": per_s(len(done)),
        "output_tokens_per_s": output_tokens,
        "output_tokens_per_s_per_gpu": None if output_tokens is None else output_tokens / inputs.mean_num_gpus(span_ns),
        "total_tokens_per_s": per_s(done["output_tokens"].sum() + done["prompt_tokens"].sum()),
        "makespan_throughput_rps": completed * NS_PER_S / (last_ns - first_ns) if last_ns > first_ns else None,
        "makespan_s": (last_ns - first_ns) / NS_PER_S if completed else None,
        "user_tokens_per_s_p50": NS_PER_S / median_ns if median_ns else None,
    }


def judged_requests(inputs: PointInputs, latencies: Mapping[str, Ns]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which requests an objective of the per-request form judges, and which of these meet it; not those of tasks."""
    judged, passes = np.zeros((2, len(inputs.records.requests)), dtype=bool)
    values = _judged_values(inputs, latencies)
    for slo, members, _ in _slo_groups(inputs):
        if slo.per_request and not slo.of_tasks:
            judged |= members
            passes |= members & slo.passes(values)
    return judged, passes


def _judged_values(inputs: PointInputs, latencies: Mapping[str, Ns]) -> dict[str, Ns]:
    """`judged_ns` of every request; an answer of several tokens comes whole where the policy does not stream."""
    requests = inputs.records.requests
    whole = (requests["output_tokens"] >= 2) & (not inputs.streams)
    return judged_ns(latencies, requests["outcome"] == FINISHED, whole)


def _objectives(
    inputs: PointInputs,
    cohort: NDArray[np.bool_],
    latencies: dict[str, Ns],
    span_ns: tuple[int, int],
    tasks: TaskLives | None,
) -> dict[str, float | None]:
    """`in_slo`: share of the cohort's offered requests that meet their objective. `goodput_rps`: completions inside the
    span that meet it, per second. `slo_margin`: the least margin of any class's objective. `slo_met`: 1 where it is 0
    or more, else 0.

    `in_slo` and `goodput_rps` exist only where all objectives are of the per-request form. Requests without one are
    not judged. Where an objective bounds tasks, `in_slo` counts these by their first requests; goodput is of requests.
    """
    records, requests = inputs.records, inputs.records.requests
    finished = requests["outcome"] == FINISHED
    judged = _judged_values(inputs, latencies)
    margins: list[float | None] = []
    begun, considered = between(requests["sent_ns"], inputs.window_ns), cohort.copy()
    counted, passes = judged_requests(inputs, latencies)
    groups = list(_slo_groups(inputs))
    missing, expired = inputs.num_missing, _expired(inputs)
    for slo, members, num_expired in groups:
        lost = np.full(
            missing + num_expired, np.inf
        )  # the missing are of unknown class: every class may have lost them
        sampled = members & cohort
        samples = {name: Sample(np.concatenate((values[sampled], lost))) for name, values in judged.items()}
        samples["itl"] = samples["tpot"]
        samples[MAKESPAN] = Sample(np.array([makespan_ns(inputs, sampled, makespan(records, sampled))]))
        if tasks is not None:
            samples[TASK_E2E] = Sample(tasks.e2e_ns[(members & begun)[tasks.first]])
        if inputs.streams and any(bound.metric == "itl" for bound in slo.bounds):
            offered = int(sampled.sum()) + missing
            uncompleted = 1 - int((sampled & finished).sum()) / offered if offered else 0.0
            gaps, counts = _gaps(inputs, sampled & finished)
            lacking = not len(gaps) and bool((requests["output_tokens"][sampled & finished] > 1).any())
            samples["itl"] = Sample(gaps, counts, 0.0 if lacking else uncompleted)  # none are known: no verdict
        margins.append(slo.margin(samples))
        if slo.per_request and slo.of_tasks:
            assert tasks is not None, "checked by the inputs"
            first = tasks.first[members[tasks.first]]
            counted[first] = True
            considered[first] = begun[first]  # a task counts though its first request was pruned
            passes[first] = slo.passes({TASK_E2E: tasks.e2e_ns[members[tasks.first]]})
    margin = min((margin for margin in margins if margin is not None), default=None)
    values: dict[str, float | None] = {
        "in_slo": None,
        "goodput_rps": None,
        "slo_margin": margin,
        "slo_met": None if margin is None else float(margin >= 0),
    }
    for name in inputs.class_names:
        own, in_class = inputs.class_slos.get(name, inputs.slo), considered & counted & of_class(records, name)
        offered = int(in_class.sum()) + expired[name]
        apart = own is not None and own.per_request and offered
        values[f"in_slo[{name}]"] = float((passes & in_class).sum()) / offered if apart else None
    judging = [slo for slo, members, lacking in groups if lacking or (members & begun).any()]
    judging = judging or [slo for slo, *_ in groups]
    if judging and all(slo.per_request for slo in judging):
        offered = int((counted & considered).sum()) + missing + sum(lacking for *_, lacking in groups)
        values["in_slo"] = float((passes & considered).sum()) / offered if offered else None
        good = passes & finished & between(requests["delivered_ns"], span_ns)
        if span_ns[1] > span_ns[0] and not any(slo.of_tasks for slo in judging):
            values["goodput_rps"] = float(good.sum()) * NS_PER_S / (span_ns[1] - span_ns[0])
    return values


def _expired(inputs: PointInputs) -> Counter[str]:
    """By class, requests of offline jobs that were not done by their deadline: they meet no objective, though no row
    says so: it was never sent, or its rows are of parts that were given up."""
    pieces = [] if inputs.offline is None else inputs.offline.pieces
    return Counter(piece.job.name for piece in pieces if piece.outcome == "expired")


def _slo_groups(inputs: PointInputs) -> Iterable[tuple[Slo, NDArray[np.bool_], int]]:
    """The objectives, which requests each judges: those of its class, or all of the other classes, and how many more
    expired."""
    records, expired = inputs.records, _expired(inputs)
    others = np.ones(len(records.requests), dtype=bool)
    for name, slo in inputs.class_slos.items():
        members = of_class(records, name)
        others &= ~members
        yield slo, members, expired.pop(name, 0)
    if inputs.slo is not None:
        yield inputs.slo, others, expired.total()


def _warmup_needed_s(requests: NDArray[np.void], ttft: Ns) -> float | None:
    """The warm-up in s that MSER-5 asks for, by TTFT in order of sending: when the first request it keeps was sent."""
    order = np.argsort(requests["sent_ns"], kind="stable")
    order = order[~np.isnan(ttft[order])]
    first = mser5(ttft[order])
    if first is None:
        return None
    return float(requests["sent_ns"][order[first]]) / NS_PER_S if first else 0.0


def _time_by_part(inputs: PointInputs, wanted: NDArray[np.bool_]) -> dict[str, int]:
    """ns that the wanted requests spent in each part, with its reason."""
    if inputs.digest is not None:
        return dict(inputs.digest.part_ns)
    total: dict[str, int] = {}
    for times in part_times(inputs.records, inputs.per_chunk_ns):
        total[times.part] = total.get(times.part, 0) + int(times.ns[wanted[times.request]].sum())
    return total


def _shares(inputs: PointInputs, part_ns: dict[str, int]) -> dict[str, float | None]:
    """`attr_<part>_share`: each part of the summed E2E of the cohort's finished requests, reasons merged; parts of what
    the run does not have are left out."""
    there = {
        "adapters": inputs.adapters is not None,
        "ranks": inputs.fleet is not None and inputs.fleet.are_ranks,
        "share": inputs.fleet is not None and inputs.fleet.shares,
        "tiers": inputs.tiers is not None,
    }
    whole = sum(part_ns.values())
    by_part: dict[str, int] = dict.fromkeys(PARTS, 0)
    for part, ns in part_ns.items():
        by_part[part.partition(":")[0]] += ns
    known = {part: ns for part, ns in by_part.items() if there.get(PART_NEEDS.get(part, ""), True)}
    return {f"attr_{part}_share": ns / whole if whole else None for part, ns in known.items()}


def _reasons(records: Records, missing: int) -> dict[str, dict[str, int]]:
    """How many requests of the whole run were rejected, cancelled, left unfinished or finished otherwise than they were
    to be, by reason."""
    requests, reasons = records.requests, {}
    for code, name in _LAST_OUTCOMES.items():
        codes, counts = np.unique(requests["reason"][requests["outcome"] == code], return_counts=True)
        by_reason = {records.texts[c]: int(n) for c, n in zip(codes, counts, strict=True)}
        if code == FINISHED:
            by_reason.pop("", None)
        if by_reason or code != FINISHED:
            reasons[name] = by_reason
    if missing:
        reasons[OUTCOME_NAMES[UNFINISHED]]["never_let_in"] = missing
    return reasons
