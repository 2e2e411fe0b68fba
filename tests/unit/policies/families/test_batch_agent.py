"""An agent of whole batches, by hand: a step takes 10 us, decisions to wait last for 25."""

from __future__ import annotations

from math import exp, log1p
from typing import Any

import pytest
from hypothesis import given

from batchsim.base.errors import ScenarioError
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Request, Sequence
from batchsim.policies.families.batch_agent import BATCH_OBSERVED, BatchAgent, BatchAgentConfig
from tests.support.microseconds import US, busy, records_of, starts_us, steps
from tests.support.random_cases import random_cases

CONFIG = BatchAgentConfig(max_batch_size=4, max_wait=25 * US)


class Pairs(BatchAgent):
    """Two at a time; one alone waits until it has done so for 40 us."""

    def decide(self, observed: tuple[float, ...]) -> int:
        return 2 if observed[0] > 1 or observed[2] >= 40e-6 else 0


class Answers(BatchAgent):
    """Always the same number."""

    answer: Any = 0

    def decide(self, observed: tuple[float, ...]) -> int:
        return self.answer


def test_a_decision_takes_the_first_requests_and_waiting_lasts_until_an_arrival_or_its_bound() -> None:
    """The first two go at 5; the third is asked about at 15, at 40, 25 later, and at 45, when the fourth has come."""
    assert starts_us(records_of(Pairs, CONFIG, "0:4->1 5:4->1 6:4->1 45:4->1 200:4->1")) == [5, 5, 45, 45, 200]
    assert starts_us(records_of(Pairs, CONFIG, "0:4->1 300:4->1"))[0] == 50


def test_where_no_more_requests_come_what_would_be_kept_waiting_is_served() -> None:
    assert starts_us(records_of(Answers, CONFIG, "0:4->1 7:4->1")) == [7, 7]


def test_the_observation_is_of_what_a_server_can_know() -> None:
    """Two wait for 3 and 1 us at 10 us, of 5 and 6 tokens; rates decay from 1 and 0.1 a request; nothing ran."""
    scheduler = Answers(CONFIG, PolicyContext(CountingKV(99, 4), 64))
    for i, at in ((0, 7 * US), (1, 9 * US)):
        scheduler.add(Sequence(Request(i, at, 5 + i, 9)), at)
    fast = exp(-3e-6) + exp(-1e-6)
    slow = (exp(-3e-7) + exp(-1e-7)) / 10
    expected = (log1p(2), log1p(11), 3e-6, log1p(fast), log1p(slow), 0, 0, 0)
    assert scheduler.observed(10 * US) == pytest.approx(expected, rel=1e-6)
    assert len(expected) == len(BATCH_OBSERVED)
    assert scheduler.is_due(10 * US)


def test_the_latest_batch_and_decision_are_observed() -> None:
    """Of 8 decisions asked for at most 4 run; the batch took 20 us."""
    seen = []

    class Watching(BatchAgent):
        def decide(self, observed: tuple[float, ...]) -> int:
            seen.append(observed)
            return 3

    records_of(Watching, CONFIG, "0:4->2 0:4->2 100:4->1")
    assert seen[1][5:] == pytest.approx((20e-6, 2 / 4, 3 / 4))


def test_a_size_out_of_range_is_an_error_in_a_line() -> None:
    scheduler = Answers(CONFIG, PolicyContext(CountingKV(99, 4), 64))
    scheduler.add(Sequence(Request(0, 0, 5, 9)), 0)
    for answer in (5, -1):
        scheduler.answer = answer
        with pytest.raises(ScenarioError, match=f"Answers.decide returned {answer}. It must be a number from 0 to"):
            scheduler.schedule(0, False)


def test_rows_beyond_the_memory_wait() -> None:
    assert steps(records_of(Pairs, CONFIG, "0:4->1 0:4->1", blocks=1), "num_chunks") == [(1,), (1,)]


@random_cases(15)
@given(busy())
def test_every_driver_agrees(arrivals: Any) -> None:
    records_of(Pairs, CONFIG, arrivals, blocks=30)
