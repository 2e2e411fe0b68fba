"""What SGLang 0.5.23 counts before it admits: budgets of one prefill batch, and how much the running may still grow.

Source: python/sglang/srt/mem_cache/prefill_budget.py, managers/schedule_policy.py (PrefillAdder) and
managers/scheduler_components/new_token_ratio_tracker.py of the 0.5.23 wheel; its environment variables at defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from batchsim.kernel.kv_blocks import KVBlockManager
from batchsim.kernel.types import Sequence

CLIP_MAX_NEW_TOKENS = 4096  # the most output tokens a request is expected to need
INIT_NEW_TOKEN_RATIO = 0.7
MIN_NEW_TOKEN_RATIO_FACTOR = 0.14
NEW_TOKEN_RATIO_DECAY_STEPS = 600
IGNORE_EOS_RESERVE_TOKENS = 1  # kept for each request at every end that is played through
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
        """Lowers the ratio after a decode step without retractions."""
        self.current = max(self.current - self._decay, self._min)

    def reset(self) -> None:
        """Sets the ratio back to its start, as when the engine has nothing to do."""
        self.current = self._init

    def after_retraction(self, output_tokens: int, max_new_tokens: int, num_left: int) -> None:
        """Sets the ratio by the tokens that the `num_left` remaining requests have generated and may in all."""
        self.current = min((output_tokens + RETRACT_DECODE_STEPS * num_left) / (max_new_tokens + 1), 1.0)


class RemainingOutput:
    """Output tokens that the decodes may still generate, each clipped to CLIP_MAX_NEW_TOKENS; O(1) but for long ones.

    A decode's output cap less what it has generated, plus the group's step, stays the same while it decodes.
    """

    __slots__ = ("_at", "_fixed", "_long", "_sum")

    def __init__(self) -> None:
        self._at: dict[Sequence, int] = {}
        self._long: dict[Sequence, int] = {}  # those beyond the clip when last looked at
        self._fixed: dict[Sequence, int] = {}  # sequences that ignore the end of their text
        self._sum = 0

    def join(self, seq: Sequence, step: int) -> None:
        """Adds `seq`, which has joined the group at its `step`."""
        remaining = seq.max_output_tokens - seq.num_output_tokens
        self._at[seq] = remaining + step
        self._sum += remaining + step
        if remaining > CLIP_MAX_NEW_TOKENS:
            self._long[seq] = remaining + step
        if seq.request.ignore_eos:
            self._fixed[seq] = remaining + step

    def leave(self, seq: Sequence) -> None:
        """Takes out `seq`, which leaves the group."""
        self._sum -= self._at.pop(seq)
        self._long.pop(seq, None)
        self._fixed.pop(seq, None)

    def of(self, seq: Sequence, step: int, ratio: float) -> float:
        """KV tokens reserved for the decode `seq`: `ratio` of what it may still generate, or all with `ignore_eos`."""
        tokens = min(self._at[seq] - step, CLIP_MAX_NEW_TOKENS)
        return float(tokens) if seq.request.ignore_eos else tokens * ratio

    def tokens(self, step: int) -> int:
        """Output tokens that all decodes may still generate at the group's `step`."""
        total = self._sum - len(self._at) * step
        clip = CLIP_MAX_NEW_TOKENS + step
        for seq, at in list(self._long.items()):
            if at > clip:
                total -= at - clip
            else:
                del self._long[seq]
        return total

    def reserved(self, step: int, ratio: float, behind: Collection[Sequence] = ()) -> float:
        """KV tokens reserved for all decodes, those `behind` as of the step before; may differ from SGLang's float sum,
        row by row, in the last digits."""
        fixed = sum([min(at - step, CLIP_MAX_NEW_TOKENS) for at in self._fixed.values()])
        tokens = self.tokens(step)
        for seq in behind:
            more = int(self._at[seq] - step < CLIP_MAX_NEW_TOKENS)
            tokens += more
            fixed += more * seq.request.ignore_eos
        return (tokens - fixed) * ratio + fixed


