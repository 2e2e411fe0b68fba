"""vLLM 0.33, V1 engine; with `speculative_config` decodes verify draft tokens.

Without it: `batchsim.policies.systems.vllm.vllm`. With it a decode gains one token and as many as drafts are right.
Rule: as `vllm`, with the drafts that wait for a sequence among the tokens it asks for. Drafts that the budget cuts off
are lost; max_tokens cuts none. Blocks are taken for all drafts, and for what the drafter writes ahead, and kept where
they are rejected. A sequence admitted with one token to compute is padded with dummy drafts to the width of a decode.
Ahead of results a step counts as if all its drafts were accepted, and the rejected are taken off one step later.
Source: vllm/v1/core/sched/scheduler.py, async_scheduler.py and vllm/v1/core/kv_cache_manager.py of the 0.33.0 wheel.
Simplifies: the drafter's own time is the cost's to say; ahead of results n-grams that are not found are rows too, which
the engine leaves out on the device; several MTP modules, DFlash, suffix decoding, drafts of
structured outputs, pipelines and a number of drafts by batch size are not simulated.
"""

from __future__ import annotations

from batchsim.base.errors import ScenarioError
from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.draft_group import DraftGroup, DraftRows
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import MISSING, DecodeGroup, Event, Sequence
from batchsim.policies.systems.vllm.vllm import Vllm, importance
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.policies.systems.vllm.vllm_intervals import VllmAtIntervals
from batchsim.policies.systems.vllm.vllm_items import VllmWithItems

Chunks = list[tuple[Sequence, int]]


class _Budget:
    """The tokens that are left to a step in the making: `left` of the scheduler's budget, and `with_slots` of the whole
    step's, from which the drafter takes `slots` for each sequence."""

    __slots__ = ("left", "slots", "with_slots")

    def __init__(self, tokens: int, with_slots: int, slots: int) -> None:
        self.left, self.with_slots, self.slots = tokens, with_slots, slots

    @property
    def most(self) -> int:
        """Tokens that one more sequence may take; none if not positive."""
        return min(self.left, self.with_slots - self.slots)

    def take(self, tokens: int, sequences: int = 1) -> None:
        """Subtracts `tokens`, and the draft slots of `sequences` sequences, from the budget."""
        self.left -= tokens
        self.with_slots -= tokens + self.slots * sequences


