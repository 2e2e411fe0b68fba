"""vLLM 0.33, scheduling ahead of results as shipped, or synchronous. V1 engine; groups of layers are `vllm_groups`'.

Rule: no phases. Running sequences come first, in order of admission, each with the tokens it still lacks; then waiting
ones from the head of a strict queue. A running sequence that finds no KV block preempts (by recompute) the last
admitted one, or under `priority` the least important, latest one; after a preemption nothing is admitted in that step.
With prefix caching an admission begins after the cached blocks of its tokens, at least one token before their end.
Ahead of results a sequence at its output cap is not scheduled again; one ended by a stop token is once more, in vain.
In a pipeline a sequence that decodes has one turn in as many calls as there are stages (`Cohorts`). One preempted
with results in flight is passed over in the queue until they are there; they are delivered, and may end it. So is one
whose LoRA adapter would be one too many (`ActiveAdapters`). `SINCE` in `vllm_config` has what older versions do.
Source: vllm/v1/core/sched/scheduler.py, vllm/v1/core/kv_cache_manager.py of the 0.33.0 wheel; equal to its recordings.
Simplifies: request ids tie as integers where vLLM compares strings; a pool below max_model_len is taken, and requests
that could not end in it are rejected; no structured outputs. Drafts are `vllm_drafts`', KV that is passed between
engines `vllm_connector`'s.
"""

from __future__ import annotations

from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.kv_blocks import never_fits
from batchsim.kernel.types import MISSING, DecodeGroup, Event, Sequence
from batchsim.kv.prefix_cache import BlockHashKV
from batchsim.policies.systems.vllm.vllm_state import VllmState


