"""vLLM 0.33 with KV offloaded to the memory of the host (OffloadingConnector, `--kv-offloading-size`).

Rule, beside that of `vllm_connector`, whose pulls are loads from the tier here:

1. Whole chunks of a prompt, or of all tokens, are offered to the tier as the step that computes them is scheduled, and
   once more after the request's end; chunks that the GPU's prefix cache had are offered, too. What finds no room is
   offered again in each later step.
2. A waiting request loads the chunks that follow what the prefix cache has of it, at least one whole chunk. It is
   passed over, and asked for again in the next step, while any of them is still being stored, or loaded by another
   request so that the cache will have it, and while stores of its earlier life run.
3. Blocks are not kept for stores. If a block of an ended request is given to another one before it is stored, or a
   request with stores under way is preempted, the launch waits for these stores.

Source: vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py of the 0.33.0 wheel; equal to recordings.
Simplifies: no synchronous loads, no tiers beyond the host's memory, one KV group.
"""

from __future__ import annotations

from collections.abc import Iterable

from batchsim.base.errors import ScenarioError
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.offload import OffloadConnector, OffloadJob
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Sequence
from batchsim.kv.block_keys import BlockKeys
from batchsim.kv.choice import TailFirstKV
from batchsim.kv.offload_chains import Part, num_chunks
from batchsim.kv.offload_tier import OffloadTier
from batchsim.kv.prefix_cache import BlockHashKV
from batchsim.policies.families.held_back import HeldBack
from batchsim.policies.systems.vllm.offload_config import VllmOffloadConfig
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_connector import VllmConnector

BEING_STORED = "kv_storing"
"""Why a request is passed over whose chunks are still being stored, or loaded by another one."""


