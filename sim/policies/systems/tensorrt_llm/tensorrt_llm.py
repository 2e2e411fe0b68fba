"""TensorRT-LLM, whole blocks reused: its PyTorch runtime, which is its default, or the C++ one of TensorRT engines.

Rule: the first max_batch_size requests by arrival are active, until they end. Two stages a step over them. First, whose
KV fits. GUARANTEED_NO_EVICT: all that decodes, then prompts while blocks for prompt and output cap are there.
STATIC_BATCH: likewise, but prompts only while no sequence decodes. MAX_UTILIZATION: each in turn with the blocks of
this step; one that finds none pauses the last started one from it on. Then, which run within max_num_tokens, in the
order of the first stage: a decode takes a token, a prompt all of its own, and the first that finds too few ends the
step. With chunked prefill all decodes, then chunks of what they leave. With block reuse a prompt begins after its
cached blocks, which neither stage knows of; one whose next block another prompt is about to make is passed over for
this step.
Both runtimes ask the same two C++ schedulers, for a step at a time, and differ around them. `backend: pytorch`: the
loop overlaps by default; a paused request comes back with all its tokens, and where these are more than the step that
is to compute them takes, the second stage raises and the engine is lost; blocks of a prompt are stored chunk by chunk,
the last one too. `backend: tensorrt`: each step is waited for; a paused request is cut to what one step computes, but
for chunked prefill; blocks of a prompt are stored with its end, but for that of its last token.
Overlapping, a request that ends by its cap with the step in flight passes the first stage as if it went on, and takes
no tokens in the second; one that ends by a stop token runs once more, in vain. Blocks are stored and freed with a
step's results.
Source: C++, 2025: cpp/tensorrt_llm/batch_manager/{capacityScheduler,microBatchScheduler,allocateKvCache,pauseRequests}
.cpp of cf6abc45, 0a949d31 and 1ce9149b. PyTorch, as stored in 2026: create_py_executor_instance in tensorrt_llm/_torch/
pyexecutor/_util.py and _executor_loop_overlap in py_executor.py there (00043967), scheduler/scheduler.py (002f3cc3),
update_resources in resource_manager.py; storeContextBlocks in kvCacheManager.cpp.
Simplifies: tokens_per_block (32 there) is the pool's block size; more than 16 chunks or decodes of a step keep their
order, which std::sort scrambles there. No beams, attention windows, pipelining. GPU memory only, no block found
in part; the cache as sim/kv/reuse_tree.py says: above all, no block is lost with the one above it. A cancel takes
effect at once. Tokens of a paused request in flight are delivered as they come, not with its next token, and may be its
last, past which that backend goes on. The PyTorch runtime's other schedulers, behind use_kv_cache_manager_v2 and
use_python_scheduler, are not simulated, nor that since 1.3 cached tokens count for less in both stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush, merge
from itertools import islice

from batchsim.base.errors import ScenarioError
from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.kv_blocks import never_fits
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import DecodeGroup, Event, Sequence, by_order
from batchsim.kv.reuse_tree import ReuseTreeKV
from batchsim.policies.systems.tensorrt_llm.chunks import (
    Chunks,
    Waiting,
    equal_progress,
    first_come,
    lacking,
    unfinished_first,
    whole,
)
from batchsim.policies.systems.tensorrt_llm.in_flight import InFlight
from batchsim.policies.systems.tensorrt_llm.prefixes import Prefixes, store_chunks, store_prompts
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm_config import TensorrtLlmConfig


class TensorrtLlm:
    """The scheduler. A decode-only step is O(1) in the number of sequences unless KV blocks or tokens are short."""

    evidence = "recorded"
    streams = True
    _each = 1  # tokens of a decode and step
    _extra = 0  # tokens beyond its own for which a sequence holds blocks

    def __init__(self, config: TensorrtLlmConfig, context: PolicyContext) -> None:
        kv = context.kv
        if config.enable_chunked_prefill and config.max_num_tokens < kv.block_size:
            raise ScenarioError(
                f"tensorrt_llm: chunks are cut to whole KV blocks, so max_num_tokens {config.max_num_tokens} must be at"
                f" least the block size {kv.block_size}. Raise it."
            )
        if config.enable_block_reuse and not isinstance(kv, ReuseTreeKV):
            raise ScenarioError(
                f"tensorrt_llm: its block reuse needs a ReuseTreeKV, not a {type(kv).__name__}. Set enable_block_reuse:"
                " false."
            )
        self.config = config
        self.kv = kv
        self._cache = kv if isinstance(kv, ReuseTreeKV) and config.enable_block_reuse else None
        self.max_model_len = context.max_model_len
        self.events: list[Event] = []
        self.group = self._new_group()
        self.waiting = Waiting()
        self.running: dict[Sequence, None] = {}
        self.partial: dict[Sequence, None] = {}  # running, prompt or recompute not done
        self.left_out: dict[Sequence, None] = {}  # running, decode, but found no tokens in the last step
        self._ahead = context.loop.is_ahead
        self._pytorch = config.backend == "pytorch"
        self._in_flight = self._new_in_flight()
        self._evicts = config.capacity_scheduler_policy == "MAX_UTILIZATION"
        self._static = config.capacity_scheduler_policy == "STATIC_BATCH"
        self._to_come = 0  # blocks that the running will still take if they reach their caps
        self._started: list[tuple[int, int, Sequence]] = []  # a heap, the last by arrival first; ended ones linger
        self._arrived = self._starts = 0
        self._prefixes = Prefixes(None, ())  # of the last step
        self._stopped: tuple[Sequence, str] | None = None  # who did not fit in the last step, and why
        self._blocked: tuple[Sequence, str, int | None] | None = None

    def _new_group(self) -> DecodeGroup:
        return DecodeGroup(self.kv.block_size)

    def _new_in_flight(self) -> InFlight:
        return InFlight(self.group, self.kv, self.max_model_len, ahead=self._ahead)

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
            self._end(seq, self._in_flight.tokens_of(seq))
        else:
            self._forget(seq)
        return []

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        preempted: list[Sequence] = []
        if self._ahead:
            self._in_flight.go_on(self.partial)
        self._stopped = None
        self._prefixes = Prefixes(self._cache if self.config.waits_for_prefixes else None, self.partial)
        if self._evicts and not self._undisturbed():
            contexts: Iterable[Sequence] = self._with_tokens(self._fit_by_pausing(preempted))
        elif not self._seat_decodes():
            contexts = ()
        elif self._static and (self.group.members or self._in_flight.ending):
            contexts = ()
            self.events.extend(Event("sat_out", seq, "batch_running") for seq in self.partial)
        else:
            contexts = self._contexts()
        # Decodes fit, but for the sequences that have been left out.
        chunks = self._micro_batch(contexts, self.config.max_num_tokens - self._each * len(self.group))
        cached = self._start(chunks)
        room = self._grow_group()
        assert room, f"{self.kv.num_free} blocks free, {self.group.blocks_due()} kept for the decodes"
        self._note_blocked(preempted)
        if not (self.group.members or chunks or preempted):
            self._in_flight.batch = None
            return IDLE
        tokens = sum([n for _, n in chunks])
        batch = Batch(self.group, chunks, tokens, preempted=preempted, cached=cached, layout="chunks_first")
        self._ask(batch)
        if self._ahead:
            self._in_flight.batch = batch
        return batch

    def _ask(self, batch: Batch) -> None:
        """Says of the step `batch`, just made, what its decodes compute: a token each."""

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        if batch.preempted or self.partial or self.left_out:
            return False
        # A head that lacks slots or blocks goes on to, as both only get fewer; one that lacks tokens may come to lack
        # blocks.
        if self._evicts and self._blocked is not None and self._blocked[1] == "token_budget":
            return False
        if not self._grow_group():
            return False
        batch.again()
        return True

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        if not self._pytorch and self._cache is not None:
            store_prompts(self._cache, batch)
        self._end_finished(finished)
        self._store_chunks(batch)
        if not self._ahead:
            self._in_flight.let_decode(batch.sampled, self.partial)
        return finished

    def _end_finished(self, finished: list[Sequence]) -> None:
        for seq in finished:
            if seq in self.running:
                self._end(seq, seq.num_wasted_tokens)
            else:
                self._forget(seq)  # paused with its last token in flight

    def _store_chunks(self, batch: Batch) -> None:
        if self._pytorch and self._cache is not None:
            store_chunks(self._cache, batch, self.running, self._in_flight.batch)

    # ---- stage 1: whose KV fits

    def _undisturbed(self) -> bool:
        """MAX_UTILIZATION: whether no request is paused or left out: all started ones come first and fit. O(1)."""
        if self.left_out or self._each * len(self.group) > self.config.max_num_tokens or self._due() > self.kv.num_free:
            return False
        head, started = self.waiting.head(), self._started
        while started and started[0][2] not in self.running:
            heappop(started)
        return head is None or not started or head.order > started[0][2].order

    def _seat_decodes(self) -> bool:
        """Whether all that decode find tokens in this step: one each is no more than what an earlier step took."""
        return True

    def _contexts(self) -> Iterator[Sequence]:
        """The prompts whose KV fits beside the decodes, by arrival; no more is looked at than is asked for."""
        started = sorted(self.partial, key=by_order)
        # What is kept for started sequences that do not decode is theirs when their turn comes, not before.
        room = self._room() + sum(map(self._need, started)) - (self._due() if self._evicts else 0)
        for seq in merge(started, self._active(), key=by_order):
            if seq not in self.partial and self._prefixes.must_wait(seq):
                continue
            need = self._need(seq)
            if need > room:
                self._stopped = (seq, "kv_blocks")
                self.events.extend(Event("sat_out", s, "kv_blocks") for s in started if s.order >= seq.order)
                return
            room -= need
            yield seq

    def _active(self) -> Iterator[Sequence]:
        """The waiting that have one of the `max_batch_size` places, which go by arrival and are kept to the end."""
        return islice(self.waiting, self.config.max_batch_size - len(self.running))

    def _room(self) -> int:
        """Number of blocks neither held nor reserved."""
        return self.kv.num_free if self._evicts else self.kv.num_free - self._to_come

    def _need(self, seq: Sequence) -> int:
        """Number of further blocks without which `seq`, which does not decode, does not run: those for its known
        tokens, or, under a policy without pauses, for its whole output cap too."""
        if self._evicts:
            return self._blocks_for_step(seq)
        return self._blocks_at_end(seq) - self.kv.held(seq)

    def _blocks_at_end(self, seq: Sequence) -> int:
        request = seq.request
        return self.kv.blocks_for(min(request.prompt_tokens + request.max_output_tokens, self.max_model_len))

    def _fit_by_pausing(self, preempted: list[Sequence]) -> list[Sequence]:
        """MAX_UTILIZATION: the requests that fit, by arrival. For want of blocks the last started are paused, into
        `preempted`; the list then ends before them."""
        kv, fitting, used = self.kv, list[Sequence](), 0
        started = sorted(self.running, key=by_order)
        self._prefixes.note(seq for seq in self.waiting if seq.order < started[-1].order)
        for seq in merge(started.copy(), self._active(), key=by_order):
            if preempted and seq.order >= preempted[-1].order:
                break
            if seq not in self.running and self._prefixes.must_wait(seq):
                continue
            need = self._blocks_for_step(seq)
            while used + need > kv.num_free:
                if not started or started[-1].order < seq.order:
                    self._stopped = (seq, "kv_blocks")
                    return fitting
                victim = started.pop()
                self.events.append(Event("preempted", victim, "kv_blocks", seq.request.id))
                preempted.append(victim)
                self._pause(victim)
                if victim is seq:
                    return fitting
                # As there: the one it was paused for is asked again, and then waits for the blocks of its own prompt.
                if seq not in self.running and self._prefixes.must_wait(seq):
                    break
            else:
                fitting.append(seq)
                used += need
        return fitting

    def _due(self) -> int:
        """MAX_UTILIZATION: number of blocks for a step of all that decode. Ending sequences count, as in
        TensorRT-LLM."""
        return self.group.blocks_due() + sum(map(self._blocks_for_step, self._in_flight.ending))

    def _blocks_for_step(self, seq: Sequence) -> int:
        if seq not in self.running:
            return self.kv.blocks_for(seq.num_tokens + self._extra)
        if seq in self.partial:  # holds the blocks of its whole prompt
            return 0
        return self._blocks_to_decode(seq)

    def _blocks_to_decode(self, seq: Sequence) -> int:
        return int(seq.num_computed_tokens % self.kv.block_size == 0)

    # ---- stage 2: who runs in this step

    def _with_tokens(self, fitting: list[Sequence]) -> list[Sequence]:
        """The prompts of `fitting` up to the first that finds too few tokens.

        Tokens go by arrival, with chunks those of decodes alone, until someone finds too few: decodes from there on are
        left out of this step, those before are in it again.
        """
        left, contexts = self.config.max_num_tokens, list[Sequence]()
        for seq in fitting:
            if seq in self._in_flight.ending:
                continue
            if seq not in self.running or seq in self.partial:
                if left >= 0:
                    contexts.append(seq)
                    left -= 0 if self.config.enable_chunked_prefill else seq.num_tokens
                continue
            left -= self._each
            if left < 0:
                self._leave_out(seq)
            elif seq in self.left_out:
                del self.left_out[seq]
                self._in_flight.decode_on(seq)
        return contexts

    def _leave_out(self, seq: Sequence) -> None:
        if seq not in self.left_out:
            self._in_flight.step_aside(seq)
            self.left_out[seq] = None
            self.events.append(Event("sat_out", seq, "token_budget"))

    def _micro_batch(self, contexts: Iterable[Sequence], capacity: int) -> Chunks:
        """The chunks of `contexts` that run in `capacity` tokens: whole prompts until one does not fit, or cut ones."""
        if self.config.enable_chunked_prefill:
            cut = equal_progress if self.config.context_chunking_policy == "EQUAL_PROGRESS" else first_come
            return unfinished_first(cut(contexts, capacity, self.kv.block_size)) if capacity else []
        return whole(contexts, capacity, self.config.max_num_tokens)

    # ---- lives

    def _refusal(self, seq: Sequence) -> Event | None:
        """The rejection of a request that could never run; None if it could."""
        budget, prompt = self.config.max_num_tokens, seq.request.prompt_tokens
        refusal = self._never_fits(seq)
        if refusal is not None:
            return refusal
        if self.config.enable_chunked_prefill or prompt <= budget:
            return None
        detail = f"prompt of {prompt} tokens in one step, max_num_tokens {budget}"
        return Event("rejected", seq, "over_token_budget", detail=detail)

    def _never_fits(self, seq: Sequence) -> Event | None:
        if self._evicts:
            return never_fits(self.kv, seq, self.max_model_len)
        return self._more_than_all(seq)

    def _more_than_all(self, seq: Sequence) -> Event | None:
        if self._blocks_at_end(seq) <= self.kv.num_blocks:
            return None
        detail = f"{self._blocks_at_end(seq)} KV blocks to completion, {self.kv.num_blocks} in the pool"
        return Event("rejected", seq, "never_fits", detail=detail)

    def _start(self, chunks: Chunks) -> list[tuple[Sequence, int]]:
        """Allocates the prompts that start, as far as they are not cached, and shortens their chunks to what is left.

        Returns (sequence, tokens) for each that found some in the cache.
        """
        cached: list[tuple[Sequence, int]] = []
        for i, (seq, n) in enumerate(chunks):
            if seq in self.running:
                continue
            if hit := self._admit(seq):
                seq.start_from_cache(hit)
                cached.append((seq, hit))
                chunks[i] = (seq, min(n, lacking(seq)))
            self.waiting.remove(seq)
            self.running[seq] = None
            self.partial[seq] = None
            self._to_come += self._blocks_at_end(seq) - self.kv.held(seq)
            if self._evicts:
                self._starts += 1
                heappush(self._started, (-seq.order, self._starts, seq))
        return cached

    def _admit(self, seq: Sequence) -> int:
        """Gives `seq` blocks for its known tokens; returns how many of these were cached."""
        tokens, hit = seq.num_tokens + self._extra, 0
        if self._cache is None:
            fits = self.kv.allocate(seq, tokens)
        else:
            hit = self._cache.lookup(seq)
            fits = self._cache.admit(seq, tokens, hit)
        assert fits, f"{self.kv.num_free} blocks free for {seq!r}"
        return hit

    def _grow_group(self) -> bool:
        before = self.kv.num_free
        fits = self.kv.grow_group(self.group)
        self._to_come -= before - self.kv.num_free
        return fits

    def _pause(self, seq: Sequence) -> None:
        unknown = self._in_flight.tokens_of(seq)
        self._leave(seq)
        if self._cache is not None:
            self._cache.free(seq, unknown)
        else:
            self.kv.free(seq)
        if seq.group is not None:
            self.group.leave(seq)
        seq.reset_computed()
        if not (self._pytorch or self.config.enable_chunked_prefill):
            seq.cut_output(self.config.max_num_tokens)
        self.waiting.put_back(seq)

    def _end(self, seq: Sequence, unknown: int) -> None:
        """Ends `seq`, the last `unknown` of whose tokens are in flight."""
        self._leave(seq)
        if self._cache is not None:
            self._cache.end(seq, unknown)
        else:
            self.kv.free(seq)
        if seq.group is not None:
            self.group.leave(seq)

    def _forget(self, seq: Sequence) -> None:
        """Takes `seq` out of the queue for good."""
        self.waiting.remove(seq)
        if self._cache is not None:
            self._cache.end(seq)

    def _leave(self, seq: Sequence) -> None:
        """Takes `seq`, which still holds its blocks, out of the running."""
        self._to_come -= self._blocks_at_end(seq) - self.kv.held(seq)
        self.partial.pop(seq, None)
        self.left_out.pop(seq, None)
        self._in_flight.ending.pop(seq, None)
        del self.running[seq]

    def _note_blocked(self, preempted: list[Sequence]) -> None:
        """Says why the head of the queue did not start."""
        head = self.waiting.head()
        if head is None:
            self._blocked = None
            return
        blocker = self._prefixes.waits_for.get(head)
        if (preempted and head.order >= preempted[-1].order) or blocker == head.request.id:
            reason, blocker = "preemption", None
        elif blocker is not None:
            reason = "waits_for_prefix"
        elif self._stopped is not None and self._stopped[0] is head:
            reason = self._stopped[1]
        elif self._static and (self.group.members or self._in_flight.ending):
            reason = "batch_running"
        elif len(self.running) >= self.config.max_batch_size:
            reason = "no_slot"
        else:
            reason = "kv_blocks" if self._need(head) > self._room() else "token_budget"
        if (head, reason, blocker) != self._blocked:
            self.events.append(Event("blocked", head, reason, blocker))
        self._blocked = (head, reason, blocker)
