"""SGLang 0.5.23, no overlap of scheduling and GPU; the engine's default overlaps them. Prefill first, radix cache.

Rule: while a prefill batch can be formed it runs alone and the decodes stand still (or ride along, if mixed). From the
head of the queue, nobody overtaking, a request comes in if its uncached prompt, its whole output cap and a page fit the
KV tokens that are free or evictable, less what the running are expected to need: `new_token_ratio` of what their caps
leave. Else no prefill is tried until somebody leaves. One prompt at a time is cut to the chunk size and goes first.
If the decodes lack pages, those with the fewest output tokens are retracted to the end of the queue; the ratio rises.
Source: python/sglang/srt/managers/{scheduler,schedule_policy,schedule_batch}.py, mem_cache/* of the 0.5.23 wheel.
Simplifies: the page is the KV block (SGLang's default has 1 token); no request sets ignore_eos; requests that wait do
not refresh the cache, but for those that `lpm` and the like look at; a preemption counts the whole uncached prompt.
Where SGLang would run out of memory in mid-prompt, the prompt waits; the last decode is retracted, not aborted, for it.
Priorities are passed as they are: unlike elsewhere here the HIGHER number comes first, unless
`schedule_low_priority_values_first`.
"""

from __future__ import annotations

from sim.decode import DecodeGroup
from sim.errors import ScenarioError
from sim.kv.radix_cache import RadixKV
from sim.policies.systems.sglang_budget import (
    CLIP_MAX_NEW_TOKENS,
    RETRACT_DECODE_STEPS,
    Growth,
    NewTokenRatio,
    PrefillBudget,
)
from sim.policies.systems.sglang_config import SglangConfig
from sim.policies.systems.sglang_queue import ByPrefix, ByPriority, Fcfs, Waiting
from sim.types import IDLE, Batch, Event, Idle, PolicyContext, Sequence


