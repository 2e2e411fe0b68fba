"""The radix cache: what it finds, what it evicts first, and that no page is ever lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.kernel.tokens import TokenIds, output_stream, prompt_stream
from batchsim.kernel.types import MISSING, DecodeGroup, Request, Sequence
from batchsim.kv.radix_cache import RadixKV
from batchsim.kv.radix_tokens import common_tokens, head, known_tokens, tail
from tests.support.random_cases import random_cases


def sequence(id_: int, *segments: tuple[int, int], computed: int = 0, output: int = 0) -> Sequence:
    """A sequence whose prompt is `(text, tokens)` of each segment in turn, from the start of that text."""
    tokens = TokenIds.of([(prompt_stream(text), 0, length) for text, length in segments])
    seq = Sequence(Request(id_, 0, tokens.num_tokens, 100, tokens=tokens))
    seq.settled_computed_tokens, seq.settled_output_tokens = computed, output
    return seq


def computed(kv: RadixKV, seq: Sequence, num_tokens: int) -> None:
    """Lets `seq` compute up to `num_tokens` and insert them."""
    kv.take(seq, kv.lookup(seq))
    assert kv.allocate(seq, num_tokens)
    seq.settled_computed_tokens = num_tokens
    kv.insert(seq)
    kv.check()


def cached_and_gone(kv: RadixKV, seq: Sequence) -> None:
    """Leaves all of `seq` in the tree and nobody holding it."""
    computed(kv, seq, seq.num_tokens)
    kv.free(seq)
    kv.check()


def test_a_match_is_of_whole_pages_and_leaves_a_token_to_compute() -> None:
    """Of 12 cached tokens a prompt of the same 12 finds 8, one of 13 finds 12, one that parts after 7 finds 4."""
    kv = RadixKV(10, 4)
    cached_and_gone(kv, sequence(0, (0, 12)))
    assert kv.lookup(sequence(1, (0, 12))) == 8
    assert kv.lookup(sequence(2, (0, 13))) == 12
    assert kv.lookup(sequence(3, (0, 7), (3, 20))) == 4
    assert kv.lookup(sequence(4, (4, 20))) == 0
    assert (kv.num_free, kv.cached_blocks) == (10, 3)


def test_pages_are_shared_and_counted_once() -> None:
    """Two sequences with 8 tokens in common hold the same two pages, and 10 pages serve what would need 12."""
    kv = RadixKV(10, 4)
    one, two = sequence(0, (0, 8), (1, 16)), sequence(1, (0, 8), (2, 16))
    computed(kv, one, 24)
    computed(kv, two, 24)
    assert kv.table(one)[:2] == kv.table(two)[:2]
    assert not set(kv.table(one)[2:]) & set(kv.table(two)[2:])
    assert kv.num_free == 0


def test_copies_of_what_the_tree_has_are_given_back_on_insertion() -> None:
    """Two equal prompts computed side by side end up with one set of whole pages; the odd tokens stay their own."""
    kv = RadixKV(10, 4)
    one, two = sequence(0, (0, 10)), sequence(1, (0, 10))
    for seq in (one, two):
        assert kv.allocate(seq, 10)
        seq.settled_computed_tokens = 10
    assert kv.num_free == 4
    kv.insert(one)
    kv.insert(two)
    kv.check()
    assert kv.num_free == 6
    assert kv.table(one)[:2] == kv.table(two)[:2]
    assert kv.table(one)[2] != kv.table(two)[2]


def test_the_leaf_walked_over_longest_ago_is_evicted_whole() -> None:
    """Of two texts the one not matched since goes, all three pages of it, though one page was asked for."""
    kv = RadixKV(6, 4)
    cached_and_gone(kv, sequence(0, (0, 12)))
    cached_and_gone(kv, sequence(1, (1, 12)))
    kv.match(sequence(2, (0, 13)), 12)
    assert kv.allocate(sequence(3, (3, 4)), 4)
    kv.check()
    assert (kv.lookup(sequence(4, (0, 13))), kv.lookup(sequence(5, (1, 13)))) == (12, 0)
    assert kv.num_free == 5


def test_what_is_inserted_is_younger_than_what_was_walked_over_before() -> None:
    """Text 0 was used just before text 1 was inserted, so it goes first."""
    kv = RadixKV(6, 4)
    cached_and_gone(kv, sequence(0, (0, 12)))
    seq = sequence(1, (1, 12), computed=12)
    assert kv.allocate(seq, 12)
    assert kv.match(sequence(2, (0, 13)), 12) == 12
    kv.insert(seq)
    kv.free(seq)
    kv.make_room(1)
    assert [kv.lookup(sequence(3, (text, 13))) for text in (0, 1)] == [0, 12]


def test_what_is_used_after_an_eviction_is_younger_than_what_was_before() -> None:
    """Text 0 makes room; then text 1 is used and text 2 goes."""
    kv = RadixKV(9, 4)
    for text in range(3):
        cached_and_gone(kv, sequence(text, (text, 12)))
    kv.make_room(1)
    assert kv.match(sequence(3, (1, 13)), 12) == 12
    kv.make_room(4)
    assert [kv.lookup(sequence(4, (text, 13))) for text in range(3)] == [0, 12, 0]


def test_what_follows_a_text_is_not_found_after_a_part_of_it() -> None:
    """Text 1 is cached after 12 tokens of text 0, and not after 4."""
    kv = RadixKV(10, 4)
    cached_and_gone(kv, sequence(0, (0, 12)))
    cached_and_gone(kv, sequence(1, (0, 12), (1, 8)))
    assert kv.lookup(sequence(2, (0, 12), (1, 9))) == 20
    assert kv.lookup(sequence(3, (0, 4), (1, 9))) == 4


def test_a_lookup_does_not_count_as_a_use() -> None:
    """The same, but looked up instead of matched: the older text goes."""
    kv = RadixKV(6, 4)
    cached_and_gone(kv, sequence(0, (0, 12)))
    cached_and_gone(kv, sequence(1, (1, 12)))
    assert kv.lookup(sequence(2, (0, 13))) == 12
    assert kv.allocate(sequence(3, (3, 4)), 4)
    assert (kv.lookup(sequence(4, (0, 13))), kv.lookup(sequence(5, (1, 13)))) == (0, 12)


def test_a_split_lets_the_tail_go_and_keeps_the_common_front() -> None:
    """A match of half a node splits it; under pressure the other half is evicted first."""
    kv = RadixKV(4, 4)
    cached_and_gone(kv, sequence(0, (0, 16)))
    user = sequence(1, (0, 8), (1, 4))
    kv.take(user, kv.match(user, 11))
    assert kv.num_free == 2
    assert kv.allocate(user, 12)
    kv.check()
    assert kv.lookup(sequence(2, (0, 17))) == 8


def test_with_a_lookahead_a_page_is_found_by_the_token_behind_it_too() -> None:
    """Of 16 tokens 3 pages are cached; 12 equal ones find 2 of them, 13 all; a split and an eviction keep to that."""
    kv = RadixKV(6, 4)
    kv.lookahead = 1
    cached_and_gone(kv, sequence(0, (0, 16)))
    assert kv.cached_blocks == 3
    assert [kv.lookup(sequence(n, (0, n), (7, 8))) for n in (4, 5, 12, 13)] == [0, 4, 8, 12]
    cached_and_gone(kv, sequence(1, (0, 5), (1, 8)))  # splits behind the first page, and adds two
    assert (kv.cached_blocks, kv.lookup(sequence(2, (0, 17))), kv.lookup(sequence(3, (0, 5), (1, 9)))) == (5, 12, 12)
    assert kv.allocate(sequence(4, (4, 8)), 8)
    assert (kv.lookup(sequence(5, (0, 17))), kv.lookup(sequence(6, (0, 5), (1, 9)))) == (4, 12)


def test_what_somebody_holds_is_never_evicted() -> None:
    """With the whole pool in the tree and locked, no page is to be had; once freed, all are."""
    kv = RadixKV(3, 4)
    holder = sequence(0, (0, 12))
    computed(kv, holder, 12)
    other = sequence(1, (1, 4))
    assert not kv.allocate(other, 4)
    kv.free(holder)
    assert kv.allocate(other, 12)
    kv.check()
    assert kv.cached_blocks == 0


def test_a_parent_outlives_its_children() -> None:
    """Evicting page by page takes the newer branches before the older front they share."""
    kv = RadixKV(3, 4)
    cached_and_gone(kv, sequence(0, (0, 4)))
    cached_and_gone(kv, sequence(1, (0, 4), (1, 4)))
    cached_and_gone(kv, sequence(2, (0, 4), (2, 4)))
    kv.make_room(1)
    assert [kv.lookup(sequence(9, (0, 4), (text, 5))) for text in (1, 2)] == [4, 8]
    kv.make_room(2)
    assert [kv.lookup(sequence(9, (0, 4), (text, 5))) for text in (1, 2)] == [4, 4]
    kv.make_room(3)
    assert kv.lookup(sequence(9, (0, 5))) == 0


def test_the_output_is_evicted_without_its_prompt() -> None:
    """Prompt and output of a finished sequence are two nodes: one page of pressure leaves the prompt."""
    kv = RadixKV(4, 4)
    seq = sequence(0, (0, 8), output=9)
    computed(kv, seq, 16)
    kv.free(seq)
    later = TokenIds.of([(prompt_stream(0), 0, 8), (output_stream(0), 0, 9)])
    assert kv.lookup(Sequence(Request(1, 0, 17, 1, tokens=later))) == 16
    kv.make_room(1)
    assert kv.lookup(Sequence(Request(1, 0, 17, 1, tokens=later))) == 8


def test_a_prompt_without_identity_is_found_by_its_own_sequence_alone() -> None:
    """After it lost its KV a sequence finds its prompt again; an equal request does not."""
    kv = RadixKV(10, 4)
    seq, stranger = Sequence(Request(0, 0, 12, 5)), Sequence(Request(1, 0, 12, 5))
    computed(kv, seq, 12)
    kv.free(seq)
    seq.reset_computed()
    seq.settled_output_tokens = 1
    assert (kv.lookup(seq), kv.lookup(stranger)) == (12, 0)


def test_an_allocation_is_all_or_nothing_and_counts_the_hits() -> None:
    """8 cached tokens in a pool of 4 pages: with them 16 tokens fit, 17 do not."""
    kv = RadixKV(4, 4)
    cached_and_gone(kv, sequence(0, (0, 8)))
    seq = sequence(1, (0, 8), (1, 20))
    assert (kv.held(seq), kv.num_free) == (0, 4)
    kv.take(seq, 8)
    assert not kv.allocate(seq, 17)
    assert (kv.held(seq), kv.num_free) == (2, 2)
    assert kv.allocate(seq, 16)
    assert (kv.held(seq), kv.num_free) == (4, 0)


def test_tokens_that_are_not_cached_cannot_be_taken() -> None:
    """A hit that is not there, or no whole page, is refused and leaves nothing held."""
    kv = RadixKV(4, 4)
    cached_and_gone(kv, sequence(0, (0, 8)))
    for hit in (12, 6):
        with pytest.raises(ValueError, match="cannot take"):
            kv.take(sequence(1, (0, 16)), hit)
    kv.check()


def test_what_was_matched_is_taken_by_whom_it_was_matched_for_as_long_as_it_is_there() -> None:
    """Another sequence takes its own pages, fewer pages are fewer, nobody takes twice, and what is evicted is gone."""
    kv = RadixKV(6, 4)
    for text in (0, 1):
        cached_and_gone(kv, sequence(text, (text, 12)))
    one, two, three = sequence(2, (0, 13)), sequence(3, (1, 13)), sequence(4, (0, 13))
    hits = [kv.match(one, 12), kv.match(two, 12)]
    kv.take(one, 12)
    assert kv.match(two, 12) == 12
    kv.take(two, 8)
    assert (hits, kv.table(one), kv.table(two)) == ([12, 12], [0, 1, 2], [3, 4])
    with pytest.raises(ValueError, match="cannot take"):
        kv.take(two, 8)
    kv.free(one)
    assert kv.match(three, 12) == 12
    kv.make_room(6)
    for id_ in (5, 6):
        kv.take(sequence(id_, (2, 8)), 0)
    with pytest.raises(ValueError, match="cannot take 12 cached tokens, 0 are found"):
        kv.take(three, 12)
    kv.check()


def test_the_group_grows_in_one_addition_and_ids_follow_when_asked_for() -> None:
    """Pages of a group are taken at once; tables have them when read, distinct; the pool is whole in the end."""
    kv = RadixKV(8, 1)
    group = DecodeGroup(1)
    members = [sequence(i, (i, 2), output=1) for i in range(2)]
    for seq in members:
        computed(kv, seq, 2)
        group.join(seq)
    for _ in range(2):
        assert kv.grow_group(group)
        assert [len(kv.table(seq)) for seq in members] == [seq.num_computed_tokens + 1 for seq in members]
        group.advance()
        kv.check()
    assert kv.num_free == 0
    assert not kv.grow_group(group)
    assert len({block for seq in members for block in kv.table(seq)}) == 8
    for seq in members:
        kv.insert(seq)
        kv.free(seq)
        group.leave(seq)
    kv.check()
    assert (kv.num_free, kv.cached_blocks) == (8, 8)


def test_growing_the_group_evicts_when_pages_run_short() -> None:
    """A member's next page comes out of the tree, and not from a page that the group has been promised."""
    kv = RadixKV(4, 1)
    cached_and_gone(kv, sequence(9, (9, 1)))
    group = DecodeGroup(1)
    seq = sequence(0, (0, 1), output=1)
    computed(kv, seq, 1)
    group.join(seq)
    for _ in range(3):
        assert kv.grow_group(group)
        group.advance()
    kv.check()
    assert kv.cached_blocks == 1
    assert kv.lookup(sequence(1, (9, 2))) == 0


