"""The capacity of each policy, the highest load it sustains within the SLO: as text, and as rows for JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from batchsim.base.units import format_duration
from batchsim.cost.cost_error import CostError, Unknown
from batchsim.metrics.intervals import Difference
from batchsim.metrics.slo import parse_slo
from batchsim.metrics.table import METRICS
from batchsim.report.cost_words import CANNOT_TELL, HOW, between, off_by
from batchsim.report.layout import fit
from batchsim.report.sheet import Cell, Table
from batchsim.results.decision import Decision, JudgedLoad
from batchsim.results.heading import heading
from batchsim.study.capacity.book import Capacity, probes, unmeasured
from batchsim.study.capacity.capacities import CapacityStudy, PolicyCapacity
from batchsim.study.capacity.find import USE
from batchsim.study.capacity.study import AT_SHARE, QUICK

_CAUSES = {
    "queued:batch_window": "waiting for a full batch",
    "queued:batch_running": "waiting for the running batch",
    "between_requests": "tools between its requests",
    "queued:no_slot": "queueing for a slot",
    "queued:kv_blocks": "queueing for KV memory",
    "queued:preemption": "queueing for KV memory",
    "queued:in_flight": "queueing for KV memory",
    "queued:token_budget": "queueing for the token budget",
    "queued:prefill_interval": "queueing for a step with prompts",
    "queued:adapter": "queueing for a place for its adapter",
    "adapter_load": "adapters being loaded",
    "waiting_for_gpu": "waiting for other models' steps",
    "waiting_for_ranks": "waiting for slower ranks",
    "padding_of_ranks": "padding to the fullest rank",
    "queued:kv_storing": "waiting for KV to be stored in the host",
    "queued:kv_disk": "waiting for KV from a disk",
    "queued:kv_load_queue": "waiting for KV from the host",
    "queued:kv_load": "waiting for KV from the host",
    "queued:kv_loaded": "waiting for KV from the host",
    "kv_load": "waiting for KV from the host",
    "kv_store_flush": "waiting for KV to be stored in the host",
    "queued:encoder": "queueing for the encoder",
    "waiting_step": "waiting for the running step",
    "prefill": "its own prefill",
    "recompute": "recompute after preemption",
    "decode_alone": "its own decoding",
    "decode_beside_prefill": "decoding beside prefills",
    "encoding": "encoding its own images",
    "encoding_of_others": "encoding images of others",
    "mask_wait": "masks of constrained answers",
    "response_held": "answers held with their batch",
    "whole_response": "answers sent whole",
    "unfinished:replica_failed": "its replica failed",
}
_UNITS = {"mean_rate": "req/s", "users": "users", "rate_scale": "× the trace"}

SPREAD = 8  # loads further apart than this factor stand on a logarithmic axis


def unit(study: CapacityStudy) -> str:
    return _UNITS[study.scenario.load_name]


# ---- text


def capacity_text(study: CapacityStudy) -> str:
    """The table of capacities and the remarks below it, wrapped to the output's width.

    >>> print(batchsim.capacity_text(study).splitlines()[1])
    objective: ttft<500ms @ 90%
    """
    table = capacity_table(study)
    lines = [
        heading(study.setup),
        f"objective: {study.objective}",
        *table.lines(left=range(len(table.headings))),
        _effort(study),
    ]
    lines += [f"paired: {one} − {other}  {_paired(difference, study)}" for one, other, difference in study.differences]
    return "\n".join(fit(line) for line in lines + remarks(study))


def capacity_table(study: CapacityStudy) -> Table:
    """A row a policy: its capacity, the probes or, where it is known, what the cost's error makes of the capacity, what
    breaks first above it, how the engine is used below it."""
    has_cost = any(policy.cost is not None for policy in study.policies)  # no seeds narrow it: in place of probes
    heads = ("policy", f"capacity (95 %), {unit(study)}", "cost's error" if has_cost else "probes")
    rows = [
        (
            Cell("capacity", i, "label", policy.name),
            capacity_cell(study, policy),
            Cell("capacity", i, "cost_error_share", by_cost(policy))
            if has_cost
            else Cell("capacity", i, "probes", str(len(policy.case.book))),
            Cell("capacity", i, "breaks", first_to_break(policy)),
            Cell("capacity", i, f"at_{AT_SHARE:g}", use_in_words(policy)),
        )
        for i, policy in enumerate(study.policies)
    ]
    return Table("capacity", (*heads, "first thing to break", f"at {AT_SHARE:g}× capacity"), tuple(rows))


def capacity_cell(study: CapacityStudy, policy: PolicyCapacity) -> Cell:
    """The cell of capacity.csv of a policy's capacity, with its interval."""
    column = "capacity_users" if study.scenario.load_name == "users" else "capacity_rps"
    return Cell("capacity", study.policies.index(policy), column, capacity_in_words(study, policy.found))


