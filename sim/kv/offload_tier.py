"""KV kept in the memory of the host, in chunks of some GPU blocks each, as vLLM's offloading manager keeps it.

A chunk has the key of its last block, which stands for all tokens up to there. It is being stored from the moment it is
taken in, then ready; while requests load it, it is pinned. Only chunks that are ready and not pinned are evicted.
Source: vllm/v1/kv_offload/cpu/manager.py of the 0.33.0 wheel.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from batchsim.kv.offload_order import Access, ArcOrder, EvictionOrder, LruOrder

STORING = -1
"""The count of loads of a chunk that is not ready."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What a tier made of an offer: the keys of the chunks to be stored, in order, and those evicted for them."""

    stored: list[int]
    evicted: list[int]


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
    """`num_chunks` places for chunks. `store_threshold`: at which of its offers a chunk is taken in; 0 and 1: at the
    first. Of `max_tracker_size` keys the offers are counted.

    Requests are named by any hashable object. `num_evictable` counts chunks that are ready and not pinned,
    `num_storing` those not ready.
    """

    def __init__(
        self,
        num_chunks: int,
        eviction_policy: Literal["lru", "arc"] = "lru",
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
    ) -> None:
        if num_chunks < 1:
            raise ValueError(f"a tier of {num_chunks} chunks holds nothing: give it at least 1")
        self.num_chunks = num_chunks
        self.num_evictable = self.num_storing = 0
        self._order: EvictionOrder = LruOrder() if eviction_policy == "lru" else ArcOrder(num_chunks)
        self._threshold = store_threshold
        self._counts = OfferCounts(max_tracker_size) if store_threshold >= 2 else None
        self._loads: dict[int, int] = {}  # of each chunk there is: by how many it is being loaded, or STORING
        self._accesses: dict[Hashable, Access] = {}

    @property
    def num_used(self) -> int:
        """Chunks taken in, ready or not."""
        return len(self._loads)

    def has(self, key: int) -> bool:
        """Whether the chunk of `key` is there, ready or not."""
        return key in self._loads

    def is_ready(self, key: int) -> bool:
        """Whether the chunk of `key` is there and stored."""
        return self._loads.get(key, STORING) != STORING

    def is_being_loaded(self, key: int) -> bool:
        """Whether any request loads the chunk of `key`."""
        return self._loads.get(key, 0) > 0

    def offer(self, request: Hashable, keys: list[int], first: int) -> Taken | None:
        """Offers the chunks `keys` of `request`, which are its chunks from number `first` on.

        The ones that are not there and have been offered often enough are taken in, all or none; None: there is no
        room.
        """
        if self._counts is not None:
            self._counts.count(keys)
        loads, counts = self._loads, self._counts
        ready = [key for key in keys if self.is_ready(key)]
        new = [key for key in keys if key not in loads and (counts is None or counts.of(key) >= self._threshold)]
        access = self._access(request)
        missed = [key for key in new if key not in access.missed]
        if missed:
            self._order.missed(missed)
            access.missed.update(missed)
        self._note(access, {*ready, *new}, keys, first)
        access.reused.update(key for key in ready if key not in access.inserted)
        if not new:
            return Taken([], [])
        evicted: list[int] = []
        lacking = len(new) - (self.num_chunks - self.num_used)
        if lacking > 0:
            kept = set(keys)
            is_short = lacking > self.num_evictable
            chosen = None if is_short else self._order.evict(lacking, lambda key: not loads[key] and key not in kept)
            if chosen is None:
                return None
            evicted = chosen
            for key in evicted:
                del loads[key]
            self.num_evictable -= lacking
        self._order.insert(access, new)
        loads.update(dict.fromkeys(new, STORING))
        access.inserted.update(new)
        self.num_storing += len(new)
        return Taken(new, evicted)

    def stored(self, keys: list[int]) -> None:
        """The chunks `keys`, which were taken in together, are ready."""
        for key in keys:
            self._loads[key] = 0
        self.num_storing -= len(keys)
        self.num_evictable += len(keys)

    def load(self, request: Hashable, keys: list[int], first: int) -> None:
        """Pins the chunks `keys`, all ready, which `request` loads: its chunks from number `first` on."""
        loads = self._loads
        for key in keys:
            self.num_evictable -= not loads[key]
            loads[key] += 1
        access = self._access(request)
        self._note(access, set(keys), keys, first)
        access.reused.update(key for key in keys if key not in access.inserted)

    def loaded(self, keys: list[int]) -> None:
        """Ends what `load` began."""
        for key in keys:
            self._loads[key] -= 1
            self.num_evictable += not self._loads[key]

    def end(self, request: Hashable) -> None:
        """`request` has ended and was offered for the last time."""
        access = self._accesses.pop(request, None)
        if access is not None:
            self._order.ended(access)

    def _access(self, request: Hashable) -> Access:
        access = self._accesses.get(request)
        if access is None:
            access = self._accesses[request] = Access()
        return access

    def _note(self, access: Access, seen: set[int], keys: list[int], first: int) -> None:
        """Notes an access to those of `keys` that are `seen` and were not before with the same request."""
        numbers = access.numbers
        fresh = {key: number for number, key in enumerate(keys, first) if key in seen and key not in numbers}
        if fresh:
            numbers.update(fresh)
            self._order.seen(access, fresh)

    def check(self) -> None:
        """AssertionError unless the counts agree with the chunks. O(chunks)."""
        loads = list(self._loads.values())
        assert len(loads) <= self.num_chunks, "more chunks than places"
        assert loads.count(STORING) == self.num_storing, "wrong count of chunks being stored"
        assert loads.count(0) == self.num_evictable, "wrong count of evictable chunks"
