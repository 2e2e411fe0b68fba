"""Prefix caching by block hashes: which blocks are found, in which order they are reused, what a walk costs."""

from __future__ import annotations

from typing import Any

import pytest

from batchsim.kernel.tokens import Segment, TokenIds, output_stream, prompt_stream
from batchsim.kernel.types import DecodeGroup, Request, Sequence
from batchsim.kv import prefix_cache
from batchsim.kv.block_keys import BlockKeys
from batchsim.kv.free_queue import FreeQueue
from batchsim.kv.prefix_cache import BlockHashKV

SIZE = 4
A, B = prompt_stream(0), prompt_stream(1)


def sequence(id_: int, *segments: Segment, prompt: int = 0) -> Sequence:
    """One with these prompt segments, or with `prompt` tokens of its own."""
    tokens = TokenIds.of(list(segments)) if segments else None
    return Sequence(Request(id_, 0, tokens.num_tokens if tokens else prompt, 50, tokens=tokens))


def run(kv: BlockHashKV, seq: Sequence, num_tokens: int | None = None) -> int:
    """Admits `seq` with all it can hit and computes `num_tokens` in all, or all that are known; returns the hit."""
    hit, tokens = kv.lookup(seq), num_tokens or seq.num_tokens
    assert kv.admit(seq, tokens, hit)
    seq.settled_computed_tokens = tokens
    kv.check()
    return hit


def generate(kv: BlockHashKV, seq: Sequence, num_tokens: int) -> None:
    """Decodes `num_tokens` more tokens after the one that the prompt's end gave."""
    seq.settled_output_tokens += 1
    group = DecodeGroup(SIZE)
    group.join(seq)
    for _ in range(num_tokens):
        assert kv.grow_group(group)
        group.advance()
        kv.check()
    kv.settle(seq)
    group.leave(seq)


@pytest.mark.parametrize(("known", "hit"), [(16, 12), (17, 16), (15, 12), (4, 0), (5, 4)])
def test_one_token_at_least_is_computed(known: int, hit: int) -> None:
    """Only whole blocks are hit, and never the block of the last token, even if all of it is cached."""
    kv = BlockHashKV(20, SIZE)
    run(kv, sequence(0, (A, 0, 20)))
    assert kv.lookup(sequence(1, (A, 0, known))) == hit


def test_who_gave_its_blocks_back_counts_none() -> None:
    kv = BlockHashKV(8, SIZE)
    seq = sequence(0, (A, 0, 10))
    run(kv, seq)
    assert (seq.num_blocks, kv.held(seq)) == (3, 3)
    assert kv.allocate(seq, 13)
    assert (seq.num_blocks, kv.held(seq)) == (4, 4)
    kv.free(seq)
    assert (seq.num_blocks, kv.held(seq)) == (0, 0)


def test_blocks_are_found_only_after_the_same_beginning() -> None:
    """Equal tokens after other tokens, or at another offset, are another block."""
    kv = BlockHashKV(40, SIZE)
    run(kv, sequence(0, (A, 0, 8), (B, 0, 8)))
    assert kv.lookup(sequence(1, (A, 0, 8), (B, 0, 20))) == 16
    assert kv.lookup(sequence(2, (B, 0, 20))) == 0
    assert kv.lookup(sequence(3, (A, 1, 20))) == 0
    assert kv.lookup(sequence(4, (A, 0, 4), (B, 0, 20))) == 4


def test_a_block_can_be_found_as_soon_as_it_is_scheduled() -> None:
    """Of a chunk of 10 tokens the two full blocks are found at once, before they are computed."""
    kv = BlockHashKV(20, SIZE)
    assert kv.admit(sequence(0, (A, 0, 20)), 10, 0)
    assert kv.lookup(sequence(1, (A, 0, 20))) == 8


def test_generated_tokens_are_found_too() -> None:
    """A next turn finds the prompt and the computed part of the answer: the block over their border too."""
    kv = BlockHashKV(20, SIZE)
    first = sequence(0, (A, 0, 6))
    run(kv, first)
    generate(kv, first, 6)  # 12 tokens computed, 13 known
    assert kv.lookup(sequence(1, (A, 0, 6), (output_stream(0), 0, 20))) == 12
    kv.end(first)
    assert kv.lookup(sequence(1, (A, 0, 6), (output_stream(0), 0, 20))) == 12


