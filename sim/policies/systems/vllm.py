"""vLLM V1's scheduler: vLLM 0.33.0, synchronous, one full-attention KV group, no prefix caching.

Rule: no phases. Running sequences come first, in order of admission, each with the tokens it still lacks; then waiting
ones from the head of a strict queue. A running sequence that finds no KV block preempts (by recompute) the last
admitted one, or under `priority` the least important, latest one; after a preemption nothing is admitted in that step.
Source: vllm/v1/core/sched/scheduler.py and vllm/v1/core/kv_cache_manager.py of the 0.33.0 wheel; checked step by step
against recordings of that scheduler (`batchsim conform`).
Simplifies: request ids tie as integers where vLLM compares strings; no speculative decoding, LoRA, connectors.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, ClassVar, Literal

from sim.decode import DecodeGroup
from sim.errors import ScenarioError
from sim.kv import never_fits
from sim.types import IDLE, Batch, Event, Idle, PolicyContext, Sequence

_NO_CAP = 1 << 62


@dataclass(frozen=True)
class VllmConfig:
    """Knobs by vLLM's names. Defaults are its own for an online server on a GPU of 70 to 160 GB other than the A100.

    `enable_prefix_caching` and `async_scheduling` are on in vLLM and not simulated yet, so they must be stated false.
    `watermark` is a share of the KV blocks, 0 to 1.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    enable_prefix_caching: bool
    async_scheduling: bool
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    policy: Literal["fcfs", "priority"] = "fcfs"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0

    def __post_init__(self) -> None:
        for knob in ("enable_prefix_caching", "async_scheduling"):
            if getattr(self, knob):
                raise ValueError(f"{knob}: true is not simulated yet. Set it to false, here and in the engine")
        if self.max_num_seqs < 1 or self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} must be at least max_num_seqs"
                f" {self.max_num_seqs}, and that at least 1"
            )
        if self.long_prefill_token_threshold < 0 or not 0 <= self.watermark < 1:
            raise ValueError(
                f"long_prefill_token_threshold {self.long_prefill_token_threshold} must be 0 (off) or more,"
                f" watermark {self.watermark} from 0 to below 1"
            )