def test_parts_of_a_run_have_no_empty_segments() -> None:
    """Of 5 tokens of one stream and 3 of another: cut within a segment, between two, and at both ends."""
    run = ((0, 2, 5), (4, 0, 3))
    assert [head(run, n) for n in (0, 2, 5, 6)] == [(), ((0, 2, 2),), ((0, 2, 5),), ((0, 2, 5), (4, 0, 1))]
    assert [head(run, n) for n in (8, 9)] == [run, run]
    assert [tail(run, n) for n in (0, 2, 5)] == [run, ((0, 4, 3), (4, 0, 3)), ((4, 0, 3),)]
    assert [tail(run, n) for n in (6, 8, 9)] == [((4, 1, 2),), (), ()]
    others = [((0, 2, 5), (4, 0, 2), (4, 7, 1)), ((0, 2, 4), (4, 0, 3)), ((0, 3, 5),), ((2, 2, 5),)]
    assert [common_tokens(run, other) for other in others] == [7, 4, 0, 0]


runs = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=5)


@given(runs, runs, st.integers(0, 20))
def test_runs_are_cut_and_compared_as_their_tokens_are(one: list, other: list, at: int) -> None:
    """Head, tail and common length of runs equal those of the lists of tokens they stand for."""
    a, b = (TokenIds.of([(2 * s, i, n) for s, i, n in segments]).segments for segments in (one, other))

    def tokens(run: tuple) -> list[tuple[int, int]]:
        return [(s, i) for s, start, n in run for i in range(start, start + n)]

    assert tokens(head(a, at)) == tokens(a)[:at]
    assert tokens(tail(a, at)) == tokens(a)[at:]
    same = [x == y for x, y in zip(tokens(a), tokens(b), strict=False)]
    assert common_tokens(a, b) == (same.index(False) if False in same else len(same))


