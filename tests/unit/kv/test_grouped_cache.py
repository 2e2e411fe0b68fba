"""Blocks of groups of layers that are found again: which ones, and from where a prompt goes on.

Source of the rules: vllm/v1/core/kv_cache_coordinator.py and single_type_kv_cache_manager.py of the 0.33.0 wheel.
"""

from __future__ import annotations

import pytest

from batchsim.base.kv_groups import KvGroup, KvLayout
from batchsim.kernel.tokens import Segment, TokenIds, prompt_stream
from batchsim.kernel.types import DecodeGroup, Request, Sequence
from batchsim.kv.grouped_cache import GroupedHashKV

A, B, C = prompt_stream(0), prompt_stream(1), prompt_stream(2)
FULL, STATE = KvGroup("full", 4), KvGroup("state", 4, states=2, aligned=True)
LONG = 200


def manager(*groups: KvGroup, blocks: int = 200) -> GroupedHashKV:
    return GroupedHashKV(KvLayout(groups), blocks, LONG, LONG)


def sequence(*segments: Segment) -> Sequence:
    tokens = TokenIds.of(list(segments))
    return Sequence(Request(0, 0, tokens.num_tokens, 50, tokens=tokens))


def run(kv: GroupedHashKV, seq: Sequence, *ends: int) -> int:
    """Admits `seq` with all that is found and computes it in steps up to these ends, or in one; returns the hit."""
    hit = kv.lookup(seq)
    for number, end in enumerate(ends or (seq.num_tokens,)):
        kv.begin_step()
        assert kv.allocate(seq, end) if number else kv.admit(seq, end, kv.lookup(seq))
        seq.settled_computed_tokens = end
        kv.check()
    kv.begin_step()
    return hit


def decode(kv: GroupedHashKV, seq: Sequence, steps: int) -> list[int]:
    """Blocks that `seq` holds after each of `steps` more tokens."""
    group, held = DecodeGroup(kv.block_size), []
    seq.settled_output_tokens += 1
    group.join(seq)
    for _ in range(steps):
        assert kv.grow_group(group)
        held.append(kv.held(seq))
        group.advance()
        kv.check()
    group.leave(seq)
    return held


@pytest.mark.parametrize(("known", "hit"), [(33, 32), (32, 16), (31, 16), (17, 16), (16, 0)])
def test_a_hit_ends_where_blocks_of_all_groups_end(known: int, hit: int) -> None:
    """Blocks of 8 and 16 tokens end together at multiples of 16; at least one token is computed."""
    kv = manager(KvGroup("full", 8), KvGroup("full", 16))
    run(kv, sequence((A, 0, 48)))
    assert kv.lookup(sequence((A, 0, known))) == hit


def test_of_windows_the_tail_of_the_prompt_is_kept() -> None:
    """`reachable_block_mask`, of retention interval 0: of 41 tokens the ceil((9 - 1) / 4) = 2 blocks up to token 40 are
    kept for a window of 9, so that who shares less than these 40 finds nothing to go on from."""
    kv = manager(FULL, KvGroup("window", 4, 9))
    run(kv, sequence((A, 0, 41)))
    assert kv.cached_blocks == 10 + 2
    assert kv.lookup(sequence((A, 0, 41), (B, 0, 9))) == 40
    assert kv.lookup(sequence((A, 0, 39), (B, 0, 9))) == 0


def test_the_first_blocks_of_a_window_are_a_hit_however_few() -> None:
    """A prompt shorter than a window is found whole: `SlidingWindowManager.find_longest_cache_hit` takes the leading
    run where no run fills the window."""
    kv = manager(FULL, KvGroup("window", 4, 33))
    run(kv, sequence((A, 0, 13)))
    assert kv.lookup(sequence((A, 0, 13), (B, 0, 9))) == 12


def test_a_junction_is_kept_for_the_next_that_shares_it() -> None:
    """Who shares 24 of 40 tokens finds them in full attention, and no state there: the 24 are its junction. It keeps
    the state at its end, by which the third goes on."""
    kv = manager(FULL, STATE)
    run(kv, sequence((A, 0, 40)), 36, 40)
    second, third = sequence((A, 0, 24), (B, 0, 9)), sequence((A, 0, 24), (C, 0, 9))
    assert (kv.lookup(second), kv.junction(second)) == (0, 24)
    run(kv, second, 24, 32, 33)
    assert kv.junction(second) == 24
    assert (kv.lookup(third), kv.junction(third)) == (24, 0)
    assert run(kv, third) == 24