def decided(study: CapacityStudy, policy: PolicyCapacity) -> Decision:
    """The decision on a policy, from all loads that were tried for it."""
    asked = asked_share(study)
    loads = [
        JudgedLoad(
            p.load,
            p.margin,
            p.low,
            p.high,
            grows=p.grows,
            by_cost=p.load == policy.untold,
            shares={} if asked is None or p.low is None or p.high is None else {"": (asked + p.low, asked + p.high)},
        )
        for p in probes(policy.case.book)
    ]
    return Decision(policy.name, tuple(loads))


def remarks(study: CapacityStudy) -> list[str]:
    """What is said below the table: what was not found and why, saturation, what would change it, the costs' error."""
    return _remarks(study) + _saturation(study) + _changes(study) + _cost(study)


def asked_share(study: CapacityStudy) -> float | None:
    """The share of the requests that must keep the SLO; None where it is not one share of all requests."""
    file = study.scenario.file
    own = any(each.slo is not None for each in file.workload.classes.values())
    return None if own else parse_slo(file.slo).share


def load_edges(low: float, high: float) -> tuple[float, float]:
    """The ends of the axis of loads, a little beyond those tried."""
    if high > SPREAD * low:
        margin = (high / low) ** 0.04
        return low / margin, high * margin
    margin = 0.04 * ((high - low) or high)
    return low - margin, high + margin


def share_or_margin(margin: float, asked: float | None) -> str:
    """A margin as a share of the requests where one share is `asked` for, else in percent with its sign."""
    if asked is not None:
        return f"{100 * (asked + margin):.4g} %"
    return f"{100 * margin:+.3g} %".replace("-", "−") if margin else "0"


def capacity_in_words(study: CapacityStudy, capacity: Capacity) -> str:
    """`9.1 [8.8, 9.3]`: capacity and interval, or words for an end no load decides; for a trace in requests/s too."""
    if capacity.never and not capacity.undecided:
        return "met at no rate" if study.scenario.load_name != "users" else "met by nobody"
    if capacity.load is None and capacity.low == capacity.highest:
        return f"met up to {number(capacity.low)}, the highest tried"
    if capacity.load is None:
        met = "" if capacity.never or capacity.low is None else f"met up to {number(capacity.low)}, then "
        return f"{met}undecided"
    ends = ("undecided" if end is None else number(end) for end in (capacity.low, capacity.high))
    interval = f" [{', '.join(ends)}]" if capacity.num_seeds > 1 else ""
    rps = f" = {number(capacity.load * study.rate)} req/s" if study.scenario.load_name == "rate_scale" else ""
    return f"{number(capacity.load)}{interval}{rps}"


def by_cost(policy: PolicyCapacity) -> str:
    """`7.6…11.3`: the capacities with the longest and the shortest steps that the cost's error allows; `?` for one that
    was not found."""
    load = policy.found.load
    if policy.cost is None or load is None:
        return "–"
    return between(*("?" if share is None else number(load * (1 + share)) for share in reversed(policy.cost)))


