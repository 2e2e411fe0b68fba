"""Makes a plan: searches every GPU and policy, picks the cheapest group that holds, and asks what would break it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor, inf
from typing import Any

from batchsim.base.errors import ScenarioError
from batchsim.base.units import NS_PER_S
from batchsim.cost.cost_error import CostError, Unknown
from batchsim.metrics.slo import NOT_ALL, parse_slo
from batchsim.scenario import Scenario, changed
from batchsim.scenario.longest_prompt import check_reach
from batchsim.scenario.setup import Setup
from batchsim.scenario.unread_keys import check_planned
from batchsim.study.planning.demand import Demand, Variation, can_disperse, demand_of, minutes
from batchsim.study.planning.fleet_search import SmallestGroup, first_guess, headroom, judge, smallest, whole
from batchsim.study.planning.halving import SAME
from batchsim.study.planning.money import cost_per_hour, cost_per_month
from batchsim.study.planning.probe import PLANNED, Ask, Book, GpuGroup, GroupProbe, Search, drive, is_of_tiers, spec_of
from batchsim.study.planning.searched import Searched, search
from batchsim.study.planning.space import space_of
from batchsim.study.sweep import overload
from batchsim.study.sweep.points import Sweep
from batchsim.workload.open_loop import OpenWorkload

GROWN = "30 % more traffic"
WHAT_IFS = {
    GROWN: Variation(traffic=1.3),
    "bursts of twice the dispersion": Variation(dispersion=2),
    "prompts 1.5 times as long": Variation(prompts=1.5),
}
LONG = 20_000
"""Requests to simulate for one look at every configuration, from which on it is said beforehand how many they are."""

TURNED = {
    "30 % less traffic": Variation(traffic=0.7),
    GROWN: Variation(traffic=1.3),
    "limits of the SLO × 0.8": Variation(slo=0.8),
    "limits of the SLO × 1.25": Variation(slo=1.25),
}
"""What might change which configuration a search chooses."""

CURVE = (0.25, 0.5, 0.75)
"""Parts of the peak at which the recommended group is simulated for the rest of the traffic."""


@dataclass
class Planned:
    """All that a plan showed. Lists are in the order of the scenario: GPUs, and their policies.

    `saturation_rps`, by group, is None of tasks, which cannot be piled up; `completed` is how many times the planned
    traffic one replica completes under overload, without end where that is not known. `best` is the index of the
    recommended group, None where none holds; `favourites` are the cheapest of every GPU. `changed` has, for every
    favourite and what-if, the search (of the recommended) or the probe (of the others). `at_error` has the searches
    with all steps as short, and as long, as the cost's error allows; `if_fast` those with the shortest, where no group
    holds.
    `searched` is the search that named the groups, where the plan leaves something free, and `turned`, by configuration
    of it, what the winner needs where traffic or objectives differ, and its contenders where they are no dearer then.
    """

    demand: Demand
    book: Book
    groups: list[GpuGroup]
    saturation_rps: list[float | None]
    smallest: list[SmallestGroup]
    best: int | None = None
    favourites: list[int] = field(default_factory=list)
    completed: Sequence[float] = ()
    headroom: dict[int, list[GroupProbe]] = field(default_factory=dict)
    changed: dict[tuple[int, str], SmallestGroup | GroupProbe] = field(default_factory=dict)
    curve: list[GroupProbe] = field(default_factory=list)
    at_error: dict[int, tuple[SmallestGroup, SmallestGroup]] = field(default_factory=dict)
    if_fast: dict[int, SmallestGroup] = field(default_factory=dict)
    tiers: list[tuple[tuple[str, ...], SmallestGroup]] = field(default_factory=list)
    searched: Searched | None = None
    turned: dict[tuple[int, str], SmallestGroup] = field(default_factory=dict)

    def cost_error(self, index: int) -> CostError | Unknown:
        """How far the step times of a configuration's GPU may be off."""
        return self.book.setup(Ask(self.groups[index])).cost_error

    def held(self, index: int) -> GroupProbe | None:
        """The smallest group that holds, as simulated; None where none does."""
        return self.smallest[index].holds

    def holding(self, index: int) -> GroupProbe:
        """The same of a configuration of which some group holds."""
        probe = self.held(index)
        assert probe is not None, "asked of configurations that hold"
        return probe

    def room(self, index: int) -> float:
        """The most traffic, over the planned, of the steps tried that a configuration was shown to hold: 1 is none
        above it."""
        return max((probe.ask.change.traffic for probe in self.headroom.get(index, ()) if probe.met), default=1.0)

    def is_overloaded(self, index: int, change: Variation, replicas: int) -> bool:
        """Whether `replicas` of a configuration complete less under overload than comes under `change`: what they hold
        in a short window they do only until the queue has grown."""
        return change.traffic > self.completed[index] * replicas

    def month(self, index: int) -> float:
        """The cost a month of a configuration that holds, in the plan's currency."""
        held = self.holding(index)
        return cost_per_month(self.book.offer(held.ask.group), held.ask.group.replicas)


