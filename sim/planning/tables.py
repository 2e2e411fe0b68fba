"""A plan as tables: lists of rows with plain values. All that a report shows is read off these."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sim.cost import Calibrated
from sim.metrics.slo import parse_slo
from sim.planning.batches import BATCHES
from sim.planning.demand import Change
from sim.planning.make import WHAT_IFS, Planned, tiers
from sim.planning.money import (
    MILLION,
    cost_per_hour,
    cost_per_month,
    energy_kwh,
    shares_by_use,
    tokens_per_month,
    watts,
)
from sim.planning.probe import PLANNED, Ask, Group, Probe
from sim.planning.search import Found
from sim.results.read import POINTS
from sim.units import format_duration

Row = dict[str, Any]
Tables = dict[str, list[Row]]
ONE_DOWN = "one replica down for the whole window"


def tables_of(planned: Planned) -> Tables:
    """All tables by name; one that would be empty is left out."""
    made = {
        "recommendation": _recommendation(planned),
        "configurations": [_configuration(planned, i) for i in range(len(planned.groups))],
        "what_if": _what_if(planned),
        "traffic": _traffic(planned),
        "growth": _growth(planned),
        "classes": _classes(planned),
        "sureness": _sureness(planned),
        "probes": [_probe(planned, probe) for probe in planned.book.probes()],
    }
    return {name: rows for name, rows in made.items() if rows}


# ---- configurations


def _configuration(planned: Planned, index: int) -> Row:
    group, plan, held = planned.groups[index], planned.demand.plan, planned.held(index)
    offer = plan.gpus[group.gpu]
    row: Row = {
        "gpu": group.gpu,
        "policy": group.policy,
        "holds": held is not None,
        "replicas": None,
        "gpus": None,
        "price_per_hour": offer.price,
        "cost_per_month": None,
        "cost_per_1m_output_tokens": None,
        **_interval("attainment", held),
        "observations": None,
        "margin_low": None,
        **_interval("one_less", None),
        "one_less_margin_low": None,
        "headroom": None,
        "goodput_rps": None,
        "engine_busy_share": None,
        "energy_kwh_per_1m_output_tokens": None,
        "saturation_rps": planned.saturation_rps[index],
        "replicas_if_fast": None,
        "replicas_if_slow": None,
        "why_not": "" if held is not None else why_not(planned, index),
    }
    if held is None:
        return row
    group, month = held.ask.group, planned.month(index)
    row |= {"replicas": group.replicas, "gpus": group.replicas * offer.gpus, "observations": len(held.observed)}
    row |= {"cost_per_month": month, "cost_per_1m_output_tokens": _per_million(planned, month, held)}
    fails = planned.found[index].fails
    row |= _interval("one_less", fails) | _interval("attainment", held) | {"margin_low": held.margin.low}
    row["one_less_margin_low"] = None if fails is None else fails.margin.low
    if index in planned.headroom:
        row["headroom"] = max((p.ask.change.traffic for p in planned.headroom[index] if p.met), default=1.0) - 1
    row |= {name: held.mean(name) for name in ("goodput_rps", "engine_busy_share")}
    row["energy_kwh_per_1m_output_tokens"] = _energy(planned, held)
    if index in planned.at_error:
        fast, slow = planned.at_error[index]
        row |= {"replicas_if_fast": _replicas(fast), "replicas_if_slow": _replicas(slow)}
    return row


def why_not(planned: Planned, index: int) -> str:
    """What keeps every number of replicas from holding the traffic, with the numbers."""
    found, limit = planned.found[index], planned.demand.plan.max_replicas
    assert found.fails is not None, "a search that found nothing tried something"
    tried = found.fails.ask.group.replicas
    if found.alone is None or not found.alone.missed:
        return f"max_replicas {limit}: {_percent(found.fails)} of requests within the SLO with {tried}"
    alone = found.alone
    lost = {reason: n for result in alone.results for reason, n in result["reasons"].get("rejected", {}).items()}
    if lost:
        reason, count = max(lost.items(), key=lambda item: item[1])
        details = {k: v for result in alone.results for k, v in result["details"].items()}
        told = f" ({details[reason]})" if reason in details else ""
        return f"one replica with hardly any traffic rejects {count:,} requests: {reason}{told}"
    slo = parse_slo(planned.demand.scenario.file.slo)
    facts = []
    for bound in slo.bounds:
        value = alone.mean(f"{bound.metric}_p99_s")
        shown = "is not defined: answers come whole" if value is None else f"is {format_duration(value * 1e9)}"
        facts.append(f"p99 of {bound.metric} {shown} against {bound}")
    return (
        f"the SLO is missed on one replica with hardly any traffic: {_percent(alone)} of requests within it;"
        f" {', '.join(facts)}"
    )


def _percent(probe: Probe) -> str:
    mean = probe.attainment.mean
    return f"not simulated ({probe.failed})" if mean is None else f"{100 * mean:.4g} %"


def _replicas(found: Found) -> int | None:
    return None if found.group is None else found.group.replicas


def _interval(name: str, probe: Probe | None) -> Row:
    return {f"{name}{end}": value for end, value in _ends(probe).items()}


def _ends(probe: Probe | None) -> dict[str, float | None]:
    """Mean and ends; a share beyond 100 % cannot be, so that the interval ends there."""
    if probe is None:
        return {"": None, "_low": None, "_high": None}
    found = probe.attainment
    return {"": found.mean, "_low": found.low, "_high": None if found.high is None else min(found.high, 1.0)}


def _output_tokens(planned: Planned, probe: Probe) -> float:
    """Output tokens of a request: as the trace says, or the mean of those drawn."""
    if planned.demand.output_tokens is not None:
        return planned.demand.output_tokens
    return float(np.mean([result["workload"]["mean_output_tokens"] for result in probe.results]))


def _per_million(planned: Planned, month: float, probe: Probe) -> float:
    rate = probe.mean("offered_rps") or 0.0
    tokens = tokens_per_month(rate, planned.demand.mean_share, _output_tokens(planned, probe))
    return month / (tokens / MILLION)


def _energy(planned: Planned, probe: Probe) -> float | None:
    cost = planned.book.setup(probe.ask).cost
    power = watts(cost.profile.energy, cost.profile.samples) if isinstance(cost, Calibrated) else None
    if power is None:
        return None
    return energy_kwh(power, planned.book.sweep.home / POINTS / probe.results[0]["point"])


# ---- what if


def _what_if(planned: Planned) -> list[Row]:
    rows = []
    for index in planned.favourites:
        held, fails = planned.held(index), planned.found[index].fails
        assert held is not None, "favourites hold"
        group = held.ask.group
        for name, change in WHAT_IFS.items():
            if (index, name) in planned.changed:
                answer = planned.changed[index, name]
                probe = planned.book.probe(Ask(group, change))
                needed = _replicas(answer) if isinstance(answer, Found) else None
                row = _what_if_row(group, name, probe, needed)
                if isinstance(answer, Found) and needed is None and not row["note"]:
                    row["note"] = f"none of up to {planned.demand.plan.max_replicas} holds"
                rows.append(row)
        if fails is not None:
            rows.append(_what_if_row(group, ONE_DOWN, fails, group.replicas + 1))
    return rows


def _what_if_row(group: Group, name: str, probe: Probe, needed: int | None) -> Row:
    return {
        "gpu": group.gpu,
        "policy": group.policy,
        "replicas": group.replicas,
        "change": name,
        "holds": None if probe.failed else probe.met,
        **_interval("attainment", probe),
        "ttft_p99_s": probe.mean("ttft_p99_s"),
        "replicas_needed": needed,
        "note": probe.failed,
    }


# ---- the traffic over time


def _curve(planned: Planned) -> tuple[list[float], list[float]]:
    """Traffic over the peak's, and the share within the SLO there, of the recommended group: what was simulated."""
    assert planned.best is not None, "asked where something holds"
    held = planned.held(planned.best)
    assert held is not None
    probes = [*planned.curve, held, *planned.headroom.get(planned.best, [])]
    known = sorted((p.ask.change.traffic, p.attainment.mean) for p in probes if p.attainment.mean is not None)
    return [traffic for traffic, _ in known], [share for _, share in known]


