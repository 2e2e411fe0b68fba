"""The tier of KV in the host's memory: what it takes in, what it gives up, and in which order.

The rules are those of vllm/v1/kv_offload/cpu/manager.py, policies/lru.py and policies/arc.py of vLLM 0.33.0.
"""

from __future__ import annotations

import pytest

from batchsim.kv.offload_chains import Chain, ChunkRun, Part, Path
from batchsim.kv.offload_order import Access, ArcOrder, Numbers
from batchsim.kv.offload_tier import Found, OfferCounts, OffloadTier
from tests.support.tier_prompts import Prompt, keys_of


def begun(tier: OffloadTier, request: str, prompt: Prompt) -> str:
    """`request`, of the tokens `prompt`, known to `tier`."""
    tier.begin(request, keys_of(prompt))
    return request


def names(parts: list[Part]) -> list[str]:
    """Chunks as whose tokens they are, where each prompt has those of one, and their number; of each part the last one
    first."""
    return [f"{chain.keys[0]}:{number}" for chain, low, high in parts for number in reversed(range(low, high))]


def chunks(whose: int, *numbers: int) -> list[str]:
    """As `names`."""
    return [f"{keys_of([(whose, 99)]).key(0)}:{number}" for number in numbers]


def offered(tier: OffloadTier, request: str, first: int, stop: int) -> tuple[list[str], list[str]] | None:
    """The chunks to be stored and those evicted; None: no room."""
    taken = tier.offer(request, first, stop)
    tier.check()
    return None if taken is None else (sorted(names(taken.stored)), names(taken.evicted))


def stored(tier: OffloadTier, request: str, first: int, stop: int) -> list[str]:
    """Offers chunks and has what is taken in stored; returns what was evicted."""
    taken = tier.offer(request, first, stop)
    assert taken is not None
    tier.stored(taken.stored)
    tier.check()
    return names(taken.evicted)


def used(tier: OffloadTier, request: str, prompt: Prompt) -> list[str]:
    """A whole life of `request`, which stores the chunks of `prompt` or finds them there; what was evicted."""
    evicted = stored(tier, begun(tier, request, prompt), 0, sum(count for _, count in prompt))
    tier.end(request)
    tier.check()
    return evicted


def numbers(tier: OffloadTier) -> tuple[int, int, int]:
    return tier.num_used, tier.num_evictable, tier.num_storing


def test_a_chunk_is_stored_then_ready_and_pinned_while_loaded() -> None:
    """Three chunks: being stored, ready, one of them loaded by two requests, ready again after both."""
    tier = OffloadTier(4)
    for name in "abc":
        begun(tier, name, [(1, 9)])
    assert tier.find("b", 0, 3) == Found(0, False, False)
    taken = tier.offer("a", 0, 3)
    assert taken is not None and names(taken.stored) == chunks(1, 2, 1, 0) and taken.evicted == []
    assert numbers(tier) == (3, 0, 3)
    assert tier.find("b", 0, 9) == Found(3, True, False)
    tier.stored(taken.stored)
    assert numbers(tier) == (3, 3, 0)
    assert tier.find("b", 1, 9) == Found(3, False, False)
    assert tier.find("b", 0, 2) == Found(2, False, False) and tier.find("b", 3, 9) == Found(3, False, False)
    first, second = tier.load("b", 0, 1), tier.load("c", 0, 1)
    assert numbers(tier) == (3, 2, 0)
    tier.loaded(first)
    assert tier.find("b", 0, 3) == Found(3, False, True)
    assert tier.find("b", 1, 3) == Found(3, False, False)
    tier.loaded(second)
    assert tier.find("b", 0, 3) == Found(3, False, False) and numbers(tier) == (3, 3, 0)
    tier.check()


def test_what_is_found_ends_at_the_first_chunk_that_is_not_there() -> None:
    """Of five chunks the third was given up: a request finds two from the first on, and two from the fourth on."""
    tier = OffloadTier(5)
    stored(tier, begun(tier, "a", [(1, 9)]), 0, 5)
    held = [tier.load("a", 0, 2), tier.load("a", 3, 5)]
    assert stored(tier, begun(tier, "b", [(2, 1)]), 0, 1) == chunks(1, 2)
    assert [tier.find("a", first, 9).stop for first in range(6)] == [2, 2, 2, 5, 5, 5]
    for parts in held:
        tier.loaded(parts)
    tier.check()


