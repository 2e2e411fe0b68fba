"""The tier of KV in the host's memory: what it takes in, what it gives up, and in which order.

The rules are those of vllm/v1/kv_offload/cpu/manager.py, policies/lru.py and policies/arc.py of vLLM 0.33.0.
"""

from __future__ import annotations

import random
from typing import Any, Literal

import pytest

from batchsim.kv.offload_order import Access, ArcOrder
from batchsim.kv.offload_tier import OfferCounts, OffloadTier, Taken


def stored(tier: OffloadTier, request: str, keys: list[int], first: int = 0) -> list[int]:
    """Offers `keys` and has what is taken in stored; returns what was evicted."""
    taken = tier.offer(request, keys, first)
    assert taken is not None
    tier.stored(taken.stored)
    tier.check()
    return taken.evicted


def used(tier: OffloadTier, request: str, keys: list[int]) -> None:
    """A whole life of `request`, which stores the chunks `keys` or finds them there."""
    stored(tier, request, keys)
    tier.end(request)


def numbers(tier: OffloadTier) -> tuple[int, int, int]:
    return tier.num_used, tier.num_evictable, tier.num_storing


def test_a_chunk_is_stored_then_ready_and_pinned_while_loaded() -> None:
    """Three chunks: being stored, ready, one of them loaded by two requests, ready again after both."""
    tier = OffloadTier(4)
    assert tier.offer("a", [1, 2, 3], 0) == Taken([1, 2, 3], [])
    assert numbers(tier) == (3, 0, 3)
    assert tier.has(1) and not tier.is_ready(1)
    tier.stored([1, 2, 3])
    assert numbers(tier) == (3, 3, 0)
    assert tier.is_ready(1) and not tier.is_ready(9)
    tier.load("b", [1], 0)
    tier.load("c", [1], 0)
    assert numbers(tier) == (3, 2, 0)
    tier.loaded([1])
    assert tier.is_being_loaded(1)
    tier.loaded([1])
    assert not tier.is_being_loaded(1) and numbers(tier) == (3, 3, 0)
    tier.check()


def test_only_new_chunks_are_stored() -> None:
    """Chunks that are there, ready or not, are not stored twice."""
    tier = OffloadTier(4)
    stored(tier, "a", [1])
    assert tier.offer("b", [1, 2], 0) == Taken([2], [])
    assert tier.offer("c", [1, 2, 3], 0) == Taken([3], [])
    assert numbers(tier) == (3, 1, 2)


def test_an_offer_without_room_is_refused_whole() -> None:
    """Two places, one chunk being stored: no room for two, and nothing is evicted for one of them."""
    tier = OffloadTier(2)
    tier.offer("a", [1], 0)
    assert tier.offer("b", [2, 3], 0) is None
    assert numbers(tier) == (1, 0, 1)
    tier.stored([1])
    assert tier.offer("b", [2, 3], 0) == Taken([2, 3], [1])


def test_no_chunk_of_the_offer_is_evicted_for_it() -> None:
    """Three chunks of which two are there: of 3 places the third would have to be another's, which is loaded."""
    tier = OffloadTier(3)
    stored(tier, "a", [1, 2])
    stored(tier, "b", [9])
    tier.load("c", [9], 0)
    assert tier.offer("d", [1, 2, 3], 0) is None
    tier.loaded([9])
    assert tier.offer("d", [1, 2, 3], 0) == Taken([3], [9])
    tier.check()


def test_pinned_chunks_are_passed_over() -> None:
    """Of two ended requests the older's chunk is loaded, so the younger's goes."""
    tier = OffloadTier(2)
    used(tier, "a", [1])
    used(tier, "b", [2])
    tier.load("c", [1], 0)
    assert stored(tier, "d", [3]) == [2]
    tier.loaded([1])
    assert stored(tier, "d", [4], 1) == [1]


def test_lru_gives_up_the_tail_of_the_request_that_began_first() -> None:
    """While both live, the one that offered first goes first, its last chunk before its others."""
    tier = OffloadTier(4)
    stored(tier, "a", [1])
    stored(tier, "b", [5, 6])
    stored(tier, "a", [2], 1)
    assert [stored(tier, "c", [key], key) for key in (7, 8, 9)] == [[2], [1], [6]]