def _traffic(planned: Planned) -> list[Row]:
    """Every part of the traffic on the recommended group. A load below or above all simulated ones has no value of its
    own: below, that of the lowest stands; above, none."""
    if planned.best is None:
        return []
    held = planned.held(planned.best)
    assert held is not None, "the best holds"
    group = held.ask.group
    loads, shares = _curve(planned)
    offer = planned.demand.plan.gpus[group.gpu]
    peak_rps = held.mean("offered_rps") or 0.0
    output = _output_tokens(planned, held)
    hourly = cost_per_hour(offer, group.replicas)
    rows = []
    for part in planned.demand.parts:
        rate = part.share_of_peak * peak_rps
        tokens = rate * output * 3600
        rows.append(
            {
                "part": part.name,
                "minutes": part.seconds / 60,
                "rate_rps": rate,
                "share_of_peak": part.share_of_peak,
                "attainment": float(np.interp(part.share_of_peak, loads, shares))
                if part.share_of_peak <= loads[-1]
                else None,
                "replicas_enough": _enough(planned, group, part.share_of_peak),
                "cost_per_hour": hourly,
                "cost_per_1m_output_tokens": hourly / (tokens / MILLION) if tokens else None,
            }
        )
    return rows


def _enough(planned: Planned, group: Group, share: float) -> int:
    """Replicas for a share of the peak, at most at the load a replica that the recommended group was shown to hold."""
    assert planned.best is not None, "asked where something holds"
    most = max((p.ask.change.traffic for p in planned.headroom.get(planned.best, []) if p.met), default=1.0)
    return max(1, math.ceil(group.replicas * share / most - 1e-9))


