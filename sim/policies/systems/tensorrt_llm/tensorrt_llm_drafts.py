"""TensorRT-LLM, whole blocks reused: its PyTorch runtime, with draft tokens where asked for, or its C++ one.

Without `speculative_config`: `batchsim.policies.systems.tensorrt_llm.tensorrt_llm`. With it, in the PyTorch runtime of
2026, a decode gains one token and as many as drafts are right, until its cap or a stop token ends it among them.
Rule: as `tensorrt_llm`, but each decode takes 1 + max_draft_len tokens of max_num_tokens, so that the last ones may
find none. A prompt takes its own tokens alone; if the drafter is a part of the model, blocks for max_draft_len - 1
tokens more, which the sequence keeps. A step takes blocks for all its drafts; with its results the blocks that rejected
drafts leave empty are freed, the last one first. Neither max_tokens nor the model's length cuts drafts. Overlapping, a
call knows nothing of what the step in flight accepts, and counts and holds blocks for all of it. A sequence one token
short of its cap as a step starts is ending, since the step makes at least one; before the next step it counts for
blocks up to its cap alone.
Source: tensorrt_llm/_torch/pyexecutor/{py_executor,resource_manager,py_executor_creator}.py, _torch/speculative/
{spec_sampler_base,drafter,utils}.py, cpp/tensorrt_llm/batch_manager/{kvCacheManager,microBatchScheduler}.cpp, as stored
of NVIDIA/TensorRT-LLM in 2026. Its pull request 16101 (July 2026) has the tokens of drafts counted where the drafter is
a part of the model: before it the engine fails where that matters. In what is stored a request's last step is foreseen
by one token a step (mNumTokensPerIteration 1); a later version goes by what the step before gained.
Simplifies: MAX_UTILIZATION counts the blocks that a step takes and the other policies keep blocks for the drafts of the
last steps too, though both know of caps alone there: the engine fails where those are not there. A paused request has
no drafts when it comes back. A drafter with a model of its own drafts before the step, here after the one before; its
KV, in a pool of its own, takes no memory. Draft trees, relaxed acceptance, numbers of drafts by batch size
(max_concurrency, draft_len_schedule), and PARD, SA, Medusa, Lookahead, AUTO and users' drafters are not simulated, nor,
where scheduling overlaps, a drafter outside the model: the engine turns its overlap off under NGram, or, in its newest
form, has that in the model too.
"""

from __future__ import annotations

from batchsim.kernel.batch import Batch
from batchsim.kernel.draft_group import DraftGroup, DraftRows
from batchsim.kernel.kv_blocks import Rewinds
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import DecodeGroup, Event, Sequence, by_order
from batchsim.policies.systems.tensorrt_llm.in_flight import InFlight
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm import TensorrtLlm
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm_config import TensorrtLlmConfig

_NO_LIMIT = 1 << 62  # the engine makes its sequences longer by their drafts


class DraftsInFlight(InFlight):
    """As InFlight, of decodes that have any number of tokens in flight, each with `num_drafts` drafts to verify."""

    _group: DraftGroup

    def __init__(self, group: DraftGroup, kv: Rewinds, max_model_len: int, num_drafts: int, *, ahead: bool) -> None:
        super().__init__(group, kv, max_model_len, ahead=ahead)
        self._num_drafts = num_drafts
        self._unknown: dict[Sequence, int] = {}  # tokens in flight of sequences that left the group with this call

    def go_on(self, partial: dict[Sequence, None]) -> None:
        if self.batch is not None:
            self.let_decode(self.batch.sampled, partial)
        for seq in self._group.last_in_flight():
            self.step_aside(seq)
            self.ending[seq] = None

    def decode_on(self, seq: Sequence) -> None:
        unknown = int(self.batch is not None and seq in self.batch.sampled)
        self._group.join(seq, self._num_drafts, unknown)
        self._group.limit[seq.phase] = min(int(self._group.limit[seq.phase]), self._max_model_len)

    def step_aside(self, seq: Sequence) -> None:
        self._unknown[seq] = int(self._group.unknown[seq.phase])
        super().step_aside(seq)

    def tokens_of(self, seq: Sequence) -> int:
        if self.batch is None:
            return 0
        if seq.group is not None:
            return int(self._group.unknown[seq.phase])
        return 1 if seq in self.batch.sampled else self._unknown.get(seq, 0)

    def landed(self) -> None:
        """The results of the step in flight when the scheduler was last asked are there."""
        self._unknown.clear()


