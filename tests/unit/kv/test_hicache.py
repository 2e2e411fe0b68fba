"""The radix cache with pages on the host: what is copied, what leaves which place, and that no page is ever lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.kernel.tokens import TokenIds, prompt_stream
from batchsim.kernel.types import Request, Sequence
from batchsim.kv import WritePolicy
from batchsim.kv.hicache import HiCacheKV
from tests.support.random_cases import random_cases


def sequence(id_: int, *segments: tuple[int, int]) -> Sequence:
    """A sequence whose prompt is `(text, tokens)` of each segment in turn, from the start of that text."""
    tokens = TokenIds.of([(prompt_stream(text), 0, length) for text, length in segments])
    return Sequence(Request(id_, 0, tokens.num_tokens, 100, tokens=tokens))


def admitted(kv: HiCacheKV, seq: Sequence) -> tuple[int, int]:
    """Lets `seq` in: (tokens that the GPU had, number of the load of what the host had)."""
    limit = seq.num_tokens - 1
    hit = kv.match(seq, limit)
    kv.take(seq, hit)
    return hit, kv.load(seq, limit)


def computed(kv: HiCacheKV, seq: Sequence) -> None:
    """Lets `seq` in, compute its prompt, and end; what is to be stored stays to be."""
    _, number = admitted(kv, seq)
    assert kv.allocate(seq, seq.num_tokens)
    seq.settled_computed_tokens = seq.num_tokens
    if number:
        kv.loaded(kv.loading(seq), number)
    kv.insert(seq)
    kv.free(seq)


def stored(kv: HiCacheKV) -> list[tuple[int, int]]:
    """(pages, request) of what is to be stored, which then is."""
    copies = [(node.num_pages, request) for node, request in kv.to_store]
    for node, _ in kv.to_store:
        kv.stored(node)
    kv.to_store = []
    kv.check()
    return copies


def found(kv: HiCacheKV, *segments: tuple[int, int]) -> tuple[int, int]:
    """(tokens on the GPU, on the GPU and the host) of a prompt."""
    seq = sequence(99, *segments)
    return kv.match_all(seq, seq.num_tokens)


def test_a_tier_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a tier of 0 pages holds nothing"):
        HiCacheKV(10, 4, 0, "write_through")


def test_what_is_stored_stays_found_on_the_host() -> None:
    """Rule 2 of the tree: text 0 leaves the GPU whole, for 6 pages of text 1."""
    kv = HiCacheKV(8, 4, 20, "write_through")
    computed(kv, sequence(0, (0, 16)))
    assert stored(kv) == [(4, 0)]
    computed(kv, sequence(1, (1, 24)))
    assert found(kv, (0, 16)) == (0, 16)
    assert found(kv, (1, 24)) == (24, 24)
    assert (kv.cached_blocks, kv.host.num_host_free) == (6, 20 - 4 - 6)


def test_selective_counts_each_part_by_itself() -> None:
    """Rule 1: a second request is the second to insert the first 8 tokens, a third one that of the others; its own
    match has left a page of them apart."""
    kv = HiCacheKV(20, 4, 20, "write_through_selective")
    computed(kv, sequence(0, (0, 16)))
    computed(kv, sequence(1, (0, 8), (1, 8)))
    assert stored(kv) == [(2, 1)]
    computed(kv, sequence(2, (0, 8), (1, 8)))
    assert stored(kv) == [(1, 2), (1, 2)]
    assert kv.host.num_host_free == 16


def test_the_first_that_finds_no_room_ends_the_chain() -> None:
    """Rule 1: a host of 3 pages: 4 pages and, behind them, 2 others are not stored, though these 2 would fit."""
    kv = HiCacheKV(20, 4, 3, "write_through")
    computed(kv, sequence(0, (0, 16)))
    computed(kv, sequence(1, (0, 16), (1, 8)))
    assert stored(kv) == []
    assert kv.host.num_host_free == 3


def test_what_is_being_stored_is_not_evicted() -> None:
    """Rule 1: 4 of 8 pages are locked until they are stored."""
    kv = HiCacheKV(8, 4, 20, "write_through")
    computed(kv, sequence(0, (0, 16)))
    assert kv.num_free == 4
    assert not kv.allocate(sequence(1, (1, 20)), 20)
    stored(kv)
    assert kv.num_free == 8


def test_the_host_gives_up_the_leaf_used_longest_ago() -> None:
    """Rule 3 of the tree: of texts 0 and 1, both off the GPU, text 0 was looked for since; text 2 takes the room of
    text 1."""
    kv = HiCacheKV(4, 4, 8, "write_through")
    for text in range(2):
        computed(kv, sequence(text, (text, 16)))
        stored(kv)
    kv.make_room(4)
    assert found(kv, (0, 16)) == (0, 16)
    computed(kv, sequence(2, (2, 16)))
    assert stored(kv) == [(4, 2)]
    assert found(kv, (0, 16)) == (0, 16)
    assert found(kv, (1, 16)) == (0, 0)


def test_an_insertion_brings_back_what_is_only_on_the_host() -> None:
    """Rule 3: 8 tokens, too few to be loaded, are computed again: the tree takes these pages, and nothing is stored
    twice."""
    kv = HiCacheKV(4, 4, 20, "write_through")
    computed(kv, sequence(0, (0, 8)))
    stored(kv)
    kv.make_room(4)
    seq = sequence(1, (0, 8), (1, 4))
    assert admitted(kv, seq) == (0, 0)
    assert kv.allocate(seq, 12)
    own = list(kv.table(seq))
    seq.settled_computed_tokens = 12
    kv.insert(seq)
    assert kv.table(seq) == own
    assert stored(kv) == [(1, 1)]
    assert found(kv, (0, 8), (1, 4)) == (12, 12)


def test_what_is_loaded_is_shared_at_once() -> None:
    """Rule 2: a second request finds on the GPU what the first one loads; both go, and all pages are free."""
    kv = HiCacheKV(8, 4, 20, "write_through")
    computed(kv, sequence(0, (0, 16)))
    stored(kv)
    kv.make_room(8)
    first, second = sequence(1, (0, 16)), sequence(2, (0, 16))
    assert admitted(kv, first) == (0, 1)
    assert admitted(kv, second) == (12, 0)
    assert kv.table(first) == kv.table(second)
    end = kv.loading(first)
    for seq in (first, second):
        kv.free(seq)
    assert kv.num_free == 5  # until the load is over
    kv.loaded(end, 1)
    kv.check()
    assert kv.num_free == 8


def test_written_back_is_what_leaves_the_gpu() -> None:
    """Rule 1, and rules 1 and 2 of the tree: nothing is stored before; a leaf is, with its request's name, and its
    parent only later."""
    kv = HiCacheKV(8, 4, 20, "write_back")
    computed(kv, sequence(0, (0, 8)))
    computed(kv, sequence(1, (0, 8), (1, 16)))
    assert stored(kv) == []
    kv.make_room(4)
    assert kv.host.written_back == [(1, 4)]
    assert found(kv, (0, 8), (1, 16)) == (8, 24)
    kv.make_room(8)
    assert kv.host.written_back == [(1, 4), (0, 2)]
    kv.check()


def test_copies_of_what_is_on_the_gpu_make_room_first() -> None:
    """Rule 3 of the tree: write_back: text 0 is written back and loaded again, so that it is in both places. The room
    of its copy is used for text 1, and not that of text 2, which is only on the host and was used longest ago."""
    kv = HiCacheKV(6, 4, 9, "write_back")
    computed(kv, sequence(2, (2, 16)))
    computed(kv, sequence(0, (0, 16)))
    kv.make_room(6)
    seq = sequence(4, (0, 17))
    assert admitted(kv, seq) == (0, 1)
    kv.loaded(kv.loading(seq), 1)
    kv.free(seq)
    computed(kv, sequence(1, (1, 8)))
    assert found(kv, (0, 16)) == (16, 16)
    kv.make_room(1)
    assert kv.host.written_back == [(2, 4), (0, 4), (1, 2)]
    assert kv.host.num_host_free == 9 - 4 - 2
    assert [found(kv, (text, 16)) for text in range(3)] == [(16, 16), (0, 8), (0, 16)]
    kv.make_room(6)
    assert kv.host.written_back[3:] == [(0, 4)]
    kv.check()


def _written_and_loaded(loads: tuple[int, int]) -> tuple[HiCacheKV, dict[int, Sequence]]:
    """A GPU of 12 pages and a host of 9, which has 4 of text 0 and, written back behind them, 4 of text 1. The texts
    are loaded in the order of `loads`; a request holds each of them."""
    kv = HiCacheKV(12, 4, 9, "write_back")
    for text in range(2):
        computed(kv, sequence(text, (text, 16)))
        kv.make_room(12)
    holders: dict[int, Sequence] = {}
    for text in loads:
        seq = holders[text] = sequence(10 + text, (text, 17))
        _, number = admitted(kv, seq)
        kv.loaded(kv.loading(seq), number)
    computed(kv, sequence(2, (2, 8)))
    return kv, holders


def test_the_copy_that_was_written_first_makes_room_first() -> None:
    """Rule 3 of the tree: Text 1 was loaded first, but text 0 written back first: its copy goes, for the 2 pages of
    text 2."""
    kv, holders = _written_and_loaded((1, 0))
    for seq in holders.values():
        kv.free(seq)
        kv.match(seq, 16)
    kv.make_room(3)
    assert kv.host.written_back[2:] == [(2, 2)]
    kv.make_room(12)
    assert kv.host.written_back[3:] == [(0, 4)]


def test_the_copy_of_what_leaves_the_gpu_next_makes_room_last() -> None:
    """Rule 3 of the tree: Text 0 was written back first, but can be evicted from the GPU; text 1 is held, and loses its
    copy. Once it is not, it is written back again, and now text 0 loses its own for that."""
    kv, holders = _written_and_loaded((0, 1))
    kv.free(holders[0])
    kv.match(holders[0], 16)
    kv.make_room(3)
    assert kv.host.written_back[2:] == [(2, 2)]
    kv.free(holders[1])
    kv.make_room(12)
    assert kv.host.written_back[3:] == [(1, 4), (0, 4)]


def test_what_cannot_be_written_back_is_dropped_with_all_below() -> None:
    """Rule 4 of the tree: a host of 4 pages has the leaf; its parent, of 6, has no room, and both are gone."""
    kv = HiCacheKV(10, 4, 4, "write_back")
    computed(kv, sequence(0, (0, 24)))
    computed(kv, sequence(1, (0, 24), (1, 16)))
    kv.make_room(1)
    assert found(kv, (0, 24), (1, 16)) == (24, 40)
    kv.make_room(10)
    kv.check()
    assert found(kv, (0, 24), (1, 16)) == (0, 0)
    assert kv.host.num_host_free == 4


@st.composite
def _visits(draw: st.DrawFn) -> list[tuple[str, tuple[tuple[int, int], ...]]]:
    parts = st.tuples(st.integers(0, 2), st.integers(1, 12))
    acts = st.sampled_from(["compute", "compute", "compute", "store", "room"])
    return draw(st.lists(st.tuples(acts, st.lists(parts, min_size=1, max_size=3).map(tuple)), max_size=25))


@random_cases(300)
@given(
    _visits(),
    st.sampled_from([1, 5, 12, 40]),
    st.sampled_from(["write_through", "write_through_selective", "write_back"]),
    st.sampled_from([1, 4]),
)
def test_no_page_is_lost(
    visits: list[tuple[str, tuple[tuple[int, int], ...]]], host: int, policy: WritePolicy, page: int
) -> None:
    """Whatever is computed, stored, evicted and loaded: all locks are those of holders and copies, all pages are
    somewhere once, and prefixes on each place begin at the root."""
    kv = HiCacheKV(40 // page, page, host, policy)
    for number, (act, segments) in enumerate(visits):
        if act == "compute":
            seq = sequence(number, *segments)
            if kv.blocks_for(seq.num_tokens) <= kv.num_free:
                computed(kv, seq)
        elif act == "store":
            stored(kv)
        else:
            kv.make_room(segments[0][1])
        kv.check()
    stored(kv)
    assert kv.num_free == kv.num_blocks
