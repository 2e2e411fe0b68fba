"""vLLM 0.33, scheduling ahead of results as shipped, or synchronous. V1 engine, one full-attention KV group.

Rule: no phases. Running sequences come first, in order of admission, each with the tokens it still lacks; then waiting
ones from the head of a strict queue. A running sequence that finds no KV block preempts (by recompute) the last
admitted one, or under `priority` the least important, latest one; after a preemption nothing is admitted in that step.
With prefix caching an admission begins after the cached blocks of its tokens, at least one token before their end.
Ahead of results a sequence at its output cap is not scheduled again; one ended by a stop token is once more, in vain.
In a pipeline a sequence that decodes has one turn in as many calls as there are stages (`Cohorts`). One preempted
with results in flight is passed over in the queue until they are there; they are delivered, and may end it.
Source: vllm/v1/core/sched/scheduler.py, vllm/v1/core/kv_cache_manager.py of the 0.33.0 wheel; equal to its recordings.
Simplifies: request ids tie as integers where vLLM compares strings; a pool below max_model_len is taken, and requests
that could not end in it are rejected; no LoRA, connectors, structured outputs. Drafts are `vllm_drafts`'.
"""

from __future__ import annotations

from batchsim.base.errors import ScenarioError
from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.kv_blocks import CountingKV, TableKV, never_fits
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import DecodeGroup, Event, Sequence
from batchsim.kv.prefix_cache import BlockHashKV
from batchsim.policies.families.queues import FcfsQueue, PriorityQueue
from batchsim.policies.systems.vllm.cohorts import Cohorts
from batchsim.policies.systems.vllm.vllm_config import VllmConfig

_NO_CAP = 1 << 62


