"""Transformers 5.24.0: `DataCollatorWithPadding`, `DataCollatorWithFlattening` and the samplers of
`trainer_pt_utils.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from batchsim.base.errors import ScenarioError
from batchsim.base.ranges import PositiveInt
from batchsim.base.units import counted
from batchsim.training.packers.bins import Bins, PaddedPacker, chunks, descending

MEGA_BATCHES = 50
"""Batches that are sorted together at most."""
QUADRATIC = 0.001
"""Share of a token's cost that each token of the longest sample adds."""


@dataclass(frozen=True)
class Padded(PaddedPacker):
    """A permutation cut into batches; each is padded to its longest sample, or with the mask `document` laid end to end
    into one row."""

    sampler: Literal["random", "sequential"] = "random"
    """`train_sampling_strategy`: a random permutation, or the order given."""
    kind: Literal["transformers.padded"] = "transformers.padded"
    follows: ClassVar = "Transformers 5.24.0"
    rule: ClassVar = "a permutation cut into batches, each padded to its longest sample"
    makes: ClassVar = "order"

    @property
    def reads(self) -> Literal["given", "random"]:  # type: ignore[override]
        return "random" if self.sampler == "random" else "given"

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> list[int]:
        return list(order)


@dataclass(frozen=True)
class LengthGrouped(PaddedPacker):
    """`group_by_length`: samples of like length in a batch, by sorting runs of a permutation; the longest sample of all
    comes first."""

    batch_size: PositiveInt | None = None
    """Samples of a batch: those of a rank's optimizer step. Null: micro_batch x accumulate."""
    mega_batch_mult: PositiveInt | None = None
    """Batches of a run. Null: a quarter of all, at most 50."""
    kind: Literal["transformers.length_grouped"] = "transformers.length_grouped"
    follows: ClassVar = "Transformers 5.24.0"
    rule: ClassVar = "runs of a permutation sorted by length, the longest sample first"
    makes: ClassVar = "order"
    reads: ClassVar = "random"

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> list[int]:
        return length_grouped(lengths, order, self.batch_size or 1, self.mega_batch_mult)