def test_lru_ranks_anew_at_the_end_tail_first() -> None:
    """A request that ended is younger than one that goes on; its tail still goes before its head."""
    tier = OffloadTier(4)
    stored(tier, "a", [1, 2])
    stored(tier, "b", [3, 4])
    tier.end("a")
    assert stored(tier, "c", [5, 6, 7, 8]) == [4, 3, 2, 1]


def test_lru_counts_finding_and_loading_as_use() -> None:
    """Chunks that a later request loads, or offers and finds, rank with it; a refused offer gives it its rank too."""
    tier = OffloadTier(3)
    for name, key in (("a", 1), ("b", 2), ("c", 3)):
        used(tier, name, [key])
    tier.load("d", [1], 0)
    tier.loaded([1])
    assert tier.offer("e", [2], 0) == Taken([], [])
    assert stored(tier, "f", [4, 5, 6]) == [3, 1, 2]
    tier = OffloadTier(2)
    tier.offer("a", [1], 0)
    assert tier.offer("b", [2, 3], 0) is None  # b's rank is from here
    stored(tier, "c", [4])
    tier.stored([1])
    tier.end("a")
    assert stored(tier, "b", [2]) == [4]
    assert stored(tier, "d", [5]) == [2]


def test_a_threshold_lets_in_what_was_offered_often_enough() -> None:
    """At 2, a first offer stores nothing; at the second the chunk comes in, others of the same offer do not."""
    tier = OffloadTier(4, store_threshold=2)
    assert tier.offer("a", [1], 0) == Taken([], [])
    assert tier.offer("b", [1, 2], 0) == Taken([1], [])
    assert tier.offer("c", [1, 2], 0) == Taken([2], [])
    assert OffloadTier(4, store_threshold=1).offer("a", [1], 0) == Taken([1], [])


def test_counts_are_kept_of_so_many_keys() -> None:
    """The key offered longest ago is forgotten, never one of the offer; what finds no place is not counted."""
    counts = OfferCounts(2)
    counts.count([1, 2])
    counts.count([1])
    counts.count([3])
    assert [counts.of(key) for key in (1, 2, 3)] == [2, 0, 1]
    counts.count([1, 3, 4])
    assert [counts.of(key) for key in (1, 3, 4)] == [3, 2, 0]


def test_arc_keeps_what_was_used_twice() -> None:
    """A chunk that a second request found goes to the other list as that ends; what was used once goes first, of a
    request that lives on its head before its tail."""
    tier = OffloadTier(3, "arc")
    used(tier, "a", [1, 2])
    used(tier, "b", [1])
    assert stored(tier, "c", [3, 4]) == [2]
    assert stored(tier, "d", [5]) == [3]


def test_arc_does_not_count_what_the_request_stored_itself() -> None:
    """A chunk that its own request offers again, or loads, is still one of those used once."""
    tier = OffloadTier(2, "arc")
    stored(tier, "a", [1])
    stored(tier, "a", [1])
    tier.load("a", [1], 0)
    tier.loaded([1])
    tier.end("a")
    used(tier, "b", [2])
    used(tier, "c", [2])
    assert stored(tier, "d", [3]) == [1]


def arc(**lists: list[int]) -> ArcOrder:
    order = ArcOrder(8)
    for name, keys in lists.items():
        setattr(order, name, dict.fromkeys(keys))
    return order


def test_arc_learns_from_what_it_gave_up() -> None:
    """A miss among those once used raises the target by the other list's length over this one's, at least 1, up to the
    capacity; among those often used it lowers it, not below 0. The last key is looked at first."""
    order = arc(gone_once=[1, 2], gone_often=[3, 4, 5, 6, 7])
    order.missed([9, 2, 1])
    assert order.target == 5.0 and list(order.gone_once) == [1, 2]
    order.missed([3])
    assert order.target == 4.0 and list(order.gone_often) == [4, 5, 6, 7, 3]
    order.missed([1, 2, 1])
    assert order.target == 8
    order = arc(gone_once=[1], gone_often=[3])
    order.missed([3])
    assert order.target == 0


