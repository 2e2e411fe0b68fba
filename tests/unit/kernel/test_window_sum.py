"""What a decode group reads in layers with a window, beside a plain sum over its members at every step."""

from __future__ import annotations

import random

from batchsim.kernel.draft_group import DraftGroup
from batchsim.kernel.types import DecodeGroup, Request, Sequence
from batchsim.kernel.window_sum import WindowSum, keys_in_window


def sequence(number: int, context: int) -> Sequence:
    """A sequence that may join a group with `context` computed tokens."""
    seq = Sequence(Request(number, 0, context, 1_000))
    seq.settled_computed_tokens, seq.settled_output_tokens = context, 1
    return seq


def test_the_sum_is_that_over_the_members_whatever_joins_leaves_and_leaps() -> None:
    """Also where it was not asked for a while, and how many are below the window, and how soon one fills it."""
    for seed in range(60):
        rng = random.Random(seed)
        group, window = DecodeGroup(16), rng.choice([1, 7, 40, 1_000])
        for number in range(60):
            act = rng.random()
            if act < 0.4 or not group.members:
                group.join(sequence(number, rng.randint(1, 80)))
            elif act < 0.55:
                group.leave(rng.choice(list(group.members)))
            elif act < 0.8:
                group.advance()
            else:
                group.advance_by(rng.randint(1, 30))
            if rng.random() < 0.6:
                contexts = [seq.num_computed_tokens for seq in group.members]
                assert group.in_window(window) == sum(min(context, window) for context in contexts)
                windowed, missing = group.windowed, [window - context for context in contexts if context < window]
                assert windowed is not None
                assert windowed.below == len(missing)
                assert 0 < windowed.fills_in <= min(missing, default=windowed.fills_in)


def test_another_window_is_summed_anew() -> None:
    group = DecodeGroup(16)
    for context in (10, 300):
        group.join(sequence(context, context))
    assert (group.in_window(128), group.in_window(64), group.in_window(1_000)) == (138, 74, 310)


def test_members_that_verify_drafts_are_summed_at_their_own_contexts() -> None:
    group = DraftGroup(16)
    for context in (10, 127, 300):
        group.join(sequence(context, context))
    assert group.in_window(128) == 10 + 127 + 128


def test_a_group_that_was_never_asked_keeps_no_sum() -> None:
    group = DecodeGroup(16)
    group.join(sequence(0, 5))
    group.advance()
    assert group.windowed is None


def test_the_step_that_fills_a_window_is_the_last_that_grows() -> None:
    windowed = WindowSum(10, 0)
    windowed.add(8, 0)
    windowed.add(50, 0)
    sums = []
    for step in range(4):
        windowed.move_to(step)
        sums.append((windowed.tokens, windowed.below, windowed.fills_in))
    assert sums == [(18, 1, 2), (19, 1, 1), (20, 0, float("inf")), (20, 0, float("inf"))]


def test_keys_of_a_chunk_are_those_of_its_tokens_one_by_one() -> None:
    for tokens, before, window in [(1, 0, 4), (9, 0, 4), (3, 2, 4), (3, 4, 4), (5, 100, 4), (6, 0, 100), (0, 3, 4)]:
        plain = sum(min(before + place, window) for place in range(1, tokens + 1))
        assert keys_in_window(tokens, before, window) == plain
