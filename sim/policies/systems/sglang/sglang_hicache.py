"""SGLang 0.5.23 with HiCache (`--enable-hierarchical-cache`): KV in the memory of the host below the radix cache.

Rule, beside that of `sglang`; what is stored, evicted and found is `kv/hicache.py`'s:

1. What a prefix has on the host, beyond the GPU, counts as tokens to be allocated as a request is admitted, and not as
   tokens to be computed. It is loaded once the request is, unless it has fewer than 10 tokens: then these are computed,
   if the request still fits.
2. All loads of a batch are one copy, which runs beside its step, layer by layer.
3. Nodes to be stored are gathered, and copied together once the results of a step are processed, or at the next call
   where there is no step. What is over is asked at each call of the scheduler, before anything else.
4. `write_back`: an eviction waits for the copy of what it evicts, and all that is launched with it.
5. `lpm` and `shortest-prefill-first` count what is on the host as cached.

Source: python/sglang/srt/managers/{scheduler,schedule_policy}.py and mem_cache/unified_radix_cache.py of the 0.5.23
wheel.
Simplifies: no storage below the host, drafts, items or adapters; a cancel stores at once what it puts into the tree. A
decode that, alone, lacks a page which is locked for a store waits for that, where SGLang aborts it.
"""

from __future__ import annotations

from batchsim.base.errors import ScenarioError
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.host_copies import HostCopies
from batchsim.kernel.host_link import LayerLoad
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Sequence
from batchsim.kv.hicache import HiCacheKV
from batchsim.kv.radix_tree import Node
from batchsim.policies.systems.sglang.prefill_adder import Prefill, PrefillAdder
from batchsim.policies.systems.sglang.sglang import Sglang
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.policies.systems.sglang.token_budget import PrefillBudget


class HiCacheAdder(PrefillAdder):
    """A PrefillAdder that loads. `loading`: the nodes with which the loads of the latest batch end, by number."""

    def set_tier(self, hicache: HiCacheKV) -> None:
        """Names the cache from whose host it loads."""
        self._hicache = hicache
        self.loading: dict[int, Node] = {}

    def make(self, ratio: float, now_ns: int) -> Prefill:
        self.loading = {}
        return super().make(ratio, now_ns)

    def _placed(self, seq: Sequence, lacking: int, budget: PrefillBudget, made: Prefill) -> tuple[str, int, int]:
        hicache, limit = self._hicache, seq.num_tokens - 1
        on_host = hicache.beyond(seq, limit)
        obstacle, n = self._fitting(seq, lacking, budget, made, on_host)
        if obstacle or not on_host:
            return obstacle, n, 0
        number = hicache.load(seq, limit)
        if not number:
            obstacle, n = self._fitting(seq, lacking, budget, made)
            return obstacle, n, 0
        self.loading[number] = hicache.loading(seq)
        return "", n, on_host


class SglangWithHiCache(Sglang):
    """The scheduler."""

    evidence = "hand-derived"

    def __init__(self, config: SglangConfig, context: PolicyContext) -> None:
        if not isinstance(context.connector, HostCopies) or not isinstance(context.kv, HiCacheKV):
            raise ScenarioError("sglang: HiCache needs a HiCacheKV and HostCopies.")
        self.hicache = context.kv
        self.connector = context.connector
        self._completes_ns: int | None = None  # while the results of a step are processed: now
        self._storing: dict[int, list[Node]] = {}  # by the number of the copy
        self._loading: list[tuple[LayerLoad, dict[int, Node]]] = []
        super().__init__(config, context)

    def _new_adder(self) -> HiCacheAdder:
        slots = self._most_running()
        adder = HiCacheAdder(self.config, self.kv, self._cache, self.waiting, self.batch, slots=slots, loras=self.loras)
        adder.set_tier(self.hicache)
        self._loads_of = adder
        return adder

    def notice(self) -> None:
        """Does nothing: what is over is asked by `schedule`."""

    def leapt(self, batches: list[Batch]) -> None:
        """Does nothing: no launch is a look at copies."""

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        responses = super().cancel(seq, now_ns)
        self._submit(now_ns)
        return responses

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        self._take_over(now_ns)
        work = super().schedule(now_ns, drain)
        if isinstance(work, Idle):
            self._submit(now_ns)
            if self._take_over(now_ns):
                work = super().schedule(now_ns, drain)
        host = self.hicache.host
        still_until_ns = now_ns
        if host.written_back:
            page = self.kv.block_size
            parts = [(owner, pages * page, pages) for owner, pages in host.written_back]
            host.written_back = []
            still_until_ns = self.connector.write_back(parts, now_ns)
        if isinstance(work, Batch):
            return work
        return self._idle(work, now_ns, still_until_ns)

    def _idle(self, idle: Idle, now_ns: int, still_until_ns: int) -> Idle:
        """`idle`, until the next copy is over, or the host goes on, where that is sooner."""
        copies = self.connector
        if copies.is_busy and self.running:
            copies.wait(now_ns)
        times = [at_ns for at_ns in (idle.until_ns, copies.next_end_ns) if at_ns is not None]
        if still_until_ns > now_ns:
            times.append(still_until_ns)
        return Idle(min(times)) if times else idle

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        if self.connector.is_busy:
            return False
        if self.hicache.host.writes_back:
            needed = max(len(self.batch), self.batch.blocks_due())
            if needed > self.hicache.num_unused:
                return False
        return super().repeat(batch, now_ns)

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        self._completes_ns = now_ns
        responses = super().complete(batch, finished, now_ns)
        self._completes_ns = None
        if self._ahead:
            self._submit(now_ns)
        return responses

    def _take_in_last(self) -> bool:
        # Of a prompt in the making SGLang inserts a part as it schedules the next, behind what it stores here.
        if self._completes_ns is not None:
            self._submit(self._completes_ns)
        return super()._take_in_last()

    def _work(self, made: Prefill, preempted: list[Sequence]) -> Batch:
        work = super()._work(made, preempted)
        if made.loaded:
            pages = sum([tokens for _, tokens in made.loaded]) // self.kv.block_size
            work.load = self.connector.load(made.loaded, pages)
            self._loading.append((work.load, self._loads_of.loading))
        return work

    def _pages_will_be_free(self) -> bool:
        return self.connector.is_busy

    def _submit(self, now_ns: int) -> None:
        """Begins to copy the nodes gathered."""
        hicache, page = self.hicache, self.kv.block_size
        if not hicache.to_store:
            return
        to_store, hicache.to_store = hicache.to_store, []
        for node, request_id in to_store:
            self.connector.gather((request_id, node.num_pages * page, node.num_pages))
        number = self.connector.submit(now_ns)
        assert number is not None
        self._storing[number] = [node for node, _ in to_store]

    def _take_over(self, now_ns: int) -> bool:
        """Unlocks what is copied by now; returns whether there was any."""
        stored, loaded = self.connector.called(now_ns)
        for number in stored:
            for node in self._storing.pop(number):
                self.hicache.stored(node)
        for load in loaded:
            first, nodes = self._loading.pop(0)
            assert first is load
            for number, node in nodes.items():
                self.hicache.loaded(node, number)
        return bool(stored or loaded)
