"""vLLM 0.33 with LMCache 0.5.6 in its process (LMCacheConnectorV1), KV in the memory of the host.

Rule, beside that of `vllm`; what the host keeps is `kv/chunk_store.py`'s:

1. A waiting request is looked up with all its tokens as it first comes to be admitted, and not again until it is. What
   the host has of it beyond the GPU's prefix cache counts as computed, but for its last token.
2. It is loaded in whole chunks before the step, which waits for it; the step after waits for that.
3. A step that computes prompts then stores their whole chunks that the lookup did not find and earlier steps did not
   store, and waits for that, too. Nothing is stored of a request once a step had a single token of it, but for its
   first step: neither its answer, nor what is computed again after a preemption.
4. Stores are entered with the results of the step. What the lookup pinned is let go then, of loads before all stores,
   else before those of its request: requests that are new first, then running ones, then ones that come back.

5. Layer by layer (`num_layers`) loads run beside the step, each of whose layers waits for its own part, and so do
   stores, each part once its layer is computed; the step ends with the last of them. Of what a step is to store, what
   is there already is left out, and places are taken as the step begins, while what it and steps in flight looked up is
   pinned. What found no place is not copied.

Source: lmcache/integration/vllm/vllm_v1_adapter.py and lmcache/v1/cache_engine.py of the 0.5.6 wheel.
Simplifies: no disks or remote stores, or asynchronous loads; a store of whole chunks that finds no room takes its time
all the same; all loads of a step are one copy, and all stores. One that is cancelled lets go of its chunks at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.host_link import LayerCopies, OffloadLink, StepCopies
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Sequence
from batchsim.kv.block_keys import BlockKeys
from batchsim.kv.chunk_store import ChunkStore
from batchsim.policies.systems.vllm.lmcache_config import VllmLmcacheConfig
from batchsim.policies.systems.vllm.vllm import Vllm


@dataclass(slots=True, eq=False)
class Tracked:
    """What LMCache knows of a request that was admitted: the keys of its chunks, the tokens that it takes to be stored,
    those known as it was last admitted, and whether it decodes."""

    keys: BlockKeys
    stored_tokens: int = 0
    known_tokens: int = 0
    decodes: bool = False


@dataclass(slots=True, eq=False)
class Work:
    """What a step does for a request: `found` chunks are pinned, and of these some loaded or none; chunks `first` to
    `stop` - 1 are stored, or layer by layer those `reserved`. `is_new`: it is the first step of the request."""

    keys: BlockKeys
    found: int = 0
    is_new: bool = False
    is_load: bool = False
    first: int = 0
    stop: int = 0
    reserved: list[int] = field(default_factory=list[int])


class VllmLmcache(Vllm):
    """The scheduler. `store` is what the host has."""

    evidence = "hand-derived"

    def __init__(self, config: VllmLmcacheConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        self._chunk, self._layers = config.chunk_size, config.num_layers
        self.store = ChunkStore(config.cpu_chunks)
        self._loading = OffloadLink(config.copy_ns, config.load_ns)
        self._storing = OffloadLink(config.copy_ns, config.store_ns)
        self._looked_up: dict[Sequence, tuple[BlockKeys, int]] = {}  # waiting: keys, chunks found
        self._tracked: dict[Sequence, Tracked] = {}
        self._on_gpu = 0  # tokens in the prefix cache of the latest one looked up
        self._begun: dict[Sequence, Work] = {}  # admitted by this call
        self._loaded: list[tuple[Sequence, int]] = []
        self._num_loaded = 0
        self._works: dict[Batch, list[Work]] = {}  # of steps whose results are not there

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        batch = super().schedule(now_ns, drain)
        if isinstance(batch, Batch) and batch.chunks:
            self._note_work(batch)
        return batch

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        works = self._works.pop(batch, [])
        for work in works:
            if work.is_load or self._layers:
                self.store.unpin(work.keys, work.found)
        for work in works:
            if self._layers:
                self.store.enter(work.reserved)
                continue
            if not work.is_load:
                self.store.unpin(work.keys, work.found)
            self.store.store(work.keys, work.first, work.stop)
        responses = super().complete(batch, finished, now_ns)
        for seq in finished:
            self._lose(seq)
        return responses

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        self._lose(seq)
        return super().cancel(seq, now_ns)

    # ---- admission

    def _in_kv(self, seq: Sequence, hit: int) -> int:
        if seq not in self._looked_up:
            tracked = self._tracked.get(seq)
            keys = BlockKeys(seq.request, self._chunk) if tracked is None else tracked.keys
            self._looked_up[seq] = keys, self.store.find(keys, seq.num_tokens // self._chunk)
        self._on_gpu = hit
        _, hits = self._looked_up[seq]
        return max(hit, min(hits * self._chunk, seq.num_tokens - 1))

    def _start(self, seq: Sequence, computed: int) -> None:
        super()._start(seq, computed)
        keys, hits = self._looked_up.pop(seq)
        is_new = seq not in self._tracked
        tracked = self._tracked.setdefault(seq, Tracked(keys))
        tracked.stored_tokens, tracked.known_tokens = hits * self._chunk, seq.num_tokens
        is_load = computed > self._on_gpu
        self._begun[seq] = Work(keys, hits, is_new, is_load)
        if is_load:
            self._loaded.append((seq, computed - self._on_gpu))
            self._num_loaded += hits - self._on_gpu // self._chunk

    def _preempt(self, victim: Sequence, by: Sequence) -> None:
        tracked = self._tracked[victim]
        tracked.decodes = tracked.decodes or victim.num_computed_tokens > tracked.known_tokens
        super()._preempt(victim, by)

    # ---- copies

    def _note_work(self, batch: Batch) -> None:
        """Settles what `batch` loads and stores."""
        works: list[Work] = []
        stored: list[tuple[Sequence, int]] = []
        rows = [(self._begun.get(seq) or Work(self._tracked[seq].keys), seq, n) for seq, n in batch.chunks]
        for work, seq, n in sorted(rows, key=_new_first):
            tracked = self._tracked[seq]
            tracked.decodes = tracked.decodes or (n == 1 and not work.is_new)
            self._note_stores(work, tracked, seq.num_computed_tokens + n)
            chunks = work.stop - work.first
            if self._layers:
                work.reserved = self.store.reserve(work.keys, work.first, work.stop)
                chunks = len(work.reserved)
            if chunks:
                stored.append((seq, chunks * self._chunk))
            if work.found or chunks:
                works.append(work)
        if works:
            self._works[batch] = works
        if self._loaded or stored:
            num_stored = sum([tokens for _, tokens in stored]) // self._chunk
            copies = self._loaded, stored, self._num_loaded, num_stored, self._loading, self._storing
            batch.load = LayerCopies(*copies, self._layers) if self._layers else StepCopies(*copies, in_turn=True)
        self._begun, self._loaded, self._num_loaded = {}, [], 0

    def _note_stores(self, work: Work, tracked: Tracked, computed: int) -> None:
        """Has the chunks stored that are whole with the first `computed` tokens, if any are to be."""
        size, before = self._chunk, tracked.stored_tokens
        if tracked.decodes or (before and computed < (before // size + 1) * size):
            return
        work.first, work.stop = before // size, computed // size
        tracked.stored_tokens = work.stop * size

    def _lose(self, seq: Sequence) -> None:
        """Forgets `seq`, which ends."""
        self._tracked.pop(seq, None)
        keys, hits = self._looked_up.pop(seq, (None, 0))
        if keys is not None:
            self.store.unpin(keys, hits)


def _new_first(row: tuple[Work, Sequence, int]) -> bool:
    return not row[0].is_new