def test_arc_evicts_from_the_list_above_its_target() -> None:
    """From those used once while there are at least as many as the target, counted down as it goes; else the others,
    and once more the first where these have none. Both lists of what is gone are cut to the capacity."""
    order = arc(once=[1, 2, 3], often=[4, 5])
    order.target = 2.9
    assert order.evict(3, lambda key: True) == [1, 2, 4]
    assert (list(order.gone_once), list(order.gone_often)) == ([1, 2], [4])
    assert order.evict(2, lambda key: key == 3) is None
    assert order.evict(1, lambda key: key == 3) == [3]
    assert list(order.once) == [] and list(order.often) == [5]
    full = ArcOrder(1)
    full.insert(Access(), [1, 2, 3])
    assert full.evict(3, lambda key: True) == [1, 2, 3]
    assert list(full.gone_once) == [3]


def test_arc_takes_a_chunk_back_from_those_gone() -> None:
    """What is stored again is no longer among those gone, and counts as used once."""
    tier = OffloadTier(1, "arc")
    used(tier, "a", [1])
    used(tier, "b", [2])
    assert stored(tier, "c", [1]) == [2]
    assert stored(tier, "d", [2]) == [1]


def test_an_ended_request_is_forgotten() -> None:
    """Its end changes nothing a second time, and a request that was never seen may end."""
    tier = OffloadTier(2)
    used(tier, "a", [1])
    tier.end("a")
    tier.end("z")
    assert numbers(tier) == (1, 1, 0)


def test_a_tier_of_no_chunk_is_refused() -> None:
    """vLLM does not start with one either."""
    with pytest.raises(ValueError, match="0 chunks"):
        OffloadTier(0)


