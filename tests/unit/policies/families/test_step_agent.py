"""An agent that moves limits between steps, by hand: a step takes 10 ns, 1 more a prefill token, 2 a decode."""

from __future__ import annotations

from math import exp, log1p
from typing import Any

import pytest
from hypothesis import given

from batchsim.base.errors import ScenarioError
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Request, Sequence
from batchsim.policies.families.observed import ArrivalRates, Quantity, observation
from batchsim.policies.families.step_agent import STEP_OBSERVED, StepAgent, StepAgentConfig
from tests.support.random_cases import random_cases
from tests.support.stepping import Run, crowds, run, run_every_way

LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 40, "budgets": (5, 12, 40), "caps": (1, 4)}
CONFIG = StepAgentConfig(**LIMITS, every=30)


class ByLatest(StepAgent):
    """The middle budget at first, the small one behind a long step; all slots while requests wait."""

    def decide(self, observed: tuple[float, ...]) -> tuple[int, int]:
        return (0 if observed[9] > 20e-9 else 1, 1)


class Answers(StepAgent):
    """Always the same places."""

    answer: Any = (2, 1)

    def decide(self, observed: tuple[float, ...]) -> tuple[int, int]:
        return self.answer


def played(arrivals: str, answer: tuple[int, int], **knobs: Any) -> Run:
    class Fixed(StepAgent):
        def decide(self, observed: tuple[float, ...]) -> tuple[int, int]:
            return answer

    return run(Fixed, StepAgentConfig(**LIMITS | knobs), arrivals)


def test_the_chosen_budget_and_cap_are_the_limits() -> None:
    """Of 5 tokens one is the decode's; under a cap of one the second request waits for the first to end."""
    assert played("0:4->4 1:8->1", (0, 1)).items[1:3] == [[(0, 1), (1, 4)], [(0, 1), (1, 4)]]
    assert played("0:4->2 1:8->1", (2, 0)).items == [[(0, 4)], [(0, 1)], [(1, 8)]]


def test_a_decision_is_held_for_its_time_and_made_again_at_the_step_behind_it() -> None:
    """Decided at 0 for 12 tokens; the step of 22 ns is long, and at 35, when a step begins behind 30, 5 are chosen."""
    result = run(ByLatest, CONFIG, "0:12->2 1:40->1")
    assert [row.start_ns for row in result.log[:3]] == [0, 22, 45]
    assert result.items[:3] == [[(0, 12)], [(0, 1), (1, 11)], [(1, 5)]]


def test_prompts_have_a_token_beside_decodes_that_fill_the_budget() -> None:
    """Three decodes under a budget of 3: the fourth prompt is computed a token a step."""
    arrivals = "0:1->9 0:1->9 0:1->9 1:3->1"
    assert [dict(items).get(3, 0) for items in played(arrivals, (0, 1), budgets=(3, 40)).items[:5]] == [0, 1, 1, 1, 0]


def test_the_observation_is_of_what_a_scheduler_can_know() -> None:
    """Behind a step at 5 ns of 5 of 8 tokens, one waits since 3 ns: 2 of 99 blocks hold the prompt begun."""
    scheduler = Answers(CONFIG, PolicyContext(CountingKV(99, 4), 64))
    scheduler.answer = (0, 0)
    assert not scheduler.is_due(0)
    for i, at in ((0, 1), (1, 3)):
        scheduler.add(Sequence(Request(i, at, 8, 9)), at)
    assert scheduler.is_due(5)
    scheduler.schedule(5, False)
    rate = exp(-22e-9) + exp(-20e-9)
    expected = (log1p(1), 20e-9, 1 / 4, 2 / 99, 1 / 4, log1p(3), 0, log1p(rate), log1p(0.2), 0, 0, 18e-9, 0, 0)
    assert scheduler.observed(23) == pytest.approx(expected, rel=1e-5, abs=1e-12)
    assert len(expected) == len(STEP_OBSERVED)
    assert (scheduler.is_due(34), scheduler.is_due(35)) == (False, True)


@pytest.mark.parametrize("answer", [(3, 0), (0, 2), (-1, 0)])
def test_places_out_of_range_are_an_error_in_a_line(answer: tuple[int, int]) -> None:
    scheduler = Answers(CONFIG, PolicyContext(CountingKV(99, 4), 64))
    scheduler.answer = answer
    scheduler.add(Sequence(Request(0, 0, 5, 9)), 0)
    with pytest.raises(
        ScenarioError, match=r"Answers.decide returned \(.*\). They must be places in 3 budgets and in 2"
    ):
        scheduler.schedule(0, False)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"budgets": ()}, r"budgets \[\] must rise, to max_num_batched_tokens 40 at most"),
        ({"budgets": (12, 5)}, r"budgets \[12, 5\] must rise"),
        ({"budgets": (5, 41)}, r"budgets \[5, 41\] must rise, to max_num_batched_tokens 40"),
        ({"caps": (4, 5)}, r"caps \[4, 5\] must rise, to max_num_seqs 4 at most"),
    ],
)
def test_lists_that_do_not_rise_to_the_limits_are_refused(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StepAgentConfig(**LIMITS | knobs)


def test_observations_are_cut_to_their_bounds_and_rounded_to_32_bits() -> None:
    quantities = (Quantity("a", 1), Quantity("b", 5), Quantity("c", 5))
    assert observation(quantities, (-1.0, 9.0, 0.1)) == (0.0, 5.0, 0.10000000149011612)


def test_rates_decay_by_their_time() -> None:
    """Ten requests at once are 10 a second of one, and 1 of ten seconds; a second later a 1/e of the first is left."""
    rates = ArrivalRates()
    for _ in range(10):
        rates.arrived(5)
    assert rates.logs(5) == pytest.approx((log1p(10), log1p(1)))
    assert rates.logs(1_000_000_005) == pytest.approx((log1p(10 * exp(-1)), log1p(exp(-0.1))))


@random_cases(20)
@given(crowds())
def test_every_driver_agrees(arrivals: Any) -> None:
    run_every_way(ByLatest, CONFIG, arrivals, blocks=12)
