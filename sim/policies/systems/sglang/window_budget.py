"""What SGLang 0.5.23 counts before it admits where layers with a window have a pool of their own.

Rule: beside what the other layers need, a request needs, in layers with a window, what its next chunk has beyond a
window, its tokens and outputs up to a window, and a page; this must be below what is free or can be evicted, less the
same of those admitted in this pass. A request that needs more than the whole pool has gets shorter chunks instead. A
prompt that is cut goes on with what there is less a page, or waits.
Source: python/sglang/srt/mem_cache/prefill_budget.py (SWAPrefillBudget) of the 0.5.23 wheel.
"""

from __future__ import annotations

from batchsim.kernel.kv_blocks import KVBlockManager
from batchsim.kv.windows import Windows
from batchsim.policies.systems.sglang.token_budget import PrefillBudget


class WindowBudget(PrefillBudget):
    """A PrefillBudget with that of `windows`; `window_offset` of its tokens are spoken for."""

    __slots__ = ("_windows", "window_offset")

    def __init__(
        self,
        kv: KVBlockManager,
        max_prefill_tokens: int,
        chunked_prefill_size: int | None,
        growth: float,
        num_mixed: int,
        *,
        windows: Windows,
    ) -> None:
        super().__init__(kv, max_prefill_tokens, chunked_prefill_size, growth, num_mixed)
        self._windows = windows
        self.window_offset = 0

    @property
    def left_window(self) -> int:
        """Tokens of windows that are free or can be evicted and are not spoken for."""
        return self._windows.available * self._page - self.window_offset

    @property
    def no_kv(self) -> bool:
        return self.left_total <= 0 or self.left_now <= 0 or self.left_window <= 0

    def chunk_room(self) -> int:
        return max(min(self.left_chunk, int(self.left_total), self.left_window - self._page), 0)

    def chunk_limit(self, num_tokens: int, max_new_tokens: int) -> int | None:
        need = self._need(self.paged(num_tokens), max_new_tokens)
        if need < self.left_window:
            return self.left_chunk
        if not self.chunked or need < self._windows.num_blocks * self._page:
            return None
        room = (self.left_window - self._need(0, max_new_tokens)) // self._page * self._page
        return min(self.left_chunk, room) if room > 0 else None

    def has_room(self, num_tokens: int, max_new_tokens: int) -> bool:
        return self._need(num_tokens, max_new_tokens) <= self.left_window

    def charge(self, num_tokens: int, max_new_tokens: int) -> None:
        self.window_offset += self._need(self.paged(num_tokens), max_new_tokens)
        super().charge(num_tokens, max_new_tokens)

    def _need(self, num_tokens: int, max_new_tokens: int) -> int:
        """Tokens of windows of a request with `num_tokens` to compute and `max_new_tokens` to generate."""
        reach = self._windows.reach
        beyond = max(min(num_tokens, self.left_chunk) - reach, 0)
        return beyond + min(num_tokens + max_new_tokens, reach) + self._page