class VllmWithDrafts(Vllm):
    """The scheduler of a VllmConfig that has a `speculative_config`; of any other, a Vllm, or a VllmAtIntervals.

    A step is a few operations on the columns of a DraftGroup where no sequence must sit out or be preempted.
    """

    group: DraftGroup

    def __new__(cls, config: VllmConfig, context: PolicyContext) -> Vllm:
        if context.items is not None:
            return VllmWithItems(config, context)
        if config.prefill_schedule_interval > 1:
            return VllmAtIntervals(config, context)
        return Vllm(config, context) if config.speculative_config is None else super().__new__(cls)

    def __init__(self, config: VllmConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        assert config.speculative_config is not None, "__new__ has seen to that"
        if context.loop.stages > 1:
            raise ScenarioError("vllm: speculative_config in a pipeline is not simulated. Leave one of them out.")
        self._ahead = context.loop.is_ahead
        self._spec = config.speculative_config
        width, most = 1 + self._spec.num_speculative_tokens, config.max_num_batched_tokens - self._spec.slots
        if self.cache is not None and min(config.step_tokens, most) < width:
            raise ScenarioError(
                f"vllm: a step of at most {min(config.step_tokens, most)} tokens never takes in a prompt of which all"
                f" but one token is cached: it is padded to {width}, num_speculative_tokens and one. Raise"
                f" {'max_num_scheduled_tokens' if config.step_tokens < width else 'max_num_batched_tokens'}."
            )
        self._num_drafts, self._lookahead = self._spec.num_speculative_tokens, self._spec.lookahead
        self._beyond = 2 * (1 + self._num_drafts) + self._lookahead  # a step in flight and the next, all accepted
        self.group = DraftGroup(self.kv.block_size)  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.cache is not None:
            self.cache.lookahead = self._spec.hash_lookahead
        self._drafts: dict[Sequence, int] = {}  # that wait for those outside the group
        self._in_flight: dict[Sequence, int] = {}  # tokens of sequences that left the group with this schedule
        if self._groups is not None:
            self._groups.kv.draft_room, self._groups.left = self._lookahead, self._in_flight
        self._padding: dict[Sequence, int] = {}  # dummy drafts of the step in the making

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        if self._groups is not None:
            self._groups.begin_step()
        if self._ahead:
            self._go_on_unseen()
        cap, config = self.config.most_prefill(len(self.running) + len(self.waiting)), self.config
        preempted: list[Sequence] = []
        cached: Chunks = []
        self._padding = {}
        budget = _Budget(self._step_tokens, config.max_num_batched_tokens, self._spec.slots)
        chunks = self._extend_all(cap, budget)
        if chunks is None:
            chunks = self._walk(cap, budget, preempted)
        if self.waiting:
            reason = "preemption" if preempted else self._let_in(cap, budget, chunks, cached)
            self._note_blocked(reason)
        group = self.group
        if not (group.members or chunks or preempted):
            return IDLE
        batch = Batch(group, chunks, sum([n for _, n in chunks]), preempted=preempted, cached=cached)
        batch.verify(DraftRows(group.sequences, group.rows, self._padding, num_rows=group.num_rows))
        self._last = batch
        if self._groups is not None:
            self._groups.launched(batch)
        return batch

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        drafting, group, cache = batch.drafting, self.group, self.cache
        if self._ahead or batch.chunks or batch.preempted or drafting is None or drafting.verified is None:
            return False
        if drafting.verified.drafts is not None or (cache is not None and self.waiting):
            return False
        if self._groups is not None and self.waiting:
            return False
        # A blocked head stays blocked: free blocks only shrink until a sequence ends; the budget is left as it was.
        rows = group.wanted(self.config.most_prefill(len(self.running) + len(self.waiting)), self.max_model_len)
        if rows is not drafting.rows or self.stalled:
            return False
        if cache is not None:
            cache.publish_group(group, 0)
        group.ask(rows, self._lookahead, self.max_model_len)
        if not self.kv.grow_group(group):
            return False
        group.take_due()
        batch.verify_again()
        return True

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        group, drafting = self.group, batch.drafting
        assert drafting is not None and drafting.verified is not None
        if self._ahead:
            self._in_flight.clear()
            if self.cache is not None:
                self.cache.publish_group(group, 0)
            return super().complete(batch, finished, now_ns)
        if self._groups is not None:
            self._groups.landed(batch)
        first = drafting.verified.first_drafts or {}
        group.give_drafts(self._num_drafts, drafting.verified.drafts)
        if self.cache is not None:
            self.cache.publish_group(group, 0)
            for seq in batch.sampled:
                if seq in self.running:
                    self.cache.publish(seq, seq.num_computed_tokens)
        for seq in finished:
            self._release(seq, 0, returns=False)
        for seq in batch.sampled:
            if seq in self.running:
                del self.partial[seq]
                group.join(seq, min(first.get(seq, self._num_drafts), self._num_drafts))
        return finished

    # ---- ahead of results

    def _go_on_unseen(self) -> None:
        """Lets those decode whose prompts end with the last batch, its results not there yet, and takes out those whose
        last token is surely in flight."""
        group = self.group
        for seq in group.last_in_flight():
            self._step_aside(seq)
            self.ending[seq] = None
        if self._last is not None:
            drafting = self._last.drafting
            assert drafting is not None  # every batch verifies, if only no draft of a prompt
            for seq in self._last.sampled:
                if seq in self.partial:
                    del self.partial[seq]
                    more = drafting.padding.get(seq, 0)
                    if seq.num_output_tokens >= seq.max_output_tokens:
                        self.ending[seq] = None
                        self._in_flight[seq] = 1
                    else:
                        group.join(seq, self._num_drafts, 1 + more)
            self._last = None

    def _step_aside(self, seq: Sequence) -> None:
        """Takes `seq` out of the group, with its blocks."""
        place = seq.phase
        self._in_flight[seq] = int(self.group.unknown[place])
        self._drafts[seq] = int(self.group.drafts[place])
        seq.num_blocks = self.kv.held(seq)
        self.group.leave(seq)

    def _unknown(self, seq: Sequence) -> int:
        if seq.group is not None:
            return int(self.group.unknown[seq.phase])
        return self._in_flight.get(seq, 0)

    # ---- the running

    def _extend_all(self, cap: int, budget: _Budget) -> Chunks | None:
        """Schedules all running sequences at once: their chunks; None, and nothing changed, if any must be cut short or
        sit out."""
        kv, group = self.kv, self.group
        if self.stalled:
            return None
        rows = group.wanted(cap, self.max_model_len)
        total, least = group.sum_and_least(rows)
        left, with_slots = budget.left - total, budget.with_slots - total - budget.slots * len(rows)
        if left < 0 or with_slots < 0 or least < 1:
            return None
        chunks: Chunks = []
        need = 0
        trial = _Budget(left, with_slots, budget.slots) if self.partial else budget
        for seq in self.partial:
            n = min(seq.num_tokens - seq.settled_computed_tokens, cap)
            if n > trial.most:
                # Only the last running sequence may take what is left: others behind it would have to sit out.
                if trial.most <= 0 or next(reversed(self.running)) is not seq:
                    return None
                n = trial.most
            if self._groups is not None and not (n := self._groups.clip(seq, seq.settled_computed_tokens, n)):
                continue
            need += max(kv.blocks_for(self._room_for(seq.settled_computed_tokens + n)) - kv.held(seq), 0)
            chunks.append((seq, n))
            trial.take(n)
            left, with_slots = trial.left, trial.with_slots
        group.ask(rows, self._lookahead, self.max_model_len)
        if self._groups is not None:
            if not self._groups.take(group, chunks):
                return None
        elif need + group.blocks_due() > kv.num_free:
            return None
        else:
            kv.grow_group(group)
            for seq, n in chunks:
                self._allocate(seq, seq.settled_computed_tokens + n)
        group.take_due()
        budget.left, budget.with_slots = left, with_slots
        return chunks

    def _room_for(self, num_tokens: int) -> int:
        """The tokens for which blocks are taken where `num_tokens` are computed."""
        return min(num_tokens + self._lookahead, self.max_model_len)

    def _walk(self, cap: int, budget: _Budget, preempted: list[Sequence]) -> Chunks:
        """As `_extend_all`, but one by one in vLLM's order, preempting for blocks; O(running)."""
        group, by_priority = self.group, self.config.policy == "priority"
        order = list(self.running)
        scheduled: dict[Sequence, int] = {}
        i = 0
        while i < len(order) and budget.most > 0:
            seq = order[i]
            computed = seq.num_computed_tokens
            n = min(seq.num_tokens + self._waiting_drafts(seq) - computed, cap, budget.most)
            n = min(n, self.max_model_len - computed - 1)
            if self._groups is not None and n > 0:
                n = self._groups.clip(seq, computed, n)
            if seq in self.ending or n < 1:
                i += 1
                continue
            while not self._allocate(seq, computed + n):
                victim = max(order, key=importance) if by_priority else order[-1]
                at = order.index(victim)
                del order[at]
                if at < i:
                    i -= 1
                if victim in scheduled:
                    budget.take(-scheduled.pop(victim), -1)
                self._preempt(victim, seq)
                preempted.append(victim)
                if victim is seq:
                    break
            else:
                scheduled[seq] = n
                budget.take(n)
                i += 1
        for seq in order:
            if seq.group is not None and seq not in scheduled:
                self._step_aside(seq)
                self.stalled[seq] = None
                self.events.append(Event("sat_out", seq, "token_budget"))
        chunks = [(seq, n) for seq, n in scheduled.items() if not self._decodes(seq)]
        group.take_rows(scheduled)
        return chunks

    def _waiting_drafts(self, seq: Sequence) -> int:
        return int(self.group.drafts[seq.phase]) if seq.group is not None else self._drafts.get(seq, 0)

    def _decode_on(self, seq: Sequence) -> None:
        self.group.join(seq, self._drafts.pop(seq, 0))

    def _leave(self, seq: Sequence, group: DecodeGroup) -> None:
        group.leave(seq)  # its cap is not expected: it depends on what is accepted

    def _allocate(self, seq: Sequence, num_tokens: int) -> bool:
        room = self._room_for(num_tokens)
        if self.cache is not None:
            has_room = self.cache.allocate(seq, room, self._unknown(seq), room - num_tokens)
        else:
            has_room = self.kv.allocate(seq, room)
        if has_room and seq.group is not None:
            self.group.hold(seq)
        return has_room

    def _release(self, seq: Sequence, unknown: int, *, returns: bool) -> None:
        super()._release(seq, unknown, returns=returns)
        self._drafts.pop(seq, None)
        self._in_flight.pop(seq, None)

    # ---- the waiting

    def _let_in(self, cap: int, budget: _Budget, chunks: Chunks, cached: Chunks) -> str:
        """Admits from the head of the queue, into `chunks` and `cached`; returns why the next one does not fit, "" if
        there is none. Sequences whose adapters hold them back are passed over."""
        passed_over: list[Sequence] = []
        reason = self._let_in_others(cap, budget, chunks, cached, passed_over)
        return self._put_back(passed_over, reason) if passed_over else reason

    def _let_in_others(
        self, cap: int, budget: _Budget, chunks: Chunks, cached: Chunks, passed_over: list[Sequence]
    ) -> str:
        """As `_let_in`; leaves the sequences that it has passed over outside the queue."""
        queue, cache = self.queue, self.cache
        pads = not chunks  # beside prompts there is no width to keep to
        alone = not self.group.members
        while self.waiting:
            if reason := self._limit(budget.most):
                return reason
            seq = queue.head()
            if seq.request.adapter != MISSING and self.adapters.holds_back(seq):
                passed_over.append(queue.pop())
                continue
            hit = cache.lookup(seq) if cache is not None else 0
            start = self._in_kv(seq, hit)
            n, padding = min(seq.num_tokens - start, cap), 0
            width = 1 + self._num_drafts
            if (
                seq.num_tokens - start == 1
                and pads
                and (start or not alone)
                and start + width + 1 <= self.max_model_len
            ):
                if width > budget.most:
                    return "token_budget"
                padding = self._num_drafts
            elif not (n := self._cut(n, budget.most)):
                return "token_budget"
            if self._groups is not None:
                clipped = self._groups.clip(seq, start, n + padding)
                if not clipped:
                    return "token_budget"
                n, padding = (n, padding) if clipped == n + padding else (1 if padding else clipped, 0)
            if not self._room(seq, start + n + padding, hit):
                return "kv_blocks"
            self._start(queue.pop(), start)
            if hit:
                cached.append((seq, hit))
            if padding:
                self._padding[seq] = padding
            chunks.append((seq, n))
            budget.take(n + padding)
        return ""

    def _room(self, seq: Sequence, num_tokens: int, hit: int) -> bool:
        kv, spare = self.kv, self._watermark_blocks if self.running else 0
        room = self._room_for(num_tokens)
        must_fit = min(seq.num_tokens, self.max_model_len) if self.config.scheduler_reserve_full_isl else 0
        if self.cache is not None:
            return self.cache.admit(seq, room, hit, spare, must_fit, room - num_tokens)
        need = kv.blocks_for(max(must_fit, room))
        return need + spare <= kv.num_free and kv.allocate(seq, room)