def test_an_answer_to_less_than_a_block_is_found_with_it() -> None:
    """Of a prompt of 2 tokens the first block is filled by its answer, and the second is the answer's alone."""
    kv = BlockHashKV(20, SIZE)
    first = sequence(0, (A, 0, 2))
    run(kv, first)
    generate(kv, first, 6)
    assert kv.lookup(sequence(1, (A, 0, 2), (output_stream(0), 0, 20))) == 8


def test_unpublished_blocks_are_reused_first_and_cached_ones_from_the_end_of_the_longest_unused() -> None:
    """Freed last block of `a`, never full, then the fresh ones; then a's cached blocks, deepest first, then b's."""
    kv = BlockHashKV(8, SIZE)
    a, b = sequence(0, (A, 0, 10)), sequence(1, (B, 0, 8))
    run(kv, a)
    run(kv, b)
    assert (kv.table(a), kv.table(b)) == ([0, 1, 2], [3, 4])
    kv.end(a)
    kv.end(b)
    other = sequence(2, prompt=32)
    assert kv.admit(other, 32, 0)
    assert kv.table(other) == [2, 5, 6, 7, 1, 0, 4, 3]
    assert kv.cached_blocks == 0


def test_a_hit_block_is_not_the_next_to_be_evicted() -> None:
    """Blocks that were found again go to the end of the queue when they are free again."""
    kv = BlockHashKV(4, SIZE)
    a, b = sequence(0, (A, 0, 8)), sequence(1, (B, 0, 8))
    for seq in (a, b):
        run(kv, seq)
    for seq in (a, b):
        kv.end(seq)
    again = sequence(2, (A, 0, 9))
    assert kv.lookup(again) == 8
    assert kv.admit(again, 9, 8)  # one new block: b's last
    assert kv.table(again) == [0, 1, 3]
    kv.end(again)
    assert kv.lookup(sequence(3, (A, 0, 9))) == 8
    assert kv.lookup(sequence(4, (B, 0, 9))) == 4


def test_of_two_equal_blocks_the_older_is_found_until_it_is_evicted() -> None:
    """The recomputed last block is a second one of its kind; lookups name the first one, then the second."""
    kv = BlockHashKV(4, SIZE)
    a, b = sequence(0, (A, 0, 8)), sequence(1, (A, 0, 8))
    run(kv, a)
    assert run(kv, b) == 4
    assert (kv.table(a), kv.table(b)) == ([0, 1], [0, 2])
    kv.end(a)  # block 1 is free, block 0 is b's too
    third = sequence(2, (A, 0, 12))
    assert kv.lookup(third) == 8
    filler = sequence(3, prompt=8)
    run(kv, filler)
    assert kv.table(filler) == [3, 1]
    assert kv.lookup(third) == 8
    kv.end(filler)
    assert run(kv, third) == 8
    assert kv.table(third)[:2] == [0, 2]


def test_a_chain_is_kept_as_one_run_until_its_blocks_differ_in_users() -> None:
    """Of 600 blocks published together the first 200 are shared, then the first 100: three spans, in the end one user
    each again; what is given back goes last block first, whatever was cut."""
    kv = BlockHashKV(1000, SIZE)
    first = sequence(0, (A, 0, 600 * SIZE))
    run(kv, first)
    assert [span.length for span in kv._pool.spans.values()] == [600]
    second, third = sequence(1, (A, 0, 200 * SIZE), (B, 0, 4)), sequence(2, (A, 0, 100 * SIZE), (B, 0, 8))
    assert (run(kv, second), run(kv, third)) == (200 * SIZE, 100 * SIZE)
    assert [(span.length, span.runs[0].users) for span in kv._pool.spans.values()] == [
        (100, 3), (400, 1), (1, 1), (100, 2), (2, 1),
    ]  # fmt: skip
    for seq in (second, third, first):
        kv.end(seq)
        kv.check()
    assert kv._pool.free_ids()[397:] == [600, 602, 601, *range(599, -1, -1)]


def test_a_prompt_that_leaves_a_run_before_its_end_goes_on_elsewhere() -> None:
    """The answer that grew after another prompt had branched off is one run with what stood before the branch; a prompt
    of both hits the run's first part, then the branch."""
    kv = BlockHashKV(40, SIZE)
    first = sequence(0, (A, 0, 2 * SIZE))
    branch = sequence(1, (A, 0, 2 * SIZE), (B, 0, 2 * SIZE))
    run(kv, first)
    run(kv, branch)
    kv.end(branch)
    generate(kv, first, SIZE)
    assert run(kv, sequence(2, (A, 0, 2 * SIZE), (B, 0, 2 * SIZE), (A, 0, 1))) == 4 * SIZE
    assert kv.lookup(sequence(3, (A, 0, 2 * SIZE), (output_stream(0), 0, 9))) == 3 * SIZE