def make_plan(scenario: Scenario, sweep: Sweep, tell: Callable[[str], None] | None = None) -> Planned:
    """Simulates on `sweep` until every question of the scenario's plan is answered.

    ScenarioError where one look at every configuration is beyond the limits of `sweep`. `tell` is called with how much
    is to be simulated, before it is and where it is long.
    """
    demand = demand_of(scenario)
    _check(demand)
    book = Book(demand, sweep)
    space = None if demand.plan.free is None else space_of(scenario)
    groups = [GpuGroup(gpu, spec.name, 1) for gpu in demand.plan.gpus for spec in scenario.specs]
    groups = groups if space is None else list(space.groups)
    for group in groups[:: len(scenario.specs)] if space is None else ():
        _check_reach(book, group)
    busiest = book.setup(Ask(groups[0]))
    once = len(groups) * len(book.seeds(PLANNED))  # a look at every configuration; how many looks, the search decides
    sweep.check_size(once, [(busiest, busiest.scenario.loads[0])], scenario.source)
    searched = None if space is None else search(book, space)
    if searched is not None:
        groups = [replace(searched.group(i), replicas=1) for i in searched.finalists]
    peak_rps, is_exact = _peak_rps(busiest)
    saturated: list[float | None] = [None] * len(groups)
    if scenario.file.workload.tasks is None:
        saturated = [*_saturations(book, groups, sweep.jobs, must=searched is None)]
    parts = [None if rps is None else rps / peak_rps for rps in saturated]
    limit = demand.plan.max_replicas
    starts = [replace(group, replicas=first_guess(part, limit)) for group, part in zip(groups, parts, strict=True)]
    if searched is not None:
        starts = [searched.group(i) for i in searched.finalists]
    elif tell is not None:
        _tell_length(tell, book, demand.stated_rps(PLANNED) or peak_rps, [start.replicas for start in starts])
    searches = [
        smallest(book, start, limit, per_replica=part, show=True) for start, part in zip(starts, parts, strict=True)
    ]
    planned = Planned(demand, book, groups, saturated, drive(book, searches), searched=searched)
    holding = [i for i in range(len(groups)) if planned.held(i) is not None]
    if holding:
        planned.completed = [part if part is not None and is_exact else inf for part in parts]
        planned.headroom = _headroom(planned, holding)
        planned.favourites = sorted(
            min((i for i in holding if groups[i].gpu == gpu), key=lambda i: merit(planned, i))
            for gpu in dict.fromkeys(groups[i].gpu for i in holding)
        )
        planned.best = min(planned.favourites, key=lambda i: merit(planned, i))
        if searched is not None:
            rooms = {searched.finalists[i]: planned.room(i) for i in holding}
            planned.searched = searched.decided(searched.finalists[planned.best], rooms)
        _look_around(planned, planned.best)
    else:
        _try_fast(planned)
    return planned


def _try_fast(planned: Planned) -> None:
    """Searches, where no group holds, with steps as short as the cost's error allows."""
    book, limit = planned.book, planned.demand.plan.max_replicas
    errors = {i: error for i in range(len(planned.groups)) if isinstance(error := planned.cost_error(i), CostError)}
    searches = []
    for i, error in errors.items():
        fails = planned.smallest[i].fails
        start = planned.groups[i] if fails is None else fails.ask.group
        searches.append(smallest(book, start, limit, Variation(cost_factor=1 + error.low)))
    planned.if_fast = dict(zip(errors, drive(book, searches), strict=True))


def merit(planned: Planned, index: int) -> tuple[float, float, float]:
    """A sort key of configurations, the best first: the cheaper; of one price, the one with more headroom, then with
    the higher lower end of the margin, which ends where no request is seen to miss."""
    probe = planned.held(index)
    assert probe is not None and probe.margin.low is not None, "asked of configurations that hold"
    return round(planned.month(index), 6), -planned.room(index), -probe.margin.low


def _headroom(planned: Planned, holding: Sequence[int]) -> dict[int, list[GroupProbe]]:
    """For each group that holds its probes with more traffic."""
    groups = {i: probe.ask.group for i in holding if (probe := planned.held(i)) is not None}
    searches = [headroom(planned.book, group, planned.completed[i] * group.replicas) for i, group in groups.items()]
    return dict(zip(holding, drive(planned.book, searches), strict=True))


