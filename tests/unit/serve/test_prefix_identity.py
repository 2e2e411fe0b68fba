"""Equal beginnings of prompts are the same tokens to the engines."""

from __future__ import annotations

from batchsim.kernel.tokens import TokenIds, output_stream
from batchsim.serve.prefix_identity import BLOCK, PrefixIdentity


def tokens(ids: TokenIds) -> list[tuple[int, int]]:
    """Each token as (stream, index)."""
    return [(stream, start + i) for stream, start, length in ids.segments for i in range(length)]


def shared(one: TokenIds, other: TokenIds) -> int:
    """How many tokens two prompts begin with in common."""
    pairs = list(zip(tokens(one), tokens(other), strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def test_prompts_share_the_blocks_that_are_equal() -> None:
    """Two prompts equal for 40 tokens share the 32 of two blocks, and one equal to neither shares nothing."""
    identity = PrefixIdentity()
    first, second = identity.of(list(range(60))), identity.of([*range(40), *range(900, 930)])
    assert (first.num_tokens, second.num_tokens) == (60, 70)
    assert shared(first, second) == 2 * BLOCK
    assert shared(first, identity.of(list(range(1, 61)))) == 0
    assert shared(second, identity.of([*range(40), *range(900, 930)])) == 4 * BLOCK


def test_a_later_block_alone_is_not_shared() -> None:
    """A block that is equal after one that differs is another text, as its KV is."""
    identity = PrefixIdentity()
    one, other = identity.of([1] * 16 + [2] * 16), identity.of([3] * 16 + [2] * 16)
    assert not set(tokens(one)) & set(tokens(other))


def test_an_answer_is_part_of_the_next_prompt() -> None:
    """A prompt that goes on with what was answered has the answer's own tokens, but for the last block's rest."""
    identity = PrefixIdentity()
    prompt, answer = list(range(20)), list(range(500, 530))
    first = identity.of(prompt)
    identity.answered(prompt, first, 7, answer)
    after = identity.of([*prompt, *answer, 1, 2, 3])
    assert shared(first, after) == 20
    assert tokens(after)[20:48] == [(15, i) for i in range(28)]
    assert after.num_tokens == 53


def test_what_is_forgotten_is_new_again() -> None:
    """After `forget`, and beyond the number of blocks kept, equal prompts share nothing."""
    identity = PrefixIdentity(max_blocks=3)
    first = identity.of(list(range(48)))
    assert shared(first, identity.of(list(range(48)))) == 48
    identity.of(list(range(100, 132)))
    assert shared(first, identity.of(list(range(48)))) == 0
    again = identity.of(list(range(32)))
    identity.forget(1)
    assert shared(again, identity.of(list(range(32)))) == 0


def test_an_answer_under_way_at_a_reset_is_shared_with_no_later_prompt() -> None:
    """A request of before the reset ends after it; one sent after it is known as ever."""
    identity = PrefixIdentity()
    prompt, output = [1, 2, 3], list(range(20))
    before = identity.of(prompt)
    identity.forget(1)
    identity.answered(prompt, before, 0, output)
    after = identity.of([*prompt, *output])
    assert not {stream for stream, _, _ in after.segments} & {output_stream(0), before.segments[0][0]}
    again = PrefixIdentity()
    tokens = again.of(prompt)
    again.answered(prompt, tokens, 0, output)
    assert output_stream(0) in {stream for stream, _, _ in again.of([*prompt, *output]).segments}
