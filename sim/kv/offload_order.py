"""In which order a tier of KV beyond the GPU gives up its chunks: by least recent use, or by ARC.

What a request does to chunks is one access: while it lives its chunks rank by when it began, its tail before its head;
as it ends they are ranked anew, tail first.
Source: vllm/v1/kv_offload/cpu/policies/lru.py and arc.py of the 0.33.0 wheel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Protocol

MayGo = Callable[[int], bool]
"""Whether the chunk of a key may be evicted."""


@dataclass(slots=True)
class Access:
    """What one request did to chunks. `numbers`: of the chunks it was seen with, by key, counted from its first token;
    `inserted` by it; `reused`: that were there, or that it loaded; `missed`: that it offered and were not there.
    `rank` is its place among the requests, 0 before it has one."""

    numbers: dict[int, int] = field(default_factory=dict[int, int])
    inserted: set[int] = field(default_factory=set[int])
    reused: set[int] = field(default_factory=set[int])
    missed: set[int] = field(default_factory=set[int])
    rank: int = 0

    def tail_first(self) -> list[int]:
        """The keys it was seen with, the last chunk first."""
        return sorted(self.numbers, key=lambda key: -self.numbers[key])


class EvictionOrder(Protocol):
    """The order of the chunks of one tier, by their keys."""

    def missed(self, keys: list[int]) -> None:
        """A request offered `keys`, which are not there, for the first time."""
        ...

    def seen(self, access: Access, keys: Iterable[int]) -> None:
        """`keys`, some of which may not be there, are seen for the first time with the request of `access`."""
        ...

    def insert(self, access: Access, keys: list[int]) -> None:
        """The request of `access` puts chunks in."""
        ...

    def evict(self, count: int, may_go: MayGo) -> list[int] | None:
        """Takes out the next `count` chunks that may go; None, and nothing changed, if there are fewer."""
        ...

    def ended(self, access: Access) -> None:
        """The request of `access` has ended."""
        ...


class LruOrder:
    """The chunk of the lowest rank goes first; O(log chunks), and as much for each that may not go and ranks lower."""

    def __init__(self) -> None:
        self._ranks: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[tuple[int, int], int]] = []  # with entries of ranks that are no longer so
        self._last = 0

    def missed(self, keys: list[int]) -> None:
        pass

    def seen(self, access: Access, keys: Iterable[int]) -> None:
        rank = self._rank_of(access)
        for key in keys:
            old = self._ranks.get(key)
            if old is not None and old < (new := (rank, -access.numbers[key])):
                self._put(key, new)

    def insert(self, access: Access, keys: list[int]) -> None:
        rank = self._rank_of(access)
        for key in keys:
            self._put(key, (rank, -access.numbers[key]))

    def evict(self, count: int, may_go: MayGo) -> list[int] | None:
        heap, ranks = self._heap, self._ranks
        taken: dict[int, tuple[int, int]] = {}
        passed: list[tuple[tuple[int, int], int]] = []
        while heap and len(taken) < count:
            rank, key = heappop(heap)
            if ranks.get(key) != rank or key in taken:
                continue
            if may_go(key):
                taken[key] = rank
            else:
                passed.append((rank, key))
        is_short = len(taken) < count
        if is_short:
            passed += [(rank, key) for key, rank in taken.items()]
        for entry in passed:
            heappush(heap, entry)
        if is_short:
            return None
        for key in taken:
            del ranks[key]
        return list(taken)

    def ended(self, access: Access) -> None:
        for key in access.tail_first():
            if key in self._ranks:
                self._last += 1
                self._put(key, (self._last, 0))

    def _rank_of(self, access: Access) -> int:
        if not access.rank:
            self._last += 1
            access.rank = self._last
        return access.rank

    def _put(self, key: int, rank: tuple[int, int]) -> None:
        self._ranks[key] = rank
        heappush(self._heap, (rank, key))
        if len(self._heap) > 64 + 4 * len(self._ranks):
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapify(self._heap)


class ArcOrder:
    """Chunks used by one request (`once`) and by several (`often`), each oldest first, and those lately evicted of
    either. `target` is the size of `once` above which it is the one to give up chunks."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.target = 0.0
        self.once: dict[int, None] = {}
        self.often: dict[int, None] = {}
        self.gone_once: dict[int, None] = {}
        self.gone_often: dict[int, None] = {}

    def missed(self, keys: list[int]) -> None:
        """Lets the target follow the list in which what is missed now would still be, the last key first."""
        once, often = self.gone_once, self.gone_often
        for key in reversed(keys):
            if key in once:
                self.target = min(self.target + max(1.0, len(often) / len(once)), float(self._capacity))
                _to_end(once, key)
            elif key in often:
                self.target = max(self.target - max(1.0, len(once) / len(often)), 0.0)
                _to_end(often, key)

    def seen(self, access: Access, keys: Iterable[int]) -> None:
        pass

    def insert(self, access: Access, keys: list[int]) -> None:
        for key in keys:
            self.once[key] = None
            self.gone_once.pop(key, None)
            self.gone_often.pop(key, None)

    def evict(self, count: int, may_go: MayGo) -> list[int] | None:
        once, often = filter(may_go, self.once), filter(may_go, self.often)
        left = len(self.once)
        taken: list[tuple[int, bool]] = []
        for _ in range(count):
            key = next(once, None) if left >= int(self.target) else None
            of_once = key is not None
            if key is None:
                key = next(often, None)
            if key is None:
                key, of_once = next(once, None), True
            if key is None:
                return None
            left -= of_once
            taken.append((key, of_once))
        for key, of_once in taken:
            del (self.once if of_once else self.often)[key]
            (self.gone_once if of_once else self.gone_often)[key] = None
        for gone in (self.gone_once, self.gone_often):
            for _ in range(len(gone) - self._capacity):
                del gone[next(iter(gone))]
        return [key for key, _ in taken]

    def ended(self, access: Access) -> None:
        for key in access.tail_first():
            if key in access.reused:
                if key in self.once:
                    del self.once[key]
                    self.often[key] = None
                elif key in self.often:
                    _to_end(self.often, key)
            elif key in access.inserted:
                if key in self.once:
                    _to_end(self.once, key)
                elif key in self.often:
                    _to_end(self.often, key)


def _to_end(keys: dict[int, None], key: int) -> None:
    del keys[key]
    keys[key] = None
