"""vLLM 0.33, V1 engine, for requests with images, audios or videos: `vllm` with an encoder budget and cache.

Rule: as `vllm` (`batchsim.policies.systems.vllm.vllm`), and a step computes no placeholder token of an item that is
neither in the cache nor encoded in it (`encoder_cache`). A running request that gets no token so is skipped in the
step; a waiting one is set aside, and those behind it may come in.
Source: vllm/v1/core/sched/scheduler.py of the 0.33.0 wheel; equal to its recordings.
Simplifies: drafts, pipelines and encoders on servers of their own are refused.
"""

from __future__ import annotations

from batchsim.base.errors import ScenarioError, SchedulerStalled
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Event, Sequence
from batchsim.policies.systems.vllm.encoder_cache import EncoderCache
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import VllmConfig


class VllmWithItems(Vllm):
    """The scheduler of an engine whose requests may have items. O(running) in steps with chunks of prompts that have
    items yet to come."""

    def __init__(self, config: VllmConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        assert context.items is not None, "it is made for requests with items alone"
        if config.speculative_config is not None:
            raise ScenarioError(
                "vllm: speculative_config beside images, audios or videos is not simulated. Drop one of the two."
            )
        if config.prefill_schedule_interval > 1 or self._groups is not None:
            other = "a model with groups of KV blocks" if self._groups is not None else "prefill_schedule_interval"
            raise ScenarioError(f"vllm: {other} beside images, audios or videos is not simulated. Drop one of the two.")
        if context.loop.stages > 1:
            raise ScenarioError(
                f"vllm: images, audios or videos in a pipeline of {context.loop.stages} stages are not simulated. Set"
                " pp to 1."
            )
        default = max(config.max_num_batched_tokens, context.items.largest)
        self.encoder = self._encoder = EncoderCache(
            config.max_num_encoder_input_tokens or default,
            config.encoder_cache_size or default,
            whole_items=config.disable_chunked_mm_input,
            ahead=self._ahead,
        )
        self._latest: Batch | None = None  # in flight

    def add(self, seq: Sequence, now_ns: int) -> None:
        encoder = self._encoder
        largest = max((item.tokens for item in seq.request.items), default=0)
        for name, limit in (("max_num_encoder_input_tokens", encoder.budget), ("encoder_cache_size", encoder.size)):
            if largest > limit:
                detail = f"an item of {largest:,} embeddings, {name} {limit:,}"
                self.events.append(Event("rejected", seq, "item_too_large", detail=detail))
                return
        super().add(seq, now_ns)

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        self._encoder.begin()
        work = super().schedule(now_ns, drain)
        if isinstance(work, Batch):
            self._encoder.scheduled(work)
            self._latest = work
        elif self._encoder.refused and self._latest is None:
            raise SchedulerStalled(self._why_it_spins())
        return work

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        if batch is self._latest:
            self._latest = None
        self._encoder.processed(batch, finished)
        return super().complete(batch, finished, now_ns)

    def _why_it_spins(self) -> str:
        """The error where the engine would go on asking for ever: there is nothing to run, and nothing will change."""
        seq, item = next(iter(self._encoder.refused.items()))
        cap = min(self.config.most_prefill(len(self.running) + len(self.waiting)), self._step_tokens)
        what = f"vllm: request {seq.request.id} has an item of {item.tokens:,} tokens from token {item.start:,} on"
        if self.config.disable_chunked_mm_input and cap < item.tokens:
            knob = "long_prefill_token_threshold" if cap < self._step_tokens else "max_num_batched_tokens"
            return (
                f"{what}, which disable_chunked_mm_input keeps whole, and {knob} lets a step compute {cap:,}: the"
                f" engine would ask for steps for ever and compute nothing. Raise {knob}, or drop"
                " disable_chunked_mm_input."
            )
        return (
            f"{what}, and the encoder cache has room for {self._encoder.num_freeable:,} embeddings, the rest being held"
            " by requests that wait for others: the engine would ask for steps for ever and compute nothing. Raise"
            " encoder_cache_size."
        )

    # ---- leaps

    @property
    def _is_quiet(self) -> bool:
        """Whether steps of decodes let go of no item and no waiting request lacks one."""
        return not self._encoder.refused and not any(seq in self.running for seq in self._encoder.holding)

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        return self._is_quiet and super().repeat(batch, now_ns)

    def is_steady(self, batch: Batch) -> bool:
        return self._is_quiet and super().is_steady(batch)

    def foreseen(self, batch: Batch) -> list[int] | None:
        return super().foreseen(batch) if self._is_quiet else None

    def is_followed_by_decodes(self, batch: Batch) -> bool:
        return self._is_quiet and super().is_followed_by_decodes(batch)

    def is_turning(self) -> bool:
        return False  # a pipeline's

    # ---- the rule

    def _extend_running(self, cap: int) -> tuple[list[tuple[Sequence, int]], int] | None:
        for seq in self.partial:
            items = seq.request.items
            if items and seq.settled_computed_tokens < items[-1].start + items[-1].tokens:
                return None
        return super()._extend_running(cap)

    def _start(self, seq: Sequence, computed: int) -> None:
        super()._start(seq, computed)
        self._encoder.encode(seq)

    def _room(self, seq: Sequence, num_tokens: int, hit: int) -> bool:
        has_room = super()._room(seq, num_tokens, hit)
        if not has_room:
            self._encoder.free(seq)
        return has_room

    def _release(self, seq: Sequence, unknown: int, *, returns: bool) -> None:
        super()._release(seq, unknown, returns=returns)
        self._encoder.free(seq)

    def _forget(self, seq: Sequence) -> None:
        super()._forget(seq)
        self._encoder.free(seq)
