"""NeMo-RL at 7ea279abf (`nemo_rl/data/packing/algorithms.py`), and SkyRL 0.3.0 (`train/dataset/bin_packing.py`):
the sequences of a step in bins, as many as data-parallel ranks can share."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from batchsim.base.ranges import PositiveInt
from batchsim.training.packers.bins import Bins, PackerConfig, at_least, descending, first_fit, next_fit, tokens
from batchsim.training.packers.swift import worst_fit


@dataclass(frozen=True)
class _NemoRl(PackerConfig):
    bin_capacity: PositiveInt | None = None
    """Tokens of a bin. Null: the scenario's capacity."""
    min_bin_count: PositiveInt | None = None
    """Bins at least. Null: as many as there are."""
    bin_count_multiple: PositiveInt | None = None
    """The number of bins is a multiple of this: the data-parallel size. In a scenario null is that size."""
    follows: ClassVar = "NeMo-RL 7ea279abf"
    makes: ClassVar = "rows"
    per_step: ClassVar = True
    capacity_option: ClassVar = "bin_capacity"
    ranks_option: ClassVar = "bin_count_multiple"

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> Bins:
        self.refuse_longer(lengths, order, tokens(self.bin_capacity))
        bins = self._bins(lengths, order)
        return at_least(bins, self.min_bin_count, self.bin_count_multiple, self.name)

    def _bins(self, lengths: Sequence[int], order: Sequence[int]) -> Bins:
        raise NotImplementedError


@dataclass(frozen=True)
class NemoRlConcatenative(_NemoRl):
    """Next fit in the order given."""

    kind: Literal["nemo_rl.concatenative"] = "nemo_rl.concatenative"
    rule: ClassVar = "next fit in the order given"

    def _bins(self, lengths: Sequence[int], order: Sequence[int]) -> Bins:
        return next_fit(order, lengths, tokens(self.bin_capacity))


@dataclass(frozen=True)
class NemoRlDecreasing(_NemoRl):
    """First fit by (length, index), both descending."""

    kind: Literal["nemo_rl.first_fit_decreasing"] = "nemo_rl.first_fit_decreasing"
    rule: ClassVar = "first fit by length and index, both descending"

    def _bins(self, lengths: Sequence[int], order: Sequence[int]) -> Bins:
        ranked = sorted(order, key=lambda i: (lengths[i], i), reverse=True)
        return first_fit(ranked, lengths, tokens(self.bin_capacity))


@dataclass(frozen=True)
class NemoRlShuffle(_NemoRl):
    """First fit in random order."""

    kind: Literal["nemo_rl.first_fit_shuffle"] = "nemo_rl.first_fit_shuffle"
    rule: ClassVar = "first fit in random order"
    reads: ClassVar = "random"

    def _bins(self, lengths: Sequence[int], order: Sequence[int]) -> Bins:
        return first_fit(order, lengths, tokens(self.bin_capacity))


@dataclass(frozen=True)
class NemoRlModified(_NemoRl):
    """Johnson and Garey's modified first fit decreasing, as NeMo-RL has it; what it recommends.

    Large examples, of more than half a bin, have a bin each; a medium one, of more than a third, is added to each, or
    two small ones, of more than a sixth; then the largest that fit. What is left over goes by worst fit into new bins,
    in the order of their loads. Where nothing is left over NeMo-RL adds an empty bin, which is in the result.
    """

    kind: Literal["nemo_rl.modified_first_fit_decreasing"] = "nemo_rl.modified_first_fit_decreasing"
    rule: ClassVar = "modified first fit decreasing: large ones with a medium or two small ones, then worst fit"

    def _bins(self, lengths: Sequence[int], order: Sequence[int]) -> Bins:
        capacity = tokens(self.bin_capacity)
        ranked = descending(lengths, order)
        large = [i for i in ranked if lengths[i] > capacity / 2]
        medium = [i for i in ranked if capacity / 3 < lengths[i] <= capacity / 2]
        small = sorted((i for i in order if capacity / 6 < lengths[i] <= capacity / 3), key=lambda i: lengths[i])
        tiny = sorted((i for i in order if lengths[i] <= capacity / 6), key=lambda i: lengths[i])
        bins = [[i] for i in large]
        space = [capacity - lengths[i] for i in large]
        _add_mediums(bins, space, medium, lengths)
        _add_pairs(bins, space, small, lengths, capacity)
        rest = descending(lengths, [*medium, *small, *tiny])
        sizes = [-lengths[i] for i in rest]  # ascending, so that the first that fits is found by halving
        for place, row in enumerate(bins):
            while (at := bisect_right(sizes, -space[place] - 1)) < len(rest):
                space[place] += sizes.pop(at)
                row.append(rest.pop(at))
        return bins + _by_load(rest, lengths, capacity)


