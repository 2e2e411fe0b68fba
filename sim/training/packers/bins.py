"""What packers have in common: the config they derive from, first fit, next fit, and the counts of bins.

An *example* is known by its place in the list of lengths. A *bin* is a list of examples: one row of the model's input,
or the samples of one micro-batch, as the packer's `makes` says. A *piece* is `(example, first token, tokens)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from batchsim.base.errors import ScenarioError
from batchsim.base.ranges import Config

Bins = list[list[int]]
Piece = tuple[int, int, int]
Makes = Literal["rows", "pieces", "row_batches", "samples", "order", "rank_orders", "rank_samples", "parts", "groups"]
"""What a packer returns: `rows`, bins that are rows; `pieces`, rows of pieces; `row_batches`, micro-batches of rows;
`samples`, micro-batches of samples; `order`, one permutation; `rank_orders`, one a rank; `rank_samples`, micro-batches
by rank; `parts`, the samples of each rank; `groups`, by group and rank, between barriers, the samples."""


Mask = Literal["document", "cross", "padded"]
Pads = Literal["none", "longest", "capacity"]


@dataclass(frozen=True)
class PackerConfig(Config):
    """A packer with its options, under the names and defaults of the framework that it follows.

    `follows` is that framework with the version, `rule` what it does in a line, `makes` what `pack` returns.
    `per_step`: it packs the samples of one optimizer step, not those of an epoch; of one rank of the step where
    `per_rank`.
    `reads`: the examples as they stand, or a random permutation of them. `capacity_option` names the option that holds
    the tokens of a bin, `ranks_option` the one that holds the number of data-parallel ranks; "" for a packer without
    one. `takes_longer`: examples longer than that are truncated, cut or left out by the packer, as the framework does;
    else they are left to a filter before it. `least_option` names the option for the least number of micro-batches,
    which ranks agree on. `shuffled`: the rows are shuffled before they are trained on.

    `mask` and `pads`: how the framework lays a micro-batch out by default. Attention stays within documents,
    crosses them, or is over padded samples; rows lie end to end, are padded to the longest of the micro-batch (to a
    multiple of `rounded`), or to `row_tokens`.
    """

    follows: ClassVar[str]
    rule: ClassVar[str]
    makes: ClassVar[Makes]
    per_step: ClassVar[bool] = False
    per_rank: ClassVar[bool] = False
    reads: ClassVar[Literal["given", "random"]] = "given"
    capacity_option: ClassVar[str] = ""
    ranks_option: ClassVar[str] = ""
    takes_longer: ClassVar[bool] = False
    least_option: ClassVar[str] = ""
    mask: ClassVar[Mask] = "document"
    pads: ClassVar[Pads] = "none"
    rounded: ClassVar[int] = 1
    shuffled: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The packer's kind."""
        return str(getattr(self, "kind", ""))

    @property
    def row_tokens(self) -> int | None:
        """Tokens of a row that is full; None for a packer without a capacity."""
        return getattr(self, self.capacity_option) if self.capacity_option else None

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> Any:
        """What `makes` says, of the examples with these `lengths`, which `order` lists in the order they are read.

        ScenarioError where the framework fails: for an example that no bin can hold, say.
        """
        raise NotImplementedError

    def refuse_longer(self, lengths: Sequence[int], order: Iterable[int], most: int) -> None:
        """ScenarioError for an example of more than `most` tokens, which the framework refuses to pack."""
        for i in order:
            if lengths[i] > most:
                raise ScenarioError(
                    f"{self.name}: example {i} has {lengths[i]:,} tokens, more than {self.capacity_option} {most:,}."
                    " Write training.longer: drop or truncate, or a larger capacity."
                )


@dataclass(frozen=True)
class PaddedPacker(PackerConfig):
    """A packer of samples that are padded to the longest of their micro-batch."""

    mask: ClassVar[Mask] = "padded"
    pads: ClassVar[Pads] = "longest"


def tokens(value: int | None) -> int:
    """A capacity that the scenario has filled in."""
    assert value is not None, "the scenario fills capacities in"
    return value


def first_fit(order: Sequence[int], lengths: Sequence[int], capacity: int, most: int | None = None) -> Bins:
    """Each example of `order` in the first bin with space for it, a new one if there is none; at most `most` examples a
    bin. No example may be longer than `capacity`.

    A tree over the bins holds the largest space below each node, so that an example takes the logarithm of the number
    of bins. Bins not yet opened are leaves of full capacity: the first with space is then the next to open.
    """
    if not order:
        return []
    total = sum(lengths[i] for i in order)
    leaves = min(len(order), 2 * (total // capacity) + 2 + (len(order) // most if most else 0))
    size = 1 << (leaves - 1).bit_length()
    space = [capacity] * (2 * size)
    bins: Bins = []
    for i in order:
        length, at = lengths[i], 1
        while at < size:
            at *= 2
            if space[at] < length:
                at += 1
        if at - size == len(bins):
            bins.append([])
        held = bins[at - size]
        held.append(i)
        left = -1 if len(held) == most else space[at] - length
        space[at] = left
        while at > 1:
            beside = space[at ^ 1]
            left = max(left, beside)
            at >>= 1
            if space[at] == left:
                break
            space[at] = left
    return bins


def next_fit(order: Iterable[int], lengths: Sequence[int], capacity: int) -> Bins:
    """Each example in the last bin if it has space, else in a new one."""
    bins: Bins = []
    space = -1
    for i in order:
        if lengths[i] > space:
            bins.append([])
            space = capacity
        bins[-1].append(i)
        space -= lengths[i]
    return bins


def descending(lengths: Sequence[int], order: Iterable[int]) -> list[int]:
    """`order` by length from the longest on, equal ones as they stand."""
    return sorted(order, key=lambda i: -lengths[i])


def at_least(bins: Bins, least: int | None, multiple: int | None, kind: str) -> Bins:
    """`bins` with further ones, so that there are at least `least` and a multiple of `multiple`.

    Each new bin gets the last example of a bin: of the one with most (of equal ones the last), until one is left in it,
    then of the next in that ranking. ScenarioError where there are fewer examples than bins.
    """
    wanted = max(len(bins), least or 0)
    wanted += -wanted % (multiple or 1)
    count = sum(map(len, bins))
    if wanted == len(bins):
        return bins
    if count < wanted:
        raise ScenarioError(
            f"{kind}: {wanted} bins are asked for and there are {count} examples. Lower min_bin_count or"
            " bin_count_multiple, or give more examples."
        )
    new = [list(each) for each in bins]
    for place in sorted(range(len(bins)), key=lambda place: (len(bins[place]), place), reverse=True):
        while len(new) < wanted and len(new[place]) > 1:
            new.append([new[place].pop()])
    return new


def chunks(items: Sequence[Any], size: int) -> list[Any]:
    """`items` cut into runs of `size`, the last one shorter."""
    return [items[at : at + size] for at in range(0, len(items), size)]


def cut_stream(lengths: Sequence[int], order: Iterable[int], capacity: int) -> list[list[Piece]]:
    """The examples as one stream of tokens that is cut every `capacity`; the last row is shorter."""
    rows: list[list[Piece]] = []
    space = 0
    for i in order:
        first = 0
        while first < lengths[i]:
            if not space:
                rows.append([])
                space = capacity
            taken = min(space, lengths[i] - first)
            rows[-1].append((i, first, taken))
            first, space = first + taken, space - taken
    return rows