@pytest.mark.parametrize("ids", [True, False])
def test_without_ids_as_many_blocks_are_held_free_and_found(ids: bool) -> None:
    """One that shares nothing grows, one shares a prompt, one is preempted: counts are the same, tables empty."""
    kv = BlockHashKV(20, SIZE, ids=ids)
    one, other = sequence(0, prompt=10), sequence(1, prompt=4)
    run(kv, one)
    run(kv, other)
    one.settled_output_tokens += 1
    group = DecodeGroup(SIZE)
    group.join(one)
    for _ in range(3):
        assert kv.grow_group(group)
        group.advance()
    assert (kv.held(one), kv.held(other), kv.num_free) == (4, 1, 15)
    assert kv.table(one) == ([0, 1, 2, 4] if ids else [])
    run(kv, sequence(2, (A, 0, 8)))
    assert (kv.num_free, kv.cached_blocks, kv.lookup(sequence(3, (A, 0, 9)))) == (13, 2, 8)
    kv.free(other)
    other.settled_output_tokens = 1
    assert (kv.num_free, kv.cached_blocks, kv.lookup(other)) == (14, 3, 4)
    kv.check()
    assert kv.allocate(one, 17)
    kv.end(one)
    kv.check()
    assert (kv.num_free, kv.lookup(other), kv.table(one)) == (18, 4, [])


@pytest.mark.parametrize("ids", [True, False])
def test_blocks_of_a_step_that_is_yet_to_be_launched_are_taken(ids: bool) -> None:
    """A group has grown for its next step when, in the same call, a prompt with identity is admitted."""
    kv = BlockHashKV(20, SIZE, ids=ids)
    one = sequence(0, prompt=2 * SIZE)
    run(kv, one)
    one.settled_output_tokens += 1
    group = DecodeGroup(SIZE)
    group.join(one)
    assert kv.grow_group(group)
    kv.check()
    run(kv, sequence(1, (A, 0, 2 * SIZE)))
    assert kv.num_free == 15
    group.advance()
    kv.check()
    kv.end(one)
    kv.check()
    assert kv.num_free == 18


@pytest.mark.parametrize("shares", [True, False])
def test_tokens_kept_for_drafts_are_not_published(shares: bool) -> None:
    """Of a prompt of three blocks, admitted with one block and room for as many drafts, one block can be found: by
    another with the same beginning, or by itself once it was preempted."""
    kv = BlockHashKV(20, SIZE, ids=shares)
    one = sequence(0, (A, 0, 3 * SIZE)) if shares else sequence(0, prompt=3 * SIZE)
    assert kv.admit(one, 2 * SIZE, 0, ahead=SIZE)
    if not shares:
        kv.free(one)
    assert kv.lookup(sequence(1, (A, 0, 3 * SIZE)) if shares else one) == SIZE
    kv.check()


def test_copies_of_a_chain_are_cut_where_any_of_them_ends() -> None:
    """Three prompts computed side by side, up to blocks 3, 5 and 2: each block is found as the copy published first."""
    kv = BlockHashKV(40, SIZE)
    seqs = [sequence(i, (A, 0, 5 * SIZE)) for i in range(3)]
    for seq in seqs:
        assert kv.admit(seq, 1, 0)
    for seq, blocks in zip(seqs, (3, 5, 2), strict=True):
        assert kv.allocate(seq, blocks * SIZE)
        seq.settled_computed_tokens = blocks * SIZE
        kv.check()
    assert [len(span.runs) for span in sorted(kv._pool.spans.values(), key=lambda span: span.key)] == [3, 2, 1]
    tables = [list(kv.table(seq)) for seq in seqs]
    late = sequence(3, (A, 0, 6 * SIZE))
    run(kv, late)
    assert kv.table(late)[:5] == [*tables[0][:3], *tables[1][3:5]]
    for seq in (*seqs, late):
        kv.end(seq)
        kv.check()


