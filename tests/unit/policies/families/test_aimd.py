"""Additive increase and multiplicative decrease of a batch's size, by hand: a step takes 10 us."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from batchsim.policies.families.aimd import Aimd, AimdConfig
from tests.support.microseconds import US, busy, records_of, starts_us
from tests.support.random_cases import random_cases


def aimd(arrivals: str, objective_ns: int = 10 * US, blocks: int = 1000, **knobs: Any) -> list[int | None]:
    return starts_us(records_of(Aimd, AimdConfig(latency_objective=objective_ns, **knobs), arrivals, blocks))


def test_a_full_batch_within_the_objective_adds_to_the_size() -> None:
    """One, two, then one of three: a batch that was not full says nothing of four. 10 us keep an objective of 10 us."""
    assert aimd("0:4->1 0:4->1 0:4->1 0:4->1") == [0, 10, 10, 20]
    six = "21:4->1 " * 6
    assert aimd(f"0:4->1 0:4->1 0:4->1 0:4->1 {six}")[4:] == [30, 30, 30, 40, 40, 40]


def test_a_batch_that_took_longer_multiplies_the_size() -> None:
    """From 10 to 9 to 8.1, of which 8 are used, to 7.29."""
    starts = aimd("0:4->1 " * 28, 10 * US - 1, initial_batch_size=10)
    assert [starts.count(at) for at in (0, 10, 20, 30)] == [10, 9, 8, 1]


def test_the_size_stays_at_least_one_and_at_most_the_largest() -> None:
    """Backing off from one leaves one; under a largest size of 2 a full batch of two adds nothing."""
    assert aimd("0:4->1 0:4->1 0:4->1", 1) == [0, 10, 20]
    assert aimd("0:4->1 " * 5, max_batch_size=2) == [0, 10, 10, 20, 20]


def test_the_oldest_waits_for_a_fuller_batch_as_long_as_the_delay() -> None:
    """Of two the first waits until 30, or for a second at 20; the last of all, for which none will come, does not."""
    knobs: dict[str, Any] = {"initial_batch_size": 2, "batch_delay": 30 * US}
    assert aimd("0:4->1 50:4->1", **knobs) == [30, 50]
    assert aimd("0:4->1 20:4->1 60:4->1", **knobs) == [20, 20, 60]


def test_where_kv_is_short_a_batch_has_the_rows_that_fit() -> None:
    """Two rows of a block each fit; the third runs alone."""
    assert aimd("0:4->1 0:4->1 0:4->1", blocks=2, initial_batch_size=3) == [0, 0, 10]


def test_a_first_size_above_the_largest_is_refused() -> None:
    with pytest.raises(ValueError, match="initial_batch_size 3 must be at most max_batch_size 2"):
        AimdConfig(latency_objective=1, initial_batch_size=3, max_batch_size=2)


@random_cases(15)
@given(busy())
def test_every_driver_agrees(arrivals: Any) -> None:
    records_of(Aimd, AimdConfig(latency_objective=50 * US, batch_delay=7 * US, respond="row_end"), arrivals, blocks=30)
