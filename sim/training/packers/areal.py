"""AReaL 1.0.4 (`utils/seqpack.py`): a rank's sequences in groups that a micro-batch can hold, or those of a step by
rank.

`ffd` sorts with an unstable sort of numpy, whose order of equal lengths depends on the CPU; here it is stable, so that
groups hold the same lengths in the same order, and of equal ones perhaps other examples.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar, Literal

from batchsim.base.errors import ScenarioError
from batchsim.base.ranges import PositiveInt
from batchsim.training.packers.bins import Bins, PackerConfig, descending, tokens
from batchsim.training.packers.differencing import karmarkar_karp


@dataclass(frozen=True)
class _MicroBatches(PackerConfig):
    capacity: PositiveInt | None = None
    """Tokens of a group at most, `max_tokens_per_mb`. Null: the scenario's capacity."""
    min_groups: PositiveInt = 1
    """Groups at least."""
    n_groups_divisor: PositiveInt = 1
    """The number of groups is a multiple of this."""
    follows: ClassVar = "AReaL 1.0.4"
    makes: ClassVar = "samples"
    per_step: ClassVar = True
    per_rank: ClassVar = True
    capacity_option: ClassVar = "capacity"
    least_option: ClassVar = "min_groups"

    def least(self, lengths: Sequence[int], order: Sequence[int]) -> int:
        """The number of groups to begin with. ScenarioError for fewer sequences, or one that is too long."""
        self.refuse_longer(lengths, order, tokens(self.capacity))
        least = max(self.min_groups, self.n_groups_divisor)
        self.check(len(order), least)
        return least

    def check(self, count: int, groups: int) -> None:
        """ScenarioError where `groups` groups cannot have a sequence each."""
        if count < groups:
            raise ScenarioError(
                f"{self.name}: {groups} groups are asked for and there are {count} sequences. Lower min_groups or"
                " n_groups_divisor."
            )

    def fewest_first(self, lengths: Sequence[int], order: Sequence[int]) -> Bins:
        """Groups by `ffd`: with more of them until their number is a multiple of the divisor."""
        least, ranked = self.least(lengths, order), descending(lengths, order)
        while True:
            groups = _allocated(ranked, lengths, tokens(self.capacity), least)
            if len(groups) % self.n_groups_divisor == 0:
                return groups
            least += self.n_groups_divisor - least % self.n_groups_divisor
            self.check(len(order), least)


@dataclass(frozen=True)
class ArealFfd(_MicroBatches):
    """The longest first: a new group where the least loaded one has no space, else the group of fewest sequences that
    has."""

    kind: Literal["areal.ffd"] = "areal.ffd"
    rule: ClassVar = "the longest first into the group of fewest sequences that has space"

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> Bins:
        return self.fewest_first(lengths, order)


def _allocated(ranked: Sequence[int], lengths: Sequence[int], capacity: int, least: int) -> Bins:
    groups, loads = Bins(), list[tuple[int, int]]()
    for i in ranked:
        if len(groups) < least or loads[0][0] + lengths[i] > capacity:
            insort(loads, (lengths[i], len(groups)))
            groups.append([i])
            continue
        fitting = bisect_right(loads, (capacity - lengths[i], len(lengths)))
        at = min(range(fitting), key=lambda at: len(groups[loads[at][1]]))
        load, group = loads.pop(at)
        insort(loads, (load + lengths[i], group))
        groups[group].append(i)
    return groups


@dataclass(frozen=True)
class ArealKk(_MicroBatches):
    """Karmarkar-Karp on tokens into as few groups as the capacity lets; where a group is too large, `ffd`."""

    kind: Literal["areal.kk"] = "areal.kk"
    rule: ClassVar = "Karmarkar-Karp on tokens, ffd where a group is too large"

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> Bins:
        capacity = tokens(self.capacity)
        count = max(self.least(lengths, order), -(-sum(lengths[i] for i in order) // capacity))
        count = min(count + -count % self.n_groups_divisor, len(order))
        groups = [
            [order[i] for i in group] for group in karmarkar_karp([lengths[i] for i in order], count, equal=False)
        ]
        fits = all(sum(lengths[i] for i in group) <= capacity for group in groups)
        return groups if fits else self.fewest_first(lengths, order)


@dataclass(frozen=True)
class ArealBalanced(PackerConfig):
    """A step's sequences to the ranks: the longest first, to the least sum among ranks that may have more."""

    K: PositiveInt | None = None
    """Parts, one a rank. In a scenario null is the number of data-parallel ranks."""
    kind: Literal["areal.balanced_greedy"] = "areal.balanced_greedy"
    follows: ClassVar = "AReaL 1.0.4"
    rule: ClassVar = "the longest first to the least sum, counts equal"
    makes: ClassVar = "parts"
    per_step: ClassVar = True
    ranks_option: ClassVar = "K"

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> Bins:
        parts = self.K or 1
        most = [len(order) // parts + (part < len(order) % parts) for part in range(parts)]
        bins, sums = [list[int]() for _ in range(parts)], [0] * parts
        for i in descending(lengths, order):
            part = min((p for p in range(parts) if len(bins[p]) < most[p]), key=lambda p: sums[p])
            bins[part].append(i)
            sums[part] += lengths[i]
        return bins


@dataclass(frozen=True)
class ArealContiguous(PackerConfig):
    """A step's sequences to the ranks in contiguous runs whose sums differ little, by dynamic programming.

    As AReaL has it: of each count and end one partition is kept, so that the result need not be the best.
    """

    k: PositiveInt | None = None
    """Parts, one a rank. In a scenario null is the number of data-parallel ranks."""
    min_size: PositiveInt = 1
    """Sequences of a part at least."""
    kind: Literal["areal.min_abs_diff"] = "areal.min_abs_diff"
    follows: ClassVar = "AReaL 1.0.4"
    rule: ClassVar = "contiguous runs whose sums differ little"
    makes: ClassVar = "parts"
    per_step: ClassVar = True
    ranks_option: ClassVar = "k"

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> Bins:
        parts, least = self.k or 1, self.min_size
        if len(order) < parts * least:
            raise ScenarioError(
                f"{self.name}: {parts} parts of at least {least} need {parts * least} sequences, there are"
                f" {len(order)}. Lower min_size."
            )
        ends = _ends([0, *accumulate(lengths[i] for i in order)], parts, least)
        return [list(order[start:end]) for start, end in pairwise(ends)]


def _ends(sums: Sequence[int], parts: int, least: int) -> list[int]:
    """Where `parts` runs end, from 0 on, of items whose sums up to each place are `sums`.

    By place and number of runs: the difference of the largest and the smallest run, those two, and where the last run
    starts; a later start replaces an equal one.
    """
    count = len(sums) - 1
    best = {(end, 1): (0, sums[end], sums[end], 0) for end in range(count + 1)}
    for runs in range(2, parts + 1):
        for end in range(runs * least, count + 1):
            for start in range(least, end - least + 1):
                before = best.get((start, runs - 1))
                if before is None:
                    continue
                difference, large, small, _ = before
                last = sums[end] - sums[start]
                worst = max(difference, large - last, last - small)
                if worst > best.get((end, runs), (worst,))[0]:
                    continue
                if worst == large - last:
                    small = last
                elif worst == last - small:
                    large = last
                best[end, runs] = (worst, large, small, start)
    ends = [count]
    for runs in range(parts, 0, -1):
        ends.append(best[ends[-1], runs][3])
    return ends[::-1]
