"""The sequences that run and wait under vLLM's scheduler, what each holds, and how they leave for good.

The rule, that is, which of them a step takes and which are preempted, is `vllm`'s.
"""

from __future__ import annotations

from collections.abc import Sized

from batchsim.base.errors import ScenarioError
from batchsim.kernel.batch import Batch
from batchsim.kernel.kv_blocks import CountingKV, TableKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import MISSING, DecodeGroup, Event, Sequence
from batchsim.kv.grouped_cache import GroupedHashKV
from batchsim.kv.prefix_cache import BlockHashKV
from batchsim.policies.families.queues import FcfsQueue, PriorityQueue, TwoQueues
from batchsim.policies.systems.vllm.active_adapters import ActiveAdapters
from batchsim.policies.systems.vllm.cohorts import Cohorts
from batchsim.policies.systems.vllm.encoder_cache import EncoderCache
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.policies.systems.vllm.vllm_groups import LayerGroups


class VllmState:
    """The state of a scheduler of `config`. ScenarioError where its knobs do not go with the model or the KV blocks."""

    def __init__(self, config: VllmConfig, context: PolicyContext) -> None:
        kv = context.kv
        if not config.enable_chunked_prefill and config.step_tokens < context.max_model_len:
            knob = "max_num_batched_tokens" if config.max_num_scheduled_tokens is None else "max_num_scheduled_tokens"
            raise ScenarioError(
                f"vllm: without chunked prefill {knob} {config.step_tokens} must be at least"
                f" max_model_len {context.max_model_len}. Raise it or lower max_model_len."
            )
        if config.runner == "pooling" and context.loop.stages > 1:
            raise ScenarioError(
                f"vllm: runner: pooling in a pipeline of {context.loop.stages} stages is not simulated. Set pp to 1."
            )
        self.cache = kv if config.enable_prefix_caching and isinstance(kv, BlockHashKV | GroupedHashKV) else None
        if config.enable_prefix_caching and self.cache is None:
            raise ScenarioError(
                f"vllm: enable_prefix_caching: true cannot work on a {type(kv).__name__}. Give it a BlockHashKV."
            )
        self.config = config
        self.kv = kv
        self._grows = kv if isinstance(kv, CountingKV | TableKV | BlockHashKV) else None
        self.max_model_len = context.max_model_len
        self.events: list[Event] = []
        self._ahead = config.async_scheduling
        if self._ahead and self.cache is not None:
            self.cache.unknown = 1
        self._cohorts = Cohorts(context.loop.stages, kv.block_size)
        self._pipelined = context.loop.stages > 1
        self.group: DecodeGroup = self._cohorts.group  # the sequences that may decode in this call
        self.running: dict[Sequence, None] = {}  # in order of admission
        self.partial: dict[Sequence, None] = {}  # running, prompt or recompute not done
        self.stalled: dict[Sequence, None] = {}  # running, ready to decode, sat out the last step
        self.ending: dict[Sequence, None] = {}  # running, their last token by length in flight
        self._last: Batch | None = None  # of the last call; the prompts that end in it have not joined its group
        self.queue: FcfsQueue | PriorityQueue | TwoQueues = self._new_queue()
        self.waiting: Sized = self.queue.entries  # to ask whether anyone waits
        self._aside: dict[Sequence, None] = {}  # waiting, were passed over once for results in flight
        self._watermark_blocks = int(config.watermark * (kv.num_blocks + 1))  # vLLM counts its null block in
        self._step_tokens, self._slots = config.step_tokens, config.slots
        self._beyond = 0  # tokens beyond a request's own for which a step may take blocks
        self._admitted = 0
        self._defers = False  # whether this call computes no part of a prompt
        self._goes_on = config.has_rule("goes_on")
        self._blocked: tuple[Sequence, str] | None = None
        self.adapters = ActiveAdapters(config.lora_slots)
        self.encoder: EncoderCache | None = None  # where requests have images, audios or videos
        cohorts = self._cohorts if self._pipelined else None
        self._groups = LayerGroups.of(kv, config, cohorts, ahead=context.loop.is_ahead)

    def _new_queue(self) -> FcfsQueue | PriorityQueue | TwoQueues:
        return PriorityQueue() if self.config.policy == "priority" else FcfsQueue()

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    # ---- what the running hold

    def _decode_on(self, seq: Sequence) -> None:
        """Lets `seq` join the group, or end if its last token is in flight already."""
        if self._ahead:
            left = min(seq.max_output_tokens, self.max_model_len - seq.request.prompt_tokens) - seq.num_output_tokens
            if left <= 0:
                self.ending[seq] = None
                return
            self._cohorts.expect(seq, self.group, left)
        self.group.join(seq)

    def _settle(self, seq: Sequence) -> None:
        """Notes how many blocks `seq` holds, which is about to leave its group and keeps them."""
        if self.cache is None or not self._ahead:
            self.kv.allocate(seq, seq.num_computed_tokens)
        else:
            self.cache.settle(seq)

    def _leave(self, seq: Sequence, group: DecodeGroup) -> None:
        """Takes `seq` out of the group that it decodes in."""
        group.leave(seq)
        if self._ahead:
            self._cohorts.left(seq)

    def _unknown(self, seq: Sequence) -> int:
        """How many of the tokens of `seq` are in flight."""
        return int(self._ahead and (seq.group is not None or seq in self.ending))

    def _allocate(self, seq: Sequence, num_tokens: int) -> bool:
        if self._ahead and self.cache is not None:
            return self.cache.allocate(seq, num_tokens, self._unknown(seq))
        return self.kv.allocate(seq, num_tokens)

    def _free(self, seq: Sequence, unknown: int, *, returns: bool) -> None:
        """Gives back the blocks of `seq`, before it leaves its group; the last `unknown` of its tokens are in
        flight."""
        if self.cache is None:
            self.kv.free(seq)
        elif returns:
            self.cache.free(seq, unknown)
        else:
            self.cache.end(seq, unknown)

    def _release(self, seq: Sequence, unknown: int, *, returns: bool) -> None:
        self._free(seq, unknown, returns=returns)
        if seq.group is not None:
            self._leave(seq, seq.group)
        self.partial.pop(seq, None)
        self.stalled.pop(seq, None)
        self.ending.pop(seq, None)
        del self.running[seq]
        if seq.request.adapter != MISSING:
            self.adapters.leave(seq)

    # ---- the waiting

    def _forget(self, seq: Sequence) -> None:
        """Takes `seq` out of the queue for good."""
        self.queue.remove(seq)
        self._aside.pop(seq, None)
        self.adapters.forget(seq)
        self._cohorts.stale.pop(seq, None)
