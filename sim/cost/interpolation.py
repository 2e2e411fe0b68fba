"""Times between measured knots: linear, over one quantity or two. Below the first knot its value holds, beyond the last
the last segment goes on."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from batchsim.base.later import np
from batchsim.base.ranges import PositiveInt, Range, check_ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.float64]"


Ns = Annotated[float, Range(0, 1e15)]
"""Nanoseconds of a part of a step: up to eleven days, as long as no step takes."""
Knots = tuple[Annotated[float, Range(0, 1e15)], ...]
"""The points at which was measured, as values of the quantity (tokens, rows, context) that a curve is over."""


@dataclass(frozen=True)
class Curve:
    """A measured curve: `ns[i]` at `x[i]`, x increasing."""

    x: Knots
    ns: tuple[Ns, ...]

    def __post_init__(self) -> None:
        check_ranges(self)
        _check_knots("x", self.x)
        if len(self.ns) != len(self.x):
            raise ValueError(f"ns has {len(self.ns)} values for {len(self.x)} of x")

    def check_end(self, name: str) -> None:
        """ValueError if the curve falls at its end, where it may be continued."""
        for before, last in list(pairwise(self.ns))[-1:]:
            if last < before:
                raise ValueError(f"{name} falls at its end, from {before:g} to {last:g} ns")

    def at(self, x: NDArray[Any]) -> Floats:
        """ns at each x."""
        if (table := _table(x)) is not None:
            return self.at(table)[x]
        i, j, share = _between(self.x, x)
        ns = np.array(self.ns)
        return ns[i] * (1 - share) + ns[j] * share

    def at_one(self, x: float) -> float:
        """ns at x: equal to `at`, bit for bit."""
        i, j, share = _between_one(self.x, x)
        return self.ns[i] * (1 - share) + self.ns[j] * share

    def holding(self, x: NDArray[Any]) -> Floats:
        """ns at the smallest knot that is not below each x, the size of the captured graph to which x rows are padded;
        x within the knots."""
        return np.array(self.ns)[np.searchsorted(self.x, x)]

    def holding_one(self, x: float) -> float:
        """ns at the smallest knot that is not below x, which is within the knots."""
        return float(self.ns[bisect_left(self.x, x)])


@dataclass(frozen=True)
class Grid:
    """A measured surface: `ns[i][j]` at `sequences[i]` and a mean context of `context[j]` tokens."""

    sequences: tuple[PositiveInt, ...]
    context: Knots
    ns: tuple[tuple[Ns, ...], ...]

    def __post_init__(self) -> None:
        check_ranges(self)
        _check_knots("sequences", self.sequences)
        _check_knots("context", self.context)
        if [len(row) for row in self.ns] != [len(self.context)] * len(self.sequences):
            raise ValueError(f"ns is not {len(self.sequences)} rows of {len(self.context)} values")
        for row in self.ns:
            Curve(self.context, row).check_end("ns over context")
        Curve(self.sequences, tuple(row[-1] for row in self.ns)).check_end("ns over sequences")

    def at(self, sequences: NDArray[Any], context: NDArray[Any]) -> Floats:
        """ns at each pair, bilinear."""
        i, j, down = _between(self.sequences, sequences)
        k, m, right = _between(self.context, context)
        ns, left = np.array(self.ns), 1 - right
        first = ns[i, k] * left + ns[i, m] * right
        second = ns[j, k] * left + ns[j, m] * right
        return first * (1 - down) + second * down

    def row(self, sequences: float) -> list[float]:
        """ns at `sequences` and each of the grid's contexts: equal to `at`, bit for bit."""
        i, j, down = _between_one(self.sequences, sequences)
        return [above * (1 - down) + below * down for above, below in zip(self.ns[i], self.ns[j], strict=True)]


class GridReader:
    """A grid read at one pair after another; which of its rows a number of sequences lies between is found once."""

    __slots__ = ("_grid", "_knots", "_rows")

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._knots = grid.context
        self._rows: dict[int, tuple[tuple[float, ...], tuple[float, ...], float]] = {}

    def at(self, sequences: int, context: float) -> float:
        """ns at one pair: equal to `Grid.at`, bit for bit."""
        rows = self._rows.get(sequences)
        if rows is None:
            i, j, down = _between_one(self._grid.sequences, sequences)
            rows = self._rows[sequences] = self._grid.ns[i], self._grid.ns[j], down
        above, below, down = rows
        knots = self._knots
        if len(knots) == 1:
            return above[0] * (1 - down) + below[0] * down
        k = bisect_right(knots, context, 1, len(knots) - 1) - 1
        past = context - knots[k]
        right = past / (knots[k + 1] - knots[k]) if past > 0 else 0.0
        left = 1 - right
        first = above[k] * left + above[k + 1] * right
        return first * (1 - down) + (below[k] * left + below[k + 1] * right) * down


def _table(x: NDArray[Any]) -> NDArray[np.int64] | None:
    """0, 1, ... to the largest of x, where x has several elements for each of these on average; else None.

    A curve is then cheaper to compute once for each and to index by x.
    """
    if x.dtype.kind != "i" or not len(x) or x.min() < 0 or _SEVERAL * (x.max() + 1) > len(x):
        return None
    return np.arange(x.max() + 1)


_SEVERAL = 4


def _between(knots: Sequence[float], x: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[np.intp], Floats]:
    """The indices of the two knots around each x, and the share of the way between them at which x is: above 1 beyond
    the last knot."""
    if (table := _table(x)) is not None:
        i, j, share = _between(knots, table)
        return i[x], j[x], share[x]
    last = len(knots) - 1
    values = np.array(knots, dtype=float)
    i = np.clip(np.searchsorted(values, x, side="right") - 1, 0, max(last - 1, 0))
    j = np.minimum(i + 1, last)
    share = np.maximum(x - values[i], 0.0) / np.append(np.diff(values), math.inf)[i]
    return i, j, share


def _between_one(knots: Sequence[float], x: float) -> tuple[int, int, float]:
    """`_between` of one number."""
    last = len(knots) - 1
    i = min(max(bisect_right(knots, x) - 1, 0), max(last - 1, 0))
    j = min(i + 1, last)
    return i, j, max(x - knots[i], 0.0) / (knots[j] - knots[i] if j > i else math.inf)


def _check_knots(name: str, knots: Sequence[float]) -> None:
    """ValueError, headed `name`, unless there are knots, and they increase."""
    if not knots or any(a >= b for a, b in pairwise(knots)):
        raise ValueError(f"{name} does not increase: {list(knots[:8])}")