def test_only_new_chunks_are_stored() -> None:
    """Chunks that are there, ready or not, are not stored twice."""
    tier = OffloadTier(4)
    for name in "abc":
        begun(tier, name, [(1, 9)])
    stored(tier, "a", 0, 1)
    assert offered(tier, "b", 0, 2) == (chunks(1, 1), [])
    assert offered(tier, "c", 0, 3) == (chunks(1, 2), [])
    assert numbers(tier) == (3, 1, 2)


def test_an_offer_without_room_is_refused_whole() -> None:
    """Two places, one chunk being stored: no room for two, and nothing is evicted for one of them."""
    tier = OffloadTier(2)
    taken = tier.offer(begun(tier, "a", [(1, 9)]), 0, 1)
    assert taken is not None
    assert tier.offer(begun(tier, "b", [(2, 9)]), 0, 2) is None
    assert numbers(tier) == (1, 0, 1)
    tier.stored(taken.stored)
    assert offered(tier, "b", 0, 2) == (chunks(2, 0, 1), chunks(1, 0))


def test_no_chunk_of_the_offer_is_evicted_for_it() -> None:
    """Three chunks of which two are there: of 3 places the third would have to be another's, which is loaded."""
    tier = OffloadTier(3)
    stored(tier, begun(tier, "a", [(1, 9)]), 0, 2)
    stored(tier, begun(tier, "b", [(2, 9)]), 0, 1)
    parts = tier.load("b", 0, 1)
    begun(tier, "d", [(1, 9)])
    assert offered(tier, "d", 0, 3) is None
    tier.loaded(parts)
    assert offered(tier, "d", 0, 3) == (chunks(1, 2), chunks(2, 0))


def test_what_lies_around_the_offer_is_evicted_for_it() -> None:
    """Of a run of five the third is kept, as it is offered again with one that is new: those behind it go first."""
    tier = OffloadTier(5)
    stored(tier, begun(tier, "a", [(1, 5), (2, 9)]), 0, 5)
    begun(tier, "b", [(1, 3), (3, 4)])
    assert offered(tier, "b", 2, 5) == (chunks_behind(1, 3, 3), chunks(1, 4, 3))
    tier = OffloadTier(5)
    stored(tier, begun(tier, "a", [(1, 9)]), 0, 5)
    begun(tier, "b", [(1, 3), (3, 9)])
    assert offered(tier, "b", 2, 6) == (sorted(chunks_behind(1, 3, 3, 6)), chunks(1, 4, 3, 1))


def chunks_behind(whose: int, count: int, then: int, stop: int = 5) -> list[str]:
    """As `names`: the chunks of tokens of `then` behind `count` ones of `whose`."""
    chain = keys_of([(whose, count), (then, 9)]).key(count)
    return [f"{chain}:{number}" for number in range(count, stop)]


def test_pinned_chunks_are_passed_over() -> None:
    """Of two ended requests the older's chunk is loaded, so the younger's goes."""
    tier = OffloadTier(2)
    used(tier, "a", [(1, 1)])
    used(tier, "b", [(2, 1)])
    parts = tier.load(begun(tier, "c", [(1, 1)]), 0, 1)
    assert stored(tier, begun(tier, "d", [(3, 9)]), 0, 1) == chunks(2, 0)
    tier.loaded(parts)
    assert stored(tier, "d", 1, 2) == chunks(1, 0)


def test_lru_gives_up_the_tail_of_the_request_that_began_first() -> None:
    """While both live, the one that offered first goes first, its last chunk before its others."""
    tier = OffloadTier(4)
    stored(tier, begun(tier, "a", [(1, 9)]), 0, 1)
    stored(tier, begun(tier, "b", [(2, 9)]), 0, 2)
    stored(tier, "a", 1, 2)
    begun(tier, "c", [(3, 9)])
    assert [stored(tier, "c", number, number + 1) for number in range(3)] == [
        chunks(*c) for c in ((1, 1), (1, 0), (2, 1))
    ]


def test_lru_ranks_anew_at_the_end_tail_first() -> None:
    """A request that ended is younger than one that goes on; its tail still goes before its head."""
    tier = OffloadTier(4)
    stored(tier, begun(tier, "a", [(1, 9)]), 0, 2)
    stored(tier, begun(tier, "b", [(2, 9)]), 0, 2)
    tier.end("a")
    assert stored(tier, begun(tier, "c", [(3, 9)]), 0, 4) == [*chunks(2, 1, 0), *chunks(1, 1, 0)]


