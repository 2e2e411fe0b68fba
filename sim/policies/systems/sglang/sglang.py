"""SGLang 0.5.23, prefill first, radix cache; in an engine whose loop overlaps, its default, or in one that does not.

Rule: while a prefill batch can be formed it runs alone and the decodes stand still (or ride along, if mixed). From the
head of the queue, in strict order, a request comes in if its uncached prompt, its whole output cap and a page fit the
KV tokens that are free or evictable, less what the running are expected to need: `new_token_ratio` of what their caps
leave. Else no prefill is tried until a sequence leaves. One prompt at a time is cut to the chunk size and goes first.
If the decodes lack pages, those with the fewest output tokens are retracted to the end of the queue; the ratio rises.
Overlapping, it knows each row's tokens but the one in flight, which a retraction loses; a row ended by it is not
decoded. Arrivals enter the queue at every call; with `scheduler_recv_interval` N at every N-th call after decodes, and
after every step with a prompt.
Source: python/sglang/srt/managers/{scheduler,schedule_policy,schedule_batch}.py, mem_cache/* of the 0.5.23 wheel;
scheduler_recv_skipper.py @ 0cc650f.
Simplifies: an engine at rest polls without end, so that it takes in arrivals at once. The page is the KV block
(SGLang's default has 1 token). Where SGLang dies or hangs there is a way on: a prompt short of memory waits for the
decodes, what can never fit is rejected, no prompt is cut behind another. A refused prompt takes no step. Several
victims of one request queue up in batch order. A cancel takes effect at once.
Unlike elsewhere here the HIGHER priority number comes first, unless `schedule_low_priority_values_first`.
"""

from __future__ import annotations

from batchsim.base.errors import ScenarioError
from batchsim.base.kv_pools import STATE_GRID
from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import MISSING, DecodeGroup, Event, Sequence, by_order
from batchsim.kv.pooled_radix import PooledRadixKV, windows_of
from batchsim.kv.radix_cache import RadixKV
from batchsim.kv.states import StateRadixKV, states_of
from batchsim.policies.systems.sglang.lora_batch import LoraBatch
from batchsim.policies.systems.sglang.prefill_adder import Prefill, PrefillAdder
from batchsim.policies.systems.sglang.running_batch import RunningBatch
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.policies.systems.sglang.token_budget import IGNORE_EOS_RESERVE_TOKENS, NewTokenRatio
from batchsim.policies.systems.sglang.waiting_queue import ByPrefix, ByPriority, Fcfs, Waiting

_PROMPTS = 1000  # polls that a step with prompts counts as
RESERVED_LEN = 6  # tokens that a prompt leaves of the context, or of the KV memory if that is smaller