def test_a_state_that_this_step_keeps_is_found_from_the_next_on() -> None:
    """`MambaManager.cached_blocks_this_step`: two equal prompts of one instant; the second waits a step, then goes on
    from the end of the first one's chunk."""
    kv = manager(FULL, STATE)
    first, second = sequence((A, 0, 9)), sequence((A, 0, 9))
    kv.begin_step()
    assert kv.admit(first, 8, 0)
    assert kv.lookup(second) == 8 and not kv.admit(second, 9, 8)
    first.settled_computed_tokens = 8
    kv.begin_step()
    assert kv.admit(second, 9, 8)


def test_states_in_flow() -> None:
    """A second state while a step crosses into a new block, and its predecessor goes back a step later."""
    kv, seq = manager(STATE), sequence((A, 0, 6))
    run(kv, seq, 4, 6)
    #                         token 7  8  9  10 11 12 13 14 15
    assert decode(kv, seq, 9) == [1, 1, 2, 1, 1, 1, 2, 1, 1]


def test_a_chunk_holds_the_state_at_its_end_alone() -> None:
    """A prompt of 40 tokens in chunks of 12: the states between are not kept, and with the third chunk the first one's
    goes back."""
    kv, seq = manager(STATE), sequence((A, 0, 40))
    run(kv, seq, 12)
    assert kv.held(seq) == 1
    for end, held in ((24, 2), (36, 2), (40, 2)):
        kv.begin_step()
        assert kv.allocate(seq, end)
        seq.settled_computed_tokens = end
        assert kv.held(seq) == held


def test_an_engine_that_can_keep_a_state_within_a_step_takes_a_block_for_it() -> None:
    """`_needs_internal_checkpoint`: a prompt of 11 tokens in one step keeps the state after 8, two blocks in all; with
    a grid that 8 is not on it keeps none."""
    for grid, held, hit in ((4, 2, 8), (16, 1, 0)):
        kv = manager(FULL, KvGroup("state", 4, states=3, aligned=True, checkpoint=grid))
        seq = sequence((A, 0, 11))
        run(kv, seq)
        assert kv.held(seq) == 3 + held
        assert kv.lookup(sequence((A, 0, 11))) == hit


def test_states_of_drafts_move_with_the_running_one() -> None:
    """`_relocate_speculative_block`: with 2 drafts a sequence holds 3 states, and 4 while it crosses."""
    kv, seq = manager(KvGroup("state", 4, states=4, aligned=True)), sequence((A, 0, 3))
    run(kv, seq)
    assert kv.held(seq) == 3
    assert decode(kv, seq, 7) == [3, 4, 3, 3, 3, 4, 3]


def test_what_was_found_longest_ago_is_reused_first_and_blank_blocks_before_it() -> None:
    """Of 12 blocks the first prompt leaves 3 with a key, the second 3; a third of 8 blocks takes the 6 blank ones and
    the 2 last blocks of the first."""
    kv = manager(FULL, blocks=12)
    for stream in (A, B):
        seq = sequence((stream, 0, 12))
        run(kv, seq)
        kv.free(seq)
    run(kv, sequence((C, 0, 32)))
    assert kv.lookup(sequence((A, 0, 13))) == 4
    assert kv.lookup(sequence((B, 0, 13))) == 12


def test_found_blocks_that_are_free_count_as_taken() -> None:
    """A pool of 6 with 3 found ones free: who shares them and needs 4 more is not admitted, who needs 3 more is."""
    kv = manager(FULL, blocks=6)
    seq = sequence((A, 0, 12))
    run(kv, seq)
    kv.free(seq)
    long, short = sequence((A, 0, 12), (B, 0, 16)), sequence((A, 0, 12), (B, 0, 12))
    assert not kv.admit(long, 28, kv.lookup(long))
    assert kv.num_free == 6
    assert kv.admit(short, 24, kv.lookup(short))
    assert kv.num_free == 0


def test_what_was_not_looked_up_is_refused() -> None:
    kv = manager(FULL)
    with pytest.raises(ValueError, match="cannot admit with 4 cached tokens"):
        kv.admit(sequence((A, 0, 12)), 12, 4)