def open_ends(study: CapacityStudy, capacity: Capacity) -> str:
    """Why the capacity, or an end of its interval, is not known; "" if all are."""
    ends: list[str] = []
    if capacity.load is not None or capacity.never:
        if capacity.low is None and (capacity.load is not None or capacity.undecided):
            ends.append(f"no load from {number(capacity.lowest)} {unit(study)} on is decided to meet the SLO")
        if capacity.high is None:
            ends.append(f"no load up to {number(capacity.highest)} {unit(study)} is decided to miss the SLO")
    elif capacity.low is None or capacity.low < capacity.highest:
        ends.append(f"capacity not found up to {number(capacity.highest)} {unit(study)}")
    return "; ".join(ends)


def number(value: float | None) -> str:
    """A load or rate to three digits: `0.83`, `9.14`, `22.5`, `1,240`."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def first_to_break(policy: PolicyCapacity) -> str:
    """The SLO bound that most requests miss just above the capacity, and the most frequent cause of those misses."""
    if policy.breaks_at is None:
        return "nothing tried"
    by_metric: Counter[str] = Counter()
    for metric, _, count in policy.breaks:
        by_metric[metric] += count
    grows = "the queue grows" if policy.grows else ""
    if not by_metric:
        return grows or "the SLO"
    metric = by_metric.most_common(1)[0][0]
    cause = next(cause for named, cause, _ in policy.breaks if named == metric)
    return "; ".join(filter(None, (grows, f"{metric}: {cause_in_words(cause)}")))


def cause_in_words(cause: str) -> str:
    name, _, reason = cause.partition(":")
    return _CAUSES.get(cause) or _CAUSES.get(name) or f"{name} {reason}".replace("_", " ").strip()


def use_in_words(policy: PolicyCapacity) -> str:
    known = {name: share for name in USE if (share := policy.at.get(name)) is not None}
    return ", ".join(f"{METRICS[name].heading} {share:.0%}" for name, share in known.items()).replace("%", " %") or "–"


def _effort(study: CapacityStudy) -> str:
    """One line: seeds and requests of a probe (one load tried), and the number of probes and simulations."""
    tried = [p for policy in study.policies for p in probes(policy.case.book)]
    requests = [round(p.num_requests / p.num_seeds) for p in tried]
    seeds = _from_to([p.num_seeds for p in tried]) + (" seed" if max(p.num_seeds for p in tried) == 1 else " seeds")
    runs = sum(p.num_seeds for p in tried)
    each = f"{_from_to(requests)} requests"
    return f"a probe: {seeds} × {each}, as long as the scenario says; {len(tried)} probes, {runs:,} simulations"


def _from_to(values: Sequence[float]) -> str:
    """The range of `values`, like `2 to 32`; one number where both ends read alike."""
    return " to ".join(dict.fromkeys([number(min(values)), number(max(values))]))


def _paired(difference: Difference, study: CapacityStudy) -> str:
    if difference.mean is None:
        return f"not known: {difference.why}"
    sign = "+" if difference.mean > 0 else "−" if difference.mean < 0 else ""
    digits = 2 if max(abs(difference.mean), difference.half_width or 0.0) < 10 else 1
    half = "" if difference.half_width is None else f" ± {difference.half_width:.{digits}f}"
    remark = difference.why or ("no difference" if difference.is_none else "")
    return f"{sign}{abs(difference.mean):.{digits}f}{half} {unit(study)}" + (f" ({remark})" if remark else "")


def _remarks(study: CapacityStudy) -> list[str]:
    """Lines, each starting with `! `, on what is not as one would expect."""
    lines = []
    for policy in study.policies:
        capacity, why = policy.found, open_ends(study, policy.found)
        more = "raise --max-seeds or --max-probes"
        if capacity.never:
            floor = [
                f"{name.removesuffix('_s').replace('_', ' ')} {format_duration(1e9 * value)}"
                for name, value in policy.floor.items()
                if value is not None
            ]
            at = f"at {number(policy.breaks_at)} {unit(study)}, where it comes closest"
            floor = floor if policy.untold is None else []  # the cost's error decides them
            text = ", ".join(filter(None, [first_to_break(policy), ", ".join(floor)]))
            lines.append(f"! {policy.name}: {f'{why} ({more})' if why else 'no load meets the SLO'}: {at}: {text}")
        elif why:
            lines.append(f"! {policy.name}: {why}: {more}")
        elif capacity.load is None:
            least = number(capacity.low)
            lines.append(f"! {policy.name}: every load tried meets the SLO: its capacity is above {least}")
        if policy.untold is not None:
            lines.append(
                f"! {policy.name}: whether the SLO is met at {number(policy.untold)} {unit(study)} the cost's error"
                f" decides ({off_by(study.error)}): it {CANNOT_TELL}"
            )
        if skipped := unmeasured(policy.case.book):
            loads = ", ".join(map(number, skipped))
            lines.append(f"! {policy.name}: nobody sends after the warm-up at {loads} {unit(study)}, which say nothing")
        if capacity.fails_below:
            loads = ", ".join(map(number, capacity.fails_below))
            lines.append(f"! {policy.name}: misses the SLO at lower loads too: {loads} {unit(study)}")
        if capacity.load is not None and capacity.num_seeds == 1:
            lines.append(f"! {policy.name}: nothing here is random, so that there is no interval")
        elif _is_wide(capacity, study.effort.precision):
            lines.append(
                f"! {policy.name}: not decided to ±{study.effort.precision:.0%}".replace("%", " %")
                + f" with {capacity.num_seeds} seeds: raise --max-seeds or --max-probes"
            )
    return lines


def _is_wide(capacity: Capacity, precision: float) -> bool:
    load, low, high = capacity.load, capacity.low, capacity.high
    if load is None or low is None or high is None or load == math.floor(load) < 50:
        return False
    return (high - low) / 2 > 1.02 * precision * load


def _saturation(study: CapacityStudy) -> list[str]:
    """Lines on the throughput of the best policy under overload, and its capacity under Poisson arrivals."""
    best = study.best
    if best is None or best.case.saturation is None or best.found.load is None:
        return []
    rate = best.found.load * study.rate
    kept = rate / best.case.saturation
    leaves = f"the SLO leaves {kept:.0%} of it" if kept <= 1 else "less than the capacity"
    lines = [f"saturation of {best.name} {number(best.case.saturation)} req/s: {leaves}"]
    if study.poisson is not None:
        text = study.poisson.why if study.poisson.load is None else f"{number(study.poisson.load)} req/s"
        lines[0] += f"; as Poisson arrivals: {text}"
    if kept > 1:
        text = "at its capacity the queue grows, which runs are too short to show. Lengthen workload.duration"
        lines.append(f"! {best.name}: {text}")
    return [line.replace("%", " %") for line in lines]


def _changes(study: CapacityStudy) -> list[str]:
    best = study.best
    if best is None or best.found.load is None or not study.changes:
        return []
    helping = [c for c in study.changes if c.load is not None and c.load > best.found.load]
    text = "; ".join(f"{c.what} → {number(c.load)}" for c in helping)
    if not text:
        return [f"what would help {best.name}: none of {len(study.changes)} single changes wins 5 %"]
    return [f"what would help {best.name}: {text}"]


def _cost(study: CapacityStudy) -> list[str]:
    """Lines on the cost model's error: more seeds do not narrow it, and no interval contains it."""
    known = {p.name: p.cost for p in study.policies if p.cost is not None}
    if isinstance(study.error, Unknown):
        return [f"cost-model error is not in the interval, and is unknown: {study.error.source}. The capacity {HOW}"]
    head = f"cost-model error is not in the interval: {study.error} in step time ({study.error.source})"
    if not known:
        return [head]
    by_shares: dict[str, list[str]] = {}
    for name, shares in known.items():
        by_shares.setdefault(_shares(shares), []).append(name)
    each = "; ".join(f"{', '.join(names)} {shares}" for shares, names in by_shares.items())
    return [f"{head} moves the capacity: {each}; where in between it is {HOW}"]