class _Plain:
    """The same by lists that are walked: chunks with their loads, and for LRU a rank each."""

    def __init__(self, places: int, policy: str, threshold: int) -> None:
        self.places, self.policy, self.threshold = places, policy, threshold
        self.loads: dict[int, int] = {}
        self.ranks: dict[int, tuple[int, int]] = {}
        self.once: list[int] = []
        self.often: list[int] = []
        self.ghosts: tuple[list[int], list[int]] = ([], [])
        self.target: float = 0
        self.clock = 0
        self.offered: dict[int, int] = {}
        self.own: dict[str, dict[str, Any]] = {}

    def of(self, request: str) -> dict[str, Any]:
        new: dict[str, Any] = {"rank": 0, "seen": {}, "inserted": set(), "reused": set(), "missed": set()}
        return self.own.setdefault(request, new)

    def use(self, own: dict[str, Any], places: dict[int, int]) -> None:
        for key, place in places.items():
            if key in own["seen"]:
                continue
            if not own["rank"]:
                self.clock += 1
                own["rank"] = self.clock
            own["seen"][key] = place
            if key in self.ranks:
                self.ranks[key] = max(self.ranks[key], (own["rank"], -place))

    def offer(self, request: str, keys: list[int], first: int) -> tuple[list[int], list[int]] | None:
        own, place = self.of(request), {key: first + i for i, key in enumerate(keys)}
        for key in keys:
            self.offered[key] = self.offered.get(key, 0) + 1
        ready = [key for key in keys if self.loads.get(key, -1) >= 0]
        new = [key for key in keys if key not in self.loads]
        if self.threshold >= 2:
            new = [key for key in new if self.offered[key] >= self.threshold]
        for key in reversed(new):
            if key not in own["missed"]:
                own["missed"].add(key)
                self.learn(key)
        self.use(own, {key: place[key] for key in keys if key in ready or key in new})
        own["reused"] |= set(ready) - own["inserted"]
        lacking = max(len(new) + len(self.loads) - self.places, 0)
        evicted = self.evict(lacking, set(keys))
        if evicted is None:
            return None
        for key in new:
            self.loads[key] = -1
            self.ranks[key] = (own["rank"], -place[key])
            self.once.append(key)
            for ghosts in self.ghosts:
                if key in ghosts:
                    ghosts.remove(key)
        own["inserted"] |= set(new)
        return new, evicted

    def learn(self, key: int) -> None:
        for mine, other, sign in ((*self.ghosts, 1), (*self.ghosts[::-1], -1)):
            if key in mine:
                step = max(1, len(other) / len(mine))
                self.target = min(max(self.target + sign * step, 0), self.places)
                mine.remove(key)
                mine.append(key)
                return

    def evict(self, count: int, kept: set[int]) -> list[int] | None:
        free = [key for key, loads in self.loads.items() if loads == 0 and key not in kept]
        if len(free) < count:
            return None
        gone: list[int] = []
        for _ in range(count):
            if self.policy == "lru":
                key = min(free, key=lambda key: self.ranks[key])
            else:
                once = [key for key in self.once if key in free]
                often = [key for key in self.often if key in free]
                left = len([key for key in self.once if key not in gone])
                key = (once + often if left >= int(self.target) else often + once)[0]
            free.remove(key)
            gone.append(key)
        for key in gone:
            del self.loads[key], self.ranks[key]
            at = 0 if key in self.once else 1
            (self.once, self.often)[at].remove(key)
            self.ghosts[at].append(key)
        for ghosts in self.ghosts:
            del ghosts[: max(len(ghosts) - self.places, 0)]
        return gone

    def load(self, request: str, keys: list[int], first: int) -> None:
        own = self.of(request)
        for key in keys:
            self.loads[key] += 1
        self.use(own, {key: first + i for i, key in enumerate(keys)})
        own["reused"] |= set(keys) - own["inserted"]

    def end(self, request: str) -> None:
        own = self.own.pop(request, None)
        seen = {} if own is None else own["seen"]
        for key in sorted(seen, key=lambda key: -seen[key]):
            assert own is not None
            if key not in self.loads:
                continue
            self.clock += 1
            self.ranks[key] = (self.clock, 0)
            if key in own["reused"]:
                (self.once if key in self.once else self.often).remove(key)
                self.often.append(key)
            elif key in own["inserted"]:
                line = self.once if key in self.once else self.often
                line.remove(key)
                line.append(key)


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("threshold", [0, 2])
def test_random_lives_equal_the_plain_ones(policy: Literal["lru", "arc"], threshold: int) -> None:
    """Requests of shared prefixes offer, find, load and end at random; what is taken in and evicted is the same."""
    evictions = refusals = loads = 0
    for seed in range(12):
        rng = random.Random(seed)
        places = rng.randint(3, 12)
        tier, plain = OffloadTier(places, policy, threshold), _Plain(places, policy, threshold)
        storing: list[list[int]] = []
        loading: list[list[int]] = []
        for _ in range(250):
            request = f"r{rng.randrange(6)}"
            chain, start = int(request[1]) // 2 * 100, rng.randrange(4)
            keys = [chain + number for number in range(start, start + rng.randint(1, 4))]
            match rng.randrange(8):
                case 0 | 1 | 2:
                    taken, other = tier.offer(request, keys, start), plain.offer(request, keys, start)
                    assert (None if taken is None else (taken.stored, taken.evicted)) == other
                    refusals += taken is None
                    if taken is not None:
                        evictions += len(taken.evicted)
                        storing.append(taken.stored)
                case 3 | 6 if storing:
                    done = storing.pop(rng.randrange(len(storing)))
                    tier.stored(done)
                    plain.loads |= dict.fromkeys(done, 0)
                case 4 if all(map(tier.is_ready, keys := keys[:2])):
                    tier.load(request, keys, start)
                    plain.load(request, keys, start)
                    loading.append(keys)
                    loads += 1
                case 5 if loading:
                    done = loading.pop()
                    tier.loaded(done)
                    for key in done:
                        plain.loads[key] -= 1
                case 7:
                    tier.end(request)
                    plain.end(request)
                case _:
                    pass
            tier.check()
            assert tier.num_used == len(plain.loads)
    assert evictions > 100 and refusals > 100 and loads > 10
