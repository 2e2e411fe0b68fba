"""What SGLang 0.5.23 counts before it admits: budgets of one prefill batch, and how much the running may still grow.

Source: python/sglang/srt/mem_cache/prefill_budget.py, managers/schedule_policy.py (PrefillAdder) and
managers/scheduler_components/new_token_ratio_tracker.py of the 0.5.23 wheel; its environment variables at defaults.
"""

from __future__ import annotations

from sim.kv.blocks import KVBlockManager
from sim.types import Sequence

CLIP_MAX_NEW_TOKENS = 4096  # the most output tokens a request is expected to need
INIT_NEW_TOKEN_RATIO = 0.7
MIN_NEW_TOKEN_RATIO_FACTOR = 0.14
NEW_TOKEN_RATIO_DECAY_STEPS = 600
RETRACT_DECODE_STEPS = 20  # steps that a retraction makes room for
_NO_CAP = 1 << 62


class NewTokenRatio:
    """The share of their output caps that running requests are expected to need; falls with every decode step."""

    __slots__ = ("_decay", "_init", "_min", "current")

    def __init__(self, schedule_conservativeness: float) -> None:
        self._init = min(INIT_NEW_TOKEN_RATIO * schedule_conservativeness, 1.0)
        self._min = self._init * MIN_NEW_TOKEN_RATIO_FACTOR
        self._decay = (self._init - self._min) / NEW_TOKEN_RATIO_DECAY_STEPS
        self.current = self._init

    def decay(self) -> None:
        """After a decode step that retracted nobody."""
        self.current = max(self.current - self._decay, self._min)

    def reset(self) -> None:
        """When the engine has nothing to do."""
        self.current = self._init

    def after_retraction(self, output_tokens: int, max_new_tokens: int, num_left: int) -> None:
        """Set anew by what the `num_left` requests that stay have generated and may generate in all."""
        self.current = min((output_tokens + RETRACT_DECODE_STEPS * num_left) / (max_new_tokens + 1), 1.0)


class Growth:
    """Output tokens that the members of the decode group may still generate, clipped each; O(1) but for long ones.

    For a member its output cap less what it has generated, plus the group's step, stays the same while it decodes.
    """

    __slots__ = ("_at", "_long", "_sum")

    def __init__(self) -> None:
        self._at: dict[Sequence, int] = {}
        self._long: dict[Sequence, int] = {}  # those beyond the clip when last looked at
        self._sum = 0

    def join(self, seq: Sequence, remaining: int, step: int) -> None:
        """`seq`, which may still generate `remaining` tokens, joins the group at its `step`."""
        self._at[seq] = remaining + step
        self._sum += remaining + step
        if remaining > CLIP_MAX_NEW_TOKENS:
            self._long[seq] = remaining + step

    def leave(self, seq: Sequence) -> None:
        """`seq` leaves the group."""
        self._sum -= self._at.pop(seq)
        self._long.pop(seq, None)

    def of(self, seq: Sequence, step: int) -> int:
        """The part of one member."""
        return min(self._at[seq] - step, CLIP_MAX_NEW_TOKENS)

    def tokens(self, step: int) -> int:
        """Of all members, at the group's `step`."""
        total = self._sum - len(self._at) * step
        clip = CLIP_MAX_NEW_TOKENS + step
        for seq, at in list(self._long.items()):
            if at > clip:
                total -= at - clip
            else:
                del self._long[seq]
        return total


class PrefillBudget:
    """The budgets of one prefill batch. A request is charged for its chunk in whole pages, each budget alike.

    `offset` is what of the free KV tokens is spoken for: chunks of this batch with a page each, the outputs of those
    whose prompt ends in it, and the expected growth of the running.
    """

    __slots__ = ("_kv", "_now_offset", "_page", "chunked", "left_chunk", "left_input", "offset")

    def __init__(
        self,
        kv: KVBlockManager,
        max_prefill_tokens: int,
        chunked_prefill_size: int | None,
        growth: float,
        num_mixed: int,
    ) -> None:
        self._kv = kv
        self._page = kv.block_size
        self.chunked = chunked_prefill_size is not None
        self.left_input = max_prefill_tokens - num_mixed
        self.left_chunk = _NO_CAP if chunked_prefill_size is None else chunked_prefill_size - num_mixed
        self.offset = num_mixed + growth
        self._now_offset = num_mixed

    @property
    def left_total(self) -> float:
        """KV tokens that are free or can be evicted and are not spoken for."""
        return self._kv.num_free * self._page - self.offset

    @property
    def no_kv(self) -> bool:
        """Whether KV tokens are used up: with what the running may need, or already without."""
        return self.left_total <= 0 or self._kv.num_free * self._page - self._now_offset <= 0

    @property
    def no_tokens(self) -> bool:
        """Whether the input or the chunk is used up."""
        return self.left_input <= 0 or self.left_chunk <= 0

    def paged(self, num_tokens: int) -> int:
        """`num_tokens` up to a whole page."""
        return -(-num_tokens // self._page) * self._page

    def charge(self, num_tokens: int, max_new_tokens: int) -> None:
        """For a chunk of a request that may then generate `max_new_tokens`; 0 for one that is not its last."""
        tokens = self.paged(num_tokens)
        self.offset += tokens + self._page + max_new_tokens
        self._now_offset += tokens + self._page
        self.left_input -= tokens
        self.left_chunk -= tokens
