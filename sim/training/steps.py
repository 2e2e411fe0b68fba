"""From what a packer makes to the optimizer steps of an epoch: which rank computes which micro-batch of which rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from batchsim.base.errors import ScenarioError
from batchsim.base.units import counted
from batchsim.training.config import TrainingConfig
from batchsim.training.packers.bins import Mask, PackerConfig, Pads, Piece, chunks
from batchsim.training.packers.verl import VerlKarmarkarKarp, small_at_both_ends
from batchsim.training.stream import Cut, arrivals_s, windows

Row = Sequence[Piece]


@dataclass(frozen=True)
class MicroBatch:
    """What a rank puts through the model at once: rows of pieces, and what they come to.

    `real` are tokens of examples, `computed` those with padding; `squares` is the sum of squares of what attends to
    itself under the mask, `own_squares` that of the documents alone. `shape` is what a compiled program depends on.
    `by_row`: whole rows attend to themselves. `ranks`: on how many ranks it runs together.
    """

    rows: tuple[Row, ...]
    real: int
    computed: int
    squares: int
    own_squares: int
    shape: tuple[int, int]
    by_row: bool = False
    ranks: int = 1

    def squares_of(self, tokens: float) -> float:
        """The sum of squares if the rows were padded to `tokens` together."""
        return tokens**2 / max(len(self.rows), 1) if self.by_row else self.squares


@dataclass(frozen=True)
class Layout:
    """How rows become a micro-batch: mask, padding, the tokens of a full row, the multiples to which a row and a
    document are rounded up."""

    mask: Mask
    pads: Pads
    row_tokens: int | None
    rounded: int
    document: int

    def micro_batch(self, rows: Iterable[Row], ranks: int = 1) -> MicroBatch:
        """The micro-batch of `rows`; a row without pieces counts for nothing."""
        rows = tuple(row for row in rows if row)
        sizes = [[_up(piece[2], self.document) for piece in row] for row in rows]
        sums = [sum(row) for row in sizes]
        width = _up(max(sums, default=0), self.rounded)
        if self.pads == "capacity" and self.row_tokens is not None:
            width = max(width, self.row_tokens)
        computed = sum(sums) if self.pads == "none" else len(rows) * width
        squares = sum(size**2 for row in sizes for size in row)
        if self.mask != "document":
            squares = len(rows) * width**2 if self.pads != "none" else sum(total**2 for total in sums)
        shape = (len(rows), width) if self.pads != "none" else (1, computed)
        real = sum(piece[2] for row in rows for piece in row)
        own = sum(piece[2] ** 2 for row in rows for piece in row)
        return MicroBatch(rows, real, computed, squares, own, shape, self.mask != "document", ranks)


@dataclass(frozen=True)
class Step:
    """One update of the weights: by round and data-parallel rank the micro-batches. Ranks meet at the end of a round,
    of which there are several where documents run on several ranks."""

    rounds: tuple[tuple[tuple[MicroBatch, ...], ...], ...]

    def micro_batches(self) -> list[MicroBatch]:
        """All of them, each once."""
        return list({id(each): each for ranks in self.rounds for rank in ranks for each in rank}.values())


@dataclass
class Epoch:
    """The steps of an epoch with one packer. `rows` are all packed rows, in their order; `lost` are the examples of
    micro-batches beyond the last whole step, `lengths` the lengths that were packed, after `longer`; `filtered` counts
    examples that `longer` dropped, `cut_tokens` the tokens that it truncated. Of a stream `arrivals_s` are the arrivals
    of examples, and `ready_s` the seconds at which the windows of each step are closed."""

    steps: list[Step]
    rows: list[Row]
    lengths: Sequence[int]
    capacity: int | None
    lost: list[int] = field(default_factory=list[int])
    cut_tokens: int = 0
    cut_examples: int = 0
    filtered: list[int] = field(default_factory=list[int])
    arrivals_s: Sequence[float] = ()
    ready_s: list[float] = field(default_factory=list[float])


def epoch_of(config: TrainingConfig, label: str, lengths: Sequence[int], cut: Cut | None = None) -> Epoch:
    """The epoch with the packer `label` on examples of these lengths, or with windows of a stream that close by `cut`.

    ScenarioError where the packer cannot pack them.
    """
    packer = _filled(config, config.packers[label])
    kept, packed_lengths, epoch = _filtered(config, packer, lengths)
    rng = np.random.default_rng([config.seed, 1])
    order = kept
    if packer.reads == "random":
        order = [kept[i] for i in rng.permutation(len(kept))]
    layout = Layout(
        config.mask or packer.mask,
        config.pads or ("longest" if config.mask == "padded" else "none" if _flat(config, packer) else packer.pads),
        packer.row_tokens,
        packer.rounded,
        1 if config.ranks.context == 1 or packer.makes == "groups" else 2 * config.ranks.context,
    )
    maker = _Maker(config, packer, packed_lengths, layout, rng, epoch)
    try:
        if cut is not None and config.stream is not None:
            maker.stream(kept, arrivals_s(config.stream.rate, len(lengths), config.seed), cut)
        else:
            maker.make(order)
    except ScenarioError as error:
        raise ScenarioError(f"training.packers.{label}: {error}") from None
    if not epoch.steps:
        raise ScenarioError(
            f"training.packers.{label}: no whole step of {counted(config.accumulate, 'micro-batch', 'micro-batches')}"
            f" on {counted(config.ranks.data, 'rank')} can be made of {counted(len(kept), 'example')}. Give more, lower"
            " accumulate or micro_batch, or write drop_last: false."
        )
    return epoch


def _flat(config: TrainingConfig, packer: PackerConfig) -> bool:
    """Whether samples that the framework would pad lie end to end, since the mask is by document."""
    return config.mask == "document" and packer.mask == "padded"


def _filled(config: TrainingConfig, packer: PackerConfig) -> PackerConfig:
    """The packer with what it takes from the scenario: capacity, ranks and batches."""
    options: dict[str, Any] = {}

    def fill(name: str, value: int | None) -> None:
        if name and hasattr(packer, name) and getattr(packer, name) is None:
            options[name] = value

    ranks = config.ranks.data * (config.ranks.context if packer.makes == "groups" else 1)
    fill(packer.capacity_option, config.capacity)
    fill(packer.ranks_option, ranks)
    rows = packer.makes == "row_batches"
    fill("batch_size", config.micro_batch if rows else config.samples_at_once * config.accumulate)
    fill("grad_accum", config.accumulate)
    per_step = config.accumulate * config.ranks.data
    fill("effective_batch_size", per_step if packer.makes == "samples" else config.step_samples)
    return replace(packer, **options)


def _filtered(
    config: TrainingConfig, packer: PackerConfig, lengths: Sequence[int]
) -> tuple[list[int], Sequence[int], Epoch]:
    """The examples that are packed, their lengths, and an epoch that counts what became of the others."""
    most = getattr(packer, packer.capacity_option) if packer.capacity_option else config.capacity
    epoch = Epoch([], [], lengths, packer.row_tokens if packer.makes in ("rows", "pieces", "row_batches") else None)
    longer = [] if most is None else [i for i, length in enumerate(lengths) if length > most]
    if not longer or config.longer is None:
        if longer and packer.capacity_option and not packer.takes_longer:
            packer.refuse_longer(lengths, longer, most or 0)
        return list(range(len(lengths))), lengths, epoch
    if config.longer == "drop":
        gone = set(longer)
        epoch.filtered = longer
        return [i for i in range(len(lengths)) if i not in gone], lengths, epoch
    epoch.cut_examples, epoch.cut_tokens = len(longer), sum(lengths[i] - (most or 0) for i in longer)
    epoch.lengths = [min(length, most or length) for length in lengths]
    return list(range(len(lengths))), epoch.lengths, epoch


@dataclass
class _Maker:
    """Makes the steps of an epoch."""

    config: TrainingConfig
    packer: PackerConfig
    lengths: Sequence[int]
    layout: Layout
    rng: np.random.Generator
    epoch: Epoch

    def make(self, order: Sequence[int]) -> None:
        """Fills the epoch from the examples in `order`."""
        if self.packer.per_step:
            size = self.config.step_samples
            for samples in chunks(order, size):
                if len(samples) < size:
                    self.epoch.lost += samples
                    break
                self.epoch.steps.append(self._of_step(samples))
            return
        packed = self.packer.pack(self.lengths, order)
        if self.packer.makes == "rank_orders":
            ranks = [[self._samples(run) for run in chunks(rank, self.config.samples_at_once)] for rank in packed]
            self._by_rank(ranks)
        elif self.packer.makes == "rank_samples":
            self._by_rank([[self._samples(batch) for batch in rank] for rank in packed])
        else:
            self._by_turns(self._micro_batches(packed))

    def stream(self, kept: Sequence[int], arrivals: Sequence[float], cut: Cut) -> None:
        """Fills the epoch from examples that arrive, window by window."""
        self.epoch.arrivals_s = arrivals
        batches: list[MicroBatch] = []
        ready: list[float] = []
        for places, closed in windows([arrivals[i] for i in kept], cut):
            held = [kept[place] for place in places]
            if self.packer.reads == "random":
                held = [held[i] for i in self.rng.permutation(len(held))]
            made = self._micro_batches(self.packer.pack(self.lengths, held))
            batches += made
            ready += [closed] * len(made)
        self._by_turns(batches)
        size = self.config.ranks.data * self.config.accumulate
        ends = [min((number + 1) * size, len(ready)) - 1 for number in range(len(self.epoch.steps))]
        self.epoch.ready_s = [ready[end] for end in ends]

    def _micro_batches(self, packed: Any) -> list[MicroBatch]:
        """The micro-batches of an epoch, in the order in which ranks take them."""
        match self.packer.makes:
            case "order":
                return [self._samples(run) for run in chunks(packed, self.config.samples_at_once)]
            case "samples":
                batches = [self._samples(batch) for batch in packed]
                return self._shuffled(batches)
            case "row_batches":
                return [self._rows_of(batch) for batch in packed]
            case _:
                rows = packed if self.packer.makes == "pieces" else [self._pieces(row) for row in packed]
                self.epoch.rows += rows
                rows = self._shuffled(rows)
                return [self.layout.micro_batch(run) for run in chunks(rows, self.config.micro_batch)]

    def _shuffled(self, items: list[Any]) -> list[Any]:
        wanted = self.config.shuffle_rows
        if not (self.packer.shuffled if wanted is None else wanted):
            return items
        return [items[i] for i in self.rng.permutation(len(items))]

    def _pieces(self, row: Sequence[int]) -> Row:
        return [(i, 0, self.lengths[i]) for i in row]

    def _samples(self, samples: Sequence[int], ranks: int = 1) -> MicroBatch:
        """Samples as rows of their own."""
        return self.layout.micro_batch((self._pieces([i]) for i in samples), ranks)

    def _rows_of(self, bins: Sequence[Sequence[int]]) -> MicroBatch:
        rows = [self._pieces(row) for row in bins]
        self.epoch.rows += rows
        return self.layout.micro_batch(rows)

    def _by_turns(self, batches: Sequence[MicroBatch]) -> None:
        """Ranks take micro-batches by turns, `accumulate` each a step."""
        ranks, size = self.config.ranks.data, self.config.ranks.data * self.config.accumulate
        for run in chunks(batches, size):
            if len(run) < size and (self.config.drop_last or len(run) < ranks):
                self._lose(run)
                continue
            whole = len(run) // ranks * ranks
            self._lose(run[whole:])
            self._add([run[rank:whole:ranks] for rank in range(ranks)])

    def _by_rank(self, ranks: Sequence[Sequence[MicroBatch]]) -> None:
        """Each rank has micro-batches of its own, `accumulate` a step."""
        count, size = min(map(len, ranks)), self.config.accumulate
        for at in range(0, count, size):
            if at + size > count and self.config.drop_last:
                self._lose([batch for rank in ranks for batch in rank[at:]])
                break
            self._add([rank[at : min(at + size, count)] for rank in ranks])

    def _lose(self, batches: Iterable[MicroBatch]) -> None:
        self.epoch.lost += [piece[0] for batch in batches for row in batch.rows for piece in row]

    def _of_step(self, samples: Sequence[int]) -> Step:
        """The step of these samples, which are packed by themselves."""
        ranks, packer = self.config.ranks.data, self.packer
        if packer.makes == "groups":
            return self._of_groups(packer.pack(self.lengths, samples))
        if packer.per_rank:
            return self._per_rank(samples)
        if packer.reads == "random":
            samples = [samples[i] for i in self.rng.permutation(len(samples))]
        packed = packer.pack(self.lengths, samples)
        if packer.makes == "parts":
            if isinstance(packer, VerlKarmarkarKarp):
                packed = [small_at_both_ends(part, self.lengths) for part in packed]
            runs = [chunks(part, self.config.samples_at_once) for part in packed]
            return _step([[self._samples(run) for run in rank] for rank in runs])
        rows = [self._pieces(row) for row in packed if row]
        self.epoch.rows += rows
        batches = [self.layout.micro_batch(run) for run in chunks(rows, self.config.micro_batch)]
        return _step([batches[rank::ranks] for rank in range(ranks)])

    def _per_rank(self, samples: Sequence[int]) -> Step:
        """Each rank's share packed by itself, again with as many micro-batches as the rank that has most."""
        ranks, packer = self.config.ranks.data, self.packer
        if packer.name.startswith("verl") and len(samples) % ranks == 0:
            shares = VerlKarmarkarKarp(k_partitions=ranks).pack(self.lengths, samples)
        else:
            shares = [list(each) for each in np.array_split(np.array(samples), ranks)]
            shares = [[int(i) for i in share] for share in shares]
        packed = [packer.pack(self.lengths, share) for share in shares]
        while packer.least_option and min(map(len, packed)) < (most := max(map(len, packed))):
            again = replace(packer, **{packer.least_option: most})
            packed = [again.pack(self.lengths, share) for share in shares]
        return _step([[self._samples(batch) for batch in rank] for rank in packed])

    def _of_groups(self, groups: Sequence[Sequence[Sequence[int]]]) -> Step:
        """Documents by group and rank; a document on several ranks is one micro-batch that they share."""
        rounds: list[tuple[tuple[MicroBatch, ...], ...]] = []
        for group in groups:
            on = {i: sum(i in rank for rank in group) for rank in group for i in rank}
            whole = {i: self._samples([i], count) for i, count in on.items()}
            rounds.append(tuple(tuple(whole[i] for i in rank) for rank in group))
        return Step(tuple(rounds))

    def _add(self, ranks: Sequence[Sequence[MicroBatch]]) -> None:
        self.epoch.steps.append(_step(ranks))


def _step(ranks: Sequence[Sequence[MicroBatch]]) -> Step:
    """A step of one round."""
    return Step((tuple(tuple(rank) for rank in ranks),))


def _up(value: int, multiple: int) -> int:
    return value + -value % multiple
