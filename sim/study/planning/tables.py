"""A plan as tables: lists of rows with plain values. All that a report shows is read off these."""

from __future__ import annotations

import json
import math

import numpy as np

from batchsim.cost.cost_error import Unknown
from batchsim.results.read import POINTS
from batchsim.study.planning.batches import BATCHES
from batchsim.study.planning.choices import choices
from batchsim.study.planning.configurations import (
    Row,
    configuration,
    ends,
    interval_row,
    offered_rps,
    output_tokens,
    replicas_of,
)
from batchsim.study.planning.demand import Variation
from batchsim.study.planning.fleet_search import SmallestGroup
from batchsim.study.planning.make import WHAT_IFS, Planned, merit, tiers
from batchsim.study.planning.money import MILLION, cost_per_hour, cost_per_month, shares_by_use, tier_replicas
from batchsim.study.planning.probe import OVERLOADED, PLANNED, Ask, GpuGroup, GroupProbe
from batchsim.study.planning.probe_rows import open_ends, probe_row
from batchsim.study.planning.search_tables import search_tables

Tables = dict[str, list[Row]]
ONE_DOWN = "one replica down for the whole window"


def tables_of(planned: Planned) -> Tables:
    """All tables by name; one that would be empty is left out."""
    made = {
        "recommendation": _recommendation(planned),
        "choices": choices(planned),
        "configurations": [configuration(planned, i) for i in range(len(planned.groups))],
        "what_if": _what_if(planned),
        "traffic": _traffic(planned),
        "growth": _growth(planned),
        "classes": _classes(planned),
        "sureness": _sureness(planned),
        **search_tables(planned),
        "probes": [probe_row(planned, probe) for probe in planned.book.probes()],
    }
    return {name: rows for name, rows in made.items() if rows}


# ---- what if


def _what_if(planned: Planned) -> list[Row]:
    rows = []
    for index in planned.favourites:
        group, fails = planned.holding(index).ask.group, planned.smallest[index].fails
        for name, change in WHAT_IFS.items():
            if (index, name) in planned.changed:
                answer = planned.changed[index, name]
                probe = planned.book.probe(Ask(group, change))
                needed = replicas_of(answer) if isinstance(answer, SmallestGroup) else None
                row = _what_if_row(planned, group, name, probe, needed)
                if probe.met and planned.is_overloaded(index, change, group.replicas):
                    row |= {"holds": False, "shown": OVERLOADED}  # the queue grows, however short the window
                if isinstance(answer, SmallestGroup) and needed is None and not row["note"]:
                    row["note"] = f"none of up to {planned.demand.plan.max_replicas} holds"
                rows.append(row)
        if fails is not None:
            rows.append(_what_if_row(planned, group, ONE_DOWN, fails, group.replicas + 1))
    return rows


def _what_if_row(planned: Planned, group: GpuGroup, name: str, probe: GroupProbe, needed: int | None) -> Row:
    return {
        "gpu": group.gpu,
        "policy": group.name,
        "replicas": group.replicas,
        "change": name,
        "holds": None if probe.failed else probe.met,
        "shown": probe.shown,
        "seeds": probe.seeds,
        **interval_row("attainment", probe),
        "margin_low": probe.margin.low,
        "ttft_p99_s": None if open_ends(planned, probe) else probe.mean("ttft_p99_s"),
        "replicas_needed": needed,
        "cost_per_month_needed": None if needed is None else cost_per_month(planned.book.offer(group), needed),
        "note": probe.failed,
    }


# ---- the traffic over time


def _curve(planned: Planned) -> tuple[list[float], list[float]]:
    """Traffic over the peak's, and the share within the SLO there, of the recommended group: what was simulated."""
    assert planned.best is not None, "asked where something holds"
    held = planned.holding(planned.best)
    probes = [*planned.curve, held, *planned.headroom.get(planned.best, [])]
    known = sorted((p.ask.change.traffic, p.attainment.mean) for p in probes if p.attainment.mean is not None)
    return [traffic for traffic, _ in known], [share for _, share in known]


