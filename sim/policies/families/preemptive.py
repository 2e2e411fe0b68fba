"""Preemptive batching: optimistic admission on paged KV; when blocks run out a running sequence gives its own up.

Rule: the head of a strict queue comes in when a slot, budget and blocks for its known tokens (with what the decodes
need next and a watermark to spare) are there. Decodes take blocks as they grow; if those run out, a victim leaves: its
KV is dropped and computed again, or moved to host memory. The swapped return before new ones; a step that preempts for
blocks admits none. `preempt_after`: a head that waited that long takes, in that very step, the place of less
important running ones, if that lets it in. Only the head does so. `order` as in the continuous family.
Source: paged KV, recompute or swap of the latest arrivals, watermark: vLLM (Kwon et al., SOSP 2023).
Simplifies: prompts hold all their blocks from admission on; swaps are whole sequences. `srpt` orders the queue only.
Rejected: what cannot fit the pool (`never_fits`); without chunked prefill also what might have to be recomputed in a
step longer than the budget (`over_token_budget`).
"""

from __future__ import annotations

from collections.abc import Iterator

from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.kv_blocks import never_fits
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import DecodeGroup, Event, Sequence
from batchsim.policies.families.preemption import (
    PreemptiveConfig,
    WaitingQueue,
    check_context,
    next_victim,
    pays_to_swap,
)


class _Step:
    """A step in the making; `left` is what remains of its token budget."""

    __slots__ = ("chunks", "left", "preempted", "swap_in", "swap_out")

    def __init__(self) -> None:
        self.left = 0
        self.chunks: list[tuple[Sequence, int]] = []
        self.preempted: list[Sequence] = []
        self.swap_out: list[tuple[Sequence, int]] = []
        self.swap_in: list[tuple[Sequence, int]] = []


