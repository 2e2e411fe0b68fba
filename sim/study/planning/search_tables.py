"""A plan's search as tables: its rungs, every configuration with why it lost, what would change the decision, what more
money buys."""

from __future__ import annotations

from collections import Counter
from typing import Any

from batchsim.base.units import NS_PER_S
from batchsim.study.planning.configurations import goodput_rps
from batchsim.study.planning.halving import FEWEST, KEPT, SAME, State
from batchsim.study.planning.make import TURNED, Planned
from batchsim.study.planning.money import HOURS_A_MONTH, cost_per_month, gpu_price_at
from batchsim.study.planning.probe import PLANNED, Ask, GpuGroup
from batchsim.study.planning.searched import STRESS, Searched

Row = dict[str, Any]
PRICE = "price of"
WAITS, HOLDS = "waits", "holds"
_LEFT = {
    "failed": "{} that cannot be simulated",
    "price": "{} dearer with one replica than what was found to hold",
    "looks": "{} with too few replicas for the price of what holds",
    "limit": "{} too few with max_replicas",
    WAITS: "{} waiting, no cheaper than those that went on and of no more margin",
    HOLDS: "{} shown to hold",
}
"""Why configurations are left on a rung, in words."""
_STRESSED = f"in a short look with {STRESS - 1:.0%} more traffic did no better".replace("%", " %")


def search_tables(planned: Planned) -> dict[str, list[Row]]:
    """The tables by name; none of a plan that leaves nothing free."""
    if (searched := planned.searched) is None:
        return {}
    return {
        "search": _rungs(planned, searched),
        "searched": _configurations(searched),
        "left_out": _left_out(searched),
        "sensitivity": [*_prices(planned, searched), *_turned(planned)],
        "pareto": _pareto(planned),
    }


def _rungs(planned: Planned, searched: Searched) -> list[Row]:
    """A row per rung. Configurations that entered it, less the ones ruled out there and the waiting ones, entered the
    next."""
    rows = []
    fates = [_fate(state) for state in searched.halving.states]
    for i, part in enumerate(searched.parts):
        last = i == len(searched.parts) - 1
        left = Counter(why for rung, why in fates if rung == i)
        rows.append(
            {
                "rung": "decides" if last else f"look {i + 1}",
                "window_s": part * planned.demand.plan.window / NS_PER_S,
                "seeds": len(planned.book.seeds(PLANNED)) if last else 1,
                "what": _told_rung(i, last),
                "entered": len([rung for rung, _ in fates if rung >= i]),
                "looks": searched.halving.looked[i],
                "ruled_out": sum(count for why, count in left.items() if why not in (WAITS, HOLDS)),
                "waiting": left[WAITS],
                "why_left": "; ".join(_LEFT[why].format(left[why]) for why in _LEFT if left[why]),
            }
        )
    return rows


def _fate(state: State) -> tuple[int, str]:
    """The rung on which a configuration was left, and why: one of `_LEFT`."""
    return max(state.rung, 0), state.out or (WAITS if state.held is None else HOLDS)


def _told_rung(number: int, is_last: bool) -> str:
    if is_last:
        return "all seeds decide, the cheapest first, up to the price of the first that holds"
    if number:
        return f"of those left, the cheapest, then those of most margin: 1 of {1 / KEPT:.0f}, at least {FEWEST}"
    return "of every configuration the fewest replicas that are not ruled out, by too many misses"


def _order(searched: Searched) -> list[int]:
    """The configurations, the winner first, then by their least cost; infeasible ones last."""
    states = searched.halving.states
    return sorted(
        range(len(states)),
        key=lambda i: (i != searched.best, bool(states[i].failed), round(states[i].cost, 9), -states[i].margin, i),
    )


def _configurations(searched: Searched) -> list[Row]:
    """A row per configuration, each with a unique name. Configurations that differ by router alone are one group as a
    single replica: all but the first keep the router in their name, and are marked `twin`."""
    rows: list[Row] = []
    seen: set[GpuGroup] = set()
    for i in _order(searched):
        group = searched.group(i)
        twin = group.replicas == 1 and group in seen
        name = searched.space.groups[i].name if twin else group.name
        rows.append(_configuration(searched, i) | {"policy": name, "twin": twin})
        if twin and not searched.halving.states[i].failed:
            rows[-1]["why_lost"] = f"as one replica, which needs no router, the same as {group.name}"
        seen.add(group)
    return rows


def _configuration(searched: Searched, i: int) -> Row:
    state, group = searched.halving.states[i], searched.group(i)
    return {
        "gpu": group.gpu,
        "policy": group.name,
        "replicas_at_least": None if state.failed else state.replicas,
        "cost_per_month_at_least": None if state.failed else state.cost * HOURS_A_MONTH,
        "margin_low": state.margin if state.held is not None else None,
        "decided": state.held is not None,
        "why_lost": "" if i == searched.best else why_lost(searched, i),
    }


def why_lost(searched: Searched, i: int) -> str:
    """What keeps a configuration from being chosen, in words."""
    halving = searched.halving
    state, best = halving.states[i], None if searched.best is None else halving.states[searched.best]
    if state.failed:
        return f"cannot be simulated: {state.failed}"
    if state.out == "limit":
        return f"{halving.limit} replicas, the most allowed, are too few"
    if best is None:
        return "not shown to hold"
    dearer = state.cost > best.cost * (1 + SAME)
    if state.held is not None:
        return "holds, and costs more" if dearer else _tied(searched, i)
    if state.out == "price":
        return "one replica costs more than the winner"
    if dearer:
        return f"{_counted(state.replicas - 1)} shown to be too few, and one more costs more than the winner"
    return f"waited: at the same price at least, and {_STRESSED} than those that went on"


