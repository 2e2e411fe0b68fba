"""The search for the highest load that keeps an objective, by trials of loads with several seeds each.

Every load gets the same seeds, so that all that differs from one probe to the next is the load. A load at which no
request is left to measure is too low to be tried, and counts for nothing. The search brackets the crossing with few
seeds, halves the bracket with more, looks on either side for a load that is decided, and adds seeds until what is
undecided is narrow. Nothing here simulates: `search` yields the trials that it wants, and its caller runs them and
writes them into its book.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from batchsim.base.errors import ScenarioError
from batchsim.study.capacity.book import Book, Probe, bracket_of, capacity, probes
from batchsim.study.sweep.search import Bracket

DOWN = (0.8, 0.8, 0.8, 0.75, 0.7, 0.65, 0.55, 0.5, 0.4, 0.35, 0.3)  # of the load before: down to 2 ‰ of the start
UP = (1.25, 1.25, 1.25, 1.5, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0)
NEAR_DOWN = (0.93, 0.9, 0.85, *DOWN)  # from a load that is thought to be close
NEAR_UP = (1.08, 1.12, 1.18, *UP)
BELOW, ABOVE = (0.96, 0.92, 0.85, 0.75, 0.6, 0.4), (1.04, 1.08, 1.16, 1.3, 1.6, 2.0)
"""Factors on the bracket's ends, at which a load that is decided is looked for."""

CHECKED_BELOW = (0.5, 0.2)  # of the capacity: whether a lower load fails


@dataclass(frozen=True)
class Axis:
    """The loads that can be tried: whole numbers or not, from `lowest` to `highest`, None where nothing ends them.

    `near`: a search begins close to what it looks for, and takes smaller strides.
    """

    lowest: float
    highest: float | None = None
    whole: bool = False
    digits: int = 3
    near: bool = False

    def load(self, wanted: float) -> float:
        """The load that can be tried next to `wanted`."""
        near = float(round(wanted)) if self.whole else float(f"{wanted:.{self.digits}g}")
        return max(self.lowest, near if self.highest is None else min(near, self.highest))

    def between(self, low: float, high: float) -> float | None:
        """A load in the middle, by factor; None if there is none."""
        middle = self.load(math.sqrt(low * high))
        return middle if low < middle < high else None

    def beyond(self, edge: float, strides: int, *, up: bool) -> float | None:
        """The load above or below `edge` after `strides` strides that way; None at the axis's end, or after the
        last."""
        factors = (NEAR_UP if self.near else UP) if up else (NEAR_DOWN if self.near else DOWN)
        if strides >= len(factors):
            return None
        following = self.load(edge * factors[strides])
        if self.whole and following == edge:
            following = self.load(edge + (1 if up else -1))
        return None if following == edge else following


@dataclass(frozen=True)
class Effort:
    """How much is tried. `pilot` seeds bracket the crossing, from `fewest` to `most` seeds decide.

    The search ends when half the undecided band is at most `precision` of the capacity. `near`: the first load is
    thought to be close to it. `narrow`: a capacity for comparisons; only the bracket is narrowed, nothing decided.
    """

    pilot: int = 2
    fewest: int = 10
    most: int = 32
    precision: float = 0.03
    max_probes: int = 40
    near: bool = False
    narrow: bool = False

    def __post_init__(self) -> None:
        for name in ("pilot", "fewest", "most", "max_probes"):
            if getattr(self, name) < 1:
                raise ScenarioError(f"effort: {name} is {getattr(self, name)}. It must be at least 1.")

    @property
    def width(self) -> float:
        """The widest ratio of a bracket's ends that ends the halving."""
        return 1 + (2.0 if self.narrow else 1.5) * self.precision


def search(book: Book, start: float, axis: Axis, effort: Effort) -> Iterator[list[tuple[float, int]]]:
    """Yields the (load, seed) it wants tried; they must be in `book` when it is asked for more."""
    if wanted := _missing(book, [axis.load(start)], effort.pilot):
        yield wanted
    num_seeds, bracket = effort.fewest, Bracket[float](replace(axis, near=effort.near))
    while len(book) < effort.max_probes:
        low, high = bracket_of(probes(book))
        bracket.put(low and low.load, high and high.load)
        if low is None or high is None:
            is_judged = low is not None or high is not None
            if not is_judged:  # no load had requests to measure yet: higher ones have more
                bracket.put(max(book), None)
            wanted = _missing(book, _loads(bracket.following()), effort.pilot)
            if not wanted and not is_judged:
                return
            if not wanted:  # nowhere further to go: the verdict takes more than a pilot's seeds
                best = max(probes(book), key=lambda p: p.margin) if low is None else low
                doubtful = [p.load for p in probes(book) if not (p.decided or effort.narrow)]
                wanted = _missing(book, [best.load, *doubtful], num_seeds)
            if not wanted:
                return
            yield wanted
            continue
        if wanted := _missing(book, [low.load, high.load], num_seeds):
            yield wanted
            continue
        if high.load > effort.width * low.load and (wanted := _missing(book, _loads(bracket.following()), num_seeds)):
            yield wanted
            continue
        if effort.narrow:
            return
        if wanted := _missing(book, _undecided_ends(book, low, high, num_seeds, axis), num_seeds):
            yield wanted
            continue
        more = _more_seeds(book, num_seeds, effort)
        if more > num_seeds:
            num_seeds = more
            near = [p.load for p in probes(book, effort.fewest)]
            yield _missing(book, [load for load in near if 0.8 * low.load <= load <= 1.25 * high.load], num_seeds)
            continue
        if wanted := _missing(book, [axis.load(low.load * share) for share in CHECKED_BELOW], effort.pilot):
            yield wanted
            continue
        doubtful = [p.load for p in probes(book) if p.load < low.load and not p.passes and not p.decided]
        if wanted := _missing(book, doubtful, effort.fewest):
            yield wanted
            continue
        return


def _loads(load: float | None) -> list[float]:
    return [] if load is None else [load]


def _missing(book: Book, loads: Iterable[float], num_seeds: int) -> list[tuple[float, int]]:
    """The trials of the first seeds that are not in the book."""
    return [(load, s) for load in dict.fromkeys(loads) for s in range(num_seeds) if s not in book.get(load, {})]


def _undecided_ends(book: Book, low: Probe, high: Probe, num_seeds: int, axis: Axis) -> list[float]:
    """Loads to try next, below or above the bracket, where no probe with `num_seeds` seeds is decided yet."""
    known, wanted = {p.load: p for p in probes(book, num_seeds)}, []
    for end, factors in ((low, BELOW), (high, ABOVE)):
        beyond = [p for p in known.values() if (p.load <= end.load) == (end is low) or p.load == end.load]
        if any(p.decided and p.passes is end.passes for p in beyond):
            continue
        tries = [load for factor in factors if (load := axis.load(end.load * factor)) not in known]
        wanted += tries[:1]
    return wanted


def _more_seeds(book: Book, num_seeds: int, effort: Effort) -> int:
    """How many seeds would make the undecided band narrow enough; `num_seeds` where it is."""
    estimate = capacity(book, num_seeds)
    if estimate.load is None or estimate.low is None or estimate.high is None:
        return effort.most
    excess = (estimate.high - estimate.low) / 2 / estimate.load / effort.precision
    wanted = num_seeds if excess <= 1 else max(num_seeds + 4, math.ceil(1.1 * num_seeds * excess**2))
    return min(wanted, effort.most)
