"""KV kept in the memory of the host, in chunks of some GPU blocks each, as vLLM's offloading manager keeps it.

A chunk has the key of its last block, which stands for all tokens up to there. It is being stored from the moment it is
taken in, then ready; while requests load it, it is pinned. Only chunks that are ready and not pinned are evicted.
Chunks that follow each other in a prompt are kept as runs (`offload_chains`), and work costs a step for each of these.
Source: vllm/v1/kv_offload/cpu/manager.py of the 0.33.0 wheel.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from batchsim.kv.block_keys import BlockKeys
from batchsim.kv.offload_chains import STORING, Chains, ChunkRun, Part, num_chunks
from batchsim.kv.offload_order import Access, ArcOrder, EvictionOrder, LruOrder


@dataclass(slots=True)
class Taken:
    """What a tier made of an offer: the chunks to be stored, in order, and those evicted for them, in this order with
    the last one of each part first."""

    stored: list[Part]
    evicted: list[Part]


@dataclass(slots=True)
class Found:
    """The chunks of a request before number `stop` that are there without a gap, from one asked for on, and whether any
    of them is being stored, or loaded by another request."""

    stop: int
    is_storing: bool
    is_loading: bool


class OfferCounts:
    """How often each key was offered, of at most `size` keys; the one not offered for longest is forgotten first, but
    none of the offer at hand."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._counts: dict[int, int] = {}

    def count(self, keys: list[int]) -> None:
        """Counts one offer of `keys`."""
        counts = self._counts
        known = [key for key in keys if key in counts]
        for key in known:
            counts[key] = counts.pop(key) + 1
        others = len(counts) - len(known)
        for key in keys:
            if key in counts:
                continue
            if len(counts) >= self._size:
                if not others:
                    continue
                del counts[next(iter(counts))]
                others -= 1
            counts[key] = 1

    def of(self, key: int) -> int:
        """How often `key` was offered, as far as it is remembered."""
        return self._counts.get(key, 0)