class Sglang:
    """The scheduler. A decode-only step with pages to spare is O(1) in the number of sequences.

    Except under priority scheduling with preemption, where SGLang too looks at the queue before every step.
    """

    evidence = "recorded"
    streams = True

    def __init__(self, config: SglangConfig, context: PolicyContext) -> None:
        kv, chunk = context.kv, config.chunked_prefill_size
        if chunk > 0 and chunk % kv.block_size:
            raise ScenarioError(
                f"sglang: chunked_prefill_size {chunk} must be divisible by page_size, here the KV block of"
                f" {kv.block_size} tokens. Change one of them."
            )
        if not config.disable_radix_cache and not isinstance(kv, RadixKV):
            raise ScenarioError(
                f"sglang: its radix cache needs a RadixKV, not a {type(kv).__name__}. Set disable_radix_cache: true."
            )
        self.config = config
        self.kv = kv
        self.max_model_len = context.max_model_len
        self.running: dict[Sequence, None] = {}
        self.ratio = NewTokenRatio(config.schedule_conservativeness)
        self._cache = kv if isinstance(kv, RadixKV) and not config.disable_radix_cache else None
        self._low_first = config.schedule_low_priority_values_first
        self._preempts = config.preempts
        self._ahead = context.loop.is_ahead
        self._windows, self._states = windows_of(kv), states_of(kv)
        self._check_windows()
        self._check_states()
        self._last: Batch | None = None  # the batch of the call before, whose prompts' ends do not decode yet
        self._unread: list[Sequence] = []  # have arrived and are not taken in yet
        self._now_ns = 0  # of the latest call
        self._polls = 0  # since arrivals were taken in: calls, as `scheduler_recv_interval` counts them
        self._prompts_before = False  # whether the call before made a step with prompts
        self.batch = self._new_batch()
        self.waiting: Waiting = self._new_queue()
        self.loras = LoraBatch(config, context.adapter_copy_ns)
        self.adder = self._new_adder()
        self.events: list[Event] = []
        self.free_blocks_asked = kv.num_blocks  # at the latest call, once the last chunk is in the tree
        self._blocked: tuple[Sequence, str] | None = None

    @property
    def group(self) -> DecodeGroup:
        """The decode group of the running batch."""
        return self.batch.group

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self._unread)

    @property
    def num_running(self) -> int:
        return len(self.running) - len(self.batch.capped)

    def add(self, seq: Sequence, now_ns: int) -> None:
        pool, page, prompt = self.kv.num_blocks * self.kv.block_size, self.kv.block_size, seq.request.prompt_tokens
        limit = min(self.max_model_len, pool)
        if prompt >= limit - RESERVED_LEN:
            detail = (
                f"prompt of {prompt} tokens; it must be below {limit - RESERVED_LEN}, {RESERVED_LEN} less than"
                f" max_model_len {self.max_model_len} and the {pool} KV tokens"
            )
            self.events.append(Event("rejected", seq, "prompt_too_long", detail=detail))
            return
        room = min(limit - 2 - prompt, pool - self.kv.blocks_for(prompt) * page - page - 1, self._most_output(prompt))
        seq.max_output_tokens = max(min(seq.max_output_tokens, room), 0)
        if self._never_fits(seq):
            return
        self.loras.is_used = self.loras.is_used or seq.request.adapter != MISSING
        if self.config.scheduler_recv_interval > 1:
            self._unread.append(seq)  # its cap is known from here on, its place in the queue is not
        else:
            self._enter(seq)

    def _enter(self, seq: Sequence) -> None:
        """Takes in a sequence that can run."""
        self.waiting.push(seq)

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        if seq in self._unread:
            self._unread.remove(seq)
            return []
        if seq not in self.running:
            self.waiting.remove(seq)
            self._forget(seq)
            return []
        if seq is not self.adder.chunked:
            self._insert_ended(seq, self._computed(seq))
        self._leave(seq)
        return []

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        self._poll(_PROMPTS if self._prompts_before else 1)
        batch, last = self.batch, self._last
        in_flight, replaced = last is not None, self._take_in_last()
        self.free_blocks_asked = self.kv.num_free
        preempted: list[Sequence] = []
        self._now_ns = now_ns
        made = self._prefill(preempted)
        decodes = not made.chunks and self._make_decodes_fit(preempted)
        if self._unread and not (made.chunks or decodes or in_flight):
            self._take_in()  # with nothing to run it polls again and again
            made = self._prefill(preempted)
        if not (made.chunks or decodes or in_flight or len(batch) or (self._ahead and preempted)):
            made = self._prefill(preempted)  # the sequences in the way have gone
            while not made.chunks and len(self.waiting) and self._never_fits(self.waiting.head()):
                self._forget(self.waiting.pop())
                made = self._prefill(preempted)
        self._note_blocked()
        self._prompts_before = bool(made.chunks)
        if not (made.chunks or decodes):
            if preempted:
                return Batch(None, [], 0, preempted=preempted) if self._ahead else self._work(made, preempted)
            if not (in_flight or self.running or len(self.waiting)):
                self.ratio.reset()
            return IDLE if self.loras.next_copy_ns is None else Idle(self.loras.next_copy_ns)
        work = self._last = self._work(made, preempted)
        if self.config.disable_consecutive_prefill_overlap and last is not None and last.chunks and work.chunks:
            # Where the batch before has become the running one and rides along, SGLang takes it for a decode by now.
            work.apart = not (replaced and work.decodes is not None)
        return work

    def _work(self, made: Prefill, preempted: list[Sequence]) -> Batch:
        """The step of the prompts `made`, decodes perhaps riding along, or of all decodes."""
        batch, group = self.batch, self.group
        if not made.chunks:
            return Batch(group, [], 0, preempted=preempted)
        mixed = self.config.mixes and len(batch) > 0 and self._let_ride()
        batch.place(made.chunks, ahead=mixed)
        num_tokens = sum([n for _, n in made.chunks])
        return Batch(
            group if mixed else None,
            made.chunks,
            num_tokens,
            preempted=preempted,
            cached=made.cached,
            layout="chunks_first",
        )

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        # No prefill is tried while the flag stands or the queue is empty, and no sequence leaves.
        if batch.chunks or batch.preempted or self.adder.chunked is not None:
            return False
        if self._unread or ((self._preempts or not self.batch.full) and len(self.waiting)):
            return False
        if self._ahead and self._windows is not None:
            self.batch.await_results(batch)
        if not self.batch.grow():
            return False
        if self.config.scheduler_recv_interval > 1:
            self._poll(1)
        self.ratio.decay()
        batch.again()
        return True

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        ended = set(finished) if batch.chunks else ()
        for seq in batch.sampled:
            if seq in ended:
                self._finish(seq)
            elif self._cache is not None:
                self._cache.insert(seq, seq.settled_computed_tokens)  # to the end of its prefill: it may decode by now
        for seq in finished:
            if seq in self.running:
                self._finish(seq)
        if not self._ahead:
            self._take_in_last()
        return finished

    # ---- one call

    def _poll(self, weight: int) -> None:
        """Takes in what has arrived, if this call does: `weight` is what the batch of the call before counts."""
        self._polls += weight
        if self._polls >= self.config.scheduler_recv_interval or not self.running:
            self._take_in()

    def _take_in(self) -> None:
        self._polls = 0
        unread, self._unread = self._unread, []
        for seq in unread:
            self.waiting.push(seq)

    def _take_in_last(self) -> bool:
        """Lets those decode whose prompts ended in the batch before, whether or not its results are there; the part of
        a prompt that it had goes into the tree. Returns whether it took the place of a running batch without rows."""
        last, batch, chunked = self._last, self.batch, self.adder.chunked
        self._last = None
        replaced = last is not None and (last.decodes is not None or not len(batch))
        if last is not None and last.chunks:
            if chunked is not None and self._cache is not None:
                self._cache.insert(chunked)
            # The flag is the running batch's: a prefill or mixed batch that takes its place has none.
            if replaced or chunked is not None:
                batch.full = ""
            for seq in last.sampled:
                if seq in self.running:
                    batch.join(seq)
        if self._ahead:
            batch.await_results(last)
        return replaced

    def _prefill(self, preempted: list[Sequence]) -> Prefill:
        made = self.adder.make(self.ratio.current, self._now_ns)
        self.events += self.adder.events
        self.adder.events = []
        for victim in made.victims:
            del self.running[victim]
        self.running |= dict.fromkeys([seq for seq, _ in made.chunks])
        preempted += made.victims
        return made

    def _let_ride(self) -> bool:
        """Takes pages for a token of every decode beside the prefill batch; False, and the decodes sit the step out, if
        pages are short or no decode is left."""
        self.batch.take_off_capped()
        self.batch.evict_for_growth()
        if not (len(self.batch) and self.batch.grow()):
            return False
        self.adder.decodes_ride()
        return True

    def _make_decodes_fit(self, preempted: list[Sequence]) -> bool:
        """Takes pages for a token of every decode; returns whether there is a decode step. If pages are short, decodes
        are retracted, and added to `preempted`, until they suffice; or there is no decode step, if the step in flight
        will free the pages of sequences that it ends."""
        batch = self.batch
        waits = batch.take_off_capped()
        if not len(batch):
            return False
        if batch.grow():
            self.ratio.decay()
            return True
        batch.evict_for_growth()
        if waits or (len(batch) == 1 and self.adder.chunked is None and self._pages_will_be_free()):
            return False
        stay = sorted(batch.rows(), key=self._worth, reverse=True)
        while batch.lacks_blocks() and stay:
            if len(stay) == 1 and self.adder.chunked is None:
                if not self._pages_will_be_free():
                    self._give_up(stay.pop())
                break
            victim = stay.pop()
            short = min((seq for seq in batch.group.members_due() if seq is not victim), key=by_order, default=None)
            self.events.append(Event("preempted", victim, "kv_blocks", None if short is None else short.request.id))
            if self._retract(victim):
                preempted.append(victim)
            batch.evict_for_growth()
        batch.keep_order(stay)
        output_tokens = sum(seq.num_output_tokens - batch.in_flight(seq) for seq in stay)
        self.ratio.after_retraction(output_tokens, sum(seq.max_output_tokens for seq in stay), len(stay))
        batch.full, self.adder.why = "", "preemption"
        return len(stay) > 0 and batch.grow()

    def _retract(self, victim: Sequence) -> bool:
        """Takes a decode off for lack of pages; returns whether it lives on."""
        self.adder.retracted(victim)
        self.batch.retract(victim)
        del self.running[victim]
        self.waiting.push(victim)
        return True

    def _give_up(self, seq: Sequence) -> None:
        """Does what is done with the only decode, for whose next token there is no page."""
        raise AssertionError(f"one decode alone does not fit {self.kv.num_free} free blocks: {seq!r}")

    def _pages_will_be_free(self) -> bool:
        return False  # whether pages that are locked now will not be, though no sequence leaves

    def _worth(self, seq: Sequence) -> tuple[int, int, int]:
        """The key by which decodes are spared from retraction, the largest longest: by priority where
        `retraction_policy` says so, then most output tokens, then the shortest prompt."""
        sign = 0 if self.config.retraction_policy != "priority" else -1 if self._low_first else 1
        known = seq.num_output_tokens - self.batch.in_flight(seq)
        return sign * seq.request.priority, known, -seq.request.prompt_tokens

    def _never_fits(self, seq: Sequence) -> bool:
        """Rejects `seq` if it does not fit the whole pool, and returns whether it did so: SGLang would keep such a
        request at the head of the queue for ever."""
        pool, page = self.kv.num_blocks * self.kv.block_size, self.kv.block_size
        tokens, to_come = seq.num_tokens, seq.max_output_tokens - seq.num_output_tokens
        if self._cache is None and seq.request.ignore_eos:
            tokens = self.kv.blocks_for(tokens) * page + IGNORE_EOS_RESERVE_TOKENS
        if tokens + to_come + page < pool:
            return False
        detail = (
            f"{tokens} KV tokens for what is known, {to_come} to come and a page of {page} must be below the {pool} in"
            " the pool"
        )
        self.events.append(Event("rejected", seq, "never_fits", detail=detail))
        return True

    def _finish(self, seq: Sequence) -> None:
        self._insert_ended(seq, self._kept(seq))
        self._leave(seq)

    def _insert_ended(self, seq: Sequence, num_tokens: int) -> None:
        """Puts the first `num_tokens` tokens of `seq`, which has ended, into the tree, if there is one."""
        cache = self._cache
        if isinstance(cache, PooledRadixKV | StateRadixKV):
            cache.insert_ended(seq, num_tokens)
        elif cache is not None:
            cache.insert(seq, num_tokens)

    def _kept(self, seq: Sequence) -> int:
        """How many tokens of `seq`, which has its last one, are offered to the tree."""
        return self._computed(seq)

    def _computed(self, seq: Sequence) -> int:
        """How many tokens of `seq` SGLang counts as computed."""
        return seq.num_computed_tokens

    def _leave(self, seq: Sequence) -> None:
        self.batch.release(seq)
        self.batch.full = ""
        del self.running[seq]
        self._forget(seq)

    def _forget(self, seq: Sequence) -> None:
        self.waiting.forget(seq)
        self.adder.forget(seq)
        self.loras.held.forget(seq)

    # ---- the rest

    def _check_windows(self) -> None:
        """ScenarioError for a pool of windows in which a prompt alone could wait for ever: a part of it takes as much
        as there is of it, and its window, beside a prefix whose last part is as long and whose window it has locked."""
        windows, page = self._windows, self.kv.block_size
        if windows is None:
            return
        chunk = self.config.chunked_prefill_size if self.config.chunked_prefill_size > 0 else self.max_model_len
        locked = windows.every if self._cache is None else max(chunk, windows.reach + windows.every)
        least = max(chunk, windows.reach) + locked + windows.reach + 6 * page
        if windows.num_blocks * page < least:
            what = f"chunked_prefill_size {chunk:,}" if chunk != self.max_model_len else f"max_model_len {chunk:,}"
            raise ScenarioError(
                f"sglang: {windows.num_blocks * page:,} tokens of windows are fewer than {least:,}, with which a prompt"
                f" never waits for ever at {what} and windows of {windows.reach + 1:,}. Lower the former, or raise"
                " kv.pools.window_tokens."
            )

    def _check_states(self) -> None:
        """ScenarioError for states that SGLang does not keep so, or so few that no request can run."""
        states, config, what = self._states, self.config, ""
        if states is None:
            return
        if states.num_blocks < states.per_request:
            what = f"{states.num_blocks} states are fewer than the {states.per_request} that SGLang sets aside for a"
            what += " request. Raise kv.pools.states"
        elif self._cache is not None and not states.buffers and self.kv.block_size > 1:
            what = "states without an extra buffer are cached in pages of one token. Write kv.block_size: 1"
        elif self._cache is not None and not states.buffers and self._ahead:
            what = "states without an extra buffer do not go with overlap. Write disable_overlap_schedule: true"
        elif states.buffers and config.mixes:
            what = "states of answers in mixed steps are not simulated. Write enable_mixed_chunk: false"
        elif max(STATE_GRID, self.kv.block_size) % min(STATE_GRID, self.kv.block_size):
            what = f"pages of {self.kv.block_size} and {STATE_GRID} tokens must divide each other. Change kv.block_size"
        if what:
            raise ScenarioError(f"sglang: {what}.")

    def _most_running(self) -> int:
        tokens = self.kv.num_blocks * self.kv.block_size
        asked = self.config.asked_running_requests
        if asked is None:
            asked = max(min(tokens * 512 // self.max_model_len, 4096), 2048)
        if tokens < 2:
            raise ScenarioError(f"sglang: max_running_requests is 0 with {tokens} KV tokens. Give the engine more KV.")
        if self._states is not None:
            asked = min(asked, self._states.num_blocks // self._states.per_request)
        return min(asked, tokens // 2)

    def _most_output(self, prompt: int) -> int:
        """The most output tokens beside a prompt of `prompt` tokens that its decode steps, alone, have KV for."""
        return self.max_model_len

    def _new_batch(self) -> RunningBatch:
        return RunningBatch(self.kv, self._cache, ahead=self._ahead)

    def _new_adder(self) -> PrefillAdder:
        return PrefillAdder(
            self.config,
            self.kv,
            self._cache,
            self.waiting,
            self.batch,
            slots=self._most_running(),
            loras=self.loras,
            ahead=self._ahead,
        )

    def _new_queue(self) -> Waiting:
        if self.config.enable_priority_scheduling:
            return ByPriority(self._cache, low_first=self._low_first)
        if self._cache is None or self.config.schedule_policy == "fcfs":
            return Fcfs(self._cache)  # SGLang falls back to it, too, where nothing is cached
        return ByPrefix(self._cache, shortest=self.config.schedule_policy == "shortest-prefill-first")

    def _note_blocked(self) -> None:
        stopped_at = self.adder.stopped_at or (self.waiting.head() if len(self.waiting) else None)
        blocked = None if stopped_at is None or not self.adder.why else (stopped_at, self.adder.why)
        if blocked is not None and blocked != self._blocked:
            chunked = self.adder.chunked
            ahead = chunked.request.id if chunked is not None and self.adder.why == "token_budget" else None
            self.events.append(Event("blocked", *blocked, blocker=ahead))
        self._blocked = blocked
