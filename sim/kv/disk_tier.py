"""KV kept in the memory of the host with a disk below it, as vLLM's tiering manager keeps it with its file system.

1. What was stored in the host is copied on to the disk, and cannot be evicted until that was noticed. The disk gives
   nothing up; what it has is not written again.
2. A lookup of a chunk that the host lacks asks the disk. The answer is there at the scheduler's next call, and stays as
   it was for all requests that ask, until all that did have ended. Until then the lookup says: later; it goes on to the
   chunks behind.
3. For a chunk that the disk has, the host makes room at once, one chunk after the other, evicting any but that chunk,
   and the lookup says: later, until it is there. Without room the lookup ends before it.
4. What a call asks the disk for on behalf of one request is one copy. Copies that are over are noticed at a call's
   first lookup, or before its first offer; after a call with an offer only before the next offer, or the call behind.

Source: vllm/v1/kv_offload/tiering/manager.py, async_lookup.py and fs/manager.py of the 0.32.0 wheel.
Simplifies: one disk, no `store_threshold`, no backpressure; the disk always answers by the next call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Literal

from batchsim.kv.offload_chains import STORING, Part
from batchsim.kv.offload_tier import Found, OffloadTier, Taken

MOST_FETCHES = 100
"""How often a request may have each chunk fetched, on average, while no step runs; more is taken to have no end."""


class Lookup:
    """Whether a chunk is on the disk, None while that is not known; `requests` asked and have not ended."""

    __slots__ = ("answer", "requests")

    def __init__(self) -> None:
        self.answer: bool | None = None
        self.requests: dict[Hashable, None] = {}


class DiskTier(OffloadTier):
    """`on_disk` has the keys of the chunks there. `to_write` and `to_read` are copies that are still to be asked for:
    the chunks, for the latter by request. `fetched` counts chunks by request, since it was cleared.
    `awaits_disk`: whether the latest lookup said later because of the disk."""

    def __init__(self, num_places: int, eviction_policy: Literal["lru", "arc"] = "lru", chunk_blocks: int = 1) -> None:
        super().__init__(num_places, eviction_policy, chunk_blocks=chunk_blocks)
        self.on_disk: set[int] = set()
        self.to_write: list[list[Part]] = []
        self.to_read: dict[Hashable, list[Part]] = {}
        self.fetched: dict[Hashable, int] = {}
        self.awaits_disk = False
        self._coming: set[int] = set()  # keys of chunks on their way from the disk
        self._loading: Counter[int] = Counter()  # how many requests load them, by key
        self._lookups: dict[int, Lookup] = {}
        self._asked: list[int] = []  # in this call
        self._answers: dict[int, bool] = {}  # to what the call before asked
        self._by_request: dict[Hashable, dict[int, None]] = {}
        self._over: list[tuple[list[Part], bool]] = []  # copies that are over, not noticed
        self._has_noticed = False  # before an offer of this call

    @property
    def is_asking(self) -> bool:
        """Whether the disk was asked for chunks, and the answers are not there."""
        return bool(self._answers or self._asked)

    @property
    def has_unnoticed(self) -> bool:
        """Whether copies are over that were not noticed."""
        return bool(self._over)

    def new_call(self, over: list[tuple[list[Part], bool]]) -> None:
        """The scheduler is called; the copies of `over`, each with whether it is from the disk, are over since."""
        for key, answer in self._answers.items():
            lookup = self._lookups[key]
            if lookup.requests:
                lookup.answer = answer
            else:
                del self._lookups[key]
        self._answers = {}
        for parts, is_load in over:
            if not is_load:
                self.on_disk.update(self.keys_of(parts))
        self._over += over
        if not self._has_noticed:
            self._notice()
        self._has_noticed = False

    def passed(self) -> None:
        """Calls without lookups and offers were left out."""
        self._has_noticed = False

    def call_over(self) -> None:
        """The disk is asked for what this call wants to know."""
        self._answers = {key: key in self.on_disk for key in self._asked}
        self._asked = []

    def forget(self, request: Hashable) -> None:
        """`request` has ended, and its stores are over."""
        for key in self._by_request.pop(request, ()):
            lookup = self._lookups[key]
            del lookup.requests[request]
            if not lookup.requests and key not in self._answers:
                del self._lookups[key]

    def keys_of(self, parts: list[Part]) -> list[int]:
        """The keys of the chunks of `parts`, in order."""
        return [key for part in parts for key in self._chains.keys(part)]

    def find(self, request: Hashable, first: int, stop: int) -> Found:
        at, later, is_loading = first, False, False
        self.awaits_disk = False
        for chain, low, high in self._accesses[request].path.between(first, stop):
            number, i, runs = low, 0, chain.overlapping(low, high)
            while number < high:
                if i == len(runs) or runs[i].start > number:
                    end = high if i == len(runs) else runs[i].start
                    asked, goes_on = self._look_below(request, (chain, number, end))
                    if asked > number:
                        later = self.awaits_disk = True
                    if not goes_on:
                        return Found(stop if later else at, later, is_loading)
                    number = at = asked
                    if self.num_used == self.num_places:  # others may have been evicted
                        i, runs = 0, chain.overlapping(number, high)
                    continue
                end = min(runs[i].stop, high)
                if runs[i].loads == STORING:
                    later = True
                    if self._coming and not self.awaits_disk:
                        self.awaits_disk = self._has_any(self._coming, (chain, number, end))
                elif self._loading and not is_loading:
                    is_loading = self._has_any(self._loading, (chain, number, end))
                number = at = end
                i += 1
        return Found(stop if later else at, later, is_loading)

    def _look_below(self, request: Hashable, part: Part) -> tuple[int, bool]:
        """Asks the disk for chunks that the host lacks, and fetches what it has. Returns (the number of the first chunk
        that it lacks, or of one behind which others may have been evicted; whether the lookup goes on there)."""
        number = part[1]
        for key in self._chains.keys(part):
            answer = self._ask(request, key)
            if answer is False:
                return number, False
            if answer:
                places = self.num_places - self.num_used
                if not self._fetch(request, number):
                    return number, False
                if not places:
                    return number + 1, True
            number += 1
        return number, True

    def offer(self, request: Hashable, first: int, stop: int) -> Taken | None:
        if not self._has_noticed:
            self._notice()
            self._has_noticed = True
        return super().offer(request, first, stop)

    def stored(self, parts: list[Part]) -> None:
        super().stored(parts)
        self._pin(parts)
        self.to_write.append(parts)

    def load(self, request: Hashable, first: int, stop: int) -> list[Part]:
        parts = super().load(request, first, stop)
        self._loading.update(self.keys_of(parts))
        return parts

    def loaded(self, parts: list[Part]) -> None:
        super().loaded(parts)
        for key in self.keys_of(parts):
            self._loading[key] -= 1
            if not self._loading[key]:
                del self._loading[key]

    def _has_any(self, keys: set[int] | Counter[int], part: Part) -> bool:
        return any(key in keys for key in self._chains.keys(part))

    def _ask(self, request: Hashable, key: int) -> bool | None:
        """Whether the disk has a chunk, as far as that is known."""
        lookup = self._lookups.get(key)
        if lookup is None:
            lookup = self._lookups[key] = Lookup()
            self._asked.append(key)
        lookup.requests[request] = None
        self._by_request.setdefault(request, {})[key] = None
        return lookup.answer

    def _fetch(self, request: Hashable, number: int) -> bool:
        """Makes room in the host for a chunk that is to come from the disk; returns whether there is any."""
        taken = OffloadTier.offer(self, request, number, number + 1)
        if taken is None:
            return False
        parts = self.to_read.setdefault(request, [])
        for part in taken.stored:
            if parts and parts[-1][0] is part[0] and parts[-1][2] == part[1]:
                parts[-1] = part[0], parts[-1][1], part[2]
            else:
                parts.append(part)
        self._coming.update(self.keys_of(taken.stored))
        self.fetched[request] = self.fetched.get(request, 0) + 1
        return True

    def _notice(self) -> None:
        for parts, is_load in self._over:
            if is_load:
                OffloadTier.stored(self, parts)
                self._coming.difference_update(self.keys_of(parts))
            else:
                OffloadTier.loaded(self, parts)
        self._over = []

    def check(self) -> None:
        super().check()
        users = {(key, request) for key, each in self._lookups.items() for request in each.requests}
        of_requests = {(key, request) for request, keys in self._by_request.items() for key in keys}
        assert users == of_requests, "a lookup is of a request that does not know it, or is lost"
        assert all(each.requests or key in self._answers for key, each in self._lookups.items()), "a lookup is of none"