def test_lru_counts_finding_and_loading_as_use() -> None:
    """Chunks that a later request loads, or offers and finds, rank with it; a refused offer gives it its rank too."""
    tier = OffloadTier(3)
    for whose, name in enumerate("abc", 1):
        used(tier, name, [(whose, 1)])
    tier.loaded(tier.load(begun(tier, "d", [(1, 1)]), 0, 1))
    assert offered(tier, begun(tier, "e", [(2, 1)]), 0, 1) == ([], [])
    assert stored(tier, begun(tier, "f", [(4, 9)]), 0, 3) == [*chunks(3, 0), *chunks(1, 0), *chunks(2, 0)]
    tier = OffloadTier(2)
    taken = tier.offer(begun(tier, "a", [(1, 1)]), 0, 1)
    assert taken is not None
    assert tier.offer(begun(tier, "b", [(2, 9)]), 0, 2) is None  # b's rank is from here
    stored(tier, begun(tier, "c", [(3, 1)]), 0, 1)
    tier.stored(taken.stored)
    tier.end("a")
    assert stored(tier, "b", 0, 1) == chunks(3, 0)
    assert stored(tier, begun(tier, "d", [(4, 1)]), 0, 1) == chunks(2, 0)


def test_a_request_that_began_before_does_not_make_chunks_older() -> None:
    """It finds what a later request stored, which keeps its place: what it stored itself goes first."""
    tier = OffloadTier(3)
    stored(tier, begun(tier, "a", [(1, 2), (2, 9)]), 2, 3)
    stored(tier, begun(tier, "b", [(1, 2)]), 0, 2)
    assert offered(tier, "a", 0, 2) == ([], [])
    assert stored(tier, begun(tier, "c", [(3, 9)]), 0, 1) == chunks(1, 2)


def test_runs_of_an_ended_request_are_joined() -> None:
    """Eight chunks offered one by one are as one run once their request has ended, those being stored apart."""
    tier = OffloadTier(20)
    begun(tier, "a", [(1, 99)])
    for number in range(8):
        stored(tier, "a", number, number + 1)
    begun(tier, "b", [(1, 99)])
    assert len(runs_of(tier, "b")) == 8
    taken = tier.offer("a", 8, 10)
    tier.end("a")
    assert [(run.start, run.stop) for run in runs_of(tier, "b")] == [(0, 8), (8, 10)]
    assert taken is not None
    tier.stored(taken.stored)
    tier.check()
    assert numbers(tier) == (10, 10, 0)


def runs_of(tier: OffloadTier, request: str) -> list[ChunkRun]:
    parts = tier.load(request, 0, 0)
    assert parts == []
    ((chain, _, _),) = tier._accesses[request].path.parts  # pyright: ignore[reportPrivateUsage]
    return chain.runs


def test_a_threshold_lets_in_what_was_offered_often_enough() -> None:
    """At 2, a first offer stores nothing; at the second the chunk comes in, others of the same offer do not."""
    tier = OffloadTier(4, store_threshold=2)
    for name in "abc":
        begun(tier, name, [(1, 9)])
    assert offered(tier, "a", 0, 1) == ([], [])
    assert offered(tier, "b", 0, 2) == (chunks(1, 0), [])
    assert offered(tier, "c", 0, 2) == (chunks(1, 1), [])
    tier = OffloadTier(4, store_threshold=1)
    assert offered(tier, begun(tier, "a", [(1, 9)]), 0, 1) == (chunks(1, 0), [])


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
    used(tier, "a", [(1, 2)])
    used(tier, "b", [(1, 1)])
    assert stored(tier, begun(tier, "c", [(3, 9)]), 0, 2) == chunks(1, 1)
    assert stored(tier, begun(tier, "d", [(4, 9)]), 0, 1) == chunks(3, 0)


def test_arc_does_not_count_what_the_request_stored_itself() -> None:
    """A chunk that its own request offers again, or loads, is still one of those used once."""
    tier = OffloadTier(2, "arc")
    begun(tier, "a", [(1, 1)])
    stored(tier, "a", 0, 1)
    stored(tier, "a", 0, 1)
    tier.loaded(tier.load("a", 0, 1))
    tier.end("a")
    used(tier, "b", [(2, 1)])
    used(tier, "c", [(2, 1)])
    assert used(tier, "d", [(3, 1)]) == chunks(1, 0)