class Vllm(VllmState):
    """The scheduler. A decode-only step with blocks to spare is O(1) in the number of sequences."""

    evidence = "recorded"
    streams = True

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
        cap = self.config.most_prefill(len(self.running) + len(self.waiting))
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
        if self._groups is not None:
            self._groups.launched(batch)
        if self._pipelined and (chunks or batch.num_decode):
            self._cohorts.launched(batch)
        return batch

    def begin_pass(self, passes: int) -> None:
        """Before a call, where ranks step together: the number of passes that their present wave has had."""

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
        if self._groups is not None:
            return self._groups.kv.most_due(len(self.group.members) + len(batch.sampled)) <= self.kv.num_free
        return self.group.blocks_due() + len(batch.sampled) <= self.kv.num_free

    def repeat_by(self, batch: Batch, num_steps: int, due: list[Sequence]) -> None:
        assert self._grows is not None, "it is steady"
        self._grows.grow_by(due)
        batch.again_by(num_steps)

    def is_turning(self) -> bool:
        if self.partial or self.stalled or self._last is not None or self._cohorts.stale or self._groups is not None:
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
        if self._groups is not None:
            self._groups.landed(batch)
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
        if self._groups is not None:
            self._groups.begin_step()
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
                self._settle(seq)
                self._leave(seq, self.group)
                self.ending[seq] = None

    # ---- the running

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
        for seq in self.partial if not self._defers else ():
            computed = seq.settled_computed_tokens
            n = min(seq.num_tokens - computed, cap)
            if n > left:
                # Only the last running sequence may take what is left: others behind it would have to sit out.
                if left <= 0 or next(reversed(self.running)) is not seq:
                    return None
                n = left
            if self._groups is not None and not (n := self._groups.clip(seq, computed, n)):
                continue
            need += max(kv.blocks_for(computed + n) - kv.held(seq), 0)
            chunks.append((seq, n))
            left -= n
        if self._groups is not None:
            return (chunks, left) if self._groups.take(group, chunks) else None
        if need > kv.num_free:
            return None
        kv.grow_group(group)
        for seq, n in chunks:
            kv.allocate(seq, seq.settled_computed_tokens + n)
        return chunks, left

    def _walk_running(self, cap: int, preempted: list[Sequence]) -> tuple[list[tuple[Sequence, int]], int]:
        """As `_extend_running`, but one by one in vLLM's order, preempting for blocks; O(running)."""
        group, by_priority = self.group, self.config.policy == "priority"
        left = self._step_tokens
        order = list(self.running)
        scheduled: dict[Sequence, int] = {}
        i = 0
        while i < len(order) and left > 0:
            seq = order[i]
            if seq in self.ending or (seq.group is not None and seq.group is not group) or self._is_deferred(seq):
                i += 1
                continue
            computed = seq.num_computed_tokens
            n = min(seq.num_tokens - computed, cap, left)
            if self.encoder is not None and n:
                n = self.encoder.encodable(seq, computed, n)
            if self._groups is not None and n:
                n = self._groups.clip(seq, computed, n)
            if not n:
                i += 1
                continue
            while not self._allocate(seq, computed + n):
                victim = max(order, key=importance) if by_priority else order[-1]
                if not self._may_preempt(victim):
                    i = len(order)  # the others wait, too
                    break
                at = order.index(victim)
                del order[at]
                if at < i:
                    i -= 1
                    left += scheduled.pop(victim, 0)
                self._preempt(victim, seq)
                preempted.append(victim)
                if victim is seq:
                    if not self._goes_on:
                        i = len(order)
                    break
            else:
                scheduled[seq] = n
                left -= n
                i += 1
                if self.encoder is not None:
                    self.encoder.encode(seq)
        for seq in order:
            if seq.group is group and seq not in scheduled:
                self._settle(seq)
                self._leave(seq, group)
                self.stalled[seq] = None
                self.events.append(Event("sat_out", seq, "token_budget"))
        return [(seq, n) for seq, n in scheduled.items() if not self._decodes(seq)], left

    def _is_deferred(self, seq: Sequence) -> bool:
        """Whether `seq` is a running sequence that this call passes over, as it is in its prompt."""
        return self._defers and seq in self.partial

    def _decodes(self, seq: Sequence) -> bool:
        """Whether a scheduled running sequence decodes; one that sat out joins the group again."""
        if seq in self.stalled:
            del self.stalled[seq]
            self._decode_on(seq)
        return seq.group is not None

    def _may_preempt(self, victim: Sequence) -> bool:
        """Whether the blocks of `victim` can be used by others at once."""
        return True

    def _preempt(self, victim: Sequence, by: Sequence) -> None:
        self.events.append(Event("preempted", victim, "kv_blocks", by.request.id))
        if self._pipelined:
            self._cohorts.preempted(victim)
        self._release(victim, self._unknown(victim), returns=True)
        victim.reset_computed()
        self.queue.put_back(victim, behind=len(self._aside))

    # ---- the waiting

    def _admit(
        self, cap: int, left: int, chunks: list[tuple[Sequence, int]], cached: list[tuple[Sequence, int]]
    ) -> str:
        """Admits from the head of the queue, into `chunks` and `cached`, within `left` tokens; returns why the next one
        does not fit, "" if there is none. Sequences with results in flight are passed over, and those held back."""
        queue, cache, stale = self.queue, self.cache, self._cohorts.stale
        passed_over: list[Sequence] = []
        reason = over = ""
        while self.waiting and not (reason := self._limit(left)):
            seq = queue.head()
            if seq in stale or (seq.request.adapter != MISSING and self.adapters.holds_back(seq)):
                passed_over.append(queue.pop())
                continue
            hit = cache.lookup(seq) if cache is not None else 0
            start = self._in_kv(seq, hit)
            if self._defers and start < seq.num_tokens - 1:
                reason = "prefill_interval"
                break
            if not (n := self._cut(min(seq.num_tokens - start, cap), left)):
                reason = "token_budget"
                break
            if self.encoder is not None and not (n := self.encoder.encodable(seq, start, n)):
                passed_over.append(queue.pop())
                over = "encoder"
                continue
            if self._groups is not None and not (n := self._groups.clip(seq, start, n)):
                reason = "token_budget"
                break
            if not self._room(seq, start + n, hit):
                reason = "kv_blocks"
                break
            self._start(queue.pop(), start)
            if hit:
                cached.append((seq, hit))
            chunks.append((seq, n))
            left -= n
        return self._put_back(passed_over, reason, over) if passed_over else reason

    def _in_kv(self, seq: Sequence, hit: int) -> int:
        """The tokens of `seq` that are in KV as it is admitted, `hit` of them in the prefix cache."""
        return max(hit, seq.settled_computed_tokens)  # what came with a handed-over request is not looked up

    def _cut(self, num_tokens: int, left: int) -> int:
        """The tokens that a step with `left` to spare computes of a prompt that could have `num_tokens` of it computed;
        0 where all or none would have to be."""
        if num_tokens <= left:
            return num_tokens
        return left if self.config.enable_chunked_prefill else 0

    def _limit(self, left: int) -> str:
        """Why a step with `left` tokens to spare admits no sequence at all; "" if it may admit some."""
        if left <= 0:
            return "token_budget"
        return "no_slot" if len(self.running) >= self._slots else ""

    def _put_back(self, passed_over: list[Sequence], reason: str, over: str = "") -> str:
        """Puts the sequences back that a pass has `passed_over`; returns the `reason` for which it stopped, or why none
        of them came in: `over` where that is known, "" where all of these wait for their adapters."""
        queue, stale = self.queue, self._cohorts.stale
        self.events += self.adapters.tried(passed_over, queue.head() if self.waiting else None)
        for seq in reversed(passed_over):
            queue.put_back(seq)
            self._aside[seq] = None
        return reason or over or ("in_flight" if any(seq in stale for seq in passed_over) else "")

    def _start(self, seq: Sequence, computed: int) -> None:
        """Makes `seq` the last of the running, `computed` of its tokens being in KV."""
        self._aside.pop(seq, None)
        seq.order = self._admitted
        self._admitted += 1
        self.running[seq] = None
        self.partial[seq] = None
        if seq.request.adapter != MISSING:
            self.adapters.enter(seq)
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
        if self._groups is not None:
            return self._groups.may_let_in(self._blocked)
        if not isinstance(self.cache, BlockHashKV) or not self.waiting:
            return False
        return not self.config.enable_chunked_prefill or self.cache.growth_is_awaited(self.group)

    def _note_blocked(self, reason: str) -> None:
        blocked = (self.queue.head(), reason) if reason and self.waiting else None
        if blocked is not None and blocked != self._blocked:
            self.events.append(Event("blocked", *blocked))
        self._blocked = blocked


def importance(seq: Sequence) -> tuple[int, int]:
    """The key by which running sequences are compared: larger is less important. vLLM's has no id, so of equals the
    first in running order is taken."""
    return seq.request.priority, seq.request.arrival_ns