def _tied(searched: Searched, i: int) -> str:
    """Why a configuration that holds at the winner's price is not the winner."""
    assert searched.best is not None, "something holds"
    if i not in searched.rooms:
        return f"holds at the same price, and {_STRESSED} than those whose headroom was looked at"
    room, most = (round(100 * (searched.rooms[each] - 1)) for each in (i, searched.best))
    if room < most:
        return f"holds at the same price, with headroom of {room} % where the winner has {most} %"
    return "holds at the same price, with no more headroom or margin"


def _counted(replicas: int) -> str:
    return "no replica is" if replicas == 0 else f"{replicas} replica{'s are' if replicas > 1 else ' is'}"


def _left_out(searched: Searched) -> list[Row]:
    """Why configurations could not be simulated, and how many for each reason."""
    reasons = Counter(state.failed for state in searched.halving.states if state.failed)
    return [{"why_lost": reason, "configurations": count} for reason, count in reasons.most_common()]


# ---- what would change the decision


def _prices(planned: Planned, searched: Searched) -> list[Row]:
    """For each kind of GPU the price at which the decision is another: of the winner's how far it may rise, of others
    how far they must fall, which is a bound where their replicas are. Arithmetic on the counts of the search."""
    if planned.best is None:
        return []
    held = planned.holding(planned.best)
    chosen_gpu, cost = held.ask.group.gpu, planned.month(planned.best)
    cheapest: dict[str, int] = {}
    for i in _order(searched):
        state = searched.halving.states[i]
        if not state.failed and state.out != "limit":
            cheapest.setdefault(searched.space.groups[i].gpu, i)
    rows = []
    for gpu, i in cheapest.items():
        state, bought = searched.halving.states[i], planned.book.offer(searched.space.groups[i])
        price = bought.price
        if gpu == chosen_gpu:
            rest = [searched.halving.states[other].cost for name, other in cheapest.items() if name != chosen_gpu]
            bought = planned.book.offer(held.ask.group)
            at = gpu_price_at(bought, held.ask.group.replicas, min(rest)) if rest else None
            said = "another kind of GPU may be cheaper above this price" if rest else "no other kind of GPU may hold"
        else:
            at = gpu_price_at(bought, state.held or state.replicas, cost / HOURS_A_MONTH)
            said = "it may be chosen below this price, and not above"
            if at is None:
                said = "not chosen at any price: the memory of its hosts costs more alone"
        rows.append(
            {
                "change": f"{PRICE} {gpu}",
                "price_per_hour": price,
                "decision_changes_at": at,
                "relative": None if at is None else at / price - 1,
                "gpu": None,
                "policy": None,
                "replicas": None,
                "cost_per_month": None,
                "same_decision": None,
                "note": said,
            }
        )
    return rows


def _turned(planned: Planned) -> list[Row]:
    """For each change of traffic or objectives the cheapest of the winner and its contenders; none else was judged
    anew."""
    if planned.searched is None or planned.best is None:
        return []
    rows, winner = [], planned.searched.finalists[planned.best]
    judged = len({winner, *planned.searched.contenders})
    for name in TURNED:
        answers = {i: answer for (i, change), answer in planned.turned.items() if change == name}
        holding = {i: answer.group for i, answer in answers.items() if answer.group is not None}
        costs = {i: cost_per_month(planned.book.offer(group), group.replicas) for i, group in holding.items()}
        least = min(costs.values(), default=None)
        ties = [i for i in costs if least is not None and costs[i] <= least * (1 + SAME)]
        best = winner if winner in ties else ties[0] if ties else None
        group = None if best is None else holding[best]
        rows.append(
            {
                "change": name,
                "price_per_hour": None,
                "decision_changes_at": None,
                "relative": None,
                "gpu": group and group.gpu,
                "policy": group and group.name,
                "replicas": group and group.replicas,
                "cost_per_month": least,
                "same_decision": None if best is None else best == winner,
                "note": f"{'the cheapest' if best is not None else 'none'} of the best {judged}",
            }
        )
    return rows


# ---- what more money buys


def _pareto(planned: Planned) -> list[Row]:
    """Groups decided on the whole window of which none other is as cheap with as much within the SLO."""
    points = []
    for ask in planned.book.asked:
        probe = planned.book.probe(ask)
        if ask == Ask(ask.group, PLANNED) and probe.complete and not probe.failed:
            share = probe.attainment.mean
            points.append((cost_per_month(planned.book.offer(ask.group), ask.group.replicas), share or 0.0, probe))
    points.sort(key=lambda point: (round(point[0], 6), -point[1]))
    rows: list[Row] = []
    for cost, share, probe in points:
        if not rows or share > rows[-1]["attainment"]:
            rows.append(
                {
                    "gpu": probe.ask.group.gpu,
                    "policy": probe.ask.group.name,
                    "replicas": probe.ask.group.replicas,
                    "cost_per_month": cost,
                    "attainment": share,
                    "attainment_low": probe.attainment.low,
                    "seeds": probe.seeds,
                    "holds": probe.met,
                    "goodput_rps": goodput_rps(planned, probe),
                    "energy_j_per_output_token": probe.mean("energy_j_per_output_token"),
                }
            )
    return rows