class TensorrtLlmWithDrafts(TensorrtLlm):
    """The scheduler of a TensorrtLlmConfig that has a `speculative_config`; of any other, a TensorrtLlm.

    A step is a few operations on the columns of a DraftGroup where no sequence must sit out or be paused.
    """

    group: DraftGroup  # pyright: ignore[reportIncompatibleVariableOverride]
    kv: Rewinds  # pyright: ignore[reportIncompatibleVariableOverride]
    _in_flight: DraftsInFlight  # pyright: ignore[reportIncompatibleVariableOverride]

    def __new__(cls, config: TensorrtLlmConfig, context: PolicyContext) -> TensorrtLlm:
        return TensorrtLlm(config, context) if config.speculative_config is None else super().__new__(cls)

    def __init__(self, config: TensorrtLlmConfig, context: PolicyContext) -> None:
        assert config.speculative_config is not None, "__new__ has seen to that"
        self._num_drafts = config.speculative_config.num_drafts
        self._each, self._extra = 1 + self._num_drafts, config.speculative_config.extra_kv_tokens
        # The last step begins a token before the cap, or where one is in flight two of what is known.
        steps = 2 if context.loop.is_ahead else 1
        self._beyond = steps * self._num_drafts - 1 + self._extra
        super().__init__(config, context)

    def _new_group(self) -> DecodeGroup:
        return DraftGroup(self.kv.block_size)

    def _new_in_flight(self) -> InFlight:
        return DraftsInFlight(self.group, self.kv, self.max_model_len, self._num_drafts, ahead=self._ahead)

    def _ask(self, batch: Batch) -> None:
        group = self.group
        batch.verify(DraftRows(group.sequences, group.rows, {}, num_rows=group.num_rows))

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        return False  # members gain different numbers of tokens

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        self._end_finished(finished)
        self._rewind()
        self._store_chunks(batch)
        if self._ahead:
            self._in_flight.landed()
        else:
            self._in_flight.let_decode(batch.sampled, self.partial)
        return finished

    def _rewind(self) -> None:
        """Frees the blocks that rejected drafts leave empty."""
        before = self.kv.num_free
        for seq, count in self.group.rewind(self._extra):
            self.kv.give_back(seq, count)
        for seq in self.left_out:
            spare = self.kv.held(seq) - self.kv.blocks_for(seq.num_computed_tokens + self._extra)
            if spare:
                self.kv.give_back(seq, spare)
        self._to_come += self.kv.num_free - before

    # ---- tokens

    def _seat_decodes(self) -> bool:
        """Lets decodes run, by arrival, while there are tokens in this step; returns whether all do. O(1) if all did
        before."""
        most = self.config.max_num_tokens // self._each
        if not self.left_out and len(self.group) <= most:
            return True
        order = sorted([*self.group.members, *self.left_out], key=by_order)
        for seq in order[most:]:
            self._leave_out(seq)
        for seq in order[:most]:
            if seq in self.left_out:
                del self.left_out[seq]
                self._in_flight.decode_on(seq)
        return len(order) <= most

    # ---- blocks

    def _blocks_at_end(self, seq: Sequence) -> int:
        request = seq.request
        known = min(request.prompt_tokens + request.max_output_tokens, self.max_model_len)
        return self.kv.blocks_for(known + self._beyond)

    def _never_fits(self, seq: Sequence) -> Event | None:
        return self._more_than_all(seq)

    def _blocks_to_decode(self, seq: Sequence) -> int:
        kv, computed = self.kv, seq.num_computed_tokens + self._extra
        if seq not in self._in_flight.ending:
            return kv.blocks_for(computed + self._each) - kv.held(seq)
        request = seq.request
        cap = min(request.prompt_tokens + request.max_output_tokens, self.max_model_len)
        return kv.blocks_for(max(min(computed + self._each, cap), computed)) - kv.held(seq)

    def _due(self) -> int:
        self.group.ask(self.group.alike(self._each), self._extra, _NO_LIMIT)
        return super()._due()

    def _grow_group(self) -> bool:
        self.group.ask(self.group.alike(self._each), self._extra, _NO_LIMIT)
        fits = super()._grow_group()
        self.group.take_due()
        self.group.take_alike(self._each)
        return fits
