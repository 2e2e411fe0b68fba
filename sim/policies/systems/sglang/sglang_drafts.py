"""SGLang 0.5.23, prefill first, radix cache; with `speculative_algorithm` decodes verify draft tokens.

Without it: `batchsim.policies.systems.sglang.sglang`. With it a decode gains one token and as many as drafts are right.
Rule: as `sglang`, but a decode step needs pages, for each sequence, for twice the tokens that it verifies beyond the
computed ones; pages that a rejected draft leaves empty stay with the sequence and count toward its next step. That need
decides which sequences are retracted; admission goes by what the caps leave, and knows nothing of drafts. max_tokens
cuts no draft. In a mixed step decodes verify nothing, and have the pages all the same. Where a sequence ends before the
last token it was accepted, the tree gets its last output token's KV too; where it ends in a mixed step, not that of the
last but one. With the EAGLE family a page in the tree depends on the token behind it, so that a prefix loses its last
token. Overlapping, a decode's tokens count as computed when it is known which are right, not when they are launched:
the step in flight writes into one half of the pages in reserve, the next one into the other. Of what is in flight one
token is foreseen: a sequence that reaches its cap with it is not decoded; one that does with a burst, or ends, verifies
once more in vain.
Source: python/sglang/srt/speculative/eagle_utils.py (eagle_prepare_for_decode), mem_cache/{allocation,
allocation_sizing,common,radix_cache}.py, managers/{scheduler,schedule_batch,overlap_utils}.py and
managers/scheduler_components/batch_result_processor.py of the 0.5.23 wheel.
Simplifies: the drafter's own time is the cost's to say, its memory none. SGLang aborts a request that, alone, has no
pages for a step; here its output cap is lowered to what it has pages for. Overlapping, the host waits before a launch
for what the step before verified under NGRAM, and with attention backends that want lengths on the host, as FlashInfer:
its part of the launch is taken to be done by then, so that the GPU does not wait for it. Adaptive numbers of drafts,
FROZEN_KV_MTP, DFLASH, DSPARK and UNO are not simulated.
"""

from __future__ import annotations

from batchsim.kernel.batch import Batch
from batchsim.kernel.draft_group import DraftGroup, DraftRows
from batchsim.kernel.kv_blocks import KVBlockManager
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import DecodeGroup, Sequence
from batchsim.kv.radix_cache import RadixKV
from batchsim.policies.systems.sglang.prefill_adder import Prefill
from batchsim.policies.systems.sglang.running_batch import RunningBatch
from batchsim.policies.systems.sglang.sglang import Sglang
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.policies.systems.sglang.sglang_items import SglangWithItems
from batchsim.policies.systems.sglang.token_budget import CLIP_MAX_NEW_TOKENS

_NO_LIMIT = 1 << 62  # SGLang keeps rows that reach beyond the model's length