def _growth(planned: Planned) -> list[Row]:
    """Replicas by month: the last is simulated, the others follow from the load a replica that was shown to hold."""
    plan = planned.demand.plan
    if planned.best is None or plan.growth.months == 0:
        return []
    held = planned.held(planned.best)
    assert held is not None, "the best holds"
    group = held.ask.group
    rows = []
    for month in range(plan.growth.months + 1):
        share = (1 + plan.growth.per_month) ** (month - plan.growth.months)
        last = month == plan.growth.months
        replicas = group.replicas if last else _enough(planned, group, share)
        rows.append(
            {
                "month": month,
                "peak_rps": (held.mean("offered_rps") or 0.0) * share,
                "replicas": replicas,
                "cost_per_month": cost_per_month(plan.gpus[group.gpu], replicas),
                "how": "simulated" if last else "no more traffic a replica than was shown to hold",
            }
        )
    return rows


# ---- classes


def _classes(planned: Planned) -> list[Row]:
    """What every class gets and costs on the recommended group."""
    scenario = planned.demand.scenario
    order = tiers(scenario)
    if planned.best is None or not order:
        return []
    held = planned.held(planned.best)
    assert held is not None, "the best holds"
    group = held.ask.group
    month = planned.month(planned.best)
    offer = planned.demand.plan.gpus[group.gpu]
    names = order[-1]
    folder = planned.book.sweep.home / POINTS / held.results[0]["point"]
    used = shares_by_use(folder, names)
    smaller = dict(planned.tiers)
    before: float | None = 0.0
    rows = []
    for kept in order:
        name = kept[-1]
        traffic = scenario.file.workload.classes[name]
        last = kept == names
        count = group.replicas if last else _replicas(smaller[kept]) if kept in smaller else None
        upto = None if count is None else cost_per_month(offer, count)
        interval = held.of_class(name)
        rows.append(
            {
                "class": name,
                "priority": traffic.priority,
                "share_of_requests": traffic.share,
                "slo": traffic.slo or scenario.file.slo,
                "attainment": None if interval is None else interval.mean,
                "attainment_low": None if interval is None else interval.low,
                "ttft_p99_s": held.mean(f"ttft_p99_s[{name}]"),
                "tpot_p99_s": held.mean(f"tpot_p99_s[{name}]"),
                "replicas_up_to": count,
                "cost_per_month_tiered": None if upto is None or before is None else upto - before,
                "share_of_use": used[name],
                "cost_per_month_by_use": used[name] * month,
            }
        )
        before = upto
    return rows


# ---- how sure