def test_what_is_known_is_the_prompt_and_then_the_output() -> None:
    """In as few segments as that takes; a prompt without identity is a stream of its own."""
    seq, stranger = sequence(3, (0, 8), output=3), Sequence(Request(3, 0, 8, 1))
    text = prompt_stream(0)
    assert [known_tokens(seq, n) for n in (0, 5, 8)] == [(), ((text, 0, 5),), ((text, 0, 8),)]
    assert known_tokens(seq, 10) == ((text, 0, 8), (output_stream(3), 0, 2))
    assert known_tokens(stranger, 5) == ((-4, 0, 5),)


@random_cases(60)
@given(st.data())
def test_random_lives_find_what_was_inserted_and_lose_no_page(data: st.DataObject) -> None:
    """While nothing is evicted a lookup finds the longest inserted prefix in whole pages; with eviction, no more."""
    page = data.draw(st.sampled_from([1, 2, 4]))
    kv = RadixKV(data.draw(st.sampled_from([24, 400])) // page, page)
    kv.lookahead = more = data.draw(st.integers(0, 1))
    inserted: list[tuple] = []
    living: list[Sequence] = []
    for i in range(data.draw(st.integers(1, 12))):
        texts = data.draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=3))
        seq = sequence(i, *texts, output=data.draw(st.integers(0, 5)))
        run = known_tokens(seq, seq.num_tokens - 1)
        hit = kv.lookup(seq)
        common = [max(common_tokens(run, other) - more, 0) for other in inserted]
        longest = max(common, default=0) // page * page
        assert hit == longest if kv.num_blocks * page == 400 else hit <= longest
        assert kv.match(seq, seq.num_tokens - 1) == hit
        kv.take(seq, hit)
        if kv.allocate(seq, seq.num_tokens):
            living.append(seq)
            seq.settled_computed_tokens = data.draw(st.integers(hit + more, seq.num_tokens))
            if data.draw(st.booleans()):
                kv.insert(seq)
                inserted.append(known_tokens(seq, seq.settled_computed_tokens))
        else:
            kv.free(seq)
        if living and data.draw(st.booleans()):
            kv.free(living.pop(data.draw(st.integers(0, len(living) - 1))))
        kv.check()
    for seq in living:
        kv.free(seq)
    kv.check()
    assert kv.num_free == kv.num_blocks


