"""Forms the prefill batches of SGLang 0.5.23: the prompt that is cut, then requests from the head of the queue.

Source: python/sglang/srt/managers/schedule_policy.py (PrefillAdder), scheduler.py (_get_new_batch_prefill_raw) of the
0.5.23 wheel.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from batchsim.kernel.kv_blocks import KVBlockManager
from batchsim.kernel.types import Event, Sequence, by_order
from batchsim.kv.pooled_radix import windows_of
from batchsim.kv.radix_cache import RadixKV
from batchsim.kv.states import StateRadixKV
from batchsim.policies.systems.sglang.lora_batch import LoraBatch
from batchsim.policies.systems.sglang.running_batch import RunningBatch
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.policies.systems.sglang.token_budget import CLIP_MAX_NEW_TOKENS, Completion, PrefillBudget
from batchsim.policies.systems.sglang.waiting_queue import Waiting
from batchsim.policies.systems.sglang.window_budget import WindowBudget


@dataclass
class Prefill:
    """A prefill batch: `chunks` as (sequence, tokens), `cached` as (sequence, tokens found in the radix cache),
    `loaded` as (sequence, tokens loaded from the host), and `victims`, the decodes retracted for it."""

    chunks: list[tuple[Sequence, int]] = field(default_factory=list[tuple[Sequence, int]])
    cached: list[tuple[Sequence, int]] = field(default_factory=list[tuple[Sequence, int]])
    loaded: list[tuple[Sequence, int]] = field(default_factory=list[tuple[Sequence, int]])
    victims: list[Sequence] = field(default_factory=list[Sequence])


class PrefillAdder:
    """Forms prefill batches. `chunked` is the sequence whose prompt is cut, `why` the reason for which the last batch
    took no more.

    Of each request the adder keeps the numbers of known and of cached tokens as they were when last matched: for these,
    stale as they may be, decodes must make way.
    """

    def __init__(
        self,
        config: SglangConfig,
        kv: KVBlockManager,
        cache: RadixKV | None,
        waiting: Waiting,
        batch: RunningBatch,
        *,
        slots: int,
        loras: LoraBatch,
        ahead: bool = False,
    ) -> None:
        self.chunked: Sequence | None = None
        self.why = ""
        self.events: list[Event] = []
        self.stopped_at: Sequence | None = None  # the request that the last batch did not take, of those not held back
        self.slots = slots
        self._loras = loras
        self._config = config
        self._kv = kv
        self._windows = windows_of(kv)
        self._ahead = ahead
        self._cache = cache
        self._waiting = waiting
        self._batch = batch
        self._chunk = config.chunked_prefill_size if config.chunked_prefill_size > 0 else None
        self._preempts = config.preempts
        self._matched: dict[Sequence, tuple[int, int]] = {}

    def make(self, ratio: float, now_ns: int) -> Prefill:
        """The next prefill batch; without chunks if there is to be none."""
        batch, waiting = self._batch, self._waiting
        made = Prefill()
        self.stopped_at = None
        if self._preempts or not len(batch):
            batch.full = ""
        self.why = batch.full
        if self.chunked is None:
            if batch.full or not len(waiting):
                return made
            if len(batch) >= self.slots and not self._preempts:
                batch.full = self.why = "no_slot"
                return made
        waiting.arrange()
        budget = self._budget(ratio)
        if self.chunked is not None and not self._continue(self.chunked, budget, made):
            return made
        if self._loras.is_used:
            self._admit_by_adapters(budget, made, ratio, now_ns)
        else:
            self._admit(budget, made, ratio)
        for seq in made.victims:
            waiting.push(seq)
        self._allocate(made.chunks)
        return made

    def forget(self, seq: Sequence) -> None:
        """Drops what is kept of `seq`, which has ended."""
        self._matched.pop(seq, None)
        if seq is self.chunked:
            self.chunked = None

    def retracted(self, seq: Sequence) -> None:
        """Forgets the cached tokens of `seq`, about to be retracted."""
        if self._preempts:
            self._matched[seq] = (self._matched[seq][0], 0)

    def decodes_ride(self) -> None:
        """Notes the known tokens of the decodes, which ride along in the batch just made."""
        if self._preempts:
            batch = self._batch
            for seq in batch.group.members:
                self._matched[seq] = (seq.num_tokens - batch.in_flight(seq), self._matched[seq][1])

    # ---- one batch

    def _budget(self, ratio: float) -> PrefillBudget:
        config, batch = self._config, self._batch
        num_mixed = len(batch) if config.mixes else 0
        reserved = batch.reserved(ratio, exact=self._preempts)
        if self._windows is not None:
            return WindowBudget(
                self._kv, config.max_prefill_tokens, self._chunk, reserved, num_mixed, windows=self._windows
            )
        return PrefillBudget(self._kv, config.max_prefill_tokens, self._chunk, reserved, num_mixed)

    def _allocate(self, chunks: list[tuple[Sequence, int]]) -> None:
        """Takes pages for `chunks`. Before that SGLang evicts, for each chunk, for a page more than its tokens need."""
        kv = self._kv
        if isinstance(self._cache, StateRadixKV):
            self._cache.take_states(chunks)
        if self._cache is not None and chunks:
            spare = len(chunks) if kv.block_size > 1 else 0
            self._cache.make_room(kv.blocks_for(sum([n for _, n in chunks])) + spare)
        if self._windows is not None and self._cache is None:
            unread = self._chunk if self._ahead and self._chunk is not None else 0
            for seq, _ in chunks:
                if seq.settled_computed_tokens:
                    self._windows.slide(seq, seq.settled_computed_tokens - unread)
        for seq, n in chunks:
            room = kv.allocate(seq, seq.settled_computed_tokens + n)
            assert room, f"{n} tokens were admitted with {kv.num_free} blocks free"

    def _continue(self, seq: Sequence, budget: PrefillBudget, made: Prefill) -> bool:
        """Schedules the next chunk of `seq`; False if it must wait for the decodes."""
        kv, page = self._kv, self._kv.block_size
        computed = seq.settled_computed_tokens
        lacking = seq.num_tokens - computed
        limit = budget.chunk_room()
        reserved = self._waiting.reserved_for_shorter(lacking, budget.left_chunk, page)
        if reserved:
            limit = min(limit, (budget.left_chunk - reserved) // page * page)
        room = (kv.held(seq) + kv.num_free) * page - computed
        n = min(lacking, limit, room)
        if n < 1:
            self.why = "kv_blocks"
            self.events.append(Event("sat_out", seq, self.why))
            return False
        made.chunks.append((seq, n))
        if n == lacking:
            self.chunked = None
        budget.charge(n, min(seq.max_output_tokens, CLIP_MAX_NEW_TOKENS) if n == lacking else 0)
        return True

    def _admit_by_adapters(self, budget: PrefillBudget, made: Prefill, ratio: float, now_ns: int) -> None:
        """As `_admit`, where requests whose LoRA adapters hold them back are passed over."""
        loras, waiting = self._loras, self._waiting
        running = [*self._batch.group.members, *([] if self.chunked is None else [self.chunked])]
        loras.begin([*running, *(seq for seq, _ in made.chunks)], waiting, now_ns)
        self.why = ""
        self._admit(budget, made, ratio)
        self.stopped_at = waiting.head() if len(waiting) else None
        passed_over, events = loras.end(self.stopped_at)
        waiting.put_back(passed_over)
        self.events += events

    def _admit(self, budget: PrefillBudget, made: Prefill, ratio: float) -> None:
        """Admits from the head of the queue until one does not fit; sets `why`, and the batch's `full` if no prefill
        can be made until a sequence leaves."""
        batch, waiting, most = self._batch, self._waiting, self._config.prefill_max_requests
        completion = Completion(ratio, batch.in_flight)
        while len(waiting):
            self.why = "token_budget"
            if budget.no_tokens and not budget.no_kv:
                return
            seq = waiting.head()
            if self._loras.is_used:
                if not self._loras.allows(seq):
                    waiting.pop()
                    self.why = ""
                    continue
                self._loras.take(seq)
            if len(made.chunks) >= self.slots - len(batch):
                batch.full = "no_slot"
            if batch.full and not (self._preempts and self._make_way(seq, budget, made.victims, ratio)):
                self.why = batch.full
                return
            hit = self._match(seq)
            if most is not None and len(made.chunks) >= most:
                return
            self.why = self._add(seq, hit, budget, made, completion)
            if self.why or budget.no_kv:
                if self.why != "token_budget":
                    self.why = "kv_blocks"
                    batch.full = "kv_blocks" if made.chunks or len(batch) else ""
                return

    def _match(self, seq: Sequence) -> int:
        """The cached tokens of `seq`, at most all known ones but one; counts as a use of them."""
        cache = self._cache
        hit = 0 if cache is None else cache.match(seq, seq.num_tokens - 1)
        if isinstance(cache, StateRadixKV):
            cache.reserve_state(seq)
        if self._preempts:
            self._matched[seq] = (seq.num_tokens, hit)
        return hit

    def _add(self, seq: Sequence, hit: int, budget: PrefillBudget, made: Prefill, completion: Completion) -> str:
        """Admits the head of the queue and returns ""; or returns why it does not fit, and nothing changed."""
        if self._cache is not None:
            self._cache.take(seq, hit)  # what it would use cannot be evicted for it
        lacking, loaded = seq.num_tokens - hit, 0
        if self._cache is None and seq.request.ignore_eos:
            obstacle, n = self._whole_or_cut(seq, lacking, budget, made, completion)
        else:
            obstacle, n, loaded = self._placed(seq, lacking, budget, made)
        if obstacle:
            if self._cache is not None:
                self._cache.free(seq)
            return obstacle
        self._waiting.pop()
        if hit + loaded:
            seq.start_from_cache(hit + loaded)
        if hit:
            made.cached.append((seq, hit))
        if loaded:
            made.loaded.append((seq, loaded))
        made.chunks.append((seq, n))
        is_whole = n == lacking - loaded
        if not is_whole:
            self.chunked = seq
        budget.charge(n, min(seq.max_output_tokens, CLIP_MAX_NEW_TOKENS) if is_whole else 0)
        return ""

    def _placed(self, seq: Sequence, lacking: int, budget: PrefillBudget, made: Prefill) -> tuple[str, int, int]:
        """As `_fitting`, and how many of the lacking tokens are loaded from elsewhere and not computed."""
        obstacle, n = self._fitting(seq, lacking, budget, made)
        return obstacle, n, 0

    def _fitting(
        self, seq: Sequence, lacking: int, budget: PrefillBudget, made: Prefill, loaded: int = 0
    ) -> tuple[str, int]:
        """(why `seq` does not fit, or "", how many of its `lacking` tokens the chunk takes). The first `loaded` of
        these have KV elsewhere; they need room, but are not computed."""
        page = self._kv.block_size
        expected = min(max(seq.max_output_tokens - seq.num_output_tokens, 0), CLIP_MAX_NEW_TOKENS)
        if lacking + expected + page >= budget.left_total:
            return "kv_blocks", 0
        limit = budget.chunk_limit(lacking, expected)
        if limit is None:
            return "kv_blocks", 0
        lacking -= loaded
        if not budget.chunked:
            # The first may exceed the budget, or it could never run.
            alone = not made.chunks or budget.paged(lacking) < budget.left_input
            return "" if alone else "token_budget", lacking
        if budget.paged(lacking) <= limit:
            return "", lacking
        n = limit // page * page
        return "token_budget" if n < 1 or self.chunked is not None else "", n

    def _whole_or_cut(
        self, seq: Sequence, lacking: int, budget: PrefillBudget, made: Prefill, completion: Completion
    ) -> tuple[str, int]:
        """As `_fitting`, for a request with `ignore_eos` and no cache: how long it runs is known."""
        need = budget.paged(lacking) + self._kv.block_size
        if need > min(budget.left_now, budget.left_total):
            return "kv_blocks", 0
        expected = min(max(seq.max_output_tokens - seq.num_output_tokens, 0), CLIP_MAX_NEW_TOKENS)
        if self._windows is not None:
            if not budget.has_room(lacking, expected):
                return "kv_blocks", 0
        elif not completion.fits(seq, self._batch.rows(), made.chunks, budget.left_now - need):
            return "kv_blocks", 0
        if lacking <= budget.left_chunk:
            return "", lacking
        return "" if self.chunked is None else "token_budget", budget.left_chunk

    def _make_way(self, seq: Sequence, budget: PrefillBudget, victims: list[Sequence], ratio: float) -> bool:
        """Retracts decodes so much less important that `seq` may take their places; False, and none, if too few.

        The least important first, of equals the last to enter, until the tokens expected of them suffice.
        """
        batch, entered = self._batch, self._waiting.entered
        sign = 1 if self._config.schedule_low_priority_values_first else -1
        tokens, hit = self._matched.get(seq, (0, 0))
        short = tokens - hit + min(seq.max_output_tokens, CLIP_MAX_NEW_TOKENS) - budget.left_total
        chosen: list[Sequence] = []
        for other in sorted(batch.group.members, key=lambda s: (-sign * s.request.priority, -entered(s))):
            difference = -sign * (seq.request.priority - other.request.priority)
            if difference <= self._config.priority_scheduling_preemption_threshold:
                break
            chosen.append(other)
            short -= batch.reserved_for(other, ratio)
            if short <= 0:
                break
        if not chosen or short > 0:
            return False
        for victim in sorted(chosen, key=by_order):
            budget.offset -= batch.reserved_for(victim, ratio)
            self.retracted(victim)
            self.events.append(Event("preempted", victim, "priority", seq.request.id))
            batch.retract(victim)
            victims.append(victim)
        return True