def _traffic(planned: Planned) -> list[Row]:
    """Every part of the traffic on the recommended group. A load below or above all simulated ones has no value of its
    own: below, that of the lowest stands; above, none."""
    if planned.best is None:
        return []
    held = planned.holding(planned.best)
    group = held.ask.group
    loads, shares = _curve(planned)
    offer = planned.book.offer(group)
    peak_rps = offered_rps(planned, held) or 0.0
    output = output_tokens(planned, held)
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


def _enough(planned: Planned, group: GpuGroup, share: float) -> int:
    """Replicas for a share of the peak, at most at the load a replica that the recommended group was shown to hold."""
    assert planned.best is not None, "asked where something holds"
    return max(1, math.ceil(group.replicas * share / planned.room(planned.best) - 1e-9))


def _growth(planned: Planned) -> list[Row]:
    """Replicas by month: the last is simulated, the others follow from the load a replica that was shown to hold."""
    plan = planned.demand.plan
    if planned.best is None or plan.growth.months == 0:
        return []
    held = planned.holding(planned.best)
    group = held.ask.group
    rows = []
    for month in range(plan.growth.months + 1):
        share = (1 + plan.growth.per_month) ** (month - plan.growth.months)
        last = month == plan.growth.months
        replicas = group.replicas if last else _enough(planned, group, share)
        rows.append(
            {
                "month": month,
                "peak_rps": (offered_rps(planned, held) or 0.0) * share,
                "replicas": replicas,
                "cost_per_month": cost_per_month(planned.book.offer(group), replicas),
                "how": "simulated" if last else "no more traffic a replica than was shown to hold",
            }
        )
    return rows


# ---- classes


def _classes(planned: Planned) -> list[Row]:
    """A row a request class: what it gets and costs on the recommended group."""
    scenario = planned.demand.scenario
    order = tiers(scenario)
    if planned.best is None or not order:
        return []
    held = planned.holding(planned.best)
    group = held.ask.group
    month = planned.month(planned.best)
    offer = planned.book.offer(group)
    names = order[-1]
    folder = planned.book.sweep.home / POINTS / held.results[0]["point"]
    used = shares_by_use(folder, names)
    smaller = dict(planned.tiers)
    searched = [replicas_of(smaller[kept]) if kept in smaller else None for kept in order[:-1]]
    counts = tier_replicas([*searched, group.replicas])
    rows = []
    for kept, before, count in zip(order, [0, *counts], counts, strict=False):
        name = kept[-1]
        traffic = scenario.file.workload.classes[name]
        interval = held.of_class(name)
        rows.append(
            {
                "class": name,
                "priority": traffic.priority,
                "share_of_requests": traffic.share,
                "slo": traffic.slo or scenario.file.slo,
                "attainment": None if interval is None else interval.mean,
                "attainment_low": None if interval is None else interval.low,
                **_ttft(planned, held, f"ttft_p99_s[{name}]"),
                "tpot_p99_s": held.mean(f"tpot_p99_s[{name}]"),
                "replicas_up_to": count,
                "cost_per_month_tiered": cost_per_month(offer, count - before),
                "share_of_use": used[name],
                "cost_per_month_by_use": used[name] * month,
            }
        )
    return rows


def _ttft(planned: Planned, held: GroupProbe, metric: str) -> Row:
    """The P99 TTFT of the recommended group: a number, or where the load lies within the cost's error of saturation the
    two that the shortest and the longest steps make."""
    if (both := open_ends(planned, held)) is None:
        return {"ttft_p99_s": held.mean(metric), "ttft_p99_s_fast": None, "ttft_p99_s_slow": None}
    fast, slow = both
    return {"ttft_p99_s": None, "ttft_p99_s_fast": fast.mean(metric), "ttft_p99_s_slow": slow.mean(metric)}


# ---- how sure


