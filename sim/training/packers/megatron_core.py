"""Megatron-Core 0.16.1 hybrid context parallel (`core/pipeline_parallel/hybrid_cp_schedule.py`): each document of a
step on as many ranks as its length asks for."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, log2
from typing import ClassVar, Literal

from batchsim.base.errors import ScenarioError
from batchsim.base.ranges import PositiveInt
from batchsim.training.packers.bins import Bins, PackerConfig, descending, tokens

SLACK = 0.05
"""Part of the largest time by which the times of ranks may differ."""
OVERFULL = 1.1
"""Times its share of the work that a bucket may hold."""


@dataclass(frozen=True)
class HybridContextParallel(PackerConfig):
    """`BalancedCPScheduler`: groups of documents by rank, with a barrier after each group; a document on r ranks stands
    in the list of each of them."""

    max_seqlen_per_dp_cp_rank: PositiveInt | None = None
    """Tokens that one rank takes of a document. Null: the scenario's capacity."""
    dp_cp_ranks: PositiveInt | None = None
    """Data-parallel times context-parallel ranks. In a scenario null is their number."""
    kind: Literal["megatron_core.balanced_cp"] = "megatron_core.balanced_cp"
    follows: ClassVar = "Megatron-Core 0.16.1"
    rule: ClassVar = "each document on the ranks its length needs, in groups of like work"
    makes: ClassVar = "groups"
    per_step: ClassVar = True
    capacity_option: ClassVar = "max_seqlen_per_dp_cp_rank"
    takes_longer: ClassVar = True
    ranks_option: ClassVar = "dp_cp_ranks"

    def ranks_for(self, length: int) -> int:
        """On how many ranks a document runs: a power of two."""
        return max(1, 2 ** ceil(log2(max(1, length) / tokens(self.max_seqlen_per_dp_cp_rank))))

    def work(self, length: int) -> float:
        """The work of a document on each of its ranks."""
        return length * length / self.ranks_for(length)

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> list[Bins]:
        ranks = self.dp_cp_ranks or 1
        for i in order:
            if self.ranks_for(lengths[i]) > ranks:
                raise ScenarioError(
                    f"{self.name}: example {i} of {lengths[i]:,} tokens needs {self.ranks_for(lengths[i])} ranks and"
                    f" there are {ranks}. Raise max_seqlen_per_dp_cp_rank, or add ranks."
                )
        left, groups = descending(lengths, order), list[Bins]()
        while left:
            group = _Group(self, lengths, ranks)
            left = group.fill(left)
            groups.append(group.samples)
        return groups


@dataclass
class _Group:
    """Documents that run between two barriers. `members` are the ranks of each group of ranks that share documents."""

    packer: HybridContextParallel
    lengths: Sequence[int]
    ranks: int
    samples: Bins = field(init=False)
    times: list[float] = field(init=False)
    members: list[list[int]] = field(init=False, default_factory=list[list[int]])

    def __post_init__(self) -> None:
        self.samples = [[] for _ in range(self.ranks)]
        self.times = [0.0] * self.ranks

    def fill(self, documents: Sequence[int]) -> list[int]:
        """Places what fits of `documents`, and returns the others in the order in which they are tried next."""
        buckets, first_size, smaller = self._buckets(documents), 0, False
        while buckets:
            bucket = next((each for each in buckets if each and self._best(self._size(each[0])) is not None), None)
            if bucket is None:
                break
            size = self._size(bucket[0])
            first_size = first_size or size
            best = self._best(size)
            assert best is not None
            if best not in self.members:
                self.members.append(best)
            self._place(bucket.popleft(), best)
            while buckets and not buckets[0]:
                buckets.popleft()
            smaller |= size < first_size
            if smaller and buckets and max(self.times) - min(self.times) <= SLACK * max(self.times):
                break
        left = [i for bucket in buckets for i in bucket]
        left += self._trimmed()
        while not all(self.samples):
            self._spread_out()
        return left

    def _size(self, document: int) -> int:
        return self.packer.ranks_for(self.lengths[document])

    def _work(self, document: int) -> float:
        return self.packer.work(self.lengths[document])

    def _buckets(self, documents: Sequence[int]) -> deque[deque[int]]:
        """As many runs of like work as there are sizes of groups."""
        count = len({self._size(i) for i in documents})
        target = sum(map(self._work, documents)) / count
        buckets, open_, load, owed = deque[deque[int]](), deque[int](), 0.0, count
        for place, i in enumerate(documents):
            over = load + self._work(i) > target * OVERFULL
            if open_ and (over or len(documents) - place <= owed - len(buckets)):
                buckets.append(open_)
                open_, load, owed = deque(), 0.0, owed - 1
            open_.append(i)
            load += self._work(i)
        if open_:
            buckets.append(open_)
        return buckets

    def _best(self, size: int) -> list[int] | None:
        """The ranks that a document of `size` ranks goes to; None where there is no room for it."""
        there = [each for each in self.members if len(each) == size]
        best = min(there, key=lambda each: max(self.times[r] for r in each)) if there else None
        taken = {rank for each in self.members for rank in each}
        free = sorted((r for r in range(self.ranks) if r not in taken), key=lambda r: self.times[r])[:size]
        if len(free) < size or (best and self.times[free[-1]] >= max(self.times[r] for r in best)):
            return best
        return free

    def _place(self, document: int, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.samples[rank].append(document)
            self.times[rank] += self._work(document)

    def _trimmed(self) -> list[int]:
        """Documents taken off the busiest ranks, the last placed first, while that evens the times out."""
        taken: list[int] = []
        while True:
            spread, rank = max(self.times) - min(self.times), self.times.index(max(self.times))
            if spread <= SLACK * max(self.times) or min(self.times) == 0 or len(self.samples[rank]) < 2:
                return taken
            last = self.samples[rank][-1]
            ranks = next(each for each in self.members if rank in each)
            times = [time - self._work(last) if r in ranks else time for r, time in enumerate(self.times)]
            if max(times) - min(times) >= spread:
                return taken
            self.times = times
            for r in ranks:
                self.samples[r].pop()
            taken.append(last)

    def _spread_out(self) -> None:
        """Doubles the first group of the fewest ranks; the ranks behind it, up to the first idle one, move up."""
        group = min(self.members, key=len)
        added = min(2 * len(group), self.ranks) - len(group)
        start, end, idle = group[0], group[-1], next(r for r in range(self.ranks) if not self.samples[r])
        pushed = self.samples[end + 1 : idle], self.times[end + 1 : idle]
        if end + 1 + added + len(pushed[0]) > self.ranks or any(self.samples[idle + 1 :]):
            raise ScenarioError(
                f"{self.packer.name}: a rank is idle and no group of ranks can be doubled into it, where Megatron-Core"
                " fails. Choose fewer ranks, or a larger max_seqlen_per_dp_cp_rank."
            )
        time = self.lengths[self.samples[end][0]] ** 2 / (len(group) + added)
        width = end + 1 + added - start
        samples = [*self.samples[:start], *[list(self.samples[end])] * width, *pushed[0]]
        times = [*self.times[:start], *[time] * width, *pushed[1]]
        self.samples = [list(each) for each in samples] + [[] for _ in range(self.ranks - len(samples))]
        self.times = times + [0.0] * (self.ranks - len(times))
        at = self.members.index(group)
        self.members[at] = list(range(start, end + added + 1))
        self.members[at + 1 :] = [[rank + added for rank in each] for each in self.members[at + 1 :]]