class OffloadTier:
    """`num_places` places for chunks of `chunk_blocks` blocks. `store_threshold`: at which of its offers a chunk is
    taken in; 0 and 1: at the first. Of `max_tracker_size` keys the offers are counted.

    Requests are named by any hashable object. `num_used` counts chunks taken in, ready or not, `num_evictable` those
    that are ready and not pinned, `num_storing` those not ready.
    """

    def __init__(
        self,
        num_places: int,
        eviction_policy: Literal["lru", "arc"] = "lru",
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
        chunk_blocks: int = 1,
    ) -> None:
        if num_places < 1:
            raise ValueError(f"a tier of {num_places} chunks holds nothing: give it at least 1")
        self.num_places = num_places
        self.num_used = self.num_evictable = self.num_storing = 0
        self._chains = Chains(chunk_blocks)
        self._order: EvictionOrder = LruOrder() if eviction_policy == "lru" else ArcOrder(num_places, self._chains.keys)
        self._threshold = store_threshold
        self._counts = OfferCounts(max_tracker_size) if store_threshold >= 2 else None
        self._accesses: dict[Hashable, Access] = {}

    def knows(self, request: Hashable) -> bool:
        """Whether `request` has begun and not ended."""
        return request in self._accesses

    def begin(self, request: Hashable, keys: BlockKeys) -> None:
        """`request`, whose blocks have `keys`, is about to ask for chunks or to offer them."""
        self._accesses[request] = Access(self._chains.path(keys))

    def find(self, request: Hashable, first: int, stop: int) -> Found:
        """What is there of the chunks `first` to `stop` - 1 of `request`, up to the first one that is not."""
        is_storing = is_loading = False
        at = first
        for chain, low, high in self._accesses[request].path.between(first, stop):
            if low > at:
                break
            for run in chain.overlapping(low, high):
                if run.start > at:
                    break
                is_storing = is_storing or run.loads == STORING
                is_loading = is_loading or run.loads > 0
                at = min(run.stop, high)
        return Found(at, is_storing, is_loading)

    def offer(self, request: Hashable, first: int, stop: int) -> Taken | None:
        """Offers the chunks `first` to `stop` - 1 of `request`.

        The ones that are not there and have been offered often enough are taken in, all or none; None: there is no
        room.
        """
        access, order = self._accesses[request], self._order
        parts = access.path.between(first, stop)
        ready, new = self._sorted_out(parts)
        if new:
            order.missed(access, new)
        fresh, others = _fresh(access, ready), _fresh(access, new)
        if fresh or others:
            order.seen(access, fresh)
        if ready:
            order.reused(access, ready)
        if not new:
            return Taken([], [])
        evicted: list[Part] = []
        count = num_chunks(new)
        lacking = count - (self.num_places - self.num_used)
        if lacking > 0:
            chosen = order.evict(lacking, parts) if lacking <= self.num_evictable else None
            if chosen is None:
                return None
            evicted = chosen
            for part in evicted:
                self._drop(part)
        for chain, low, high in new:
            order.insert(access, chain.add(low, high, STORING))
        self.num_used += count
        self.num_storing += count
        return Taken(new, evicted)

    def stored(self, parts: list[Part]) -> None:
        """The chunks of `parts`, which were taken in together, are ready."""
        for chain, low, high in parts:
            for run in chain.within(low, high):
                run.loads = 0
        count = num_chunks(parts)
        self.num_storing -= count
        self.num_evictable += count

    def load(self, request: Hashable, first: int, stop: int) -> list[Part]:
        """Pins the chunks `first` to `stop` - 1 of `request`, all ready, which it loads; returns them for `loaded`."""
        access = self._accesses[request]
        parts = access.path.between(first, stop)
        self._pin(parts)
        if fresh := _fresh(access, parts):
            self._order.seen(access, fresh)
        self._order.reused(access, parts)
        return parts

    def _pin(self, parts: list[Part]) -> None:
        for chain, low, high in parts:
            for run in chain.within(low, high):
                if not run.loads:
                    self.num_evictable -= run.stop - run.start
                run.loads += 1

    def loaded(self, parts: list[Part]) -> None:
        """Ends what `load` began."""
        for chain, low, high in parts:
            for run in chain.within(low, high):
                run.loads -= 1
                if not run.loads:
                    self.num_evictable += run.stop - run.start

    def end(self, request: Hashable) -> None:
        """`request` has ended and was offered for the last time."""
        access = self._accesses.pop(request, None)
        if access is None:
            return
        runs: list[ChunkRun] = []
        for first, stop in access.seen.rows:
            for chain, low, high in access.path.between(first, stop):
                for run in chain.within(low, high):
                    last = runs[-1] if runs else run
                    if last.chain is chain and last.stop == run.start and last.loads == run.loads:
                        self._order.drop(run)
                        chain.runs.remove(run)
                        last.stop = run.stop
                    else:
                        runs.append(run)
        self._order.ended(access, runs)
        self._chains.leave(access.path)

    def _sorted_out(self, parts: list[Part]) -> tuple[list[Part], list[Part]]:
        """The offered chunks that are ready, and the missing ones that were offered often enough."""
        ready, new = list[Part](), list[Part]()
        for chain, low, high in parts:
            at = low
            for run in chain.overlapping(low, high):
                if run.start > at:
                    new.append((chain, at, run.start))
                at = min(run.stop, high)
                if run.loads != STORING:
                    ready.append((chain, max(run.start, low), at))
            if at < high:
                new.append((chain, at, high))
        if (counts := self._counts) is not None:
            counts.count([key for part in parts for key in self._chains.keys(part)])
            often = [
                (part[0], number, number + 1)
                for part in new
                for number, key in enumerate(self._chains.keys(part), part[1])
                if counts.of(key) >= self._threshold
            ]
            new = often
        return ready, new

    def _drop(self, part: Part) -> None:
        chain, low, high = part
        for run in chain.within(low, high):
            self._order.drop(run)
            chain.runs.remove(run)
        self.num_used -= high - low
        self.num_evictable -= high - low
        self._chains.forget_if_unused(chain)

    def check(self) -> None:
        """AssertionError unless the counts agree with the chunks, and every row of keys has one chain. O(runs)."""
        runs = self._chains.runs([access.path for access in self._accesses.values()])
        used = sum([run.stop - run.start for run in runs])
        assert used == self.num_used <= self.num_places, "more chunks than places, or lost ones"
        storing = sum([run.stop - run.start for run in runs if run.loads == STORING])
        assert storing == self.num_storing, "wrong count of chunks being stored"
        evictable = sum([run.stop - run.start for run in runs if not run.loads])
        assert evictable == self.num_evictable, "wrong count of evictable chunks"
        self._order.check(list(self._accesses.values()), runs)


def _fresh(access: Access, parts: list[Part]) -> list[Part]:
    """Notes `parts`; returns the parts that were not seen before with the same request."""
    return [(chain, *row) for chain, low, high in parts for row in access.seen.add(low, high)]
