"""Batches of as many samples as a budget of tokens lets: fairseq 0.12.2 (`data_utils_fast.pyx`), torchdata 0.9.0
(`MaxTokenBucketizer`) and DeepSpeed 0.19.8 (`variable_batch_size_and_lr.py`)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from batchsim.base.ranges import INT32_MAX, PositiveInt, Range
from batchsim.training.packers.bins import Bins, PaddedPacker, tokens

SentencesOrNone = Annotated[int, Range(-1, INT32_MAX)]


@dataclass(frozen=True)
class Fairseq(PaddedPacker):
    """Batches whose padded tokens are at most `max_tokens`, of a multiple of samples beyond the first few.

    Samples longer than `max_tokens` are left out, as fairseq's data sets do before.
    """

    max_tokens: PositiveInt | None = None
    """Padded tokens of a batch. Null: the scenario's capacity."""
    max_sentences: SentencesOrNone = -1
    """Samples of a batch at most; -1: as many as fit."""
    required_batch_size_multiple: PositiveInt = 8
    """Batches of at least this many samples have a multiple of it."""
    order: Literal["sorted", "given"] = "sorted"
    """Ascending by length, or as given."""
    kind: Literal["fairseq.batch_by_size"] = "fairseq.batch_by_size"
    follows: ClassVar = "fairseq 0.12.2"
    rule: ClassVar = "neighbours by length while their padded tokens fit"
    makes: ClassVar = "samples"
    capacity_option: ClassVar = "max_tokens"
    takes_longer: ClassVar = True
    shuffled: ClassVar = True

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> Bins:
        most = tokens(self.max_tokens)
        kept = [i for i in order if lengths[i] <= most]
        if self.order == "sorted":
            kept.sort(key=lambda i: lengths[i])
        batches, batch, tail = Bins(), list[int](), list[int]()
        longest = tail_longest = 0
        for i in kept:
            tail_longest = max(tail_longest, lengths[i])
            whole_longest, count = max(longest, tail_longest), len(batch) + len(tail) + 1
            over = count > self.max_sentences > 0 or count * whole_longest > most
            if over:
                batches.append(batch)
                if (len(tail) + 1) * tail_longest > most:
                    batches.append(tail)
                    tail, tail_longest = [], lengths[i]
                batch, longest = [*tail, i], tail_longest
                tail, tail_longest = [], 0
            elif count < self.required_batch_size_multiple or count % self.required_batch_size_multiple == 0:
                batch += [*tail, i]
                longest, tail, tail_longest = whole_longest, [], 0
            else:
                tail.append(i)
        return [each for each in (*batches, batch, tail) if each]


class _ByLength:
    """An entry of a heap that compares lengths alone."""

    __slots__ = ("example", "length")

    def __init__(self, length: int, example: int) -> None:
        self.length, self.example = length, example

    def __lt__(self, other: _ByLength) -> bool:
        return self.length < other.length


@dataclass(frozen=True)
class Torchdata(PaddedPacker):
    """The shortest of a buffer joins the batch until its tokens are too many. Longer samples are left out."""

    max_token_count: PositiveInt | None = None
    """Tokens of a batch. Null: the scenario's capacity."""
    buffer_size: PositiveInt = 1000
    """Samples that are looked at together."""
    include_padding: bool = False
    """Whether padded tokens count, or the samples' own."""
    kind: Literal["torchdata.max_token_bucketize"] = "torchdata.max_token_bucketize"
    follows: ClassVar = "torchdata 0.9.0"
    rule: ClassVar = "the shortest of a buffer until the tokens are too many"
    makes: ClassVar = "samples"
    capacity_option: ClassVar = "max_token_count"
    takes_longer: ClassVar = True

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> Bins:
        most, batches, total, longest = tokens(self.max_token_count), Bins(), 0, 0
        for i in self._popped(lengths, [i for i in order if lengths[i] <= most]):
            total, longest = total + lengths[i], max(longest, lengths[i])
            size = (len(batches[-1]) + 1) * longest if batches and self.include_padding else total
            if not batches or size > most:
                batches.append([])
                total = longest = lengths[i]
            batches[-1].append(i)
        return batches

    def _popped(self, lengths: Sequence[int], order: Sequence[int]) -> Iterator[int]:
        buffer: list[_ByLength] = []
        for i in order:
            heapq.heappush(buffer, _ByLength(lengths[i], i))
            if len(buffer) == self.buffer_size:
                yield heapq.heappop(buffer).example
        while buffer:
            yield heapq.heappop(buffer).example


@dataclass(frozen=True)
class DeepSpeed(PaddedPacker):
    """`data_efficiency.data_sampling.dynamic_batching`: neighbours while their own tokens fit; a batch is as many
    micro-batches as ranks and accumulation ask for, and the last example of the list is never used."""

    max_tokens: PositiveInt | None = None
    """Tokens of a micro-batch, without padding. Null: the scenario's capacity."""
    min_batch_size: PositiveInt = 1
    """Samples of a micro-batch at least."""
    max_batch_size: PositiveInt | None = None
    """Samples of a micro-batch at most. Null: as many as fit."""
    sequence_picking_order: Literal["dataloader", "random", "seqlen"] = "dataloader"
    """The order given, a random one, or ascending by length."""
    effective_batch_size: PositiveInt | None = None
    """Micro-batches of a batch, over all ranks. Null: accumulate x data-parallel ranks."""
    required_microbatches_of_same_size: bool = False
    """Whether the micro-batches of a batch have equally many samples, as a pipeline needs."""
    kind: Literal["deepspeed.batch_by_seqlens"] = "deepspeed.batch_by_seqlens"
    follows: ClassVar = "DeepSpeed 0.19.8"
    rule: ClassVar = "neighbours while their own tokens fit, the last example never used"
    makes: ClassVar = "samples"
    capacity_option: ClassVar = "max_tokens"
    takes_longer: ClassVar = True

    @property
    def reads(self) -> Literal["given", "random"]:  # type: ignore[override]
        return "random" if self.sequence_picking_order == "random" else "given"

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> Bins:
        most, count = tokens(self.max_tokens), self.effective_batch_size or 1
        kept = [i for i in order if lengths[i] <= most]
        if self.sequence_picking_order == "seqlen":
            kept.sort(key=lambda i: lengths[i])
        step, at, batches = count if self.required_microbatches_of_same_size else 1, 0, Bins()
        while end := self._end(kept, lengths, at, step):
            batches += [kept[at:end][k::step] for k in range(step)]
            at = end
        return batches[: len(batches) // count * count]

    def _end(self, kept: Sequence[int], lengths: Sequence[int], at: int, step: int) -> int:
        """Where the longest run from `at` on ends that makes `step` valid micro-batches; 0 where there is none."""
        last, sums = 0, [0] * step
        for end in range(at + step, len(kept), step):
            for k in range(step):
                sums[k] += lengths[kept[end - step + k]]
            size = (end - at) // step
            if max(sums) > tokens(self.max_tokens) or size > (self.max_batch_size or size):
                break
            if size >= self.min_batch_size:
                last = end
        return last
