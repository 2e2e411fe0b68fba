"""The search of a plan whose `free` leaves something to choose: every configuration looked at, the best few named.

What a short look shows holds for the whole window, since its requests are the first of the long run's, under the same
seed: a request that misses its objective in the first sixth of the window misses it in the whole one too. Misses that
the rest of the window, without any, could not make up for rule a group out; nothing else does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from batchsim.base.errors import BatchsimError
from batchsim.metrics.slo import parse_slo
from batchsim.study.planning.demand import Variation
from batchsim.study.planning.fleet_search import ONE_SEED_DECIDES, judge
from batchsim.study.planning.halving import FEWEST, SAME, Halving, Look
from batchsim.study.planning.money import cost_per_hour
from batchsim.study.planning.probe import PLANNED, Ask, Book, GpuGroup, GroupProbe, drive
from batchsim.study.planning.space import Space, without_router

PARTS = (1 / 6, 1 / 2)  # of the window: the short looks
LEAST = 200  # requests, or tasks, of a short look: below, one more or less of them says nothing of the others
MORE_COME = 1.1  # of the requests that the part of a window suggests: how many the whole may have
GUESS = 4  # replicas with which the first look begins
TIED = 3  # other configurations of the winner's price whose headroom is looked at
STRESS = 1.3  # times the traffic, with which a short look chooses them: as much as the widest headroom
OTHERS = 2  # other kinds of GPU whose best configuration is judged beside the winner


@dataclass(frozen=True)
class Searched:
    """Result of the search. `halving.states` has every configuration in the order of the space's; `best` is the index
    of the cheapest that holds, None where none does; `parts` are the looks' parts of the window, the last one with all
    seeds. `finalists` are the indices of the configurations in the plan, `contenders` of the ones judged anew under
    other traffic or objectives: the finalists but the winner, and the next best. `rooms` has the most traffic, over the
    planned, that finalists were shown to hold."""

    space: Space
    halving: Halving
    parts: tuple[float, ...]
    best: int | None
    finalists: tuple[int, ...]
    contenders: tuple[int, ...]
    rooms: Mapping[int, float] = field(default_factory=dict)

    def decided(self, best: int, rooms: Mapping[int, float]) -> Searched:
        """The search whose winner is the finalist `best`, once the finalists' `rooms` are known."""
        contenders = tuple(sorted({*self.contenders, *self.finalists} - {best}))
        return replace(self, best=best, contenders=contenders, rooms=rooms)

    def group(self, index: int) -> GpuGroup:
        """A configuration with the replicas that it holds with, or the fewest that were not ruled out."""
        state = self.halving.states[index]
        return _group(self.space.groups[index], state.held or state.replicas)


def search(book: Book, space: Space) -> Searched:
    """Looks at every configuration of `space` until it is decided which of them is the cheapest that holds."""
    book.sweep.hold()  # else each configuration would seem to fail where another process writes
    rate, plan = book.demand.judged_per_s(PLANNED), book.demand.plan
    short = () if rate is None else tuple(p for p in PARTS if rate * plan.window / 1e9 * p >= LEAST)
    parts = (*(short or (1.0,)), 1.0)  # at least one seed alone before all of them
    offers = [book.offer(group) for group in space.groups]
    prices = [cost_per_hour(offer, 1) for offer in offers]
    pilots = [next(i for i, group in enumerate(space.groups) if group.gpu == gpu) for gpu in space.free["gpu"]]
    seen = _Looks(book, space, parts)
    halving = Halving(prices, plan.max_replicas, len(parts), seen, pilots, min(GUESS, plan.max_replicas))
    best = halving.run()
    if best is None:
        return Searched(space, halving, parts, best, tuple(pilots), ())
    possible = [i for i in _possible(halving, best) if halving.states[i].rung >= 0 or seen.can_be_built(i)]
    tied = _tied(space, halving, seen, best, possible)
    possible = [i for i in possible if halving.states[i].out not in ("limit", "failed")]  # some were decided just now
    finalists = _finalists(space, halving, best, possible, tied)
    return Searched(space, halving, parts, best, finalists, _contenders(space, halving, best, possible, finalists))


def _tied(space: Space, halving: Halving, seen: _Looks, best: int, possible: list[int]) -> list[int]:
    """Up to TIED other groups that hold at the winner's price, of which headroom is to decide.

    As planned it may be that none of them misses any. Where more may hold, they are ordered by their margin in a short
    look with STRESS times the traffic, and of equals the soonest answers come first.
    """
    states = halving.states
    groups = {_group(space.groups[best], states[best].held or 0): best}
    for i in possible:
        if states[i].cost <= states[best].cost * (1 + SAME):
            groups.setdefault(_group(space.groups[i], states[i].held or states[i].replicas), i)
    level = [i for i in groups.values() if i != best]
    if len(level) > TIED:
        looks = dict(zip(level, seen.under_stress([(i, states[i].replicas) for i in level]), strict=True))
        level.sort(key=looks.__getitem__)
    held: list[int] = []
    while level and len(held) < TIED:
        next_best, level = level[: TIED - len(held)], level[TIED - len(held) :]
        halving.finish([i for i in next_best if states[i].held is None])
        held += [
            i for i in next_best if states[i].held is not None and states[i].cost <= states[best].cost * (1 + SAME)
        ]
    return held