class Vllm:
    """The scheduler. A decode-only step with blocks to spare is O(1) in the number of sequences."""

    evidence = "recorded"
    streams = True

    def __init__(self, config: VllmConfig, context: PolicyContext) -> None:
        kv = context.kv
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < context.max_model_len:
            raise ScenarioError(
                f"vllm: without chunked prefill max_num_batched_tokens {config.max_num_batched_tokens} must be at least"
                f" max_model_len {context.max_model_len}. Raise it or lower max_model_len."
            )
        self.config = config
        self.kv = kv
        self.max_model_len = context.max_model_len
        self.events: list[Event] = []
        self.group = DecodeGroup(kv.block_size)
        self.running: dict[Sequence, None] = {}  # in order of admission
        self.partial: dict[Sequence, None] = {}  # running, prompt or recompute not done
        self.stalled: dict[Sequence, None] = {}  # running, ready to decode, sat out the last step
        self.waiting: _Fcfs | _Priority = _Priority() if config.policy == "priority" else _Fcfs()
        self._watermark_blocks = int(config.watermark * (kv.num_blocks + 1))  # vLLM counts its null block in
        self._admitted = 0
        self._blocked: tuple[Sequence, str] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    def add(self, seq: Sequence, now_ns: int) -> None:
        # vLLM refuses at start-up a pool smaller than max_model_len; here only the requests that could not end are.
        refusal = never_fits(self.kv, seq, self.max_model_len)
        if refusal is not None:
            self.events.append(refusal)
            return
        self.waiting.push(seq)

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        if seq in self.running:
            self._release(seq)
        else:
            self.waiting.remove(seq)
        return []

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        cap = self._prefill_cap()
        preempted: list[Sequence] = []
        plan = self._extend_running(cap)
        chunks, left = plan if plan is not None else self._walk_running(cap, preempted)
        if self.waiting:
            reason = "preemption" if preempted else self._admit(cap, left, chunks)
            self._note_blocked(reason)
        group = self.group
        if not (group.members or chunks or preempted):
            return IDLE
        return Batch(group, chunks, sum([n for _, n in chunks]), preempted=preempted)

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        # A blocked head stays blocked: free blocks only shrink while nobody ends.
        if batch.preempted or self.partial or self.stalled or not self.kv.grow_group(self.group):
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

    # ---- the running

    def _prefill_cap(self) -> int:
        """Most prefill tokens of one sequence in this step; a lone request is never capped."""
        threshold = self.config.long_prefill_token_threshold
        total = len(self.running) + len(self.waiting)
        if not threshold or total <= 1:
            return _NO_CAP
        if self.config.long_prefill_token_threshold_adaptive:
            return max(threshold, self.config.max_num_batched_tokens // total)
        return threshold

    def _extend_running(self, cap: int) -> tuple[list[tuple[Sequence, int]], int] | None:
        """Schedules all running sequences at once; None, and nothing changed, if any must be cut short or sit out."""
        kv, group = self.kv, self.group
        left = self.config.max_num_batched_tokens - len(group.members)
        if left < 0 or self.stalled:
            return None
        if not self.partial:
            return ([], left) if kv.grow_group(group) else None
        chunks: list[tuple[Sequence, int]] = []
        need = group.blocks_due()
        for seq in self.partial:
            computed = seq.settled_computed_tokens
            n = min(seq.num_tokens - computed, cap)
            if n > left:
                # Only the last running sequence may take what is left: others behind it would have to sit out.
                if left <= 0 or next(reversed(self.running)) is not seq:
                    return None
                n = left
            need += max(kv.blocks_for(computed + n) - kv.held(seq), 0)
            chunks.append((seq, n))
            left -= n
        if need > kv.num_free:
            return None
        kv.grow_group(group)
        for seq, n in chunks:
            kv.allocate(seq, seq.settled_computed_tokens + n)
        return chunks, left

    def _walk_running(self, cap: int, preempted: list[Sequence]) -> tuple[list[tuple[Sequence, int]], int]:
        """Schedules running sequences one by one in vLLM's order, preempting for blocks; O(running)."""
        kv, by_priority = self.kv, self.config.policy == "priority"
        left = self.config.max_num_batched_tokens
        order = list(self.running)
        scheduled: dict[Sequence, int] = {}
        i = 0
        while i < len(order) and left > 0:
            seq = order[i]
            computed = seq.num_computed_tokens
            n = min(seq.num_tokens - computed, cap, left, self.max_model_len - computed - 1)
            while not kv.allocate(seq, computed + n):
                victim = max(order, key=_importance) if by_priority else order[-1]
                at = order.index(victim)
                del order[at]
                if at < i:
                    i -= 1
                    left += scheduled.pop(victim, 0)
                self._preempt(victim, seq)
                preempted.append(victim)
                if victim is seq:
                    break
            else:
                scheduled[seq] = n
                left -= n
                i += 1
        for seq in order:
            if seq.group is not None and seq not in scheduled:
                kv.allocate(seq, seq.num_computed_tokens)  # settles its count: it holds these blocks already
                self.group.leave(seq)
                self.stalled[seq] = None
                self.events.append(Event("sat_out", seq, "token_budget"))
        return [(seq, n) for seq, n in scheduled.items() if not self._decodes(seq)], left

    def _decodes(self, seq: Sequence) -> bool:
        """Whether a scheduled running sequence decodes; one that sat out joins the group again."""
        if seq in self.stalled:
            del self.stalled[seq]
            self.group.join(seq)
        return seq.group is not None

    def _preempt(self, victim: Sequence, by: Sequence) -> None:
        self.events.append(Event("preempted", victim, "kv_blocks", by.request.id))
        self._release(victim)
        victim.reset_computed()
        self.waiting.put_back(victim)

    def _release(self, seq: Sequence) -> None:
        self.kv.free(seq)
        if seq.group is not None:
            self.group.leave(seq)
        self.partial.pop(seq, None)
        self.stalled.pop(seq, None)
        del self.running[seq]

    # ---- the waiting

    def _admit(self, cap: int, left: int, chunks: list[tuple[Sequence, int]]) -> str:
        """Admits from the head while it fits; returns why it stopped, "" if nobody is left."""
        kv, config, waiting = self.kv, self.config, self.waiting
        while waiting:
            if left <= 0:
                return "token_budget"
            if len(self.running) >= config.max_num_seqs:
                return "no_slot"
            seq = waiting.head()
            tokens = seq.num_tokens
            n = min(tokens, cap)
            if n > left:
                if not config.enable_chunked_prefill:
                    return "token_budget"
                n = left
            spare = kv.num_free - (self._watermark_blocks if self.running else 0)
            must_fit = min(tokens, self.max_model_len) if config.scheduler_reserve_full_isl else n
            if kv.blocks_for(must_fit) > spare or not kv.allocate(seq, n):
                return "kv_blocks"
            waiting.pop()
            seq.order = self._admitted
            self._admitted += 1
            self.running[seq] = None
            self.partial[seq] = None
            chunks.append((seq, n))
            left -= n
        return ""

    def _note_blocked(self, reason: str) -> None:
        blocked = (self.waiting.head(), reason) if self.waiting else None
        if blocked is not None and blocked != self._blocked:
            self.events.append(Event("blocked", *blocked))
        self._blocked = blocked


class _Fcfs:
    """First come, first served; the preempted return to the front."""

    def __init__(self) -> None:
        self._queue: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def head(self) -> Sequence:
        return self._queue[0]

    def pop(self) -> Sequence:
        return self._queue.popleft()

    def push(self, seq: Sequence) -> None:
        self._queue.append(seq)

    def put_back(self, seq: Sequence) -> None:
        self._queue.appendleft(seq)

    def remove(self, seq: Sequence) -> None:
        self._queue.remove(seq)


class _Priority:
    """A heap by (priority, arrival, id); the preempted are pushed like any other."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def head(self) -> Sequence:
        return self._heap[0][3]

    def pop(self) -> Sequence:
        return heappop(self._heap)[3]

    def push(self, seq: Sequence) -> None:
        request = seq.request
        heappush(self._heap, (request.priority, request.arrival_ns, request.id, seq))

    put_back = push

    def remove(self, seq: Sequence) -> None:
        self._heap = [entry for entry in self._heap if entry[3] is not seq]
        heapify(self._heap)


def _importance(seq: Sequence) -> tuple[int, int]:
    """Larger is less important; the id is not part of vLLM's key, so ties go to the first in running order."""
    return seq.request.priority, seq.request.arrival_ns