def _shares(shares: tuple[float | None, float | None]) -> str:
    """By how much the cost model's error moves the capacity, from longest to shortest steps: `−17 % to +24 %`."""
    low, high = (("?" if share is None else f"{100 * share:+.0f} %").replace("-", "−") for share in reversed(shares))
    return f"{low} to {high}"


# ---- JSON


def capacity_json(study: CapacityStudy) -> dict[str, Any]:
    """What `capacity_text` says as JSON values. Names that end with `_load` are on the load axis, as in probes.csv."""
    return {
        "scenario": study.scenario.name,
        "heading": heading(study.setup),
        "objective": study.objective,
        "load_name": study.scenario.load_name,
        "requests_per_s_of_load_1": study.rate if study.scenario.load_name != "users" else None,
        "capacities": [_row(study, policy) for policy in study.policies],
        "differences": [
            {"policy": one, "minus": other, "mean": _scaled(study, d.mean), "half_width": _scaled(study, d.half_width)}
            | {"no_difference": d.is_none, "why": d.why}
            for one, other, d in study.differences
        ],
        "poisson": None if study.poisson is None else {"capacity": study.poisson.load, "why": study.poisson.why},
        "changes": [{"change": c.what, "capacity": _scaled(study, c.load), "why": c.why} for c in study.changes],
        "compared_with_seeds": min([QUICK.fewest, *(policy.case.effort.fewest for policy in study.policies)]),
        "cost_error": _error(study.error),
    }