def _finalists(space: Space, halving: Halving, best: int, possible: list[int], tied: list[int]) -> tuple[int, ...]:
    """The cheapest that holds, the `tied` ones or else the next best that holds, the best of further kinds of GPU."""
    kinds: dict[str, int] = {}
    for i in possible:
        kinds.setdefault(space.groups[i].gpu, i)
    others = [i for gpu, i in kinds.items() if gpu != space.groups[best].gpu][:OTHERS]
    held = [i for i in possible if halving.states[i].held is not None and not _alike(space, halving, i, best)]
    return tuple(sorted({best, *others, *(tied or held[:1])}))


def _possible(halving: Halving, best: int) -> list[int]:
    """All but the winner that may hold with as many replicas as there may be, by what they cost at least."""
    states = halving.states
    order = sorted(range(len(states)), key=lambda i: (round(states[i].cost, 9), -states[i].margin))
    return [i for i in order if states[i].out in ("", "looks", "price") and i != best]


def _contenders(
    space: Space, halving: Halving, best: int, possible: list[int], finalists: tuple[int, ...]
) -> tuple[int, ...]:
    """The next best, as many as go on to a rung at least, each another group, and the finalists, but for the winner."""
    next_best: dict[GpuGroup, int] = {}
    for i in possible:
        next_best.setdefault(_group(space.groups[i], halving.states[i].replicas), i)
    return tuple(sorted({*[*next_best.values()][:FEWEST], *finalists} - {best}))


def _alike(space: Space, halving: Halving, one: int, other: int) -> bool:
    """Whether two configurations are the same group: one replica each, and no difference but the router."""
    groups = [without_router(space.groups[i]) for i in (one, other)]
    return groups[0] == groups[1] and halving.states[one].held == halving.states[other].held == 1


def _group(group: GpuGroup, replicas: int) -> GpuGroup:
    alone = without_router(group) if replicas == 1 else group
    return replace(alone, replicas=replicas)


@dataclass
class _Looks:
    """The looks at configurations, as simulations of a book."""

    book: Book
    space: Space
    parts: tuple[float, ...]

    def __call__(self, rung: int, wanted: list[tuple[int, int]]) -> list[Look]:
        last = rung == len(self.parts) - 1
        change = PLANNED if self.parts[rung] == 1 else Variation(window=self.parts[rung])
        return self._looks(wanted, change, last)

    def under_stress(self, wanted: list[tuple[int, int]]) -> list[tuple[float, float]]:
        """Sort keys, the best first: the margin with its sign turned, and the mean E2E in seconds, of one seed at the
        beginning of the window with STRESS times the traffic; infinite where that cannot be simulated."""
        change = Variation(traffic=STRESS, window=self.parts[0])
        keys: list[tuple[float, float]] = []
        for (i, replicas), look in zip(wanted, self._looks(wanted, change, last=False), strict=True):
            results = (
                [] if look.failed else self.book.probe(Ask(_group(self.space.groups[i], replicas), change)).results
            )
            e2e_s = [result["values"]["e2e_mean_s"] for result in results]
            keys.append((inf if look.failed else -look.margin, inf if not e2e_s or e2e_s[0] is None else e2e_s[0]))
        return keys

    def _looks(self, wanted: list[tuple[int, int]], change: Variation, last: bool) -> list[Look]:
        asks = [Ask(_group(self.space.groups[i], replicas), change) for i, replicas in wanted]
        failed = {ask: reason for ask in dict.fromkeys(asks) if (reason := self._cannot_be_built(ask))}
        runnable = [ask for ask in dict.fromkeys(asks) if ask not in failed]
        try:
            self._run(runnable, last)
        except BatchsimError:  # of one of them; all that is done by then is kept
            for ask in runnable:
                try:
                    self._run([ask], last)
                except BatchsimError as error:
                    failed[ask] = str(error)
        return [Look(False, failed=failed[ask]) if ask in failed else self._look(ask, last) for ask in asks]

    def can_be_built(self, i: int) -> bool:
        """Whether there is such an engine, of one that was not looked at."""
        return not self._cannot_be_built(Ask(_group(self.space.groups[i], 1)))

    def _run(self, asks: list[Ask], last: bool) -> None:
        if last:
            drive(self.book, [judge(self.book, ask) for ask in asks])
        else:
            self.book.run((ask, self.book.seeds(ask.change)[:1]) for ask in asks)

    def _cannot_be_built(self, ask: Ask) -> str:
        """Why there is no such engine; "" where there is."""
        try:
            self.book.setup(ask)
        except (BatchsimError, ValueError) as error:
            return str(error)
        return ""

    def _look(self, ask: Ask, last: bool) -> Look:
        probe = self.book.probe(ask)
        if probe.failed:
            return Look(False, failed=probe.failed)
        if last:
            return Look(probe.met, probe.margin.low or 0.0)
        return Look(not hopeless(self.book, probe), probe.margin.mean or 0.0)


def hopeless(book: Book, probe: GroupProbe) -> bool:
    """Whether what one seed missed in its part of the window keeps the group from holding, were all else met."""
    seeds = len(book.seeds(probe.ask.change))
    alone = 1 if seeds <= ONE_SEED_DECIDES else seeds  # one seed below its objective decides among few
    times = alone * (1.0 if probe.ask.change.window == 1 else MORE_COME / probe.ask.change.window)
    file = book.demand.scenario.file
    objectives = {name: each.slo or file.slo for name, each in file.workload.classes.items()} or {"": file.slo}
    for name, text in objectives.items():
        share, asked = parse_slo(text).share, probe.of_class(name) if name else probe.attainment
        assert share is not None, "plans take objectives of the per-request form"
        if asked is not None and asked.mean is not None and 1 - asked.mean > (1 - share) * times:
            return True
    return False