class Sglang:
    """The scheduler. A decode-only step with pages to spare is O(1) in the number of sequences.

    Except under priority scheduling with preemption, where SGLang too looks at the queue before every step.
    """

    evidence = "hand-derived"
    differs = "without overlap"  # from the engine as it is shipped
    streams = True

    def __init__(self, config: SglangConfig, context: PolicyContext) -> None:
        kv, chunk = context.kv, config.chunked_prefill_size
        if chunk > 0 and chunk % kv.block_size:
            raise ScenarioError(
                f"sglang: chunked_prefill_size {chunk} must be divisible by page_size, here the KV block of"
                f" {kv.block_size} tokens. Change one of them."
            )
        if config.prefix_cache and not isinstance(kv, RadixKV):
            raise ScenarioError(
                f"sglang: its radix cache needs a RadixKV, not a {type(kv).__name__}. Set disable_radix_cache: true."
            )
        self.config = config
        self.kv = kv
        self.max_model_len = context.max_model_len
        self.events: list[Event] = []
        self.group = DecodeGroup(kv.block_size)
        self.running: dict[Sequence, None] = {}
        self.chunked: Sequence | None = None  # running, its prompt not done after the step in flight
        self.ratio = NewTokenRatio(config.schedule_conservativeness)
        self._cache = kv if isinstance(kv, RadixKV) and config.prefix_cache else None
        self._chunk = chunk if chunk > 0 else None
        self._slots = self._most_running()
        self._low_first = config.schedule_low_priority_values_first
        self._preempts = config.enable_priority_scheduling and not config.disable_priority_preemption
        self.waiting: Waiting = self._new_queue()
        self._growth = Growth()
        self._entries: dict[Sequence, int] = {}  # when each, still open, entered the queue last
        self._num_entries = 0
        self._first_order = self._next_order = 0  # of the running, in the order of SGLang's running batch
        self._full = ""  # why no prefill is tried until somebody leaves
        self._why = ""  # why the last prefill batch took no more
        self._blocked: tuple[Sequence, str] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    def add(self, seq: Sequence, now_ns: int) -> None:
        # So much may be asked for at once, when it has been retracted with all but its last token.
        tokens = seq.request.prompt_tokens + self._max_new(seq) + self.kv.block_size
        pool = self.kv.num_blocks * self.kv.block_size
        if tokens >= pool:
            detail = f"{tokens} KV tokens for prompt, output and a page must be below the {pool} in the pool"
            self.events.append(Event("rejected", seq, "never_fits", detail=detail))
            return
        self._enqueue(seq)

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        if seq not in self.running:
            self.waiting.remove(seq)
            del self._entries[seq]
            return []
        if seq is self.chunked:
            self.chunked = None
        elif self._cache is not None:
            self._cache.insert(seq)
        self._release(seq)
        del self._entries[seq]
        self._full = ""
        return []

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        group = self.group
        preempted: list[Sequence] = []
        cached: list[tuple[Sequence, int]] = []
        chunks = self._prefill(preempted, cached)
        if not chunks and group.members:
            self._make_decodes_fit(preempted)
        if not (chunks or group.members) and preempted:
            chunks = self._prefill(preempted, cached)  # those who stood in the way have gone
        self._note_blocked()
        if not chunks:
            if not (group.members or preempted):
                self.ratio.reset()
                return IDLE
            return Batch(group, [], 0, preempted=preempted)
        mixed = self._mixes and len(group.members) > 0 and self.kv.grow_group(group)
        self._number(chunks, ahead=mixed)
        num_tokens = sum([n for _, n in chunks])
        return Batch(
            group if mixed else None, chunks, num_tokens, preempted=preempted, cached=cached, layout="chunks_first"
        )

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        # No prefill is tried while the flag stands or nobody waits, and nobody leaves.
        if batch.chunks or batch.preempted or self.chunked is not None:
            return False
        if (self._preempts or not self._full) and len(self.waiting):
            return False
        if not self.kv.grow_group(self.group):
            return False
        self.ratio.decay()
        batch.again()
        return True

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        cache, group = self._cache, self.group
        ended = set(finished) if batch.chunks else ()
        for seq in batch.sampled:
            if cache is not None:
                cache.insert(seq)
            if seq not in ended:
                group.join(seq)
                self._growth.join(seq, self._max_new(seq) - seq.num_output_tokens, group.step)
        for seq in finished:
            if cache is not None and seq.group is not None:
                cache.insert(seq)
            self._release(seq)
            del self._entries[seq]
            self._full = ""
        if batch.chunks and self.chunked is not None:
            if cache is not None:
                cache.insert(self.chunked)
            self._full = ""
        return finished

    # ---- prefill

    def _prefill(self, preempted: list[Sequence], cached: list[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
        """The chunks of the next prefill batch, with their pages; empty if there is to be none."""
        group, config = self.group, self.config
        if self._preempts or not group.members:
            self._full = ""
        self._why = self._full
        if self.chunked is None:
            if self._full or not len(self.waiting):
                return []
            if len(group.members) >= self._slots and not self._preempts:
                self._full = self._why = "no_slot"
                return []
        self.waiting.arrange()
        growth = self._growth.tokens(group.step) * self.ratio.current
        num_mixed = len(group.members) if self._mixes else 0
        budget = PrefillBudget(self.kv, config.max_prefill_tokens, self._chunk, growth, num_mixed)
        chunks: list[tuple[Sequence, int]] = []
        if self.chunked is not None and not self._continue(self.chunked, budget, chunks):
            return []
        making_way: list[Sequence] = []
        self._admit(budget, chunks, making_way, cached)
        for seq in making_way:
            self._enqueue(seq)
        preempted += making_way
        for seq, n in chunks:
            room = self.kv.allocate(seq, seq.settled_computed_tokens + n)
            assert room, f"{n} tokens were admitted with {self.kv.num_free} blocks free"
        return chunks

    def _continue(self, seq: Sequence, budget: PrefillBudget, chunks: list[tuple[Sequence, int]]) -> bool:
        """Schedules the next chunk of `seq`; False if it must wait for the decodes."""
        kv, page = self.kv, self.kv.block_size
        computed = seq.settled_computed_tokens
        lacking = seq.num_tokens - computed
        limit = min(budget.left_chunk, int(budget.left_total))
        if limit <= 0:
            limit = budget.left_chunk
        reserved = self.waiting.reserved_for_shorter(lacking, budget.left_chunk, page)
        if reserved:
            limit = min(limit, (budget.left_chunk - reserved) // page * page)
        room = (kv.held(seq) + kv.num_free) * page - computed
        n = min(lacking, limit, room)
        if n < 1:
            self._why = "kv_blocks" if room < 1 else "token_budget"
            self.events.append(Event("sat_out", seq, self._why))
            return False
        chunks.append((seq, n))
        if n == lacking:
            self.chunked = None
        budget.charge(n, min(self._max_new(seq), CLIP_MAX_NEW_TOKENS) if n == lacking else 0)
        return True

    def _admit(
        self,
        budget: PrefillBudget,
        chunks: list[tuple[Sequence, int]],
        making_way: list[Sequence],
        cached: list[tuple[Sequence, int]],
    ) -> None:
        """Admits from the head until one does not fit; says why in `_why`, and in `_full` if only leaving helps."""
        most = self.config.prefill_max_requests
        while len(self.waiting):
            self._why = "token_budget"
            if budget.no_tokens and not budget.no_kv:
                return
            seq = self.waiting.head()
            if len(chunks) >= self._slots - len(self.group.members):
                self._full = "no_slot"
            if self._full and not (self._preempts and self._make_way(seq, budget, making_way)):
                self._why = self._full
                return
            if most is not None and len(chunks) >= most:
                return
            self._why = self._add(seq, budget, chunks, cached)
            if self._why or budget.no_kv:
                if self._why != "token_budget":
                    self._why = "kv_blocks"
                    self._full = "kv_blocks" if chunks or self.group.members else ""
                return

    def _add(
        self,
        seq: Sequence,
        budget: PrefillBudget,
        chunks: list[tuple[Sequence, int]],
        cached: list[tuple[Sequence, int]],
    ) -> str:
        """Admits the head of the queue; or returns why not, and nothing changed."""
        hit = 0
        if self._cache is not None:
            hit = self._cache.match(seq, seq.num_tokens - 1)
            self._cache.take(seq, hit)  # what it would use cannot be evicted for it
        lacking = n = seq.num_tokens - hit
        max_new = self._max_new(seq)
        expected = min(max(max_new - seq.num_output_tokens, 0), CLIP_MAX_NEW_TOKENS)
        obstacle = ""
        if lacking + expected + self.kv.block_size >= budget.left_total:
            obstacle = "kv_blocks"
        elif not budget.chunked:
            # The first may exceed the budget, or it could never run.
            if chunks and budget.paged(lacking) >= budget.left_input:
                obstacle = "token_budget"
        elif budget.paged(lacking) > budget.left_chunk:
            n = budget.left_chunk // self.kv.block_size * self.kv.block_size
            if n < 1 or self.chunked is not None:
                obstacle = "token_budget"
        if obstacle:
            if self._cache is not None:
                self._cache.free(seq)
            return obstacle
        self.waiting.pop()
        self.running[seq] = None
        if hit:
            seq.start_from_cache(hit)
            cached.append((seq, hit))
        chunks.append((seq, n))
        if n < lacking:
            self.chunked = seq
        budget.charge(n, min(max_new, CLIP_MAX_NEW_TOKENS) if n == lacking else 0)
        return ""

    def _make_way(self, seq: Sequence, budget: PrefillBudget, making_way: list[Sequence]) -> bool:
        """Retracts running ones so much less important that `seq` may take their places; False, and none, if too few.

        The least important first, of equals the last to enter, until their expected tokens do.
        """
        sign = 1 if self._low_first else -1
        ratio, step = self.ratio.current, self.group.step
        hit = self._cache.lookup(seq) if self._cache is not None else 0
        short = seq.num_tokens - hit + min(self._max_new(seq), CLIP_MAX_NEW_TOKENS) - budget.left_total
        victims: list[Sequence] = []
        for other in sorted(self.group.members, key=lambda s: (-sign * s.request.priority, -self._entries[s])):
            difference = -sign * (seq.request.priority - other.request.priority)
            if difference <= self.config.priority_scheduling_preemption_threshold:
                break
            victims.append(other)
            short -= self._growth.of(other, step) * ratio
            if short <= 0:
                break
        if not victims or short > 0:
            return False
        for victim in sorted(victims, key=_order):
            budget.offset -= self._growth.of(victim, step) * ratio
            self._retract(victim, "priority", seq)
            making_way.append(victim)
        return True

    # ---- decode

    def _make_decodes_fit(self, preempted: list[Sequence]) -> None:
        """Pages for a token of every decode, retracting as many as it takes; nobody decodes if none fits."""
        kv, group = self.kv, self.group
        if kv.grow_group(group):
            self.ratio.decay()
            return
        self._evict_for(group.blocks_due())
        stay = sorted(sorted(group.members, key=_order), key=self._worth, reverse=True)
        while group.blocks_due() > kv.num_free and stay:
            if len(stay) == 1 and self.chunked is None:
                raise AssertionError(f"one decode alone does not fit {kv.num_free} free blocks: {stay[0]!r}")
            victim = stay.pop()
            short = min((seq for seq in group.members_due() if seq is not victim), key=_order, default=None)
            self._retract(victim, "kv_blocks", short)
            self._enqueue(victim)
            preempted.append(victim)
            self._evict_for(group.blocks_due())
        output_tokens = sum(seq.num_output_tokens for seq in stay)
        self.ratio.after_retraction(output_tokens, sum(map(self._max_new, stay)), len(stay))
        self._full, self._why = "", "preemption"
        if stay:
            kv.grow_group(group)

    def _worth(self, seq: Sequence) -> tuple[int, int, int]:
        """The larger, the longer it decodes on: most output tokens, then the shortest prompt."""
        priority = 0
        if self.config.retraction_policy == "priority":
            priority = -seq.request.priority if self._low_first else seq.request.priority
        return priority, seq.num_output_tokens, -seq.request.prompt_tokens

    def _retract(self, seq: Sequence, reason: str, by: Sequence | None) -> None:
        """Takes a running `seq` off; what of its KV is not in the tree is dropped, and room made for those who stay."""
        self.events.append(Event("preempted", seq, reason, None if by is None else by.request.id))
        self._release(seq)
        seq.reset_computed()
        self._evict_for(self.kv.blocks_for(RETRACT_DECODE_STEPS * len(self.group.members)))

    def _evict_for(self, num_blocks: int) -> None:
        if self._cache is not None:
            self._cache.make_room(num_blocks)

    def _release(self, seq: Sequence) -> None:
        self.kv.free(seq)
        if seq.group is not None:
            self.group.leave(seq)
            self._growth.leave(seq)
        del self.running[seq]

    # ---- the rest

    @property
    def _mixes(self) -> bool:
        return self.config.enable_mixed_chunk and self._chunk is not None

    def _max_new(self, seq: Sequence) -> int:
        return min(seq.request.max_output_tokens, self.max_model_len - seq.request.prompt_tokens)

    def _most_running(self) -> int:
        tokens = self.kv.num_blocks * self.kv.block_size
        asked = self.config.max_running_requests
        if asked is None:
            asked = max(min(tokens * 512 // self.max_model_len, 4096), 2048)
        if tokens < 2:
            raise ScenarioError(f"sglang: max_running_requests is 0 with {tokens} KV tokens. Give the engine more KV.")
        return min(asked, tokens // 2)

    def _new_queue(self) -> Waiting:
        if self.config.enable_priority_scheduling:
            return ByPriority(low_first=self._low_first)
        if self._cache is None or self.config.schedule_policy == "fcfs":
            return Fcfs()  # SGLang falls back to it, too, where nothing is cached
        return ByPrefix(self._cache, shortest=self.config.schedule_policy == "shortest-prefill-first")

    def _enqueue(self, seq: Sequence) -> None:
        self._num_entries += 1
        self._entries[seq] = self._num_entries
        self.waiting.push(seq, self._num_entries)

    def _number(self, chunks: list[tuple[Sequence, int]], *, ahead: bool) -> None:
        """Gives the batch its place among the running: behind them, or ahead of those that ride along."""
        if ahead:
            self._first_order -= len(chunks)
        start = self._first_order if ahead else self._next_order
        for i, (seq, _) in enumerate(chunks):
            seq.order = start + i
        if not ahead:
            self._next_order += len(chunks)

    def _note_blocked(self) -> None:
        blocked = (self.waiting.head(), self._why) if len(self.waiting) else None
        if blocked is not None and blocked != self._blocked:
            ahead = self.chunked.request.id if self.chunked is not None and self._why == "token_budget" else None
            self.events.append(Event("blocked", *blocked, blocker=ahead))
        self._blocked = blocked


def _order(seq: Sequence) -> int:
    return seq.order
