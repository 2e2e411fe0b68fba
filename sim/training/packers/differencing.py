"""Karmarkar-Karp: numbers into k sets of like sums, by merging the two partitions that are furthest from even."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from batchsim.training.packers.bins import Bins, chunks


class _Partition:
    """k sets as `[sum, count, items]`, the largest first; the heap pops the one of the largest spread."""

    __slots__ = ("sets", "spread")

    def __init__(self, sets: list[list[Any]]) -> None:
        self.sets = sorted(sets, reverse=True)
        self.spread: int = self.sets[0][0] - self.sets[-1][0]

    def __lt__(self, other: _Partition) -> bool:
        if self.spread != other.spread:
            return self.spread > other.spread
        return self.sets[0] > other.sets[0]

    def merged(self, other: _Partition) -> _Partition:
        """The largest sets of one with the smallest of the other."""
        pairs = zip(self.sets, reversed(other.sets), strict=True)
        return _Partition([[a + b for a, b in zip(one, two, strict=True)] for one, two in pairs])


def karmarkar_karp(values: Sequence[int], k: int, *, equal: bool) -> Bins:
    """`k` sets of places in `values`, the set of the largest sum first, items in the order in which sets were merged.

    `equal`: as many items in each, of which `len(values)` must be a multiple. The implementation that verl, slime and
    AReaL share: of equal spreads the partition whose largest set is greater by (sum, count, items) is merged first.
    """
    ranked = sorted(range(len(values)), key=lambda i: (values[i], i))
    heap: list[_Partition] = []
    for run in chunks(ranked, k if equal else 1):
        sets: list[list[Any]] = [[values[i], 1, [i]] for i in run]
        heapq.heappush(heap, _Partition(sets + [[0, 0, []] for _ in range(k - len(run))]))
    while len(heap) > 1:
        first = heapq.heappop(heap)
        heapq.heappush(heap, first.merged(heapq.heappop(heap)))
    return [each[2] for each in heap[0].sets]
