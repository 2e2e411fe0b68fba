"""Which requests a decode engine computes alone: each rule at both sides of its boundaries, by hand."""

from __future__ import annotations

from batchsim.base.units import NS_PER_S
from batchsim.drive.fleet.routers.local_prefill import (
    DynamoIslBoundingConfig,
    LlmDAlwaysConfig,
    LlmDPrefixConfig,
    LocalPrefillConfig,
    TrtllmThresholdConfig,
)
from batchsim.kernel.tokens import TokenIds, prompt_stream
from batchsim.kernel.types import Request


def _asked(number: int, prompt: int, shared: int = 0, at_s: float = 0) -> Request:
    """A prompt whose first `shared` tokens are those of all others."""
    parts = [(prompt_stream(1), 0, shared)] if shared else []
    parts += [(prompt_stream(100 + number), 0, prompt - shared)] if prompt > shared else []
    return Request(number, int(at_s * NS_PER_S), prompt, 8, tokens=TokenIds.of(parts))


def _kept(config: LocalPrefillConfig, *asked: tuple[Request, int]) -> list[bool]:
    """Which of the requests, each with its decode engine, are computed there alone."""
    decider = config.build()
    return [decider.keeps(request, decode) for request, decode in asked]


def test_tensorrt_llm_keeps_what_has_a_match_and_few_tokens_beyond() -> None:
    """The context server is used iff match is 0, or prompt less match is above max_local_prefill_length: of 100 tokens
    96 match in whole blocks, which leaves 4. An engine that has none of it never computes it."""
    first, again, elsewhere, short = _asked(0, 100, 100), _asked(1, 100, 100), _asked(2, 100, 100), _asked(3, 3)
    asked = (first, 5), (again, 5), (elsewhere, 6), (short, 5)
    assert _kept(TrtllmThresholdConfig(max_local_prefill_length=4), *asked) == [False, True, False, False]
    assert _kept(TrtllmThresholdConfig(max_local_prefill_length=3), *asked) == [False] * 4
    whole = (_asked(0, 96, 96), 5), (_asked(1, 96, 96), 5)
    assert _kept(TrtllmThresholdConfig(), *whole) == [False, True]  # by default none but what has no token beyond


def test_dynamo_keeps_few_new_tokens_that_are_a_small_share() -> None:
    """Strictly below 0.7 of the prompt, so that a short prompt without a match is not kept: 1,600 tokens with 480
    cached have 0.7 of them new, with 496 less. And strictly below 2,048: of 4,096 tokens 2,048 cached are too few."""
    before = _asked(0, 2064, 2064)
    edge, below = _asked(1, 1600, 480), _asked(2, 1600, 496)
    assert _kept(DynamoIslBoundingConfig(), (before, 3), (edge, 3), (below, 3)) == [False, False, True]
    assert _kept(DynamoIslBoundingConfig(), (before, 3), (below, 4), (_asked(3, 20), 3)) == [False] * 3
    long, longer = _asked(4, 4096, 2048), _asked(5, 4096, 2064)
    assert _kept(DynamoIslBoundingConfig(), (before, 3), (long, 3), (longer, 3)) == [False, False, True]


def test_dynamo_forgets_what_was_sent_long_ago() -> None:
    """After 120 s, of which the last instant counts still."""
    for at_s, kept in ((120, True), (120.1, False)):
        asked = (_asked(0, 160, 160), 3), (_asked(1, 160, 160, at_s), 3)
        assert _kept(DynamoIslBoundingConfig(), *asked) == [False, kept]


def test_llm_d_keeps_prompts_with_few_tokens_that_are_not_cached() -> None:
    """nonCachedTokens 16: 15 tokens stay, 16 do not; of 111 with 96 that match 15 are new, of 112 there are 16."""
    config = LlmDPrefixConfig(non_cached_tokens=16)
    assert _kept(config, (_asked(0, 15), 1), (_asked(1, 16), 1)) == [True, False]
    first, near, far = _asked(2, 100, 96), _asked(3, 111, 96), _asked(4, 112, 96)
    assert _kept(config, (first, 1), (near, 1), (far, 1)) == [False, True, False]
    assert _kept(LlmDPrefixConfig(non_cached_tokens=0), (_asked(5, 4000), 1)) == [True]


def test_llm_d_compares_so_many_blocks_and_remembers_so_many() -> None:
    """Of 10 shared blocks 4 are compared, which leaves 96 tokens of 160; of 4 sent 3 are remembered, the last ones, so
    that a prompt that begins as the first did has no match."""
    asked = (_asked(0, 160, 160), 1), (_asked(1, 160, 160), 1)
    for most, kept in ((4, False), (5, True)):
        config = LlmDPrefixConfig(non_cached_tokens=96, max_prefix_blocks=most)
        assert _kept(config, *asked) == [False, kept]
    config = LlmDPrefixConfig(non_cached_tokens=17, lru_capacity=3)
    assert _kept(config, (_asked(0, 64, 64), 1), (_asked(1, 64, 64), 1)) == [False, False]
    config = LlmDPrefixConfig(non_cached_tokens=17, lru_capacity=4)
    assert _kept(config, (_asked(0, 64, 64), 1), (_asked(1, 64, 64), 1)) == [False, True]


def test_llm_d_s_other_decider_keeps_nothing() -> None:
    """always-disagg-pd-decider: neither one token nor a prompt that was sent there before."""
    assert _kept(LlmDAlwaysConfig(), (_asked(0, 1), 1), (_asked(1, 96, 96), 1), (_asked(2, 96, 96), 1)) == [False] * 3