def test_a_hit_block_that_nobody_uses_counts_as_taken() -> None:
    """Reviving it takes it from the free ones, so it is no help where all blocks are needed."""
    kv = BlockHashKV(4, SIZE)
    run(kv, sequence(0, (A, 0, 8)))
    kv.end(next(iter(kv._held)))
    other = sequence(1, prompt=4)
    run(kv, other)
    third = sequence(2, (A, 0, 16))
    assert (kv.num_free, kv.lookup(third)) == (3, 8)
    assert not kv.admit(third, 16, 8)
    assert not kv.admit(third, 12, 8, must_fit_tokens=16)
    assert not kv.admit(third, 12, 8, spare_blocks=1)
    assert (kv.num_free, kv.table(third)) == (3, [])
    assert kv.admit(third, 12, 8)
    assert kv.num_free == 0


def test_cached_blocks_that_are_not_asked_for_are_free_ones() -> None:
    """Of two cached blocks the first is hit; the other one, the last free, is handed out as a new one."""
    kv = BlockHashKV(4, SIZE)
    first, seq = sequence(0, (A, 0, 8)), sequence(1, (A, 0, 16))
    run(kv, first)
    kv.end(first)
    assert kv.lookup(seq) == 8
    assert kv.admit(seq, 16, 4)
    assert kv.table(seq) == [0, 2, 3, 1]
    kv.check()


def test_a_hit_block_whose_last_user_ends_counts_as_taken_from_then_on() -> None:
    """The head hits a used and an unused block; when the used one comes free there is not one more for others."""
    kv = BlockHashKV(5, SIZE)
    first, user, other = sequence(0, (A, 0, 8)), sequence(1, (A, 0, 5)), sequence(2, prompt=4)
    for seq in (first, user, other):
        run(kv, seq)
    kv.end(first)
    head = sequence(3, (A, 0, 16))
    assert (kv.num_free, kv.lookup(head)) == (2, 8)
    assert not kv.admit(head, 12, 8, spare_blocks=1)
    kv.end(user)
    assert kv.allocate(other, 8)
    assert (kv.num_free, kv.lookup(head)) == (3, 8)
    assert not kv.admit(head, 12, 8, spare_blocks=1)
    assert kv.admit(head, 12, 8)


def test_who_shares_nothing_finds_only_its_own_blocks_and_only_after_a_preemption() -> None:
    """Blocks of a prompt without identity are cached for itself when it is preempted, for nobody when it ends."""
    kv = BlockHashKV(10, SIZE)
    seq = sequence(0, prompt=9)
    assert run(kv, seq) == 0
    generate(kv, seq, 4)  # 13 computed
    kv.free(seq)
    assert (kv.cached_blocks, kv.lookup(seq), kv.lookup(sequence(1, prompt=9))) == (3, 12, 0)
    seq.reset_computed()
    assert run(kv, seq) == 12
    kv.end(seq)
    kv.check()
    assert kv.num_free == 10
    gone = sequence(2, prompt=9)
    run(kv, gone)
    kv.end(gone)
    assert kv.lookup(gone) == 0


class CountedIndex(dict[int, Any]):
    """An index that counts how often it is asked."""

    asked = 0

    def get(self, key: int, default: Any = None) -> Any:
        self.asked += 1
        return super().get(key, default)


@pytest.mark.skipif(not prefix_cache.__file__.endswith(".py"), reason="compiled code asks a dict past its methods")
def test_a_blocked_head_is_not_walked_again_while_its_blocks_stand() -> None:
    """Asked again it costs nothing, and a walk asks once for each run; it is walked anew when the block at which the
    walk stopped is published."""
    kv = BlockHashKV(30, SIZE)
    kv._pool.spans = index = CountedIndex()
    first, other = sequence(0, (A, 0, 20), (B, 0, 4)), sequence(1, (B, 0, 8))
    run(kv, first, 20)
    run(kv, other, 4)
    head = sequence(2, (A, 0, 20), (B, 0, 8))
    index.asked = 0
    assert (kv.lookup(head), index.asked) == (20, 2)
    assert kv.allocate(other, 8)  # publishes what the head does not ask for
    index.asked = 0
    assert ([kv.lookup(head) for _ in range(3)], index.asked) == ([20] * 3, 0)
    assert kv.allocate(first, 24)
    index.asked = 0
    assert (kv.lookup(head), index.asked) == (24, 2)


def test_a_publication_or_eviction_shows_in_the_next_lookup() -> None:
    """The walk goes on where a missing block came, and ends where a found one went."""
    kv = BlockHashKV(5, SIZE)
    first = sequence(0, (A, 0, 16))
    assert kv.admit(first, 6, 0)
    head = sequence(1, (A, 0, 17))
    assert kv.lookup(head) == 4
    assert kv.allocate(first, 16)
    assert kv.lookup(head) == 16
    first.settled_computed_tokens = 16
    kv.end(first)
    run(kv, sequence(2, prompt=8))
    assert kv.lookup(head) == 12


