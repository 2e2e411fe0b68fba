"""ms-swift 4.6.0 (`swift/dataset/packing.py`) with binpacking 2.0.1: worst fit decreasing, or next fit, in chunks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from batchsim.base.ranges import PositiveInt
from batchsim.training.packers.bins import Bins, PackerConfig, chunks, descending, tokens


@dataclass(frozen=True)
class _Swift(PackerConfig):
    packing_length: PositiveInt | None = None
    """Tokens of a row. Null: the scenario's capacity."""
    batch: PositiveInt = 1000
    """Examples that are read at a time."""
    packing_num_proc: Literal[1] = 1
    """Processes that pack: one alone is followed."""
    follows: ClassVar = "ms-swift 4.6.0"
    makes: ClassVar = "rows"
    capacity_option: ClassVar = "packing_length"
    shuffled: ClassVar = True


@dataclass(frozen=True)
class SwiftBinpack(_Swift):
    """`binpacking.to_constant_volume`: the longest first, each into the least loaded bin; what is in the bin opened
    last goes on into the next chunk."""

    kind: Literal["swift.binpack"] = "swift.binpack"
    rule: ClassVar = "worst fit decreasing in chunks, the last bin carried on"

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> Bins:
        bins, carried = Bins(), list[int]()
        for chunk in chunks(order, self.batch):
            *closed, carried = worst_fit(descending(lengths, [*carried, *chunk]), lengths, tokens(self.packing_length))
            bins += closed
        return [*bins, carried] if carried else bins


@dataclass(frozen=True)
class SwiftSequential(_Swift):
    """Next fit that also closes a bin that is exactly full."""

    kind: Literal["swift.sequential"] = "swift.sequential"
    rule: ClassVar = "next fit in the order given"

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> Bins:
        capacity = tokens(self.packing_length)
        bins, space = Bins(), 0
        for i in order:
            if lengths[i] > space or not space:
                bins.append([])
                space = capacity
            bins[-1].append(i)
            space -= lengths[i]
        return bins


def worst_fit(order: Sequence[int], lengths: Sequence[int], capacity: int) -> Bins:
    """Each example into the least loaded bin, of equal ones the first, if that has space for it; else into a new one.

    Bins are in the order of opening. An example that is longer than `capacity` has a bin of its own.
    """
    bins: Bins = []
    heap: list[tuple[int, int]] = []
    for i in order:
        if heap and heap[0][0] + lengths[i] <= capacity:
            load, place = heapq.heappop(heap)
        else:
            load, place = 0, len(bins)
            bins.append([])
        bins[place].append(i)
        heapq.heappush(heap, (load + lengths[i], place))
    return bins
