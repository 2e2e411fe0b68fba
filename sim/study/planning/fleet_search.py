"""The smallest group of replicas shown by simulation to hold a traffic, where one less fails or is not shown to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from batchsim.study.planning.demand import Variation
from batchsim.study.planning.probe import PLANNED, Ask, Book, GpuGroup, GroupProbe, Search, with_replicas
from batchsim.study.sweep.search import Bracket, Counts

ONE_SEED_DECIDES = 4
"""With this many seeds or fewer, one seed below the objective puts the lower end of the interval below it, whatever the
others show: of n values of which one is below a bound, the t-interval of the mean reaches below it for n up to 4."""

FIRST_GUESS = 0.6  # of a replica's saturation: bursts take the rest; only where the search starts depends on it
LIGHT = 0.05  # of a replica's saturation: a request finds the engine all but empty
HEADROOM_STEPS = (1.1, 1.2, 1.3)


@dataclass(frozen=True)
class SmallestGroup:
    """What a search for the smallest group showed. `group` None: no group up to the limit holds.

    `holds` is the probe of the group, `fails` that of one replica less (None where that is no replica); where no group
    holds, `fails` is the largest group tried and `alone` one replica under light traffic, where that was tried.
    """

    group: GpuGroup | None
    holds: GroupProbe | None
    fails: GroupProbe | None
    alone: GroupProbe | None = None


def judge(book: Book, ask: Ask) -> Search[GroupProbe]:
    """The probe of `ask` with as many seeds as decide whether the group holds."""
    seeds = book.seeds(ask.change)
    if 1 < len(seeds) <= ONE_SEED_DECIDES:
        yield [(ask, seeds[:1])]
        first = book.probe(ask)
        if first.failed or first.observed[0].margin < 0:
            return first
    yield [(ask, seeds)]
    return book.probe(ask)


def whole(book: Book, ask: Ask) -> Search[GroupProbe]:
    """The probe of `ask` with all seeds."""
    yield [(ask, book.seeds(ask.change))]
    return book.probe(ask)


def smallest(
    book: Book,
    start: GpuGroup,
    limit: int,
    change: Variation = PLANNED,
    *,
    per_replica: float | None = None,
    too_few: int = 0,
    show: bool = False,
) -> Search[SmallestGroup]:
    """The smallest group of at most `limit` replicas, looked for from `start` on by steps that double, then halve.

    One seed looks for it, all seeds decide. `per_replica` is the part of the traffic that saturates one replica: where
    the first group fails, one replica is tried under a little of it, since what an empty engine cannot hold no number
    of engines can. `too_few` replicas are taken not to hold, without a try. With `show` the group of one replica less
    is run with all seeds, else with as many as decide.
    """

    def ask(replicas: int) -> Ask:
        return Ask(with_replicas(start, replicas), change)

    number: int | None = min(max(start.replicas, too_few + 1), limit)
    bracket = Bracket[int](Counts(too_few + 1, limit, max(1, number // 8)))
    alone = None
    while number is not None:
        holds = yield from first_seed_passes(book, ask(number))
        is_first = bracket.low is bracket.high is None
        bracket.tell(number, is_high=holds)
        if is_first and not holds and per_replica is not None:
            light = replace(change, traffic=change.traffic * LIGHT * per_replica)
            alone = yield from whole(book, Ask(with_replicas(start, 1), light))
            if alone.missed:
                return SmallestGroup(None, None, book.probe(ask(number)), alone)
        number = bracket.following()
    guess = bracket.high or limit  # where the limit fails, one seed alone may be mistaken
    return (yield from _decided(book, ask, guess, too_few, limit, alone, show))


def first_seed_passes(book: Book, ask: Ask, *, may_grow: bool = False) -> Search[bool]:
    """Whether the first seed alone meets every objective, and its queue, unless it `may_grow`, does not; where there is
    but one, whether its stretches decide so."""
    seeds = book.seeds(ask.change)
    yield [(ask, seeds[:1])]
    probe = book.probe(ask)
    if len(seeds) == 1:
        return probe.met
    return not probe.failed and probe.observed[0].margin >= 0 and (may_grow or not any(probe.growing[:1]))


def _decided(
    book: Book, ask: Callable[[int], Ask], guess: int, too_few: int, limit: int, alone: GroupProbe | None, show: bool
) -> Search[SmallestGroup]:
    """The smallest group near `guess` that holds with all seeds; what one seed said of its neighbours may be wrong."""
    replicas = guess
    holds = yield from judge(book, ask(replicas))
    while not holds.met:
        if replicas == limit:
            return SmallestGroup(None, None, holds, alone)
        replicas += 1
        holds = yield from judge(book, ask(replicas))
    fails = None
    while replicas - 1 > too_few:
        fails = yield from (whole if show else judge)(book, ask(replicas - 1))
        if not fails.met:
            break
        replicas, holds, fails = replicas - 1, fails, None
    return SmallestGroup(ask(replicas).group, holds, fails, alone)


def first_guess(per_replica: float | None, limit: int) -> int:
    """The replicas at which a search starts; `per_replica` is the part of the traffic that saturates one replica, None
    where that is not known."""
    return 1 if per_replica is None else min(limit, max(1, math.ceil(1 / (FIRST_GUESS * per_replica))))


def headroom(book: Book, group: GpuGroup, most: float) -> Search[list[GroupProbe]]:
    """The probes of a group under ever more traffic, up to the first that it does not hold.

    One seed looks, all seeds decide. None goes beyond `most` times the traffic, as much as the group completes under
    overload: what holds there does so only until the queue has grown, after a window that is short.
    """
    steps = [Ask(group, Variation(traffic=times)) for times in HEADROOM_STEPS if times <= most]
    passed = 0
    while passed < len(steps) and (yield from first_seed_passes(book, steps[passed], may_grow=True)):
        passed += 1
    probes = [book.probe(step) for step in steps[passed : passed + 1]]
    while passed:
        passed -= 1
        probes.insert(0, (yield from judge(book, steps[passed])))
        if probes[0].met:
            break
    return probes
