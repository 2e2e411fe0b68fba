"""The running batch of SGLang 0.5.23: the decodes in order, how much they may still grow, whether it is full.

Source: python/sglang/srt/managers/schedule_batch.py (ScheduleBatch), mem_cache/allocation.py of the 0.5.23 wheel.
"""

from __future__ import annotations

from heapq import heappop, heappush

from batchsim.kernel.batch import Batch
from batchsim.kernel.kv_blocks import KVBlockManager
from batchsim.kernel.types import DecodeGroup, Sequence, by_order
from batchsim.kv.pooled_radix import windows_of
from batchsim.kv.radix_cache import RadixKV
from batchsim.policies.systems.sglang.token_budget import RETRACT_DECODE_STEPS, RemainingOutput

NEAR_WHOLE = 1e-3  # far above what the order of adding floats can change


class RunningBatch:
    """The sequences that decode. `full` is why no prefill is tried until a sequence leaves; "" where prefill is tried.

    Where scheduling overlaps with the GPU's work (`ahead`), the last token of some is in flight and SGLang does not
    know it yet; those whose last one it is by their caps, the `capped`, are taken off before they decode.
    """

    __slots__ = (
        "_ahead", "_all_in_flight", "_cache", "_caps", "_first", "_fresh", "_in_flight", "_kv", "_next", "_num_joined",
        "_windows", "capped", "full", "group", "growth",
    )  # fmt: skip

    def __init__(self, kv: KVBlockManager, cache: RadixKV | None, *, ahead: bool = False) -> None:
        self.group = self._new_group(kv.block_size)
        self.growth = RemainingOutput()
        self.full = ""
        self.capped: set[Sequence] = set()
        self._kv = kv
        self._windows = windows_of(kv)
        self._cache = cache
        self._first = self._next = 0  # orders not given yet lie below and from here on
        self._ahead = ahead
        self._all_in_flight = False
        self._in_flight: set[Sequence] = set()  # or only these
        self._fresh: set[Sequence] = set()  # but not these, which have joined since without a step
        self._caps: list[tuple[int, int, int, Sequence]] = []  # heap: step of the group at the cap, serial, epoch, who
        self._num_joined = 0

    def _new_group(self, block_size: int) -> DecodeGroup:
        return DecodeGroup(block_size)

    def __len__(self) -> int:
        return len(self.group.members)

    def rows(self) -> list[Sequence]:
        """The decodes in batch order. O(n log n)."""
        return sorted(self.group.members, key=by_order)

    def join(self, seq: Sequence) -> None:
        """Lets `seq`, whose prompt is done, decode from the next step on; its place was given by `place`."""
        self.group.join(seq)
        self.growth.join(seq, self.group.step)
        if self._windows is not None:
            self._windows.join(seq, self.group)
        if self._ahead:
            left = max(seq.max_output_tokens - seq.num_output_tokens, 0)
            self._num_joined += 1
            heappush(self._caps, (self.group.step + left, self._num_joined, seq.epoch, seq))

    def join_prebuilt(self, seq: Sequence) -> None:
        """As `join`, for a sequence whose KV and latest token came from elsewhere: no step in flight has one of it."""
        self.join(seq)
        self._fresh.add(seq)

    def await_results(self, batch: Batch | None) -> None:
        """Notes that `batch`, whose prompts have joined, is in flight; None: nothing is."""
        self._all_in_flight = batch is not None and batch.decodes is not None
        self._in_flight.clear()
        self._fresh.clear()
        if batch is not None and not self._all_in_flight:
            self._in_flight.update([seq for seq in batch.sampled if seq.group is not None])

    def in_flight(self, seq: Sequence) -> int:
        """How many output tokens of the decode `seq` are in flight: 1 or 0."""
        return int((self._all_in_flight and seq not in self._fresh) or seq in self._in_flight)

    @property
    def num_in_flight(self) -> int:
        """How many output tokens of the decodes are in flight."""
        return len(self.group.members) - len(self._fresh) if self._all_in_flight else len(self._in_flight)

    def take_off_capped(self) -> bool:
        """Takes off those whose last token, by their caps, is in flight; returns whether there were any. They keep
        their pages until it is there."""
        caps, step, num_before = self._caps, self.group.step, len(self.capped)
        while caps and caps[0][0] <= step:
            _, _, epoch, seq = heappop(caps)
            if seq.epoch == epoch:
                self._kv.allocate(seq, seq.num_computed_tokens)  # settles what it holds
                self._off(seq)
                self.capped.add(seq)
        return len(self.capped) > num_before

    def release(self, seq: Sequence) -> None:
        """Takes `seq` off, a decode or a prompt in the making, and frees its pages that are not in the tree."""
        self._kv.free(seq)
        self.capped.discard(seq)
        if seq.group is not None:
            self._off(seq)

    def _off(self, seq: Sequence) -> None:
        self.group.leave(seq)
        self.growth.leave(seq)

    def retract(self, seq: Sequence) -> None:
        """Removes a decode from the batch; its KV outside the tree is dropped, and room made for the decodes that stay.

        Its token in flight is lost.
        """
        lost = self.in_flight(seq)
        self.release(seq)
        seq.reset_computed()
        seq.lose_in_flight(lost)
        self._evict_for(self._kv.blocks_for(RETRACT_DECODE_STEPS * len(self)))

    def place(self, chunks: list[tuple[Sequence, int]], *, ahead: bool) -> None:
        """Gives the sequences of a prefill batch their places: behind the decodes, or `ahead` of those riding along."""
        if ahead:
            self._first -= len(chunks)
            self._number([seq for seq, _ in chunks], self._first)
        else:
            self._number([seq for seq, _ in chunks], self._next)
            self._next += len(chunks)

    def keep_order(self, rows: list[Sequence]) -> None:
        """Makes the order of `rows`, all the decodes, that of the batch."""
        self._number(rows, self._next)
        self._next += len(rows)

    def _number(self, rows: list[Sequence], start: int) -> None:
        for i, seq in enumerate(rows):
            seq.order = start + i

    def reserved_for(self, seq: Sequence, ratio: float) -> float:
        """KV tokens that `seq` is expected to need still: `ratio` of its output tokens left, all with `ignore_eos`."""
        return self.growth.of(seq, self.group.step - self.in_flight(seq), ratio)

    def reserved(self, ratio: float, *, exact: bool) -> float:
        """The sum of `reserved_for` over the decodes, in KV tokens; to the last digit as SGLang adds it, row by row,
        where that digit counts.

        The sum is compared with whole tokens, so the digit counts near one, and where the sum will be changed
        (`exact`). O(1) elsewhere.
        """
        reserved = self._reserved_at_once(ratio)
        if ratio in (0.0, 1.0) or not (exact or abs(reserved - round(reserved)) < NEAR_WHOLE):
            return reserved
        return sum([self.reserved_for(seq, ratio) for seq in self.rows()])

    def _reserved_at_once(self, ratio: float) -> float:
        return self.growth.reserved(self.group.step - self._all_in_flight, ratio, self._in_flight)

    def blocks_due(self) -> int:
        """How many KV blocks the decodes lack for the next step."""
        return self.group.blocks_due()

    def lacks_blocks(self) -> bool:
        """Whether any pool has too few pages for the decodes' next step."""
        due, windows = self.blocks_due(), self._windows
        return due > self._kv.num_free or (windows is not None and due > windows.available)

    def grow(self) -> bool:
        """Takes pages for one more token of every decode; False, and nothing changed, if they are short.

        Before that SGLang evicts until a page for each decode is free, whether or not it needs one. O(1) while that
        many are free.
        """
        group = self.group
        if self._windows is not None:
            if self.lacks_blocks():
                return False
            self._evict_for(group.blocks_due())
            self._windows.slide_group(group, self.in_flight)
        elif group.blocks_due() > self._kv.num_free:
            return False
        if self._cache is not None:
            self._cache.make_room(len(group.members))
        return self._kv.grow_group(group)

    def evict_for_growth(self) -> None:
        """Evicts until the next token of every decode fits, or all there is: SGLang does so even where it is no use."""
        self._evict_for(self.blocks_due())

    def _evict_for(self, num_blocks: int) -> None:
        if self._cache is not None:
            self._cache.make_room(num_blocks)