def _check(demand: Demand) -> None:
    scenario = demand.scenario
    check_planned(scenario)
    if scenario.file.replicas is not None:
        raise ScenarioError(
            f"{scenario.source}: replicas and plan are given, and plan chooses replicas. Drop replicas."
        )
    plan, free = demand.plan, demand.plan.free or {}
    if plan.host_memory_price is not None and not (scenario.file.kv.tiers or any(map(is_of_tiers, free))):
        raise ScenarioError(
            f"{scenario.places.get('plan', scenario.source)}: plan.host_memory_price is the price of kv.tiers, and the"
            " scenario has none. Write them, or leave it out."
        )
    own = {f"classes.{name}": each.slo for name, each in scenario.file.workload.classes.items() if each.slo is not None}
    for name, text in {"slo": scenario.file.slo, **own}.items():
        with scenario.at(name.partition(".")[0]):
            if parse_slo(text).of_tasks and scenario.file.workload.tasks is None:
                raise ScenarioError(
                    f"{name} '{text}' bounds tasks, and without workload.tasks a plan counts requests. Write 'ttft<1s &"
                    " tpot<50ms @ 99%', say."
                )
            if not parse_slo(text).per_request:
                raise ScenarioError(
                    f"{name} '{text}' bounds percentiles, and a plan counts who meets it. Write the form"
                    " 'ttft<1s & tpot<50ms @ 99%'."
                )
            if parse_slo(text).share == 1:
                raise ScenarioError(f"{name} '{text}': {NOT_ALL}")
    by_seed = demand.slice_ns is None or (demand.copies(PLANNED) or 0) >= 2
    if by_seed and scenario.file.seeds < 2:
        raise ScenarioError(f"{scenario.source}: seeds is {scenario.file.seeds}, and one has no interval. Write 3.")


# ---- where to start


def _check_reach(book: Book, group: GpuGroup) -> None:
    """ScenarioError where the profile of a GPU does not reach to the longest prompt of the target traffic."""
    setup, scenario = book.setup(Ask(group)), book.demand.scenario
    advice = f"set extrapolate: true in plan.gpus.{group.gpu}.cost"
    try:
        check_reach(setup, setup.scenario.specs, setup.scenario.loads[0], [0], advice)
    except ScenarioError as error:
        where = scenario.places.get("plan", scenario.source)
        raise ScenarioError(f"{where}: plan.gpus.{group.gpu}: {error}") from None


def _saturations(book: Book, groups: Sequence[GpuGroup], jobs: int, *, must: bool) -> list[float | None]:
    """The highest completion rate of one replica of each group, in requests/s; None where there is none, which is a
    ScenarioError if there `must` be."""
    runs = []
    for group in groups:
        setup = _for_a_guess(book.setup(Ask(group)))
        runs.append((setup, spec_of(setup, group)))
    rates: dict[int, float | None] = {}
    for i, rate in overload.saturations(runs, jobs):
        if isinstance(rate, str) and must:
            raise ScenarioError(f"{book.demand.scenario.source}: {groups[i].name} on {groups[i].gpu}: {rate}.")
        rates[i] = None if isinstance(rate, str) else rate
    return [rates[i] for i in range(len(runs))]


def _for_a_guess(setup: Setup) -> Setup:
    """`setup` with its cost extrapolated beyond what was measured, and turns of sessions as requests of their own."""
    if setup.cost.reach is not None:
        setup = Setup.of(changed(setup.scenario, ["cost.extrapolate=true"]))
    return replace(setup, traffic=replace(setup.traffic, sessions=None))


def _peak_rps(setup: Setup) -> tuple[float, bool]:
    """Requests per second of the busiest window, and whether that counts all of them: of sessions it counts first
    requests, which only moves where a search starts."""
    workload = setup.workload(setup.scenario.loads[0], 0)
    start_ns, end_ns = workload.window_ns
    if isinstance(workload, OpenWorkload):
        return float((workload.sent_ns >= start_ns).sum()) / ((end_ns - start_ns) / 1e9), True
    return setup.scenario.loads[0], False


def _tell_length(tell: Callable[[str], None], book: Book, peak_rps: float, replicas: Sequence[int]) -> None:
    plan, warmup_ns = book.demand.plan, book.demand.scenario.file.workload.warmup
    requests, seeds = round(peak_rps * (plan.window + warmup_ns) / NS_PER_S), len(book.seeds(PLANNED))
    if requests * seeds * len(replicas) < LONG:
        return
    fewest, most = min(replicas), max(replicas)
    engines = "1 replica" if most == 1 else f"{most} replicas" if fewest == most else f"{fewest} to {most} replicas"
    before = f" and {minutes(warmup_ns)} of warm-up" if warmup_ns else ""
    window = f"{minutes(plan.window)}{before} at {peak_rps:.4g} requests/s"
    tell(
        f"to simulate, where it is not there already: about {requests:,} requests ({window}) in each of {seeds} seeds,"
        f" first on {engines}, for each of {len(replicas)} configurations; then as many for every other number of"
        " replicas and every what-if. A shorter plan.window takes less time."
    )


