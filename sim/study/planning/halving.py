"""The cheapest configuration that holds, by successive halving: short looks rule out, long ones decide.

A configuration is a price a replica. A **look** simulates a number of its replicas and says whether they may still
hold; one of the last rung says whether they do. What a look rules out is true of longer ones too (`hopeless`), so a
configuration's fewest replicas that are not ruled out times its price is what it costs at least, and nothing is ever
ruled out that costs less than what was chosen. Of configurations that cost the same at least, the first parts by margin
go on; the rest wait, and are looked at again where nothing decided is as cheap as they may be.

Nothing here simulates: the caller runs the looks and answers with a `Look` each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from batchsim.study.sweep.search import Bracket, Counts

KEPT = 1 / 3  # of the configurations of a rung go on to the next
FEWEST = 8  # that go on at least
SAME = 1e-9  # relative: two costs that differ by less are the same


@dataclass(frozen=True)
class Look:
    """What a look showed. `holds`: they hold, on the last rung; on others, they are not ruled out. `margin` orders
    those of one price, more being better. `failed`: why the configuration cannot be looked at with any number of
    replicas."""

    holds: bool
    margin: float = 0.0
    failed: str = ""


Looks = Callable[[int, list[tuple[int, int]]], list[Look]]
"""Looks on a rung at (configuration, replicas), all at once; the answers in order."""


@dataclass
class State:
    """One configuration: its price a replica, the fewest replicas not ruled out, and how far it came.

    `out` says why it was ruled out: `price`, `looks`, `failed`, `limit`; "" while it is not. `held`: the replicas that
    were decided to hold, None where none were. `rung`: the last one it was looked at on. While it is decided, `enough`
    are more replicas that hold, None while none are known, and the next look leaves half of `step` out.
    """

    price: float
    replicas: int = 1
    margin: float = 0.0
    out: str = ""
    failed: str = ""
    held: int | None = None
    rung: int = -1
    enough: int | None = None
    step: int = 0

    @property
    def cost(self) -> float:
        """What it costs at least."""
        return self.price * self.replicas


@dataclass
class Halving:
    """A search over configurations with these prices a replica. `limit`: the most replicas. `rungs`: how many there
    are, the last of which decides. `pilots`: those with which a first ceiling of the cost is found."""

    prices: Sequence[float]
    limit: int
    rungs: int
    looks: Looks
    pilots: Sequence[int] = (0,)
    guess: int = 1
    states: list[State] = field(init=False)
    looked: list[int] = field(init=False)  # how many looks each rung took
    ceiling: float = math.inf

    def __post_init__(self) -> None:
        self.states = [State(price) for price in self.prices]
        self.looked = [0] * self.rungs

    def run(self) -> int | None:
        """The index of the cheapest that holds; of one price the one with the most margin, then the first. None where
        none holds."""
        self._pilot()
        everybody = [i for i in range(len(self.states)) if not self.states[i].out]
        self._bound(everybody)
        going_on = everybody
        for rung in range(1, self.rungs - 1):
            going_on = self._climb(self._best(going_on), rung)
        self._decide(self._best(going_on))
        while waiting := self._cheaper():
            self.finish(waiting)
        holding = [i for i, state in enumerate(self.states) if state.held is not None]
        return min(holding, key=lambda i: (round(self.states[i].cost, 9), -self.states[i].margin, i), default=None)

    def finish(self, configurations: list[int]) -> None:
        """Takes configurations that wait to the last rung: after it each holds or is ruled out."""
        for rung in range(1, self.rungs - 1):
            configurations = self._climb(configurations, rung)
        self._decide(configurations)

    # ---- the steps

    def _pilot(self) -> None:
        """Finds the replicas of the pilots, which gives what the winner costs at most."""
        self._narrow(dict.fromkeys(self.pilots, min(self.limit, self.guess)), self.limit, "limit")
        self._decide([pilot for pilot in self.pilots if not self.states[pilot].out])

    def _bound(self, configurations: Iterable[int]) -> None:
        """Looks on the first rung at the most replicas that the ceiling pays for, and from there down."""
        most: dict[int, int] = {}
        for i in configurations:
            state = self.states[i]
            if state.rung >= 0:
                continue
            affordable = self._affordable(state.price)
            if affordable < 1:
                self._out(i, "price")
            else:
                most[i] = affordable
        self._narrow(most, 0, "looks" if self.ceiling < math.inf else "limit")

    def _narrow(self, first: dict[int, int], most: int, why: str) -> None:
        """Finds, side by side, the fewest replicas that are not ruled out, from the numbers of the `first` look up to
        `most`; a configuration ruled out there gets the reason `why`."""
        brackets = {i: Bracket[int](Counts(1, max(number, most), number), low=0) for i, number in first.items()}
        wanted = dict(first)
        while wanted:
            for i, look in self._look(0, wanted).items():
                brackets[i].tell(wanted[i], is_high=look.holds)
            wanted = {
                i: number
                for i in wanted
                if not self.states[i].failed and (number := brackets[i].following()) is not None
            }
        for i, bracket in brackets.items():
            self.states[i].replicas = bracket.high or (bracket.low or 0) + 1
            if bracket.high is None:
                self._out(i, why)
        self._look(0, {i: bracket.high for i, bracket in brackets.items() if bracket.high and not self.states[i].out})

    def _best(self, configurations: Iterable[int]) -> list[int]:
        """The cheapest share KEPT of the configurations that are not ruled out; the others wait."""
        order = sorted((i for i in configurations if not self.states[i].out), key=self._order)
        return order[: max(FEWEST, math.ceil(KEPT * len(order)))]

    def _climb(self, configurations: list[int], rung: int) -> list[int]:
        """Looks at them on a rung, with one replica more where they are ruled out; returns the ones left."""
        todo = [i for i in configurations if not self.states[i].out and self.states[i].held is None]
        while todo:
            looks = self._look(rung, {i: self.states[i].replicas for i in todo})
            todo = [i for i, look in looks.items() if not look.holds and not self._more(i)]
        return [i for i in configurations if not self.states[i].out]

    def _decide(self, configurations: list[int]) -> None:
        """Decides, the cheapest first, the configurations that may cost no more than one that holds already.

        Where replicas are too few, the next looks leave ever more out, then halve what is between: an objective so
        patient that short looks rule nothing out is not climbed to by single replicas.
        """
        last = self.rungs - 1
        while True:
            open_ = [i for i in configurations if not self.states[i].out and self.states[i].held is None]
            if not open_:
                return
            cheapest = min(self.states[i].cost for i in open_)
            if cheapest > self.ceiling * (1 + SAME):
                for i in open_:
                    self._out(i, "looks")
                return
            batch = [i for i in open_ if self.states[i].cost <= cheapest * (1 + SAME)]
            for i in batch:
                if self.states[i].enough == self.states[i].replicas:
                    self.states[i].held = self.states[i].replicas
            wanted = {i: self._next(i) for i in batch if self.states[i].held is None}
            for i, look in self._look(last, wanted).items():
                state = self.states[i]
                if look.holds:
                    self.ceiling = min(self.ceiling, state.price * wanted[i])
                    state.enough = wanted[i]
                    state.held = wanted[i] if wanted[i] == state.replicas else None
                else:
                    self._more(i, wanted[i] + 1 - state.replicas)
                    state.step = max(1, 2 * state.step)

    def _next(self, i: int) -> int:
        """The replicas to decide next: the fewest that are not ruled out, then ever more, as many as the ceiling pays
        for; half-way between, once more of them hold."""
        state = self.states[i]
        wanted = state.replicas + state.step // 2 if state.enough is None else (state.replicas - 1 + state.enough) // 2
        return max(state.replicas, min(wanted, self._affordable(state.price)))

    def _cheaper(self) -> list[int]:
        """The next waiting configurations that may cost less than one that holds, the cheapest first."""
        waiting = [
            i
            for i, state in enumerate(self.states)
            if not state.out and state.held is None and state.cost < self.ceiling * (1 - SAME)
        ]
        return sorted(waiting, key=self._order)[:FEWEST]

    # ---- its parts

    def _affordable(self, price: float) -> int:
        return self.limit if self.ceiling == math.inf else min(self.limit, math.floor(self.ceiling / price + SAME))

    def _order(self, i: int) -> tuple[float, float, int]:
        return round(self.states[i].cost, 9), -self.states[i].margin, i

    def _more(self, i: int, more: int = 1) -> bool:
        """Adds `more` replicas, which the configuration needs at least; returns whether that rules it out."""
        state = self.states[i]
        if state.out:
            return True
        state.replicas += more
        if state.replicas > self.limit:
            self._out(i, "limit")
        elif state.cost > self.ceiling * (1 + SAME):
            self._out(i, "looks")
        return bool(state.out)

    def _out(self, i: int, why: str) -> None:
        self.states[i].out = self.states[i].out or why

    def _look(self, rung: int, wanted: dict[int, int]) -> dict[int, Look]:
        """The results of the looks; a configuration that cannot be simulated is out."""
        looks = dict(zip(wanted, self.looks(rung, list(wanted.items())), strict=True)) if wanted else {}
        self.looked[rung] += len(looks)
        for i, look in looks.items():
            self.states[i].rung = max(self.states[i].rung, rung)
            if look.failed:
                self.states[i].failed = look.failed
                self._out(i, "failed")
            elif look.holds:
                self.states[i].margin = look.margin
        return looks