def test_who_holds_nothing_has_nothing_to_give_back() -> None:
    kv, seq = RadixKV(3, 4), sequence(0, (0, 8))
    kv.free(seq)
    assert (kv.table(seq), kv.swap_table(seq), kv.held(seq), seq.num_blocks, kv.num_free) == ([], [], 0, 0, 3)


def test_what_a_sequence_holds_is_known_in_blocks() -> None:
    """As it takes cached pages, gets new ones and decodes in the group, up to the last page and not beyond."""
    kv = RadixKV(4, 4)
    cached_and_gone(kv, sequence(0, (0, 8)))
    seq = sequence(1, (0, 8), (1, 1), output=1)
    kv.take(seq, 8)
    assert (seq.num_blocks, kv.held(seq)) == (2, 2)
    assert kv.allocate(seq, 12)
    assert (seq.num_blocks, kv.held(seq), kv.num_free) == (3, 3, 1)
    seq.settled_computed_tokens = 9
    group = DecodeGroup(4)
    group.join(seq)
    held = []
    for _ in range(7):
        assert kv.grow_group(group)
        group.advance()
        held.append(kv.held(seq))
        kv.check()
    assert held == [3] * 3 + [4] * 4
    assert not kv.grow_group(group)
    assert kv.allocate(seq, 16)
    group.leave(seq)
    kv.check()
    assert (seq.num_blocks, kv.held(seq), len(kv.table(seq)), kv.num_free) == (4, 4, 4, 0)
    kv.free(seq)
    assert (seq.num_blocks, kv.held(seq), kv.num_free) == (0, 0, 4)


def test_a_pool_has_no_swap_unless_asked_for() -> None:
    assert (RadixKV(8, 4).num_swap_blocks, RadixKV(8, 4, 3).num_swap_blocks) == (0, 3)


def test_tokens_are_those_of_the_adapter() -> None:
    """A prompt and its answer have streams of their own for each adapter, as the base model has; cut where asked."""
    tokens = TokenIds.of([(prompt_stream(1), 2, 8)])
    prompt, answer = prompt_stream(1), output_stream(3)
    for adapter, first in ((MISSING, 0), (0, 1 << 48), (1, 2 << 48)):
        seq = Sequence(Request(3, 0, 8, 100, tokens=tokens, adapter=adapter))
        assert known_tokens(seq, 5) == ((first + prompt, 2, 5),)
        assert known_tokens(seq, 8) == ((first + prompt, 2, 8),)
        assert known_tokens(seq, 11) == ((first + prompt, 2, 8), (first + answer, 0, 3))
