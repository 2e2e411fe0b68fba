"""What every configuration came to: its smallest group, what one replica less showed, or why none holds."""

from __future__ import annotations

from typing import Any

import numpy as np

from batchsim.base.units import NS_PER_S, format_duration
from batchsim.metrics.latencies import TASK_E2E
from batchsim.metrics.slo import parse_slo
from batchsim.study.planning.fleet_search import SmallestGroup
from batchsim.study.planning.make import Planned
from batchsim.study.planning.money import MILLION, energy_kwh, tokens_per_month
from batchsim.study.planning.probe import OVERLOADED, GroupProbe

Row = dict[str, Any]


def configuration(planned: Planned, index: int) -> Row:
    group, plan, held = planned.groups[index], planned.demand.plan, planned.held(index)
    offer = planned.book.offer(group)
    row: Row = {
        "gpu": group.gpu,
        "policy": group.name,
        "holds": held is not None,
        "replicas": None,
        "gpus": None,
        "price_per_hour": offer.price,
        "cost_per_month": None,
        "cost_per_1m_output_tokens": None,
        **interval_row("attainment", held),
        "observations": None,
        "margin_low": None,
        **_one_less(planned, None),
        "headroom": None,
        "goodput_rps": None,
        "engine_busy_share": None,
        "energy_kwh_per_1m_output_tokens": None,
        "cost_per_1m_with_energy": None,
        "saturation_rps": planned.saturation_rps[index],
        "replicas_if_fast": None,
        "replicas_if_slow": None,
        "why_not": "" if held is not None else why_not(planned, index),
    }
    if index in planned.if_fast:
        row["replicas_if_fast"] = replicas_of(planned.if_fast[index])
    if held is None:
        return row
    group, month = held.ask.group, planned.month(index)
    row |= {"replicas": group.replicas, "gpus": group.replicas * offer.gpus, "observations": len(held.observed)}
    row |= {"cost_per_month": month, "cost_per_1m_output_tokens": _per_million(planned, month, held)}
    row |= _one_less(planned, planned.smallest[index].fails) | interval_row("attainment", held)
    row["margin_low"] = held.margin.low
    if index in planned.headroom:
        row["headroom"] = planned.room(index) - 1
    row |= {"goodput_rps": goodput_rps(planned, held), "engine_busy_share": held.mean("engine_busy_share")}
    row["energy_kwh_per_1m_output_tokens"] = kwh = energy_kwh(held.mean("energy_j_per_output_token"))
    if kwh is not None and plan.energy_price is not None:
        row["cost_per_1m_with_energy"] = row["cost_per_1m_output_tokens"] + kwh * plan.energy_price
    if index in planned.at_error:
        fast, slow = planned.at_error[index]
        row |= {"replicas_if_fast": replicas_of(fast), "replicas_if_slow": replicas_of(slow)}
    return row


def _one_less(planned: Planned, probe: GroupProbe | None) -> Row:
    """Columns on the group with one replica less; all None where that is no replica."""
    row = interval_row("one_less", probe)
    if probe is None:
        return row | dict.fromkeys(("one_less_shown", "one_less_margin", "one_less_margin_low", "one_less_class"))
    return row | {
        "one_less_shown": probe.shown,
        "one_less_margin": probe.margin.mean,
        "one_less_margin_low": probe.margin.low,
        "one_less_class": _worst_class(planned, probe),
    }


def _worst_class(planned: Planned, probe: GroupProbe) -> str | None:
    """The class with the least share beyond its objective; None unless every class has an objective of its own."""
    margins = {}
    for name, each in planned.demand.scenario.file.workload.classes.items():
        share = probe.of_class(name) if probe.observed else None
        asked = None if each.slo is None else parse_slo(each.slo).share
        if share is None or share.mean is None or asked is None:
            return None
        margins[name] = share.mean - asked
    return min(margins, key=lambda name: margins[name], default=None)