def _sureness(planned: Planned) -> list[Row]:
    """Sampling and cost-model error of the favourites, apart: what each leaves open."""
    rows = []
    for index in planned.favourites:
        held = planned.held(index)
        assert held is not None, "favourites hold"
        group = held.ask.group
        head = {"gpu": group.gpu, "policy": group.policy}
        ends = _ends(held)
        rows.append(
            head
            | {
                "error": "sampling",
                "quantity": "attainment",
                "low": ends["_low"],
                "planned": ends[""],
                "high": ends["_high"],
                "source": _sampling(planned, held),
            }
        )
        error = planned.cost_error(index)
        if error is None:
            none = dict.fromkeys(("low", "planned", "high"))
            stated = {
                "error": "cost model",
                "quantity": "step_time",
                "source": "step times are stated: no error is known",
            }
            rows.append(head | stated | none)
            continue
        fast, slow = planned.at_error[index]
        offer = planned.demand.plan.gpus[group.gpu]
        counts = [_replicas(found) for found in (fast, slow)]
        months = [None if count is None else cost_per_month(offer, count) for count in counts]
        at = [
            planned.book.probe(Ask(group, Change(cost_factor=1 + e))).attainment.mean for e in (error.low, error.high)
        ]
        quantities = {
            "step_time": (error.low, 0.0, error.high),
            "attainment": (at[0], ends[""], at[1]),
            "replicas": (counts[0], group.replicas, counts[1]),
            "cost_per_month": (months[0], planned.month(index), months[1]),
        }
        for quantity, (low, middle, high) in quantities.items():
            values = {"quantity": quantity, "low": low, "planned": middle, "high": high}
            rows.append(head | {"error": "cost model"} | values | {"source": error.source})
    return rows


def _sampling(planned: Planned, probe: Probe) -> str:
    if planned.book.by_batches(PLANNED):
        return f"95 % t-interval over {BATCHES} stretches of the one recorded window; not over other days"
    if planned.demand.slice_ns is not None:
        return f"95 % t-interval over {probe.seeds} seeds: how copies of the trace line up, not other days"
    return f"95 % t-interval over {probe.seeds} seeds"


def _recommendation(planned: Planned) -> list[Row]:
    """The numbers of the three sentences that no other table has."""
    if planned.best is None:
        return []
    held = planned.held(planned.best)
    assert held is not None, "the best holds"
    group = held.ask.group
    month, plan = planned.month(planned.best), planned.demand.plan
    others = [planned.month(i) for i in range(len(planned.found)) if planned.held(i) is not None and i != planned.best]
    return [
        {
            "gpu": group.gpu,
            "policy": group.policy,
            "replicas": group.replicas,
            "router": plan.router.kind,
            "cost_per_month": month,
            "next_cost_per_month": min(others, default=None),
            "slo": _objective(planned),
            "window": planned.demand.window,
            "peak_rps": held.mean("offered_rps"),
            "months": plan.growth.months,
            "growth_per_month": plan.growth.per_month,
        }
    ]


def _objective(planned: Planned) -> str:
    """The SLO; where classes have their own, that these count."""
    file = planned.demand.scenario.file
    own = any(each.slo is not None for each in file.workload.classes.values())
    return "the SLO of their class" if own else file.slo


# ---- all that was run


def _probe(planned: Planned, probe: Probe) -> Row:
    group, change = probe.ask.group, probe.ask.change
    offer = planned.demand.plan.gpus[group.gpu]
    return {
        "gpu": group.gpu,
        "policy": group.policy,
        "replicas": group.replicas,
        "traffic": change.traffic,
        "dispersion": change.dispersion,
        "prompts": change.prompts,
        "classes": " ".join(change.classes),
        "cost_factor": change.cost_factor,
        "seeds": probe.seeds,
        "requests": probe.num_requests,
        "holds": probe.verdict,
        **_interval("attainment", probe),
        "margin_low": probe.margin.low,
        "failed": probe.failed,
        "offered_rps": probe.mean("offered_rps"),
        "goodput_rps": probe.mean("goodput_rps"),
        "ttft_p99_s": probe.mean("ttft_p99_s"),
        "tpot_p99_s": probe.mean("tpot_p99_s"),
        "engine_busy_share": probe.mean("engine_busy_share"),
        "cost_per_month": cost_per_month(offer, group.replicas),
        "points": " ".join(result["point"] for result in probe.results),
    }