def _sureness(planned: Planned) -> list[Row]:
    """Sampling and cost-model error of the favourites, apart: what each leaves open."""
    rows = []
    for index in planned.favourites:
        held = planned.holding(index)
        group = held.ask.group
        head = {"gpu": group.gpu, "policy": group.name}
        sampled = ends(held)
        rows.append(
            head
            | {
                "error": "sampling",
                "quantity": "attainment",
                "low": sampled["_low"],
                "planned": sampled[""],
                "high": sampled["_high"],
                "source": _sampling(planned, held),
                "note": None,
            }
        )
        error = planned.cost_error(index)
        if isinstance(error, Unknown):
            none = dict.fromkeys(("low", "planned", "high", "note"))
            unknown = {"error": "cost model", "quantity": "step_time", "source": f"unknown: {error.source}"}
            rows.append(head | unknown | none)
            continue
        fast, slow = planned.at_error[index]
        offer = planned.book.offer(group)
        counts = [replicas_of(outcome) for outcome in (fast, slow)]
        months = [None if count is None else cost_per_month(offer, count) for count in counts]
        at = [planned.book.probe(Ask(group, Variation(cost_factor=1 + end))) for end in (error.low, error.high)]
        quantities = {
            "step_time": (error.low, 0.0, error.high),
            "attainment": (at[0].attainment.mean, sampled[""], at[1].attainment.mean),
            "replicas": (counts[0], group.replicas, counts[1]),
            "cost_per_month": (months[0], planned.month(index), months[1]),
        }
        for quantity, (low, middle, high) in quantities.items():
            values = {"quantity": quantity, "low": low, "planned": middle, "high": high}
            note = ends_of_one_seed(at) if quantity == "attainment" else None
            rows.append(head | {"error": "cost model"} | values | {"source": error.source, "note": note})
    return rows


def ends_of_one_seed(probes: list[GroupProbe]) -> str | None:
    """Which of the two, shortest and longest steps, rest on one seed alone, in words; None if neither."""
    named = [name for name, probe in zip(("shortest", "longest"), probes, strict=True) if probe.is_alone]
    return f"{' and '.join(named)} steps: one seed alone" if named else None


def _sampling(planned: Planned, probe: GroupProbe) -> str:
    if planned.book.by_batches(PLANNED):
        return f"95 % t-interval over {BATCHES} stretches of the one recorded window; not over other days"
    if planned.demand.slice_ns is not None:
        return f"95 % t-interval over {probe.seeds} seeds: how copies of the trace line up, not other days"
    return f"95 % t-interval over {probe.seeds} seeds"


def _recommendation(planned: Planned) -> list[Row]:
    """One row: the numbers of the recommendation's three sentences that no other table has; none if no group holds."""
    if planned.best is None:
        return []
    held = planned.holding(planned.best)
    group = held.ask.group
    month, plan = planned.month(planned.best), planned.demand.plan
    others = [i for i in range(len(planned.smallest)) if planned.held(i) is not None and i != planned.best]
    following = min(others, key=lambda i: merit(planned, i), default=None)
    peak_rps = offered_rps(planned, held)
    return [
        {
            "gpu": group.gpu,
            "policy": group.name,
            "replicas": group.replicas,
            "router": _router(planned, group),
            "cost_per_month": month,
            "next_cost_per_month": None if following is None else planned.month(following),
            "next_index": following,
            "slo": _objective(planned),
            "window": planned.demand.window,
            "peak_rps": peak_rps,
            "today_rps": None if peak_rps is None else peak_rps / (1 + plan.growth.per_month) ** plan.growth.months,
            "counted": planned.demand.counted,
            "months": plan.growth.months,
            "growth_per_month": plan.growth.per_month,
            "replicas_spare": group.replicas + 1,
            "cost_per_month_spare": cost_per_month(planned.book.offer(group), group.replicas + 1),
        }
    ]


def _router(planned: Planned, group: GpuGroup) -> str:
    if group.is_apart:
        return "round_robin"  # of each pool
    chosen = dict(group.knobs).get("router")
    return planned.demand.plan.router.kind if chosen is None else str(json.loads(chosen)["kind"])


def _objective(planned: Planned) -> str:
    """The SLO as text; where classes have their own, words that say so."""
    file = planned.demand.scenario.file
    objectives = {each.slo or file.slo for each in file.workload.classes.values()} or {file.slo}
    return "the SLO of their class" if len(objectives) > 1 else objectives.pop()