def _scaled(study: CapacityStudy, load: float | None) -> float | None:
    """`load` in requests/s, whatever the load axis; a number of users stays one."""
    return load if load is None or study.scenario.load_name == "users" else load * study.rate


def _row(study: CapacityStudy, policy: PolicyCapacity) -> dict[str, Any]:
    capacity, users = policy.found, study.scenario.load_name == "users"
    loads = {"capacity": capacity.load, "low": capacity.low, "high": capacity.high}
    loads = {name: _scaled(study, load) for name, load in loads.items()}
    return {
        "policy": policy.label,
        "label": policy.name,
        ("capacity_users" if users else "capacity_rps"): loads["capacity"],
        "low": loads["low"],
        "high": loads["high"],
        "why_unknown": open_ends(study, capacity),
        "undecided_load": list(capacity.undecided),
        "probes": len(policy.case.book),
        "seeds": capacity.num_seeds,
        "met": _met(capacity),
        "fails_below_load": list(capacity.fails_below),
        "not_measured": unmeasured(policy.case.book),
        "breaks": first_to_break(policy),
        "misses": [{"bound": m, "cause": c, "requests": n} for m, c, n in policy.breaks],
        "misses_at_load": policy.breaks_at,
        f"at_{AT_SHARE:g}": policy.at,
        "saturation_rps": policy.case.saturation,
        "cost_error_share": None if policy.cost is None else list(policy.cost),
        "cost_error_decides_at_load": policy.untold,
    }


def _met(capacity: Capacity) -> str:
    if capacity.load is not None:
        return "up to the capacity"
    if capacity.never:
        return "undecided" if capacity.undecided else "never"
    return "always" if capacity.low == capacity.highest else "undecided"


def _error(error: CostError | Unknown) -> dict[str, Any]:
    low, high = (None, None) if isinstance(error, Unknown) else (error.low, error.high)
    return {"low": low, "high": high, "source": error.source}