def _add_mediums(bins: Bins, space: list[int], medium: list[int], lengths: Sequence[int]) -> None:
    """Adds to each bin the largest of `medium` that fits, and takes it out of that list."""
    for place, row in enumerate(bins):
        at = next((at for at, i in enumerate(medium) if lengths[i] <= space[place]), None)
        if at is not None:
            space[place] -= lengths[medium[at]]
            row.append(medium.pop(at))


def _add_pairs(bins: Bins, space: list[int], small: list[int], lengths: Sequence[int], capacity: int) -> None:
    """Adds to each bin without a medium, the last first, the smallest of `small` and the largest that fits with it."""
    for place in reversed(range(len(bins))):
        has_medium = any(capacity / 3 < lengths[i] <= capacity / 2 for i in bins[place])
        if has_medium or len(small) < 2 or lengths[small[0]] + lengths[small[1]] > space[place]:
            continue
        first = small.pop(0)
        left = space[place] - lengths[first]
        second = next(at for at in reversed(range(len(small))) if lengths[small[at]] <= left)
        space[place] = left - lengths[small[second]]
        bins[place] += [first, small.pop(second)]


def _by_load(order: Sequence[int], lengths: Sequence[int], capacity: int) -> Bins:
    """Worst fit into new bins, which stand by load, one that was changed after those equal to it; one at least."""
    bins, loads = Bins([[]]), [0]
    for i in order:
        row, load = (bins.pop(0), loads.pop(0)) if lengths[i] + loads[0] <= capacity else ([], 0)
        row.append(i)
        load += lengths[i]
        at = bisect_right(loads, load)
        bins.insert(at, row)
        loads.insert(at, load)
    return bins


@dataclass(frozen=True)
class SkyRlDecreasing(NemoRlDecreasing):
    """First fit by (length, index), both descending."""

    kind: Literal["skyrl.first_fit_decreasing"] = "skyrl.first_fit_decreasing"  # type: ignore[assignment]
    follows: ClassVar = "SkyRL 0.3.0"


@dataclass(frozen=True)
class SkyRlBalanced(_NemoRl):
    """The longest first, each into the least loaded bin; one that is longer than a bin sits alone."""

    kind: Literal["skyrl.balanced"] = "skyrl.balanced"
    follows: ClassVar = "SkyRL 0.3.0"
    rule: ClassVar = "worst fit decreasing, longer examples alone"

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> Bins:
        bins = worst_fit(descending(lengths, order), lengths, tokens(self.bin_capacity))
        return at_least(bins, self.min_bin_count, self.bin_count_multiple, self.name)


@dataclass(frozen=True)
class NemoRlDynamic(PackerConfig):
    """Dynamic batching, which excludes packing: neighbours by length while their padded tokens fit a micro-batch.

    Followed by its documentation alone.
    """

    train_micro_batch_tokens: PositiveInt | None = None
    """Padded tokens of a micro-batch. Null: the scenario's capacity."""
    sequence_length_round: PositiveInt = 64
    """Micro-batches are padded to a multiple of this many tokens."""
    kind: Literal["nemo_rl.dynamic_batching"] = "nemo_rl.dynamic_batching"
    follows: ClassVar = "NeMo-RL 7ea279abf"
    rule: ClassVar = "sorted by length, as many as their padded tokens let"
    makes: ClassVar = "samples"
    mask: ClassVar = "padded"
    pads: ClassVar = "longest"
    per_step: ClassVar = True
    per_rank: ClassVar = True
    capacity_option: ClassVar = "train_micro_batch_tokens"

    @property
    def rounded(self) -> int:  # type: ignore[override]
        return self.sequence_length_round

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> Bins:
        most = tokens(self.train_micro_batch_tokens)
        self.refuse_longer([self._padded(length) for length in lengths], order, most)
        batches = Bins()
        for i in sorted(order, key=lambda i: lengths[i]):
            if not batches or (len(batches[-1]) + 1) * self._padded(lengths[i]) > most:
                batches.append([])
            batches[-1].append(i)
        return batches

    def _padded(self, length: int) -> int:
        return length + -length % self.sequence_length_round
