"""Laws of lengths, and what the caps do to them."""

import numpy as np
import pytest

from batchsim.workload.laws import (
    EmpiricalTokens,
    FixedTokens,
    GammaTokens,
    LognormalTokens,
    UniformTokens,
    draw_tokens,
)
from batchsim.workload.traces.random_stream import random_stream

LAWS = [
    FixedTokens(7),
    UniformTokens(3, 9),
    LognormalTokens(1155, 0.96),
    GammaTokens(211, 0.77),
    EmpiricalTokens((10, 20, 90)),
    EmpiricalTokens((10, 20, 90), (0.0, 3.0, 1.0)),
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.kind)
def test_means_are_those_of_the_law(law):
    """200,000 draws have the law's mean, and nothing is clipped."""
    draws = draw_tokens(law, random_stream(1, "test"), 200_000)
    assert draws.tokens.mean() == pytest.approx(law.mean_tokens, rel=0.01)
    assert draws.tokens.dtype == np.int64
    assert (draws.tokens == draws.drawn).all() or law.kind in ("lognormal", "gamma")


@pytest.mark.parametrize("law", [LognormalTokens(1155, 0.96), GammaTokens(1155, 0.96)], ids=lambda law: law.kind)
def test_spread_is_that_of_the_law(law):
    """The coefficient of variation is the one asked for."""
    tokens = draw_tokens(law, random_stream(1, "test"), 200_000).tokens
    assert tokens.std() / tokens.mean() == pytest.approx(0.96, rel=0.02)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.kind)
def test_the_first_draws_do_not_depend_on_how_many_are_drawn(law):
    """Ten draws are the head of ten thousand: longer runs and higher loads see the same requests."""
    few = draw_tokens(law, random_stream(2, "test"), 10).tokens
    many = draw_tokens(law, random_stream(2, "test"), 10_000).tokens
    assert few.tolist() == many[:10].tolist()


def test_uniform_includes_both_ends():
    """Every length from min to max occurs, and no other."""
    tokens = draw_tokens(UniformTokens(3, 6), random_stream(1, "test"), 4000).tokens
    assert np.unique(tokens).tolist() == [3, 4, 5, 6]


def test_a_weight_of_zero_is_never_drawn():
    """Empirical weights of 0 at either end stay undrawn."""
    law = EmpiricalTokens((1, 2, 3, 4), (0.0, 0.1, 0.7, 0.0))
    assert np.unique(draw_tokens(law, random_stream(1, "test"), 50_000).tokens).tolist() == [2, 3]


def test_limits_clip_and_keep_what_was_drawn():
    """Draws beyond min or max sit on them; the unclipped draw stays known."""
    law = LognormalTokens(100, 1.0, min=50, max=150)
    draws = draw_tokens(law, random_stream(1, "test"), 10_000)
    assert (draws.tokens.min(), draws.tokens.max()) == (50, 150)
    outside = (draws.drawn < 50) | (draws.drawn > 150)
    assert (draws.tokens != draws.drawn).tolist() == outside.tolist()
    assert 0.3 < outside.mean() < 0.6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UniformTokens(9, 3), "max is 3, below min 9"),
        (lambda: GammaTokens(100, 1.0, max=50), "mean 100 lies outside"),
        (lambda: GammaTokens(100, 1.0, min=200), "mean 100 lies outside"),
        (lambda: EmpiricalTokens(()), "values is empty"),
        (lambda: EmpiricalTokens((1, 2), (1.0,)), "1 weights for 2 values"),
        (lambda: EmpiricalTokens((1, 2), (0.0, 0.0)), "weights add up to 0"),
    ],
)
def test_bad_laws_are_refused_in_one_line(make, message):
    """Every broken law names the field and the number."""
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_streams_differ_in_every_argument():
    """Seed, purpose, user and block each give another stream; equal arguments give the same one."""
    streams = [
        random_stream(1, "a"),
        random_stream(2, "a"),
        random_stream(1, "b"),
        random_stream(1, "a", user=1),
        random_stream(1, "a", block=1),
    ]
    heads = {tuple(stream.random(3)) for stream in streams}
    assert len(heads) == len(streams)
    assert random_stream(1, "a").random() == random_stream(1, "a").random()
