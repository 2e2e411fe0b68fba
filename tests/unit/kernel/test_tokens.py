"""Token identity: segments of numbered streams."""

from __future__ import annotations

import pytest

from batchsim.kernel.tokens import Segment, TokenIds, output_stream, prompt_stream
from batchsim.kernel.types import Request


def test_equal_tokens_have_equal_segments() -> None:
    """Neighbours of one stream are joined; those of different streams or with a gap are not."""
    split = TokenIds.of([(0, 0, 3), (0, 3, 5), (2, 0, 4), (2, 5, 1)])
    assert split == TokenIds.of([(0, 0, 8), (2, 0, 4), (2, 5, 1)])
    assert split.segments == ((0, 0, 8), (2, 0, 4), (2, 5, 1))
    assert split.num_tokens == 13


def test_streams_of_prompts_and_outputs_are_never_the_same() -> None:
    """Even ones are prompts', odd ones outputs'."""
    prompts, outputs = ({make(i) for i in range(50)} for make in (prompt_stream, output_stream))
    assert len(prompts | outputs) == 100


@pytest.mark.parametrize("segment", [(-1, 0, 1), (0, -1, 1), (0, 0, 0)])
def test_an_impossible_segment_is_refused(segment: Segment) -> None:
    """Streams and indices count from 0, lengths from 1."""
    with pytest.raises(ValueError, match="needs stream and start from 0, length from 1"):
        TokenIds.of([segment])


def test_a_prompt_has_an_identity_for_each_token() -> None:
    """More or fewer identities than tokens are a mistake of the workload."""
    tokens = TokenIds.of([(0, 0, 5)])
    assert Request(0, 0, 5, 1, tokens=tokens).tokens is tokens
    with pytest.raises(ValueError, match="request 0: 5 token ids, prompt_tokens 6"):
        Request(0, 0, 6, 1, tokens=tokens)
