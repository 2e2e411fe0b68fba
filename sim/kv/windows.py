"""The pool of layers with a window, beside that of layers that keep all tokens, as SGLang 0.5.23 has it.

A sequence takes a page of each pool for the same tokens. Pages whose tokens have left its window go back: of a decode
once `every` of them have, before a step, but not before its first one; of a prompt when a part of it is put into the
prefix cache, or, where there is none, before its next part. With a prefix cache a whole window of whole pages is kept,
so that a prefix that ends where the last page does can be found again; pages that are the cache's are let go by it.
Source: python/sglang/srt/mem_cache/common.py (free_swa_out_of_window_slots), managers/schedule_batch.py
(maybe_evict_swa) and mem_cache/allocator/swa.py of the 0.5.23 wheel.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from batchsim.base.kv_pools import KvPools
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.types import DecodeGroup, Sequence
from batchsim.kv.side_tree import SidePool


class Span:
    """What one sequence has of the pool: pages from `cursor` tokens on, or from `kept` on, before which all are the
    prefix cache's; of these its lock on windows begins at `locked_from`. `junction`: up to where its prefix was found
    in layers that keep all tokens, if that is more than could be used; else None."""

    __slots__ = ("cursor", "junction", "kept", "locked_from")

    def __init__(self, kept: int = 0) -> None:
        self.cursor = 0
        self.kept = kept
        self.locked_from = 0
        self.junction: int | None = None


class Windows(SidePool):
    """Pages of layers with a window, counted: `num_free` of `num_blocks`, and `num_evictable` in a prefix cache without
    a lock. `reach`: the tokens before its own that a layer attends to."""

    __slots__ = (
        "_kept_tokens", "_num_joined", "_turns", "every", "page", "reach", "spans",
    )  # fmt: skip

    def __init__(self, pools: KvPools, page: int, *, caches: bool) -> None:
        assert pools.window is not None and pools.window_tokens is not None, "the pools are of windows"
        super().__init__(pools.window_tokens // page)
        self.page = page
        self.reach = pools.window - 1
        self.every = pools.slide_every
        self.spans: dict[Sequence, Span] = {}
        self._kept_tokens = -(-max(self.reach, page) // page) * page if caches else self.reach
        self._turns: list[tuple[int, int, int, Sequence]] = []  # heap: step of the group at a look, serial, epoch, who
        self._num_joined = 0

    def own(self, seq: Sequence, num_blocks: int) -> int:
        """Pages that are of `seq` alone, which has `num_blocks` of the other pool from its first token on."""
        span = self.spans[seq]
        return num_blocks - max(span.cursor, span.kept) // self.page

    def leave(self, seq: Sequence, num_blocks: int) -> None:
        """Gives back the pages that are of `seq` alone; see `own`."""
        self.num_free += self.own(seq, num_blocks)
        del self.spans[seq]

    def slide(self, seq: Sequence, num_tokens: int) -> None:
        """Gives back pages of `seq` that are out of the window of the token behind the first `num_tokens`."""
        span, page = self.spans[seq], self.page
        if num_tokens - self.reach <= span.cursor:
            return
        cursor = max(span.cursor, span.kept)
        span.cursor = max(cursor, num_tokens - self._kept_tokens) // page * page
        self.num_free += (span.cursor - cursor) // page

    # ---- decodes

    def join(self, seq: Sequence, group: DecodeGroup) -> None:
        """Looks after `seq`, which has joined `group`, from its second step there on."""
        self._look_at(group.step + 1, seq)

    def slide_group(self, group: DecodeGroup, in_flight: Callable[[Sequence], int]) -> None:
        """Gives back what the members of `group` can do without, before its next step; of each, `in_flight` tokens are
        not known yet. O(1) while none has a page to give back."""
        turns, step = self._turns, group.step
        while turns and turns[0][0] <= step:
            _, _, epoch, seq = heappop(turns)
            if seq.epoch != epoch:
                continue
            span, known = self.spans[seq], seq.num_tokens - in_flight(seq)
            if known - 1 - self.reach >= span.cursor + self.every:
                self.slide(seq, known - 1)
            self._look_at(step + max(span.cursor + self.every + self.reach + 1 - known, 1), seq)

    def _look_at(self, step: int, seq: Sequence) -> None:
        self._num_joined += 1
        heappush(self._turns, (step, self._num_joined, seq.epoch, seq))


class PooledKV(CountingKV):
    """Counts the blocks of two pools: a `KVBlockManager` of layers that keep all tokens, with `windows` beside."""

    __slots__ = ("windows",)

    def __init__(self, num_blocks: int, block_size: int, pools: KvPools) -> None:
        super().__init__(num_blocks, block_size)
        self.windows = Windows(pools, block_size, caches=False)

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        windows, need = self.windows, self.blocks_for(num_tokens) - self.held(seq)
        if need > windows.num_free or not super().allocate(seq, num_tokens):
            return False
        if seq not in windows.spans:
            windows.spans[seq] = Span()
        windows.num_free -= max(need, 0)
        return True

    def grow_group(self, group: DecodeGroup) -> bool:
        need = group.blocks_due()
        if need > self.windows.num_free or not super().grow_group(group):
            return False
        self.windows.num_free -= need
        return True

    def free(self, seq: Sequence) -> None:
        if self._pinned and self.is_kept(seq):
            return
        if seq in self.windows.spans:
            self.windows.leave(seq, self.held(seq))
        super().free(seq)

    def check(self) -> None:
        """AssertionError unless every page of the windows is free or of one sequence."""
        windows = self.windows
        own = sum(windows.own(seq, self.held(seq)) for seq in windows.spans)
        assert windows.num_free + own == windows.num_blocks, "a page of a window is lost or counted twice"
