"""Searches along numbers: where a verdict changes, and several searches side by side.

A search has a **bracket**: two numbers with different verdicts, between which the answer lies. It goes outward from
where it began in growing strides until it has both ends, then halves what is between. What a verdict is made of is the
searcher's: one seed, several, an interval that they narrow.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

N = TypeVar("N", int, float)
Trials = TypeVar("Trials", bound=Sequence[Any])
T = TypeVar("T")


class Axis(Protocol[N]):
    """The numbers that can be tried."""

    def beyond(self, edge: N, strides: int, *, up: bool) -> N | None:
        """The number to try beyond `edge` after `strides` strides that way; None at the axis's end."""
        ...

    def between(self, low: N, high: N) -> N | None:
        """A number half-way between two; None where there is none, or they are close enough."""
        ...


@dataclass
class Bracket(Generic[N]):
    """Where a verdict changes along an axis: `low` has the one verdict, `high` the other; None while no number has.

    `strides` counts the numbers tried beyond the only end.
    """

    axis: Axis[N]
    low: N | None = None
    high: N | None = None
    strides: int = 0

    def put(self, low: N | None, high: N | None) -> None:
        """Sets the ends anew, as verdicts are that may change when more is known."""
        self.low, self.high = low, high
        if low is not None and high is not None:
            self.strides = 0

    def tell(self, number: N, *, is_high: bool) -> None:
        """Narrows the bracket by the verdict of one number inside it, or beyond its only end."""
        self.put(*((self.low, number) if is_high else (number, self.high)))

    def following(self) -> N | None:
        """The number to try next: half-way between the ends, or a stride beyond the only one. None where the axis has
        none left."""
        if self.low is not None and self.high is not None:
            return self.axis.between(self.low, self.high)
        edge = self.low if self.high is None else self.high
        assert edge is not None, "a search begins with a number of its own"
        self.strides += 1
        return self.axis.beyond(edge, self.strides - 1, up=self.high is None)


@dataclass(frozen=True)
class Counts:
    """Whole numbers from `lowest` to `highest`, with strides that double from `step` on."""

    lowest: int
    highest: int
    step: int = 1

    def beyond(self, edge: int, strides: int, *, up: bool) -> int | None:
        wanted = edge + self.step * 2**strides * (1 if up else -1)
        number = min(max(wanted, self.lowest), self.highest)
        return None if number == edge else number

    def between(self, low: int, high: int) -> int | None:
        return (low + high) // 2 if high - low > 1 else None


def side_by_side(
    searches: Sequence[Generator[Trials, None, T]], run: Callable[[list[tuple[int, Trials]]], object]
) -> dict[int, T]:
    """What the searches return, by their index in `searches`.

    A search yields the trials that it wants and goes on when they were made. `run` makes those of all searches at a
    time, so that processes do not wait for one another; a round in which no search wants any is the last.
    """
    ends: dict[int, T] = {}
    going_on = dict(enumerate(searches))
    while True:
        wanted: list[tuple[int, Trials]] = []
        for number, search in list(going_on.items()):
            try:
                wanted.append((number, next(search)))
            except StopIteration as end:
                ends[number] = end.value
                del going_on[number]
        if not any(trials for _, trials in wanted):
            return ends
        run(wanted)