CHAIN = Chain(None)
"""Chunks whose keys are their numbers."""
CHAIN.firsts, CHAIN.keys = [0], [0]
CHAIN.add(0, 1000, 0)


def own_keys(part: Part) -> list[int]:
    return list(range(part[1], part[2]))


def arc(capacity: int = 8, **lists: list[int]) -> ArcOrder:
    order = ArcOrder(capacity, own_keys)
    for name, keys in lists.items():
        setattr(order, name, dict.fromkeys(keys) if "gone" in name else {key: (CHAIN, key) for key in keys})
    return order


def arc_evicts(order: ArcOrder, count: int, *kept: int) -> list[int] | None:
    parts = order.evict(count, [(CHAIN, key, key + 1) for key in kept])
    return None if parts is None else [low for _, low, _ in parts]


def test_arc_learns_from_what_it_gave_up() -> None:
    """A miss among those once used raises the target by the other list's length over this one's, at least 1, up to the
    capacity; among those often used it lowers it, not below 0. The last key is looked at first."""
    order = arc(gone_once=[1, 2], gone_often=[3, 4, 5, 6, 7])
    order.learn([9, 2, 1])
    assert order.target == 5.0 and list(order.gone_once) == [1, 2]
    order.learn([3])
    assert order.target == 4.0 and list(order.gone_often) == [4, 5, 6, 7, 3]
    order.learn([1, 2, 1])
    assert order.target == 8
    order = arc(gone_once=[1], gone_often=[3])
    order.learn([3])
    assert order.target == 0


def test_arc_evicts_from_the_list_above_its_target() -> None:
    """From those used once while there are at least as many as the target, counted down as it goes; else the others,
    and once more the first where these have none. Both lists of what is gone are cut to the capacity."""
    order = arc(once=[1, 2, 3], often=[4, 5])
    order.target = 2.9
    assert arc_evicts(order, 3) == [1, 2, 4]
    assert (list(order.gone_once), list(order.gone_often)) == ([1, 2], [4])
    assert arc_evicts(order, 2, 5) is None
    assert arc_evicts(order, 1, 5) == [3]
    assert list(order.once) == [] and list(order.often) == [5]
    full = arc(capacity=1)
    full.insert(Access(Path([])), ChunkRun(CHAIN, 1, 4, 0))
    assert arc_evicts(full, 3) == [1, 2, 3]
    assert list(full.gone_once) == [3]


def test_arc_takes_a_chunk_back_from_those_gone() -> None:
    """What is stored again is no longer among those gone, and counts as used once."""
    tier = OffloadTier(1, "arc")
    used(tier, "a", [(1, 1)])
    used(tier, "b", [(2, 1)])
    assert stored(tier, begun(tier, "c", [(1, 1)]), 0, 1) == chunks(2, 0)
    assert stored(tier, begun(tier, "d", [(2, 1)]), 0, 1) == chunks(1, 0)


def test_an_ended_request_is_forgotten() -> None:
    """Its end changes nothing a second time, and a request that was never seen may end."""
    tier = OffloadTier(2)
    used(tier, "a", [(1, 1)])
    assert not tier.knows("a")
    tier.end("a")
    tier.end("z")
    assert numbers(tier) == (1, 1, 0)


def test_a_tier_of_no_chunk_is_refused() -> None:
    """vLLM does not start with one either."""
    with pytest.raises(ValueError, match="0 chunks"):
        OffloadTier(0)


def test_numbers_are_kept_as_rows() -> None:
    """Adding returns what was not there: beyond, between, before, and over all."""
    mine = Numbers()
    assert mine.add(4, 6) == [(4, 6)] and mine.add(9, 12) == [(9, 12)] and mine.add(12, 13) == [(12, 13)]
    assert mine.rows == [(4, 6), (9, 13)]
    assert mine.add(10, 12) == [] and mine.add(5, 6) == []
    assert mine.add(0, 2) == [(0, 2)] and mine.rows == [(0, 2), (4, 6), (9, 13)]
    assert mine.add(1, 10) == [(2, 4), (6, 9)] and mine.rows == [(0, 13)]