def test_who_knows_more_by_now_finds_more() -> None:
    """Asked again with 13 known tokens instead of 6, it walks on."""
    kv = BlockHashKV(20, SIZE)
    run(kv, sequence(0, (A, 0, 6), (output_stream(1), 0, 8)))
    seq = sequence(1, (A, 0, 6))
    assert kv.lookup(seq) == 4
    seq.settled_output_tokens = 7
    assert kv.lookup(seq) == 12


def test_blocks_that_go_one_after_the_other_between_two_lookups_are_all_gone() -> None:
    """Of the hits 0, 1 and 4 first 1 goes, then 0, then 4; what is found after that are the copies 2 and 3."""
    kv = BlockHashKV(10, SIZE)
    old, copy, head = sequence(0, (A, 0, 8)), sequence(1, (A, 0, 13)), sequence(2, (A, 0, 14))
    first, second = sequence(3, prompt=20), sequence(4, prompt=12)
    assert kv.admit(old, 8, 0)
    assert kv.admit(copy, 13, 0)
    kv.end(old)
    assert kv.lookup(head) == 12
    assert kv.admit(first, 20, 0)
    kv.end(copy)
    assert kv.admit(second, 12, 0)
    assert (kv.table(first)[-1], kv.table(second)) == (1, [5, 0, 4])
    kv.end(first)
    assert kv.lookup(head) == 8
    assert kv.admit(head, 14, 8)
    assert kv.table(head)[:2] == [2, 3]
    kv.check()


def test_answers_are_published_while_those_who_share_nothing_come_and_go() -> None:
    """Of two who decode one shares nothing; the other's answer is found before and after that one has ended."""
    kv = BlockHashKV(20, SIZE)
    first, other = sequence(0, (A, 0, 6)), sequence(1, prompt=4)
    run(kv, first)
    run(kv, other)
    generate(kv, first, 4)
    turn = sequence(2, (A, 0, 6), (output_stream(0), 0, 20))
    assert kv.lookup(turn) == 8
    kv.end(other)
    group = DecodeGroup(SIZE)
    group.join(first)
    for _ in range(2):
        assert kv.grow_group(group)
        group.advance()
    assert kv.lookup(turn) == 12


@pytest.mark.parametrize("id_", [0, 1])
def test_the_growth_that_publishes_the_awaited_block_is_foreseen(id_: int) -> None:
    """A head that waits for a block of somebody's answer is told of the very step in which it appears."""
    kv = BlockHashKV(20, SIZE)
    first = sequence(id_, (A, 0, 6))
    run(kv, first)
    first.settled_output_tokens = 1
    head = sequence(2, (A, 0, 6), (output_stream(id_), 0, 20))
    group = DecodeGroup(SIZE)
    group.join(first)
    found = []
    for _ in range(6):
        hit, foreseen = kv.lookup(head), kv.growth_is_awaited(group)
        assert kv.grow_group(group)
        group.advance()
        assert (kv.lookup(head) > hit) is foreseen
        found.append(foreseen)
    assert found == [False, True, False, False, False, True]


def test_the_growth_of_those_whom_nobody_waits_for_is_not_awaited() -> None:
    """Neither before anybody was looked up, nor while the head waits for the answer of somebody else."""
    kv = BlockHashKV(20, SIZE)
    other = sequence(0, (B, 0, 6))
    run(kv, other)
    other.settled_output_tokens = 1
    group = DecodeGroup(SIZE)
    group.join(other)
    found = [kv.growth_is_awaited(group)]
    assert kv.lookup(sequence(1, (B, 0, 4), (output_stream(5), 0, 20))) == 4
    for _ in range(4):
        found.append(kv.growth_is_awaited(group))
        assert kv.grow_group(group)
        group.advance()
    assert found == [False] * 5


def test_the_group_grows_by_the_last_block_and_not_beyond() -> None:
    """Of 3 blocks 2 are full: one more holds the next 4 tokens, and then nothing changes."""
    kv = BlockHashKV(3, SIZE)
    seq = sequence(0, (A, 0, 8))
    run(kv, seq)
    generate(kv, seq, 4)
    group = DecodeGroup(SIZE)
    group.join(seq)
    assert not kv.grow_group(group)
    assert (kv.num_free, len(kv.table(seq))) == (0, 3)