class DraftingBatch(RunningBatch):
    """A RunningBatch whose decodes verify `width` tokens each, and have pages for `reserve` beyond the computed, as far
    as these are known."""

    __slots__ = ("_firsts", "_ignoring", "_lookahead", "_ungrown", "_width")
    group: DraftGroup  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self, kv: KVBlockManager, cache: RadixKV | None, width: int, reserve: int, *, ahead: bool = False
    ) -> None:
        super().__init__(kv, cache, ahead=ahead)
        self._width, self._lookahead = width, reserve - width
        self._ungrown: dict[Sequence, None] = {}  # have not grown yet: their last page may be their prompt's, not full
        self._ignoring: dict[Sequence, None] = {}  # ignore the end of their text
        self._firsts: list[Sequence] = []  # whose first token is in flight, and all tokens before it are known

    def _new_group(self, block_size: int) -> DecodeGroup:
        return DraftGroup(block_size)

    def join(self, seq: Sequence) -> None:
        self.group.join(seq, unknown=int(self._ahead))
        self._ungrown[seq] = None
        if seq.request.ignore_eos:
            self._ignoring[seq] = None

    def _off(self, seq: Sequence) -> None:
        self.group.leave(seq)
        self._ungrown.pop(seq, None)
        self._ignoring.pop(seq, None)

    def await_results(self, batch: Batch | None) -> None:
        self._firsts = [] if batch is None else [seq for seq in batch.sampled if seq.group is self.group]

    def in_flight(self, seq: Sequence) -> int:
        return int(self.group.unknown[seq.phase]) if seq.group is self.group else 0

    def take_off_capped(self) -> bool:
        ending = self.group.last_in_flight()
        for seq in ending:
            self._kv.allocate(seq, seq.num_computed_tokens)  # settles what it holds
            self._off(seq)
            self.capped.add(seq)
        return bool(ending)

    def rows_of(self, *, riding: bool) -> DraftRows:
        """The rows of the decodes in a step of their own, or `riding` along with prompts."""
        group = self.group
        group.take_alike(1 if riding else self._width)
        return DraftRows(group.sequences, group.rows, {}, num_rows=group.num_rows)

    # ---- what they may still need

    def reserved_for(self, seq: Sequence, ratio: float) -> float:
        known = seq.num_output_tokens - self.in_flight(seq)
        tokens = min(seq.max_output_tokens - known, CLIP_MAX_NEW_TOKENS)
        return float(tokens) if seq.request.ignore_eos else tokens * ratio

    def _reserved_at_once(self, ratio: float) -> float:
        tokens = self.group.sum_to_come(CLIP_MAX_NEW_TOKENS)
        fixed = sum([int(self.reserved_for(seq, 1.0)) for seq in self._ignoring])
        return (tokens - fixed) * ratio + fixed

    # ---- pages

    def blocks_due(self) -> int:
        group, base = self.group, None
        if self._ahead:
            base = group.computed - group.unknown
            base[[seq.phase for seq in self._firsts if seq.group is group]] += 1
        group.ask(group.alike(self._width), self._lookahead, _NO_LIMIT, base)
        return group.blocks_due()

    def grow(self) -> bool:
        """Takes the pages due; False, and nothing changed, if they are short. Before that SGLang evicts until there
        are, for each decode, one page more, unless none needs any."""
        kv, group, page = self._kv, self.group, self._kv.block_size
        need = self.blocks_due()
        if need > kv.num_free:
            return False
        begun = sum([-seq.num_computed_tokens % page for seq in self._ungrown])
        if self._cache is not None and (need or begun):
            spare = len(group.members) if page > 1 else 0
            self._cache.make_room(need + kv.blocks_for(begun) + spare)
        self._ungrown.clear()
        grown = kv.grow_group(group)
        group.take_due()
        return grown


class SglangWithDrafts(Sglang):
    """The scheduler of a SglangConfig that has a `speculative_algorithm`; of any other, a Sglang.

    A decode step is a few operations on the columns of a DraftGroup where no sequence must be retracted.
    """

    batch: DraftingBatch  # pyright: ignore[reportIncompatibleVariableOverride]

    def __new__(cls, config: SglangConfig, context: PolicyContext) -> Sglang:
        if context.items is not None:
            return SglangWithItems(config, context)
        return Sglang(config, context) if config.speculative_algorithm is None else super().__new__(cls)

    def __init__(self, config: SglangConfig, context: PolicyContext) -> None:
        drafting = config.drafting
        assert drafting is not None, "__new__ has seen to that"
        self._width, self._reserve = drafting.width, drafting.reserve(context.kv.block_size)
        self._left_over: dict[Sequence, int] = {}  # who ends with this step -> tokens kept beyond the computed
        super().__init__(config, context)
        if self._cache is not None:
            self._cache.lookahead = drafting.key_lookahead

    def _new_batch(self) -> RunningBatch:
        return DraftingBatch(self.kv, self._cache, self._width, self._reserve, ahead=self._ahead)

    def _most_output(self, prompt: int) -> int:
        # Before its last step a sequence has prompt + cap - 2 tokens computed. The first token needs no decode.
        return max(self.kv.num_blocks * self.kv.block_size - self._reserve - prompt + 2, 1)

    def _work(self, made: Prefill, preempted: list[Sequence]) -> Batch:
        batch = super()._work(made, preempted)
        if batch.decodes is not None:
            batch.verify(self.batch.rows_of(riding=bool(made.chunks)))
        return batch

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        return False  # members gain different numbers of tokens

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        drafting = batch.drafting
        if drafting is not None and finished and self._cache is not None:
            assert drafting.verified is not None, "it was executed"
            unseen = (drafting.verified.accepted + 1 > drafting.verified.gained).tolist()
            ended = set(finished)
            rows = zip(drafting.sequences, unseen, strict=True)
            self._left_over = {seq: -1 if batch.chunks else int(more) for seq, more in rows if seq in ended}
        return super().complete(batch, finished, now_ns)

    def _kept(self, seq: Sequence) -> int:
        return self._computed(seq) + self._left_over.pop(seq, 0)

    def _computed(self, seq: Sequence) -> int:
        return seq.num_computed_tokens - self.batch.in_flight(seq)
