"""A group whose members gain different numbers of tokens answers what a walk over them would."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.kernel.draft_group import DraftGroup, DraftRows, Verified
from batchsim.kernel.types import Request, Sequence

LONG = 1_000


def ready(id: int, computed: int, blocks: int) -> Sequence:
    """A sequence whose prompt of `computed` tokens is done and has sampled its first token."""
    seq = Sequence(Request(id, 0, computed, LONG))
    seq.settled_computed_tokens, seq.settled_output_tokens, seq.num_blocks = computed, 1, blocks
    return seq


def verify(group: DraftGroup, rows: list[int], gained: list[int], *, ahead: bool = False) -> DraftRows:
    """A step of so many rows a member, of which it gains so many tokens."""
    group.ask(np.array(rows), 0, LONG)
    group.take_due()
    drafting = DraftRows(list(group.sequences), group.rows, {})
    tokens = np.array(gained)
    group.verify(drafting, Verified(tokens), ahead=ahead)
    return drafting


@given(
    block_size=st.integers(1, 5),
    steps=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=8),
)
def test_members_may_gain_different_numbers_of_tokens(block_size: int, steps: list[list[int]]) -> None:
    """However many tokens each gains, counters, context and the blocks due are those of a walk over the members."""
    group = DraftGroup(block_size)
    members = [ready(i, 3 + i, -(-(3 + i) // block_size)) for i in range(3)]
    for seq in members:
        group.join(seq)
    held = [seq.num_blocks for seq in members]
    for number, gained in enumerate(steps, start=1):
        before = [seq.num_computed_tokens for seq in members]
        verify(group, [4] * 3, gained)
        held = [max(blocks, -(-(n + 4) // block_size)) for blocks, n in zip(held, before, strict=True)]
        assert [group.blocks_held(seq) for seq in members] == held
        total = [sum(column) for column in zip(*steps[:number], strict=True)]
        assert [group.gained(seq) for seq in members] == total
        assert [seq.num_output_tokens for seq in members] == [1 + n for n in total]
        computed = [3 + i + n for i, n in enumerate(total)]
        assert [seq.num_computed_tokens for seq in members] == computed
        assert group.total_context_tokens == sum(computed)
        group.ask(np.array([4] * 3), 1, LONG)
        due = [max(-(-(n + 5) // block_size) - blocks, 0) for n, blocks in zip(computed, held, strict=True)]
        assert [group.members_due().count(seq) for seq in members] == due
        assert group.blocks_due() == sum(due)
    left = members[0]
    tokens = left.num_tokens
    group.leave(left)
    assert (left.num_tokens, group.total_context_tokens) == (tokens, sum(computed[1:]))
    assert [seq.num_computed_tokens for seq in members[1:]] == computed[1:]


@pytest.mark.parametrize("leaves", [False, True])
def test_what_is_known_as_a_step_lands_counts_as_if_known_before(leaves: bool) -> None:
    """Whoever stays or leaves in between, counters are those of a step whose drafts were judged at its launch."""
    found: list[list[int]] = []
    for told in (True, False):
        group, seqs = DraftGroup(4), [ready(i, 5, 4) for i in range(3)]
        for seq in seqs:
            group.join(seq, 3)
        group.ask(np.array([4, 4, 2]), 0, LONG)
        group.take_due()
        drafting = DraftRows(list(group.sequences), group.rows, {})
        verified = Verified(np.array([1, 3, 2]))
        group.verify(drafting, verified if told else None, ahead=True)
        assert group.total_context_tokens == (15 + 6 if told else 15 + 10)
        if leaves:
            group.leave(seqs[0])
        if not told:
            group.learn(drafting, verified)
        found.append([*(seq.num_rejected_tokens for seq in seqs), group.total_context_tokens])
        group.land(drafting, [])
        found[-1] += [seq.num_computed_tokens for seq in seqs]
    assert found[0] == found[1] and found[0][-3:] == [6, 8, 7]


def test_ahead_of_results_all_drafts_count_until_they_land() -> None:
    """With the results what was rejected is taken off: of a member, of one that left, not of one that begins anew."""
    group = DraftGroup(4)
    _, sits_out, begins_anew = members = [ready(i, 8, 2) for i in range(3)]
    for seq in members:
        group.join(seq, drafts=3)
    drafting = verify(group, [4] * 3, [1, 2, 3], ahead=True)
    assert [seq.num_output_tokens for seq in members] == [5, 5, 5] and group.total_context_tokens == 3 * 8 + 1 + 2 + 3
    assert group.unknown.tolist() == [4, 4, 4]
    group.leave(sits_out)
    group.leave(begins_anew)
    begins_anew.reset_computed()
    group.land(drafting, [])
    assert [seq.num_output_tokens for seq in members] == [2, 3, 4]
    assert [seq.num_computed_tokens for seq in members] == [9, 10, 0]
    assert group.unknown.tolist() == [0] and not any(seq.num_rejected_tokens for seq in members)


def test_a_prompt_padded_with_dummy_drafts_counts_them_until_it_lands() -> None:
    """It joins ahead of its result as if they were accepted, and has one token with it."""
    group, seq = DraftGroup(4), ready(0, 5, 3)
    none = np.zeros(0, np.int64)
    drafting = DraftRows([], none, {seq: 3}, verified=Verified(none))
    group.join(seq, drafts=3, unknown=4)
    assert (seq.num_computed_tokens, seq.num_output_tokens, group.unknown.tolist()) == (8, 4, [4])
    group.land(drafting, [seq])
    assert (seq.num_computed_tokens, seq.num_output_tokens, group.unknown.tolist()) == (5, 1, [0])


def test_the_last_token_is_foreseen_with_all_drafts_rejected() -> None:
    """Only of members with a step in flight, one token before their cap."""
    group = DraftGroup(4)
    for i, cap in enumerate((3, 4)):
        seq = Sequence(Request(i, 0, 8, cap))
        seq.settled_computed_tokens, seq.settled_output_tokens, seq.num_blocks = 8, 1, 2
        group.join(seq)
    assert group.last_in_flight() == []
    group.land(verify(group, [1, 1], [1, 1], ahead=True), [])
    assert group.last_in_flight() == []
    verify(group, [4, 4], [4, 1], ahead=True)
    assert [seq.request.id for seq in group.last_in_flight()] == [0]


def test_only_who_lacks_one_token_may_join() -> None:
    """A sequence in the middle of its prefill, or already in the group, is refused."""
    group, seq = DraftGroup(4), ready(7, 5, 2)
    seq.settled_computed_tokens = 4
    with pytest.raises(ValueError, match="request 7 cannot join"):
        group.join(seq)
    seq.settled_computed_tokens = 5
    group.join(seq)
    with pytest.raises(ValueError, match="request 7 cannot join"):
        group.join(seq)