class Vllm:
    """The scheduler. A decode-only step with blocks to spare is O(1) in the number of sequences."""

    evidence = "recorded"
    streams = True

    def __init__(self, config: VllmConfig, context: PolicyContext) -> None:
        kv = context.kv
        if not config.enable_chunked_prefill and config.step_tokens < context.max_model_len:
            knob = "max_num_batched_tokens" if config.max_num_scheduled_tokens is None else "max_num_scheduled_tokens"
            raise ScenarioError(
                f"vllm: without chunked prefill {knob} {config.step_tokens} must be at least"
                f" max_model_len {context.max_model_len}. Raise it or lower max_model_len."
            )
        self.cache = kv if config.enable_prefix_caching and isinstance(kv, BlockHashKV) else None
        if config.enable_prefix_caching and self.cache is None:
            raise ScenarioError(
                f"vllm: enable_prefix_caching: true cannot work on a {type(kv).__name__}. Give it a BlockHashKV."
            )
        self.config = config
        self.kv = kv
        self._grows = kv if isinstance(kv, CountingKV | TableKV | BlockHashKV) else None
        self.max_model_len = context.max_model_len
        self.events: list[Event] = []
        self.loop = context.loop
        self._ahead = config.async_scheduling
        if self._ahead and self.cache is not None:
            self.cache.unknown = 1
        if self.cache is not None and (self._ahead or context.loop.stages > 1):
            self.cache.name_blocks()  # a sequence may end with a block that its computed tokens do not tell of
        self._cohorts = Cohorts(context.loop.stages, kv.block_size)
        self._pipelined = context.loop.stages > 1
        self.group: DecodeGroup = self._cohorts.group  # the sequences that may decode in this call
        self.running: dict[Sequence, None] = {}  # in order of admission
        self.partial: dict[Sequence, None] = {}  # running, prompt or recompute not done
        self.stalled: dict[Sequence, None] = {}  # running, ready to decode, sat out the last step
        self.ending: dict[Sequence, None] = {}  # running, their last token by length in flight
        self._last: Batch | None = None  # of the last call; the prompts that end in it have not joined its group
        self.queue: FcfsQueue | PriorityQueue = PriorityQueue() if config.policy == "priority" else FcfsQueue()
        self.waiting = self.queue.entries  # to ask whether anyone waits
        self._aside: dict[Sequence, None] = {}  # waiting, were passed over once for results in flight
        self._watermark_blocks = int(config.watermark * (kv.num_blocks + 1))  # vLLM counts its null block in
        self._step_tokens, self._slots = config.step_tokens, config.slots
        self._beyond = 0  # tokens beyond a request's own for which a step may take blocks
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
        refusal = never_fits(self.kv, seq, self.max_model_len, self._beyond)
        if refusal is not None:
            self.events.append(refusal)
            return
        self.queue.push(seq)

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        if seq in self.running:
            self._release(seq, self._unknown(seq), returns=False)
        else:
            self._forget(seq)
        return []

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        self._go_on()
        cap = self._prefill_cap()
        preempted: list[Sequence] = []
        cached: list[tuple[Sequence, int]] = []
        plan = self._extend_running(cap)
        chunks, left = plan if plan is not None else self._walk_running(cap, preempted)
        if self.waiting:
            reason = "preemption" if preempted else self._admit(cap, left, chunks, cached)
            self._note_blocked(reason)
        group = self.group
        if not (group.members or chunks or preempted):
            return IDLE
        batch = Batch(group, chunks, sum([n for _, n in chunks]), preempted=preempted, cached=cached)
        if chunks:
            self._last = batch
        if self._pipelined and (chunks or batch.num_decode):
            self._cohorts.launched(batch)
        return batch

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        # All who run decode: each came in with a token of a step to itself, so the budget has one for all of them.
        # A blocked head stays blocked: free blocks only shrink until a sequence ends.
        if batch.chunks or batch.preempted or self._pipelined or (self._blocked is not None and self._cache_may_turn()):
            return False
        if not self.kv.grow_group(self.group):
            return False
        batch.again()
        return True

    def is_steady(self, batch: Batch) -> bool:
        if batch.chunks or batch.preempted or self._pipelined or self._grows is None:
            return False
        cache = self.cache
        return cache is None or not (cache.is_shared or (self.waiting and not self.config.enable_chunked_prefill))

    def foreseen(self, batch: Batch) -> list[int] | None:
        if batch.drafting is not None or not self.is_steady(batch):
            return None
        return None if self._blocked is not None and self._cache_may_turn() else self.group.blocks_due_in_turn()

    def is_followed_by_decodes(self, batch: Batch) -> bool:
        if self.waiting or self.stalled or self._pipelined or not batch.sampled:
            return False
        if len(self.partial) > len(batch.sampled):
            return False
        return self.group.blocks_due() + len(batch.sampled) <= self.kv.num_free

    def repeat_by(self, batch: Batch, num_steps: int, due: list[Sequence]) -> None:
        assert self._grows is not None, "it is steady"
        self._grows.grow_by(due)
        batch.again_by(num_steps)

    def is_turning(self) -> bool:
        if self.partial or self.stalled or self._last is not None or self._cohorts.stale:
            return False
        if not self.waiting:
            return self._blocked is None
        # A head that waits for a slot does so until a sequence ends.
        waits = self._blocked == (self.queue.head(), "no_slot") and len(self.running) >= self._slots
        return waits and self._step_tokens > len(self.running)

    def next_groups(self) -> list[DecodeGroup]:
        return self._cohorts.next_groups()

    def turn(self, group: DecodeGroup) -> bool:
        return not self._cohorts.has_caps(group) and self.kv.grow_group(group)

    def turned(self, calls: int, batches: list[Batch]) -> None:
        self.group = self._cohorts.turn(calls)
        for batch in batches:
            self._cohorts.launched(batch)

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        if self._pipelined:
            self._cohorts.landed(batch)
        if not (finished or self.stalled):
            return finished
        # Sequences that share no tokens publish nothing here.
        cache = self.cache if self._ahead and self.cache is not None and self.cache.is_shared else None
        if cache is not None:
            for seq in self.stalled:
                cache.publish(seq, seq.num_computed_tokens)
        for seq in finished:
            if seq not in self.running:
                self._forget(seq)  # preempted with its last token in flight
                continue
            if cache is not None:
                cache.publish(seq, seq.num_computed_tokens - seq.num_wasted_tokens)
            self._release(seq, seq.num_wasted_tokens, returns=False)
        return finished

    # ---- from call to call

    def _go_on(self) -> None:
        """Lets those decode whose prompts end with the last batch, and takes out those whose last token is in flight:
        that an output reaches its cap is known before it is there; that it ends by a stop token is not."""
        if self._last is not None:
            for seq in self._last.sampled:
                if seq in self.partial:
                    del self.partial[seq]
                    self._decode_on(seq)
            self._last = None
        if self._pipelined:
            self.group = self._cohorts.turn()
        if self._ahead:
            for seq in self._cohorts.at_their_caps():
                if self.cache is None:
                    self.kv.allocate(seq, seq.num_computed_tokens)  # settles its count
                self._leave(seq, self.group)
                self.ending[seq] = None

    def _decode_on(self, seq: Sequence) -> None:
        """Lets `seq` join the group, or end if its last token is in flight already."""
        if self._ahead:
            left = min(seq.max_output_tokens, self.max_model_len - seq.request.prompt_tokens) - seq.num_output_tokens
            if left <= 0:
                self.ending[seq] = None
                return
            self._cohorts.expect(seq, self.group, left)
        self.group.join(seq)

    def _leave(self, seq: Sequence, group: DecodeGroup) -> None:
        """Takes `seq` out of the group that it decodes in."""
        group.leave(seq)
        if self._ahead:
            self._cohorts.left(seq)

    def _unknown(self, seq: Sequence) -> int:
        """How many of the tokens of `seq` are in flight."""
        return int(self._ahead and (seq.group is not None or seq in self.ending))

    # ---- the running

    def _prefill_cap(self) -> int:
        """Most prefill tokens of one sequence in this step; a lone request is never capped."""
        threshold = self.config.long_prefill_token_threshold
        if not threshold or (total := len(self.running) + len(self.waiting)) <= 1:
            return _NO_CAP
        if self.config.long_prefill_token_threshold_adaptive:
            return max(threshold, self.config.max_num_batched_tokens // total)
        return threshold

    def _extend_running(self, cap: int) -> tuple[list[tuple[Sequence, int]], int] | None:
        """Schedules all running sequences at once: their chunks, and the tokens left of the budget; None, and nothing
        changed, if any must be cut short or sit out."""
        kv, group = self.kv, self.group
        left = self._step_tokens - len(group.members)
        if self.stalled:
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
        """As `_extend_running`, but one by one in vLLM's order, preempting for blocks; O(running)."""
        kv, group, by_priority = self.kv, self.group, self.config.policy == "priority"
        left = self._step_tokens
        order = list(self.running)
        scheduled: dict[Sequence, int] = {}
        i = 0
        while i < len(order) and left > 0:
            seq = order[i]
            if seq in self.ending or (seq.group is not None and seq.group is not group):
                i += 1
                continue
            computed = seq.num_computed_tokens
            n = min(seq.num_tokens - computed, cap, left)
            while not self._allocate(seq, computed + n):
                victim = max(order, key=importance) if by_priority else order[-1]
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
            if seq.group is group and seq not in scheduled:
                if self.cache is None or not self._ahead:
                    kv.allocate(seq, seq.num_computed_tokens)  # settles its count: it holds these blocks already
                self._leave(seq, group)
                self.stalled[seq] = None
                self.events.append(Event("sat_out", seq, "token_budget"))
        return [(seq, n) for seq, n in scheduled.items() if not self._decodes(seq)], left

    def _decodes(self, seq: Sequence) -> bool:
        """Whether a scheduled running sequence decodes; one that sat out joins the group again."""
        if seq in self.stalled:
            del self.stalled[seq]
            self._decode_on(seq)
        return seq.group is not None

    def _allocate(self, seq: Sequence, num_tokens: int) -> bool:
        if self._ahead and self.cache is not None:
            return self.cache.allocate(seq, num_tokens, self._unknown(seq))
        return self.kv.allocate(seq, num_tokens)

    def _preempt(self, victim: Sequence, by: Sequence) -> None:
        self.events.append(Event("preempted", victim, "kv_blocks", by.request.id))
        if self._pipelined:
            self._cohorts.preempted(victim)
        self._release(victim, self._unknown(victim), returns=True)
        victim.reset_computed()
        self.queue.put_back(victim, behind=len(self._aside))

    def _release(self, seq: Sequence, unknown: int, *, returns: bool) -> None:
        if self.cache is None:
            self.kv.free(seq)
        elif returns:
            self.cache.free(seq, unknown)
        else:
            self.cache.end(seq, unknown)
        if seq.group is not None:
            self._leave(seq, seq.group)
        self.partial.pop(seq, None)
        self.stalled.pop(seq, None)
        self.ending.pop(seq, None)
        del self.running[seq]

    # ---- the waiting

    def _forget(self, seq: Sequence) -> None:
        """Takes `seq` out of the queue for good."""
        self.queue.remove(seq)
        self._aside.pop(seq, None)
        self._cohorts.stale.pop(seq, None)

    def _admit(
        self, cap: int, left: int, chunks: list[tuple[Sequence, int]], cached: list[tuple[Sequence, int]]
    ) -> str:
        """Admits from the head of the queue, into `chunks` and `cached`, within `left` tokens; returns why the next one
        does not fit, "" if the queue is empty. Sequences with results in flight are passed over."""
        config, queue, cache, stale = self.config, self.queue, self.cache, self._cohorts.stale
        passed_over: list[Sequence] = []
        reason = ""
        while self.waiting:
            if left <= 0:
                reason = "token_budget"
                break
            if len(self.running) >= self._slots:
                reason = "no_slot"
                break
            seq = queue.head()
            if seq in stale:
                passed_over.append(queue.pop())
                continue
            hit = cache.lookup(seq) if cache is not None else 0
            start = max(hit, seq.settled_computed_tokens)  # what came with a handed-over request is not looked up
            n = min(seq.num_tokens - start, cap)
            if n > left:
                if not config.enable_chunked_prefill:
                    reason = "token_budget"
                    break
                n = left
            if not self._room(seq, start + n, hit):
                reason = "kv_blocks"
                break
            self._start(queue.pop(), start)
            if hit:
                cached.append((seq, hit))
            chunks.append((seq, n))
            left -= n
        if passed_over:
            for seq in reversed(passed_over):
                queue.put_back(seq)
                self._aside[seq] = None
            reason = reason or "in_flight"
        return reason

    def _start(self, seq: Sequence, computed: int) -> None:
        """Makes `seq` the last of the running, `computed` of its tokens being in KV."""
        self._aside.pop(seq, None)
        seq.order = self._admitted
        self._admitted += 1
        self.running[seq] = None
        self.partial[seq] = None
        seq.start_from_cache(computed)

    def _room(self, seq: Sequence, num_tokens: int, hit: int) -> bool:
        """Allocates for `num_tokens`, `hit` of them cached, if vLLM's admission gate lets `seq` in; whether it did."""
        kv, spare = self.kv, self._watermark_blocks if self.running else 0
        must_fit = seq.num_tokens if self.config.scheduler_reserve_full_isl else num_tokens
        if self.cache is not None:
            return self.cache.admit(seq, num_tokens, hit, spare, must_fit)
        return kv.blocks_for(must_fit) + spare <= kv.num_free and kv.allocate(seq, num_tokens)

    def _cache_may_turn(self) -> bool:
        """Whether one more step of decodes could let the head in, or block it for another reason."""
        if self.cache is None or not self.waiting:
            return False
        return not self.config.enable_chunked_prefill or self.cache.growth_is_awaited(self.group)

    def _note_blocked(self, reason: str) -> None:
        blocked = (self.queue.head(), reason) if self.waiting else None
        if blocked is not None and blocked != self._blocked:
            self.events.append(Event("blocked", *blocked))
        self._blocked = blocked


def importance(seq: Sequence) -> tuple[int, int]:
    """The key by which running sequences are compared: larger is less important. vLLM's has no id, so of equals the
    first in running order is taken."""
    return seq.request.priority, seq.request.arrival_ns