class VllmOffload(VllmConnector):
    """The scheduler. `matched` lists, of its latest call, (request, tokens in the prefix cache, tokens to be loaded or
    None: asked for again), `offers` (request, chunks offered, taken in or None: no room, evicted for them)."""

    def __init__(self, config: VllmOffloadConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        if not isinstance(context.connector, OffloadConnector) or not isinstance(context.kv, TailFirstKV | BlockHashKV):
            raise ScenarioError(
                "vllm: KV is offloaded by an OffloadConnector, from blocks that have ids in vLLM's order."
            )
        self._offload = config
        self.offloading = context.connector
        self._tables = context.kv
        self.tier = OffloadTier(
            config.cpu_chunks, config.eviction_policy, config.store_threshold, config.max_tracker_size,
            config.blocks_per_chunk,
        )  # fmt: skip
        self.matched: list[tuple[Sequence, int, int | None]] = []
        self.offers: list[tuple[Sequence, int, int | None, int]] = []
        self._chunk_tokens = config.blocks_per_chunk * context.kv.block_size
        self._offered: dict[Sequence, int] = {}  # chunks of each request that need not be offered again
        self._refused: dict[Sequence, None] = {}  # their last offer found no room
        self._moving: dict[OffloadJob, list[Part]] = {}  # the chunks of all that are under way
        self._stores: dict[Sequence, list[OffloadJob]] = {}  # under way
        self._watched: dict[int, list[OffloadJob]] = {}  # stores of ended requests under way, by the blocks they read
        self._passed_over = HeldBack()
        self._no_room = "kv_blocks"
        self._over: list[tuple[Sequence, int, list[int]]] = []  # ended since the last call: tokens computed, blocks

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        self.offloading.new_call()
        self.matched, self.offers = [], []
        held: dict[Sequence, int] | None = None
        if self._watched or any(self._is_left(*each) for each in self._over):
            held = {seq: len(self._tables.table(seq)) for seq in self.running}
        work = super().schedule(now_ns, drain)
        given = None if held is None else self._given(held)
        flushed = self._in_the_way(work.preempted if isinstance(work, Batch) else (), given)
        if isinstance(work, Batch):
            for seq, computed in self._computed(work):
                self._offer(seq, computed, self._known(seq), self._tables.table(seq))
        if self._over:
            last = self._offer_last()
            flushed += [job for job in last if given is not None and not given.isdisjoint(job.blocks)]
        if flushed:
            self.offloading.flushed = sorted(dict.fromkeys(flushed), key=lambda job: job.number)
        return work

    def _in_the_way(self, preempted: Iterable[Sequence], given: set[int] | None) -> list[OffloadJob]:
        """The stores of `preempted` requests, and those of ended ones that read blocks which the latest call has
        `given`."""
        flushed: list[OffloadJob] = []
        for seq in preempted:
            flushed += self._stores.get(seq, ())
        if given is not None and self._watched:
            for block in given & self._watched.keys():
                flushed += self._watched[block]
        return flushed

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        # While nothing is offered or given back and no copy begins or ends, which a leap ends before, the tier answers
        # as it did.
        if self._refused or self._over or self._watched or not self._offload.offload_prompt_only:
            return False
        if self.stalled or self._pulling or self._hits or self._late:
            return False
        if self.waiting and not self._stays_blocked():
            return False
        return Vllm.repeat(self, batch, now_ns)

    def _stays_blocked(self) -> bool:
        """Whether one more step of decodes leaves the head waiting, for the same reason."""
        if self._blocked is None:
            return False
        head, reason = self._blocked
        if reason != "kv_blocks":
            return reason in ("no_slot", "token_budget")
        # With less of it on the GPU more of it might be loaded, or computed in its place.
        cache = self.cache
        return head in self._apart or not isinstance(cache, BlockHashKV) or cache.growth_spares_hits(self.group)

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        for seq in finished:
            known = seq.num_tokens - seq.num_wasted_tokens
            self._end(seq, max(seq.request.prompt_tokens, known - 1))
        return super().complete(batch, finished, now_ns)

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        self._end(seq, seq.num_computed_tokens)
        self.offloading.give_up(seq, now_ns)
        return super().cancel(seq, now_ns)

    def notice(self) -> None:
        super().notice()
        for job in self.offloading.jobs_noticed.jobs:
            chunks = self._moving.pop(job)
            if job.is_load:
                self.tier.loaded(chunks)
                continue
            self.tier.stored(chunks)
            stores = self._stores[job.seq]
            stores.remove(job)
            if not stores:
                del self._stores[job.seq]
            for block in job.blocks if self._watched else ():
                watching = self._watched.get(block, [])
                if job in watching:
                    watching.remove(job)
                    if not watching:
                        del self._watched[block]

    # ---- loads

    def _pullable(self, seq: Sequence, hit: int) -> int | None:
        beyond = self._in_tier(seq, hit)
        if beyond != 0:
            self.matched.append((seq, hit, beyond))
        if beyond is None:
            self.events += self._passed_over.tried({seq: self._why_later()}, None)
        else:
            self.events += self._passed_over.tried({}, seq)
        return beyond

    def _why_later(self) -> str:
        """Why the request is passed over that was looked up last."""
        return BEING_STORED

    def _in_tier(self, seq: Sequence, hit: int) -> int | None:
        """As `_pullable`: the tokens that the tier has."""
        self._offered[seq] = 0
        if seq in self._stores:
            return None
        size = self._chunk_tokens
        most = seq.num_tokens // size * size
        if most - hit < size:
            return 0
        in_tier = self._of_tier(seq).find(seq, hit // size, most // size)
        beyond = in_tier.stop * size - hit
        if beyond < size:
            return 0
        if in_tier.is_storing or (in_tier.is_loading and self.cache is not None):
            return None
        return beyond

    def _pull(self, seq: Sequence, hit: int, beyond: int) -> bool:
        if not super()._pull(seq, hit, beyond):
            return False
        first, stop = hit // self._chunk_tokens, (hit + beyond) // self._chunk_tokens
        job = self.offloading.new_job(seq, stop - first, is_load=True, blocks=[], num_tokens=beyond)
        self._moving[job] = self.tier.load(seq, first, stop)
        self._offered[seq] = stop
        return True

    # ---- stores

    def _of_tier(self, seq: Sequence) -> OffloadTier:
        """The tier, to which `seq` is known."""
        if not self.tier.knows(seq):
            cache = self.cache if isinstance(self.cache, BlockHashKV) else None
            keys = BlockKeys(seq.request, self.kv.block_size) if cache is None else cache.keys(seq)
            self.tier.begin(seq, keys)
        return self.tier

    def _given(self, held: dict[Sequence, int]) -> set[int]:
        """The blocks that the latest call gave to sequences, of which those running before had `held`."""
        given: set[int] = set()
        for seq in self.running:
            given.update(self._tables.table(seq)[held.get(seq, 0) :])
        for seq, _, _ in self.connector.pulling:
            given.update(self._tables.table(seq))
        return given

    def _computed(self, batch: Batch) -> list[tuple[Sequence, int]]:
        """The sequences of `batch` that may have chunks to offer, in its order, each with its tokens computed once the
        step is over."""
        rows = batch.chunks
        decodes = () if batch.decodes is None else batch.decodes.members
        may_offer = self._refused if self._offload.offload_prompt_only else decodes
        if may_offer:
            chunked = dict(rows)
            rows = [*rows, *((seq, 1) for seq in may_offer if seq in decodes and seq not in chunked)]
        if len(rows) > 1:
            rows = sorted(rows, key=_by_order)
        return [(seq, seq.num_computed_tokens + tokens) for seq, tokens in rows]

    def _known(self, seq: Sequence) -> int:
        """The tokens of `seq` that are not in flight."""
        return seq.num_tokens - int(self._ahead and seq.group is not None and self._is_in_flight(seq))

    def _offer(self, seq: Sequence, computed: int, known: int, table: list[int]) -> OffloadJob | None:
        """Offers the whole chunks of the first `computed` tokens of `seq` that were not; returns their store, if any of
        them is taken in."""
        limit = min(computed, known)
        if self._offload.offload_prompt_only:
            limit = min(limit, seq.request.prompt_tokens)
        first, stop = self._offered.get(seq, 0), limit // self._chunk_tokens
        if first >= stop:
            self._refused.pop(seq, None)
            return None
        taken = self._of_tier(seq).offer(seq, first, stop)
        if taken is None:
            self.offers.append((seq, stop - first, None, 0))
            self._refused[seq] = None
            return None
        count, size = num_chunks(taken.stored), self._offload.blocks_per_chunk
        self.offers.append((seq, stop - first, count, num_chunks(taken.evicted)))
        self._refused.pop(seq, None)
        self._offered[seq] = stop
        if not count:
            return None
        blocks: list[int] = []
        for _, low, high in taken.stored:
            blocks += table[low * size : high * size]
        tokens = count * self._chunk_tokens
        job = self.offloading.new_job(seq, count, is_load=False, blocks=blocks, num_tokens=tokens)
        self._moving[job] = taken.stored
        self._stores.setdefault(seq, []).append(job)
        return job

    def _end(self, seq: Sequence, computed: int) -> None:
        """Notes that `seq`, which still has its blocks, ends with `computed` tokens."""
        table = list(self._tables.table(seq)) if self._is_left(seq, computed) else []
        self._over.append((seq, computed, table))
        for job in self._stores.get(seq, ()):
            self._watch(job)

    def _watch(self, job: OffloadJob) -> None:
        for block in job.blocks:
            self._watched.setdefault(block, []).append(job)

    def _is_left(self, seq: Sequence, computed: int, table: list[int] | None = None) -> bool:
        """Whether `seq`, which has ended with `computed` tokens, may have chunks that were not offered."""
        limit = min(computed, seq.request.prompt_tokens) if self._offload.offload_prompt_only else computed
        return limit // self._chunk_tokens > self._offered.get(seq, 0)

    def _offer_last(self) -> list[OffloadJob]:
        """Offers what is left of the requests that have ended; returns their stores."""
        jobs: list[OffloadJob] = []
        over, self._over = sorted(self._over, key=lambda each: each[0].request.id), []
        for seq, computed, table in over:
            known = seq.num_tokens - seq.num_wasted_tokens
            job = self._offer(seq, min(computed, len(table) * self.kv.block_size), known, table)
            if job is not None:
                self._watch(job)
                jobs.append(job)
        for seq, _, _ in over:
            self.tier.end(seq)
            self._refused.pop(seq, None)
            self._passed_over.forget(seq)
            self._offered.pop(seq, None)
        return jobs


def _by_order(row: tuple[Sequence, int]) -> int:
    return row[0].order
