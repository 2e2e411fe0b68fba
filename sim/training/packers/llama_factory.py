"""LLaMA-Factory 0.9.5 (`data/processor/processor_utils.py`): a knapsack filled with the largest example that fits."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from batchsim.base.ranges import PositiveInt
from batchsim.training.packers.bins import Bins, Mask, PackerConfig, chunks, tokens


@dataclass(frozen=True)
class GreedyKnapsack(PackerConfig):
    """All examples together: open a bin, take the largest example that fits until none does."""

    capacity: PositiveInt | None = None
    """Tokens of a bin, `capacity`. Null: the scenario's capacity."""
    kind: Literal["llamafactory.greedy_knapsack"] = "llamafactory.greedy_knapsack"
    follows: ClassVar = "LLaMA-Factory 0.9.5"
    rule: ClassVar = "the largest example that fits, bin by bin"
    makes: ClassVar = "rows"
    mask: ClassVar = "cross"
    pads: ClassVar = "capacity"
    capacity_option: ClassVar = "capacity"
    shuffled: ClassVar = True

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> Bins:
        self.refuse_longer(lengths, order, tokens(self.capacity))
        return greedy_knapsack(order, lengths, tokens(self.capacity))


@dataclass(frozen=True)
class PackedSupervised(PackerConfig):
    """The knapsack in map batches, longer examples dropped; rows are padded to one token more than the cutoff.

    With packing LLaMA-Factory lowers the cutoff of its options, 2048, by that one.
    """

    cutoff_len: PositiveInt | None = None
    """Tokens of a row at most. Null: the scenario's capacity."""
    neat_packing: bool = False
    """A mask by document; without it attention crosses documents."""
    preprocessing_batch_size: PositiveInt = 1000
    """Examples that are packed together."""
    kind: Literal["llamafactory.packed_supervised"] = "llamafactory.packed_supervised"
    follows: ClassVar = "LLaMA-Factory 0.9.5"
    rule: ClassVar = "greedy knapsack in map batches, longer examples dropped"
    makes: ClassVar = "rows"
    pads: ClassVar = "capacity"
    capacity_option: ClassVar = "cutoff_len"
    takes_longer: ClassVar = True
    shuffled: ClassVar = True

    @property
    def mask(self) -> Mask:  # type: ignore[override]
        return "document" if self.neat_packing else "cross"

    @property
    def row_tokens(self) -> int | None:
        """One token more than the cutoff."""
        return None if self.cutoff_len is None else self.cutoff_len + 1

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> Bins:
        cutoff = tokens(self.cutoff_len)
        batches = chunks(order, self.preprocessing_batch_size)
        kept = ([i for i in batch if lengths[i] <= cutoff] for batch in batches)
        return [row for batch in kept for row in greedy_knapsack(batch, lengths, cutoff)]


def greedy_knapsack(order: Iterable[int], lengths: Sequence[int], capacity: int) -> Bins:
    """Bins of examples, of which none is longer than `capacity`; of equal lengths the last of `order` goes first."""
    ranked = sorted(order, key=lambda i: lengths[i])
    sizes, bins = [lengths[i] for i in ranked], Bins()
    while ranked:
        bins.append([])
        space = capacity
        while at := bisect_right(sizes, space):
            bins[-1].append(ranked.pop(at - 1))
            space -= sizes.pop(at - 1)
    return bins
