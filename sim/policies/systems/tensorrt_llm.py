"""TensorRT-LLM, batch manager of 2025 (cf6abc45, 0a949d31, 1ce9149b), no block reuse; the engine's default is reuse.

Rule: two stages a step, over all requests by arrival. First, whose KV fits. GUARANTEED_NO_EVICT: all that decodes,
then prompts while blocks for prompt and output cap are there. STATIC_BATCH: likewise, but prompts only while nobody
decodes. MAX_UTILIZATION: each in turn with the blocks of this step; one that finds none pauses the last started one
from it on. Then, who runs under max_batch_size and max_num_tokens: decodes take a token each, a prompt all of its own
or, with chunked prefill, chunks of what the decodes leave.
Source: cpp/tensorrt_llm/batch_manager/{capacityScheduler,microBatchScheduler,kvCacheManager}.cpp.
Simplifies: tokens_per_block (32 there) is the pool's block size. What a pause would force into one step beyond
max_num_tokens is rejected, where the engine cuts generated text off. No beams, drafts, attention windows, pipelining.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush, merge
from typing import Any, ClassVar, Literal

from sim.decode import DecodeGroup
from sim.errors import ScenarioError
from sim.kv import never_fits
from sim.policies.systems.trt_chunks import Chunks, Waiting, by_order, equal_progress, first_come
from sim.types import IDLE, Batch, Event, Idle, PolicyContext, Sequence


@dataclass(frozen=True)
class TensorrtLlmConfig:
    """Knobs by the names of the LLM API; defaults are its own.

    `context_chunking_policy` needs chunked prefill; null: FIRST_COME_FIRST_SERVED with it. `enable_block_reuse` is on
    in TensorRT-LLM and not simulated yet.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    capacity_scheduler_policy: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"] = "GUARANTEED_NO_EVICT"
    max_batch_size: int = 2048
    max_num_tokens: int = 8192
    enable_chunked_prefill: bool = False
    context_chunking_policy: Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"] | None = None
    enable_block_reuse: bool = False

    def __post_init__(self) -> None:
        if self.enable_block_reuse:
            raise ValueError("enable_block_reuse: true is not simulated yet. Set it to false, here and in the engine")
        if self.max_batch_size < 1 or self.max_num_tokens < 1:
            raise ValueError(
                f"max_batch_size {self.max_batch_size} and max_num_tokens {self.max_num_tokens} must be at least 1"
            )
        if self.context_chunking_policy is not None and not self.enable_chunked_prefill:
            raise ValueError(
                f"context_chunking_policy {self.context_chunking_policy} needs enable_chunked_prefill: true"
            )

    @property
    def max_num_seqs(self) -> int:
        """Slots, for the occupancy that is reported."""
        return self.max_batch_size