class Completion:
    """Plays the requests of one prefill batch through to their ends, which with `ignore_eos` are known beforehand.

    `in_flight` says how many tokens of a decode SGLang does not know yet.
    """

    __slots__ = ("_in_flight", "_ratio", "_rows")

    def __init__(self, ratio: float, in_flight: Callable[[Sequence], int]) -> None:
        self._ratio = ratio
        self._in_flight = in_flight
        self._rows: list[tuple[float, int]] | None = None  # tokens to come, tokens held; the first to end first

    def fits(
        self, seq: Sequence, decodes: list[Sequence], chunks: list[tuple[Sequence, int]], left_tokens: int
    ) -> bool:
        """Whether `left_tokens` KV tokens last until all have ended, each giving back what it holds then.

        All: `seq`, the decodes and the batch so far when first asked; later `seq` alone joins them.
        """
        if self._rows is None:
            rows = [self._row(seq), *[self._row(other, self._in_flight(other)) for other in decodes]]
            rows += [self._row(other) for other, _ in chunks]
            self._rows = sorted([row for row in rows if row[0] > 0], key=_tokens_to_come)
        elif (row := self._row(seq))[0] > 0:
            # SGLang's search ends before the last one if none has as many to come.
            last = len(self._rows) - 1
            self._rows.insert(next((i for i, (n, _) in enumerate(self._rows) if row[0] <= n), max(last, 0)), row)
        freed = 0
        for i, (to_come, held) in enumerate(self._rows):
            count = len(self._rows) - i
            if left_tokens + freed - to_come * count <= IGNORE_EOS_RESERVE_TOKENS * count:
                return False
            freed += held
        return True

    def _row(self, seq: Sequence, in_flight: int = 0) -> tuple[float, int]:
        ratio = 1.0 if seq.request.ignore_eos else self._ratio
        return seq.max_output_tokens * ratio - seq.num_output_tokens + in_flight, seq.num_tokens - in_flight


def _tokens_to_come(row: tuple[float, int]) -> float:
    return row[0]


class PrefillBudget:
    """The budgets of one prefill batch, in tokens. Each is charged for a request's chunk alike, in whole pages.

    `offset` is how many of the free KV tokens are spoken for: chunks of this batch with a page each, the outputs of
    requests whose prompt ends in it, and the expected growth of the running.
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
    def left_now(self) -> int:
        """As `left_total`, but with nothing kept for output tokens."""
        return self._kv.num_free * self._page - self._now_offset

    @property
    def no_kv(self) -> bool:
        """Whether KV tokens are used up: with what the running may need, or already without."""
        return self.left_total <= 0 or self.left_now <= 0

    def chunk_room(self) -> int:
        """Tokens that the next chunk of a prompt that is cut already may have; SGLang gives one even without room."""
        room = min(self.left_chunk, int(self.left_total))
        return room if room > 0 else self.left_chunk

    def chunk_limit(self, num_tokens: int, max_new_tokens: int) -> int | None:
        """Tokens that the next chunk of a request with `num_tokens` to compute may have, which may then generate
        `max_new_tokens`; None where there is no room for it beside those of other layers."""
        return self.left_chunk

    def has_room(self, num_tokens: int, max_new_tokens: int) -> bool:
        """Whether a request as in `chunk_limit` has room in layers with a window."""
        return True

    @property
    def no_tokens(self) -> bool:
        """Whether the budget of the batch's input tokens or that of its chunks is used up."""
        return self.left_input <= 0 or self.left_chunk <= 0

    def paged(self, num_tokens: int) -> int:
        """`num_tokens` rounded up to whole pages, in tokens."""
        return -(-num_tokens // self._page) * self._page

    def charge(self, num_tokens: int, max_new_tokens: int) -> None:
        """Charges a chunk of `num_tokens` of a request that may then generate `max_new_tokens`; 0 for a chunk that is
        not the prompt's last."""
        tokens = self.paged(num_tokens)
        self.offset += tokens + self._page + max_new_tokens
        self._now_offset += tokens + self._page
        self.left_input -= tokens
        self.left_chunk -= tokens