class Preemptive:
    """The scheduler. A decode-only step with blocks to spare is O(1) in the number of sequences.

    Always ends: generated tokens are kept, and a sequence enters the decode group with a token or decodes next.
    A preemption for blocks happens in a step where some sequence decodes, or takes out of the group sequences that
    each need a token to return, so there are finitely many. One for importance puts a more important sequence in
    place of less important ones; between two tokens the running set can only grow more important, so it stops.
    """

    evidence = "family"
    streams = True

    def __init__(self, config: PreemptiveConfig, context: PolicyContext) -> None:
        kv = context.kv
        check_context(config, context)
        self.config = config
        self.kv = kv
        self.max_model_len = context.max_model_len
        self.predictor = context.predictor
        self.estimator = context.estimator
        self.events: list[Event] = []
        self.group = DecodeGroup(kv.block_size)
        self.waiting = WaitingQueue(config.waiting_order, context.predictor)
        self.swapped = WaitingQueue(config.waiting_order, context.predictor)
        self.running: dict[Sequence, None] = {}  # in order of admission
        self.classes: dict[int, dict[Sequence, None]] = {}  # the running by priority, each in order of admission
        self.partial: dict[Sequence, int] = {}  # running: known tokens lacking after the step in flight
        self._waits_since: dict[Sequence, int] = {}  # the preempted; others wait since their arrival
        self.slots = config.max_num_seqs  # how many may run at once, and tokens of a step: controllers move them
        self.budget = config.budget
        self._watermark_blocks = int(config.watermark * kv.num_blocks)
        self._prefill_first = config.order == "prefill_first"
        self._makes_way = config.preempt_after is not None
        self._admitted = 0
        self._due_ns: int | None = None  # when a head falls due that was not at the last schedule
        self._blocked: tuple[Sequence, str] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.swapped)

    @property
    def num_running(self) -> int:
        return len(self.running)

    def add(self, seq: Sequence, now_ns: int) -> None:
        refusal = never_fits(self.kv, seq, self.max_model_len)
        most = min(seq.request.prompt_tokens + seq.request.max_output_tokens, self.max_model_len) - 1
        if refusal is None and not self.config.chunked_prefill and most > self.budget:
            detail = f"up to {most} tokens to recompute in one step, max_num_batched_tokens {self.budget}"
            refusal = Event("rejected", seq, "over_token_budget", detail=detail)
        if refusal is not None:
            self.events.append(refusal)
            return
        self.waiting.push(seq)

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        self._waits_since.pop(seq, None)
        if seq in self.running:
            self._release(seq)
        elif not self.waiting.remove(seq):
            self.swapped.remove(seq)
            self.kv.free(seq)
        return []

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        group, step = self.group, _Step()
        urgent = self._make_way(step, now_ns) if self._makes_way else None
        if not (self._prefill_first and self.partial):
            self._free_blocks_for_decodes(step, now_ns)
        step.left = self.budget - (0 if self._prefill_first else len(group.members))
        for seq in self.partial:  # one at most: the next starts only when this one leaves tokens over
            self._compute(seq, step)
        if self.waiting or self.swapped:
            self._let_in(step, urgent)
        if self._makes_way:
            self._due_ns = self._next_due(now_ns)
        if not (group.members or step.chunks or step.preempted):
            return IDLE
        decodes = None if self._prefill_first and step.chunks else group
        if decodes is not None:
            room = self.kv.grow_group(group)
            assert room, f"{self.kv.num_free} blocks free, {group.blocks_due()} kept for the decodes"
        return Batch(
            decodes,
            step.chunks,
            sum([n for _, n in step.chunks]),
            preempted=step.preempted,
            swap_out=step.swap_out,
            swap_in=step.swap_in,
        )

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        # A blocked head stays blocked until one ends: slots and budget do not change, and the blocks to spare (those
        # free less those due in this step) only shrink. So does what victims could free, once a head is due.
        if batch.preempted or batch.swap_in:
            return False
        if self._due_ns is not None and now_ns >= self._due_ns:
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

    # ---- the running

    def _free_blocks_for_decodes(self, step: _Step, now_ns: int) -> None:
        """Preempts until every decode left finds its next block; one alone always does, by `never_fits`."""
        kv, group = self.kv, self.group
        while group.blocks_due() > kv.num_free:
            short = min(group.members_due(), key=lambda seq: seq.order)
            victim = next_victim(self.config.victim, self.running, self.classes, self.predictor)
            self._preempt(victim, "kv_blocks", short, step, now_ns)

    def _make_way(self, step: _Step, now_ns: int) -> Sequence | None:
        """The head that has waited `preempt_after` and, its victims preempted, can now come in; None if there is none.

        Preempts the fewest, least important and newest first, and none if even all of them would not suffice.
        """
        head = self._foremost()
        if head is None or self._due_at(head) > now_ns:
            return None
        lacking = head.num_tokens - head.num_computed_tokens
        need = self.kv.blocks_for(head.num_tokens)
        slots = self.slots - len(self.running)
        left = self.budget - sum(self.partial.values()) - (0 if self._prefill_first else len(self.group))
        spare, stay = self.kv.num_free - self.group.blocks_due(), len(self.running)
        victims: list[Sequence] = []
        less_important = self._less_important(head.request.priority)
        while not (
            slots > 0
            and left >= (1 if self.config.chunked_prefill else lacking)
            and spare - (self._watermark_blocks if stay else 0) >= need
        ):
            victim = next(less_important, None)
            if victim is None:
                return None
            victims.append(victim)
            slots, stay = slots + 1, stay - 1
            spare += self.kv.held(victim)
            if victim.group is None:
                left += self.partial[victim]
            else:
                left += 0 if self._prefill_first else 1
                spare += victim.num_computed_tokens % self.kv.block_size == 0
        for victim in victims:
            self._preempt(victim, "priority", head, step, now_ns)
        return head

    def _less_important(self, than: int) -> Iterator[Sequence]:
        """The running of priority below `than` (a larger number), the least important and newest first."""
        for priority in sorted(self.classes, reverse=True):
            if priority <= than:
                return
            yield from reversed(self.classes[priority])

    def _preempt(self, victim: Sequence, reason: str, by: Sequence, step: _Step, now_ns: int) -> None:
        moved = None
        if self._swaps(victim):
            moved = self.kv.swap_out(victim)
            if moved is None:
                reason += "_swap_full"
        self.events.append(Event("preempted", victim, reason, by.request.id))
        step.preempted.append(victim)
        self._waits_since[victim] = now_ns
        if moved is not None:
            self._leave(victim)
            step.swap_out.append((victim, moved))
            self.swapped.push(victim)
            return
        self._release(victim)
        victim.reset_computed()
        self.waiting.push(victim)

    def _swaps(self, victim: Sequence) -> bool:
        if self.config.by != "auto" or self.estimator is None:
            return self.config.by == "swap"
        return pays_to_swap(victim, self.kv, self.estimator)

    def _release(self, seq: Sequence) -> None:
        self.kv.free(seq)
        self._leave(seq)

    def _leave(self, seq: Sequence) -> None:
        """Takes `seq` out of the running; its KV must be freed or swapped out before."""
        if seq.group is not None:
            self.group.leave(seq)
        self.partial.pop(seq, None)
        del self.running[seq]
        priority = seq.request.priority
        del self.classes[priority][seq]
        if not self.classes[priority]:
            del self.classes[priority]

    # ---- the waiting

    def _let_in(self, step: _Step, urgent: Sequence | None) -> None:
        """Admits the urgent sequence, then the swapped, then the waiting, each queue in its order while heads fit."""
        waiting, swapped = self.waiting, self.swapped
        if urgent is not None:
            self._bring_in(swapped if swapped and swapped.head() is urgent else waiting, step)
        reason, blocker = "", None
        if step.preempted:
            reason = "preemption"
        else:
            while swapped and not self._obstacle(swapped.head(), step):
                self._bring_in(swapped, step)
            if swapped:
                reason, blocker = "swap_in_first", swapped.head().request.id
            else:
                while waiting and not (reason := self._obstacle(waiting.head(), step)):
                    self._bring_in(waiting, step)
        if reason == "token_budget" and step.chunks:
            blocker = step.chunks[-1][0].request.id
        self._note_blocked(reason, blocker)

    def _obstacle(self, seq: Sequence, step: _Step) -> str:
        """Why `seq` cannot come in, "" if it can."""
        if len(self.running) >= self.slots:
            return "no_slot"
        if step.left < (1 if self.config.chunked_prefill else seq.num_tokens - seq.num_computed_tokens):
            return "token_budget"
        spare = self.kv.num_free - self.group.blocks_due() - (self._watermark_blocks if self.running else 0)
        return "kv_blocks" if self.kv.blocks_for(seq.num_tokens) > spare else ""

    def _bring_in(self, queue: WaitingQueue, step: _Step) -> None:
        """Moves the head of `queue`, for which no obstacle is left, to the running."""
        seq = queue.pop()
        self._waits_since.pop(seq, None)
        seq.order = self._admitted
        self._admitted += 1
        self.running[seq] = None
        self.classes.setdefault(seq.request.priority, {})[seq] = None
        if queue is self.swapped:
            moved = self.kv.swap_in(seq)
            assert moved is not None
            step.swap_in.append((seq, moved))
        else:
            room = self.kv.allocate(seq, seq.num_tokens)
            assert room
        lacking = seq.num_tokens - seq.num_computed_tokens
        # Swapped out in mid-recompute, it may hold its next block already, which the group would take a second time.
        settled = self.kv.held(seq) == self.kv.blocks_for(seq.num_computed_tokens)
        if queue is self.swapped and lacking == 1 and seq.num_output_tokens and settled:
            self.group.join(seq)
            step.left -= 0 if self._prefill_first else 1
        else:
            self.partial[seq] = lacking
            self._compute(seq, step)

    def _compute(self, seq: Sequence, step: _Step) -> None:
        """Schedules what the budget allows of the known tokens of `seq`."""
        n = min(self.partial[seq], step.left)
        self.partial[seq] -= n
        step.chunks.append((seq, n))
        step.left -= n

    def _foremost(self) -> Sequence | None:
        """The most important head of the swapped and the waiting, which may preempt: of equals, the swapped one."""
        heads = [queue.head() for queue in (self.swapped, self.waiting) if queue]
        return min(heads, key=lambda seq: seq.request.priority, default=None)

    def _due_at(self, seq: Sequence) -> int:
        """The time in ns at which the waiting `seq` will have waited for `preempt_after`."""
        return self._waits_since.get(seq, seq.request.arrival_ns) + (self.config.preempt_after or 0)

    def _next_due(self, now_ns: int) -> int | None:
        """The time in ns at which the foremost head may preempt; None if past, so that this step took care of it."""
        head = self._foremost()
        due_ns = None if head is None else self._due_at(head)
        return due_ns if due_ns is not None and due_ns > now_ns else None

    def _note_blocked(self, reason: str, blocker: int | None) -> None:
        blocked = (self.waiting.head(), reason) if self.waiting else None
        if blocked is not None and blocked != self._blocked:
            self.events.append(Event("blocked", *blocked, blocker=blocker))
        self._blocked = blocked