class TensorrtLlm:
    """The scheduler. A decode-only step is O(1) in the number of sequences unless KV blocks or tokens are short."""

    evidence = "hand-derived"
    differs = "without block reuse"  # from the engine as it is shipped
    streams = True

    def __init__(self, config: TensorrtLlmConfig, context: PolicyContext) -> None:
        kv = context.kv
        if config.enable_chunked_prefill and config.max_num_tokens < kv.block_size:
            raise ScenarioError(
                f"tensorrt_llm: chunks are cut to whole KV blocks, so max_num_tokens {config.max_num_tokens} must be at"
                f" least the block size {kv.block_size}. Raise it."
            )
        self.config = config
        self.kv = kv
        self.max_model_len = context.max_model_len
        self.events: list[Event] = []
        self.group = DecodeGroup(kv.block_size)
        self.waiting = Waiting()
        self.running: dict[Sequence, None] = {}
        self.partial: dict[Sequence, None] = {}  # running, prompt or recompute not done
        self._evicts = config.capacity_scheduler_policy == "MAX_UTILIZATION"
        self._static = config.capacity_scheduler_policy == "STATIC_BATCH"
        self._reserved = 0  # blocks that the running will hold at their end
        self._started: list[tuple[int, int, Sequence]] = []  # a heap, the last by arrival first; ended ones linger
        self._arrived = self._starts = 0
        self._blocked: tuple[Sequence, str] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    def add(self, seq: Sequence, now_ns: int) -> None:
        refusal = self._refusal(seq)
        if refusal is not None:
            self.events.append(refusal)
            return
        seq.order = self._arrived
        self._arrived += 1
        self.waiting.push(seq)

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        if seq in self.running:
            self._release(seq)
        else:
            self.waiting.remove(seq)
        return []

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        preempted: list[Sequence] = []
        if self._evicts and not self._undisturbed():
            contexts: Iterable[Sequence] = [seq for seq in self._fit_by_pausing(preempted) if seq.group is None]
        else:
            contexts = self._contexts()
        # Decodes always fit: there are no more than the tokens of an earlier step.
        chunks = self._micro_batch(contexts, self.config.max_num_tokens - len(self.group))
        room = self.kv.grow_group(self.group)
        assert room, f"{self.kv.num_free} blocks free, {self.group.blocks_due()} kept for the decodes"
        for seq, _ in chunks:
            if seq not in self.running:
                self._start(seq)
        self._note_blocked(preempted)
        if not (self.group.members or chunks or preempted):
            return IDLE
        return Batch(self.group, chunks, sum([n for _, n in chunks]), preempted=preempted, layout="chunks_first")

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        if batch.preempted or self.partial:
            return False
        # A head that lacks slots or blocks goes on to, as both only get fewer; one that lacks tokens may come to lack
        # blocks.
        if self._evicts and self._blocked is not None and self._blocked[1] == "token_budget":
            return False
        if not self.kv.grow_group(self.group):
            return False
        batch.again()
        return True

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        for seq in finished:
            self._release(seq)
        for seq in batch.sampled:
            if seq in self.running:
                del self.partial[seq]
                self.group.join(seq)
        return finished

    # ---- stage 1: whose KV fits

    def _undisturbed(self) -> bool:
        """MAX_UTILIZATION: whether nobody is paused in this step: all that is started comes first and fits. O(1)."""
        if self.group.blocks_due() > self.kv.num_free:
            return False
        head, started = self.waiting.head(), self._started
        while started and started[0][2] not in self.running:
            heappop(started)
        return head is None or not started or head.order > started[0][2].order

    def _contexts(self) -> Iterator[Sequence]:
        """The prompts whose KV fits beside the decodes, by arrival; no more is looked at than is asked for."""
        if self._static and self.group.members:
            self.events.extend(Event("sat_out", seq, "batch_running") for seq in self.partial)
            return iter(())
        return merge(sorted(self.partial, key=by_order), self._admissible(), key=by_order)

    def _admissible(self) -> Iterator[Sequence]:
        """Those that wait, from the head on, until a slot or blocks are short."""
        slots = self.config.max_batch_size - len(self.running)
        room = self._room() - (self.group.blocks_due() if self._evicts else 0)
        for seq in self.waiting:
            need = self._need(seq)
            if slots < 1 or need > room:
                return
            slots -= 1
            room -= need
            yield seq

    def _room(self) -> int:
        """Blocks that nobody holds, nor has reserved."""
        return self.kv.num_free if self._evicts else self.kv.num_blocks - self._reserved

    def _need(self, seq: Sequence) -> int:
        """Blocks without which `seq` does not start: of its known tokens, or where nobody is paused of all to come."""
        return self.kv.blocks_for(seq.num_tokens) if self._evicts else self._blocks_at_end(seq)

    def _blocks_at_end(self, seq: Sequence) -> int:
        request = seq.request
        return self.kv.blocks_for(min(request.prompt_tokens + request.max_output_tokens, self.max_model_len))

    def _fit_by_pausing(self, preempted: list[Sequence]) -> list[Sequence]:
        """MAX_UTILIZATION: who fits, by arrival. Pauses the last started for blocks; the list then ends before it."""
        kv, fitting, used = self.kv, list[Sequence](), 0
        started = sorted(self.running, key=by_order)
        for seq in merge(started.copy(), self.waiting, key=by_order):
            if preempted and seq.order >= preempted[-1].order:
                break
            need = self._blocks_for_step(seq)
            while len(fitting) >= self.config.max_batch_size or used + need > kv.num_free:
                if not started or started[-1].order < seq.order:
                    return fitting
                victim = started.pop()
                reason = "no_slot" if len(fitting) >= self.config.max_batch_size else "kv_blocks"
                self.events.append(Event("preempted", victim, reason, seq.request.id))
                preempted.append(victim)
                self._pause(victim)
                if victim is seq:
                    return fitting
            fitting.append(seq)
            used += need
        return fitting

    def _blocks_for_step(self, seq: Sequence) -> int:
        if seq not in self.running:
            return self.kv.blocks_for(seq.num_tokens)
        if seq in self.partial:  # holds the blocks of its whole prompt
            return 0
        return int(seq.num_computed_tokens % self.kv.block_size == 0)

    # ---- stage 2: who runs in this step

    def _micro_batch(self, contexts: Iterable[Sequence], capacity: int) -> Chunks:
        """What runs of `contexts` in `capacity` tokens: whole prompts until one does not fit, or chunks."""
        if self.config.enable_chunked_prefill:
            cut = equal_progress if self.config.context_chunking_policy == "EQUAL_PROGRESS" else first_come
            return cut(contexts, capacity, self.kv.block_size) if capacity else []
        chunks: Chunks = []
        for seq in contexts:
            if seq.num_tokens > capacity:
                break
            chunks.append((seq, seq.num_tokens))
            capacity -= seq.num_tokens
        return chunks

    # ---- lives

    def _refusal(self, seq: Sequence) -> Event | None:
        """The rejection of a request that could never run; None if it could."""
        budget, prompt = self.config.max_num_tokens, seq.request.prompt_tokens
        most = min(prompt + seq.request.max_output_tokens, self.max_model_len) - 1
        if self._evicts:
            refusal = never_fits(self.kv, seq, self.max_model_len)
            if refusal is not None:
                return refusal
        elif self._blocks_at_end(seq) > self.kv.num_blocks:
            detail = f"{self._blocks_at_end(seq)} KV blocks to completion, {self.kv.num_blocks} in the pool"
            return Event("rejected", seq, "never_fits", detail=detail)
        if self.config.enable_chunked_prefill or (most if self._evicts else prompt) <= budget:
            return None
        what = f"up to {most} tokens to recompute" if self._evicts else f"prompt of {prompt} tokens"
        return Event("rejected", seq, "over_token_budget", detail=f"{what} in one step, max_num_tokens {budget}")

    def _start(self, seq: Sequence) -> None:
        fits = self.kv.allocate(seq, seq.num_tokens)
        assert fits, f"{self.kv.num_free} blocks free for {seq!r}"
        self.waiting.remove(seq)
        self.running[seq] = None
        self.partial[seq] = None
        self._reserved += self._blocks_at_end(seq)
        if self._evicts:
            self._starts += 1
            heappush(self._started, (-seq.order, self._starts, seq))

    def _pause(self, seq: Sequence) -> None:
        self._release(seq)
        seq.reset_computed()
        self.waiting.put_back(seq)

    def _release(self, seq: Sequence) -> None:
        self.kv.free(seq)
        if seq.group is not None:
            self.group.leave(seq)
        self.partial.pop(seq, None)
        del self.running[seq]
        self._reserved -= self._blocks_at_end(seq)

    def _note_blocked(self, preempted: list[Sequence]) -> None:
        """Says why the head of the queue did not start."""
        head = self.waiting.head()
        if head is None:
            self._blocked = None
            return
        if preempted and head.order >= preempted[-1].order:
            reason = "preemption"
        elif self._static and self.group.members:
            reason = "batch_running"
        elif len(self.running) >= self.config.max_batch_size:
            reason = "no_slot"
        else:
            reason = "kv_blocks" if self._need(head) > self._room() else "token_budget"
        if (head, reason) != self._blocked:
            self.events.append(Event("blocked", head, reason))
        self._blocked = (head, reason)