@dataclass(frozen=True)
class LengthGroupedDistributed(PaddedPacker):
    """`DistributedLengthGroupedSampler`: the order of `length_grouped` by turns to the ranks."""

    batch_size: PositiveInt | None = None
    """Samples of a batch. Null: micro_batch x accumulate."""
    num_replicas: PositiveInt | None = None
    """Data-parallel ranks. In a scenario null is their number."""
    drop_last: bool = False
    """Whether the last samples are left out; else the first ones come again, so that ranks have equally many."""
    kind: Literal["transformers.length_grouped_distributed"] = "transformers.length_grouped_distributed"
    follows: ClassVar = "Transformers 5.24.0"
    rule: ClassVar = "the length-grouped order, sample by sample to the ranks"
    makes: ClassVar = "rank_orders"
    reads: ClassVar = "random"
    ranks_option: ClassVar = "num_replicas"

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> list[list[int]]:
        ranks = self.num_replicas or 1
        grouped = length_grouped(lengths, order, self.batch_size or 1, None)
        if self.drop_last:
            grouped = grouped[: len(grouped) // ranks * ranks]
        else:
            grouped += [grouped[i % len(grouped)] for i in range(-len(grouped) % ranks)]
        return [grouped[rank::ranks] for rank in range(ranks)]


def length_grouped(lengths: Sequence[int], order: Sequence[int], batch: int, multiple: int | None) -> list[int]:
    """`order` in runs of `batch` x `multiple`, each sorted from the longest on; the first items of the first run and of
    the run with the longest sample are swapped."""
    if multiple is None:
        multiple = max(1, min(len(order) // (4 * batch), MEGA_BATCHES))
    runs = [descending(lengths, run) for run in chunks(order, batch * multiple)]
    if runs:
        longest = max(runs, key=lambda run: lengths[run[0]])
        longest[0], runs[0][0] = runs[0][0], longest[0]
    return [i for run in runs for i in run]


@dataclass(frozen=True)
class BatchRebalance(PaddedPacker):
    """`batch_rebalance`: the samples of each optimizer step, sorted, in contiguous groups whose padded costs are
    alike. Groups of like cost are a micro-batch of all ranks."""

    effective_batch_size: PositiveInt | None = None
    """Samples of an optimizer step over all ranks. Null: the scenario's."""
    dp_size: PositiveInt | None = None
    """Data-parallel ranks. In a scenario null is their number."""
    grad_accum: PositiveInt | None = None
    """Micro-batches of a rank's step. Null: the scenario's."""
    drop_last: bool = True
    """Whether a step with fewer samples is left out; the Trainer passes `dataloader_drop_last`, false by default."""
    kind: Literal["transformers.batch_rebalance"] = "transformers.batch_rebalance"
    follows: ClassVar = "Transformers 5.24.0"
    rule: ClassVar = "each step's samples sorted into groups of like padded cost"
    makes: ClassVar = "rank_samples"
    reads: ClassVar = "random"
    ranks_option: ClassVar = "dp_size"

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> list[Bins]:
        ranks, groups = self.dp_size or 1, (self.dp_size or 1) * (self.grad_accum or 1)
        if (self.effective_batch_size or 1) < groups:
            raise ScenarioError(
                f"{self.kind}: a step has {counted(self.effective_batch_size or 1, 'sample')} for {groups}"
                f" micro-batches, {self.grad_accum or 1} on each of {counted(ranks, 'rank')}. Raise global_batch, or"
                " the packer's effective_batch_size."
            )
        by_rank = [Bins() for _ in range(ranks)]
        for step in chunks(order, self.effective_batch_size or 1):
            samples = list(step)
            if len(samples) < (self.effective_batch_size or 1):
                if self.drop_last:
                    break
                samples += [order[i % len(order)] for i in range(groups - len(samples))]
            ranked = descending(lengths, samples)
            costs = _Costs([lengths[i] for i in ranked], groups, ranks)
            sizes = costs.even_sizes(max(30 * groups, self.effective_batch_size or 1))
            cuts = list(_cuts(sizes))
            for place, at in enumerate(sorted(range(groups), key=lambda at: -costs.of(cuts[at], sizes[at]))):
                by_rank[place % ranks].append(ranked[cuts[at] : cuts[at] + sizes[at]])
        return by_rank


def _cuts(sizes: Sequence[int]) -> Iterator[int]:
    at = 0
    for size in sizes:
        yield at
        at += size


class _Costs:
    """Contiguous groups of samples of these `lengths`, which descend, and what they cost padded."""

    def __init__(self, lengths: Sequence[int], groups: int, ranks: int) -> None:
        self._lengths, self._groups, self._ranks = lengths, groups, ranks

    def of(self, first: int, size: int) -> float:
        """The cost of the group of `size` samples from place `first` on."""
        return self._cost(size, self._lengths[first])

    def _cost(self, size: int, longest: int) -> float:
        return size * longest + QUADRATIC * size * longest * longest

    def all_of(self, sizes: Sequence[int]) -> list[float]:
        """The costs of the groups of these sizes."""
        return [self.of(*each) for each in zip(_cuts(sizes), sizes, strict=True)]

    def even_sizes(self, tries: int) -> list[int]:
        """Sizes of the groups of the least spread of costs that moving samples from the dearest one finds."""
        count, groups = len(self._lengths), self._groups
        sizes = [count // groups + (k < count % groups) for k in range(groups)]
        best, least, seen = list(sizes), float("inf"), set[tuple[int, ...]]()
        frozen: set[int] = set()
        for _ in range(tries):
            active = [k for k in range(groups) if k not in frozen]
            if tuple(sizes) in seen or len(active) < 2:
                break
            seen.add(tuple(sizes))
            costs = self.all_of(sizes)
            high, low = max(active, key=lambda k: costs[k]), min(active, key=lambda k: costs[k])
            if costs[high] - costs[low] < least:
                best, least = list(sizes), costs[high] - costs[low]
            if costs[high] == costs[low]:
                break
            if sizes[high] > 1:
                sizes[high] -= 1
                sizes[low] += 1
            else:
                self._fill_slot(sizes, costs, high, frozen)
        return best

    def _fill_slot(self, sizes: list[int], costs: Sequence[float], high: int, frozen: set[int]) -> None:
        """Gives the groups that run beside `high`, a single sample, more samples while they cost no more than it;
        freezes them."""
        ranked = sorted(range(self._groups), key=lambda k: -costs[k])
        block = ranked.index(high) // self._ranks * self._ranks
        slot = set(ranked[block : block + self._ranks])  # whose order is the framework's too
        for k in slot:
            if k == high or k in frozen:
                continue
            while self._cost(sizes[k] + 1, self._lengths[sum(sizes[:k])]) <= costs[high]:
                givers = [j for j in range(self._groups) if j not in slot and j not in frozen and sizes[j] > 1]
                if not givers:
                    break
                present = self.all_of(sizes)
                sizes[min(givers, key=lambda j: present[j])] -= 1
                sizes[k] += 1
        frozen.update(slot)
