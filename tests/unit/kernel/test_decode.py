"""The lockstep group answers in O(1) what a walk over its members would."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.kernel.types import DecodeGroup, Request, Sequence


def ready(id: int, computed: int) -> Sequence:
    """A sequence whose prompt of `computed` tokens is done and has sampled its first token."""
    seq = Sequence(Request(id, 0, computed, 1_000))
    seq.settled_computed_tokens = computed
    seq.settled_output_tokens = 1
    return seq


def test_members_gain_a_token_a_step() -> None:
    """Counters of a member follow the group and stay as they were when it leaves."""
    group = DecodeGroup(block_size=4)
    early, late = ready(0, 10), ready(1, 3)
    group.join(early)
    group.advance()
    group.join(late)
    group.advance()
    assert (early.num_computed_tokens, early.num_output_tokens, early.num_tokens) == (12, 3, 13)
    assert (late.num_computed_tokens, late.num_output_tokens, late.num_tokens) == (4, 2, 5)
    assert group.total_context_tokens == 16
    group.leave(early)
    group.advance()
    assert (early.num_computed_tokens, early.num_output_tokens) == (12, 3)
    assert late.num_computed_tokens == 5
    assert group.total_context_tokens == 5


def test_leaving_is_seen_by_whoever_planned_its_end() -> None:
    """The epoch of a sequence changes when it leaves; it may join again, and is listed once."""
    group = DecodeGroup(4)
    seq = ready(0, 5)
    group.join(seq)
    epoch = seq.epoch
    group.leave(seq)
    assert seq.epoch == epoch + 1
    group.join(seq)
    assert (list(group.joined), group.left) == ([seq], [seq])
    group.leave(seq)
    assert seq.epoch == epoch + 2


def test_only_who_lacks_one_token_may_join() -> None:
    """A sequence in the middle of its prefill, or already in the group, is refused."""
    group = DecodeGroup(4)
    seq = ready(7, 5)
    seq.settled_computed_tokens = 4
    with pytest.raises(ValueError, match="request 7 cannot join"):
        group.join(seq)
    seq.settled_computed_tokens = 5
    group.join(seq)
    with pytest.raises(ValueError, match="request 7 cannot join"):
        group.join(seq)
    assert len(group) == 1


def test_blocks_are_due_when_the_next_token_starts_one() -> None:
    """A member with a multiple of the block size in its cache needs a block for the next step, in joining order."""
    group = DecodeGroup(4)
    a, b, c = ready(0, 8), ready(1, 7), ready(2, 4)
    for seq in (a, b, c):
        group.join(seq)
    assert group.blocks_due() == 2
    assert group.members_due() == [a, c]
    assert group.members_due(ahead=1) == [b]
    group.advance()
    assert group.members_due() == [b]


@given(
    st.integers(1, 5),
    st.lists(st.one_of(st.integers(1, 30), st.sampled_from(["advance", "leave_first", "leave_last"])), max_size=40),
)
def test_the_group_equals_a_walk(block_size: int, script: list[int | str]) -> None:
    """After any joins, leaves and steps the totals and the blocks due equal those counted member by member."""
    group = DecodeGroup(block_size)
    for number, action in enumerate(script):
        if isinstance(action, int):
            group.join(ready(number, action))
        elif action == "advance":
            group.advance()
        elif group.members:
            members = list(group.members)
            group.leave(members[0 if action == "leave_first" else -1])
        members = list(group.members)
        assert group.total_context_tokens == sum(seq.num_computed_tokens for seq in members)
        for ahead in range(block_size + 1):
            due = [seq for seq in members if (seq.num_computed_tokens + ahead) % block_size == 0]
            assert sorted(seq.request.id for seq in group.members_due(ahead)) == [seq.request.id for seq in due]
        assert group.blocks_due() == len(group.members_due())