def why_not(planned: Planned, index: int) -> str:
    """What keeps every number of replicas from holding the traffic, with the numbers."""
    outcome, limit, counted = planned.smallest[index], planned.demand.plan.max_replicas, planned.demand.counted
    assert outcome.fails is not None, "a search that found nothing tried something"
    tried = outcome.fails.ask.group.replicas
    if outcome.alone is None or not outcome.alone.missed:
        seed = " in one seed" if outcome.fails.is_alone else ""
        text = f"max_replicas {limit}: {_percent(outcome.fails)} of {counted} within the SLO with {tried}{seed}"
        if outcome.fails.shown == OVERLOADED:
            return f"{text}, which complete fewer than come: the queue grows{_ramp(planned, outcome.fails)}"
        return text if outcome.fails.missed else f"{text}, {_too_few(outcome.fails)}"
    alone = outcome.alone
    lost = {reason: n for result in alone.results for reason, n in result["reasons"].get("rejected", {}).items()}
    if lost:
        reason, count = max(lost.items(), key=lambda item: item[1])
        details = {k: v for result in alone.results for k, v in result["details"].items()}
        text = f" ({details[reason]})" if reason in details else ""
        return f"one replica with hardly any traffic rejects {count:,} requests: {reason}{text}"
    slo = parse_slo(planned.demand.scenario.file.slo)
    facts = []
    for bound in slo.bounds:
        value = alone.mean(f"{bound.metric}_p99_s")
        shown = "is not defined: answers come whole" if value is None else f"is {format_duration(value * 1e9)}"
        facts.append(f"p99 of {bound.metric} {shown} against {bound}")
    return (
        f"the SLO is missed on one replica with hardly any traffic: {_percent(alone)} of {counted} within it;"
        f" {', '.join(facts)}"
    )


def _ramp(planned: Planned, probe: GroupProbe) -> str:
    """That a queue may grow since tasks are longer than the warm-up, in words; "" where they are not."""
    task_s, warmup_ns = probe.mean(f"{TASK_E2E}_p50_s"), planned.demand.scenario.file.workload.warmup
    if task_s is None or task_s * NS_PER_S <= warmup_ns:
        return ""
    before = f"the warm-up is {format_duration(warmup_ns)}" if warmup_ns else "there is no warm-up"
    task = format_duration(round(task_s * NS_PER_S))
    return f", or seems to, since a task takes {task} and {before}: lengthen workload.warmup"


def _too_few(probe: GroupProbe) -> str:
    """Why a group that meets every objective on the mean is not shown to hold."""
    least = "" if probe.margin.low is None else f", whose margin begins at {100 * probe.margin.low:+.3g} points"
    return (
        f"not shown to hold by {probe.num_judged:,.0f} {probe.counted} in {probe.seeds} seeds{least}:"
        " a longer plan.window or more seeds may"
    )


def _percent(probe: GroupProbe) -> str:
    mean = probe.attainment.mean
    return f"not simulated ({probe.failed})" if mean is None else f"{100 * mean:.4g} %"


def replicas_of(outcome: SmallestGroup) -> int | None:
    return None if outcome.group is None else outcome.group.replicas


def interval_row(name: str, probe: GroupProbe | None) -> Row:
    return {f"{name}{end}": value for end, value in ends(probe).items()}


def ends(probe: GroupProbe | None) -> dict[str, float | None]:
    """The mean share within the SLO and its interval's ends, by suffix of the column; the interval ends at 100 %."""
    if probe is None:
        return {"": None, "_low": None, "_high": None}
    share = probe.attainment
    return {"": share.mean, "_low": share.low, "_high": None if share.high is None else min(share.high, 1.0)}


def output_tokens(planned: Planned, probe: GroupProbe) -> float:
    """Mean output tokens of a request: the trace's, or the mean of the drawn ones; of tasks the output that came in the
    window, where any did, since some of their requests are needless and never sent."""
    if planned.demand.output_tokens is not None:
        return planned.demand.output_tokens
    came = probe.mean("output_tokens_per_s") if planned.demand.scenario.file.workload.tasks is not None else None
    if came:
        return came / (offered_rps(planned, probe) or 1.0)
    return float(np.mean([result["workload"]["mean_output_tokens"] for result in probe.results]))


def offered_rps(planned: Planned, probe: GroupProbe) -> float | None:
    """Requests a second of the window: as the target states them, else those of the recording."""
    stated = planned.demand.stated_rps(probe.ask.change)
    return probe.mean("offered_rps") if stated is None else stated


def goodput_rps(planned: Planned, probe: GroupProbe) -> float | None:
    """Requests per second of the window that meet their SLO; what came in the warm-up is no part of it. None where
    tasks are judged."""
    if probe.counted == "tasks":
        return None
    offered, share = offered_rps(planned, probe), probe.attainment.mean
    return None if offered is None or share is None else offered * share


def _per_million(planned: Planned, month: float, probe: GroupProbe) -> float:
    rate = offered_rps(planned, probe) or 0.0
    tokens = tokens_per_month(rate, planned.demand.mean_share, output_tokens(planned, probe))
    return month / (tokens / MILLION)