# ---- what else to know


def _look_around(planned: Planned, best: int) -> None:
    """Fills in what changes break the favourites, and the rest for the best alone."""
    book, limit = planned.book, planned.demand.plan.max_replicas
    named: list[tuple[Any, Search[Any]]] = []

    def group(index: int) -> GpuGroup:
        held = planned.holding(index)
        return held.ask.group

    for i in planned.favourites:
        for name, change in WHAT_IFS.items():
            if change.dispersion == 1 or can_disperse(planned.demand):
                overloaded = ceil(change.traffic / planned.completed[i]) - 1  # replicas that complete less than comes
                harder = max(group(i).replicas - 1, overloaded)  # what fails without the change fails with it
                more = smallest(book, group(i), limit, change, too_few=harder)
                judged = judge(book, Ask(group(i), change))
                if i == best:  # whose search may leave the group itself with one seed
                    named += [(("changed", i, name), more), (("judged", i, name), judged)]
                else:
                    named.append((("changed", i, name), judged))
        error = planned.cost_error(i)
        if isinstance(error, CostError):
            for end in (error.low, error.high):
                factor = Variation(cost_factor=1 + end)
                slower = group(i).replicas - 1 if end > 0 else 0
                named.append((("error", i, end), smallest(book, group(i), limit, factor, too_few=slower)))
    if not planned.demand.is_flat:
        named += [(("curve", part), whole(book, Ask(group(best), Variation(traffic=part)))) for part in CURVE]
    named += [
        (("tier", names), smallest(book, _share(planned, names, group(best)), limit, Variation(classes=names)))
        for names in tiers(planned.demand.scenario)[:-1]
    ]
    answers = dict(zip([name for name, _ in named], drive(book, [search for _, search in named]), strict=True))
    for name, answer in answers.items():
        if name[0] == "changed":
            planned.changed[name[1], name[2]] = _completing(planned, name[1], WHAT_IFS[name[2]], answer)
        elif name[0] == "curve":
            planned.curve.append(answer)
        elif name[0] == "tier":
            planned.tiers.append((name[1], answer))
    for i in planned.favourites:
        error = planned.cost_error(i)
        if isinstance(error, CostError):
            planned.at_error[i] = answers["error", i, error.low], answers["error", i, error.high]
    if planned.searched is not None:
        planned.turned = _turn(book, planned.searched, planned.searched.finalists[best], limit)


def _completing(
    planned: Planned, index: int, change: Variation, answer: SmallestGroup | GroupProbe
) -> SmallestGroup | GroupProbe:
    """`answer`; of a search whose largest allowed group holds and is overloaded, that none holds."""
    group = answer.group if isinstance(answer, SmallestGroup) else None
    if group is None or not planned.is_overloaded(index, change, group.replicas):
        return answer
    return SmallestGroup(None, None, planned.book.probe(Ask(group, change)))


def _turn(book: Book, searched: Searched, winner: int, limit: int) -> dict[tuple[int, str], SmallestGroup]:
    """The replicas of the winner under each variation of traffic or objectives, and of the contenders that hold at no
    higher cost, by (index, variation)."""
    names, group = list(TURNED), searched.group(winner)
    own = dict(zip(names, drive(book, [smallest(book, group, limit, TURNED[name]) for name in names]), strict=True))
    asked: dict[tuple[int, str], Search[SmallestGroup]] = {}
    for i in searched.contenders:
        start = searched.group(i)
        for name, answer in own.items():
            most = limit
            if answer.group is not None:
                budget = cost_per_hour(book.offer(group), answer.group.replicas) / cost_per_hour(book.offer(start), 1)
                most = min(limit, floor(budget * (1 + SAME)))
            if most and i != winner:
                asked[i, name] = smallest(book, start, most, TURNED[name])
    answers = dict(zip(asked, drive(book, [*asked.values()]), strict=True))
    return {(winner, name): answer for name, answer in own.items()} | answers


def tiers(scenario: Scenario) -> list[tuple[str, ...]]:
    """The classes from the most important on, each time with those before it; [] without at least two."""
    classes = scenario.file.workload.classes
    names = sorted(classes, key=lambda name: (classes[name].priority, list(classes).index(name)))
    return [tuple(names[: i + 1]) for i in range(len(names))] if len(names) > 1 else []


def _share(planned: Planned, names: tuple[str, ...], group: GpuGroup) -> GpuGroup:
    """The group at which the search for some classes alone starts: their share of the replicas of `group`."""
    classes = planned.demand.scenario.file.workload.classes
    share = sum(classes[name].share or 0.0 for name in names)
    return replace(group, replicas=max(1, round(group.replicas * share)))