def test_the_free_queue_forgets_removed_entries() -> None:
    """Blocks freed and found again thousands of times leave neither entries nor doubt about the order."""
    queue = FreeQueue(3)
    assert queue.take(3) == ([0, 1, 2], [])
    queue.put_last([0, 1, 2])
    for block in [0, 1, 2] * 5000 + [1]:
        queue.remove(block)
        queue.put_last([block])
    assert queue.blocks() == [0, 2, 1]
    assert len(queue._last) < 5000
    assert queue.take(2) == ([], [0, 2])


def test_the_free_queue_forgets_what_was_taken() -> None:
    """Blocks taken and given back thousands of times come round in order, and the entries do not pile up."""
    queue = FreeQueue(3)
    queue.put_last(queue.take(3)[0])
    for i in range(5000):
        (block,) = queue.take(1)[1]
        assert block == i % 3
        queue.put_last([block])
    assert queue.blocks() == [2, 0, 1]
    assert len(queue._last) < 2100


def test_keys_of_an_answer_to_whole_blocks_are_those_of_the_next_turn() -> None:
    """Of a prompt of two blocks and an answer of three, told as both or as one prompt."""
    first = BlockKeys(Request(7, 0, 8, 20, tokens=TokenIds.of([(A, 0, 8)])), SIZE)
    second = BlockKeys(Request(8, 0, 20, 20, tokens=TokenIds.of([(A, 0, 8), (output_stream(7), 0, 12)])), SIZE)
    assert first.up_to(5) == second.up_to(5)


def test_keys_of_a_conversation_are_those_of_its_turns() -> None:
    """A prompt made of earlier turns has the keys that these had, whatever the segments it is told in."""
    first = Request(7, 0, 10, 20, tokens=TokenIds.of([(A, 0, 3), (B, 5, 7)]))
    keys = BlockKeys(first, SIZE)
    segments = [(A, 0, 1), (A, 1, 2), (B, 5, 7), (output_stream(7), 0, 4), (output_stream(7), 4, 6)]
    second = BlockKeys(Request(8, 0, 20, 20, tokens=TokenIds.of(segments)), SIZE)
    assert keys.up_to(5) == second.up_to(5)
    assert len(set(second.up_to(8))) == 8


@pytest.mark.parametrize("wrong", ["users", "free", "index"])
def test_the_check_notices_what_is_wrong(wrong: str) -> None:
    """A wrong count of users or free blocks, or a key without its block, fails it."""
    kv = BlockHashKV(6, SIZE)
    run(kv, sequence(0, (A, 0, 8)))
    if wrong == "users":
        next(iter(kv._pool.spans.values())).runs[0].users += 1
    elif wrong == "free":
        kv._pool.num_free -= 1
    else:
        kv._pool.spans.popitem()
    with pytest.raises(AssertionError):
        kv.check()


def test_the_key_of_a_begun_block_is_that_of_its_tokens() -> None:
    """Of 6 prompt and 5 generated tokens, told as one prompt or as both. No two lengths are alike, nor a full block."""
    first = Request(3, 0, 6, 20, tokens=TokenIds.of([(0, 2, 5), (4, 0, 1)]))
    both = TokenIds.of([(0, 2, 5), (4, 0, 1), (output_stream(3), 0, 5)])
    ones, others = BlockKeys(first, SIZE), BlockKeys(Request(8, 0, 11, 20, tokens=both), SIZE)
    lengths = [n for n in range(1, 12) if n % SIZE]
    found = [ones.begun(n) for n in lengths]
    assert found == [others.begun(n) for n in lengths]
    assert len({*found, *ones.up_to(2)}) == len(lengths) + 2
    shorter = BlockKeys(Request(9, 0, 5, 20, tokens=TokenIds.of([(0, 2, 5)])), SIZE)
    assert shorter.begun(5) == ones.begun(5)
    other = BlockKeys(Request(9, 0, 6, 20, tokens=TokenIds.of([(8, 0, 4), (0, 6, 1), (4, 0, 1)])), SIZE)
    assert other.begun(6) != ones.begun(6)


def test_a_hit_that_is_not_there_is_refused() -> None:
    """Admission with more cached tokens than a lookup finds is a mistake of the policy."""
    kv = BlockHashKV(6, SIZE)
    with pytest.raises(ValueError, match="cannot admit with 4 cached tokens"):
        kv.admit(sequence(0, (A, 0, 8)), 8, 4)
