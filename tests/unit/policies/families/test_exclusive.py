"""Exclusive phases, by hand: a step takes 10 ns, 1 more a prefill token, 2 a decode; a KV block holds 4 tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from batchsim.policies.families.exclusive import Exclusive, ExclusiveConfig
from tests.support.random_cases import random_cases
from tests.support.stepping import Run, crowds, run, run_every_way
from tests.support.whole_batches import blocked, leap_end_ns

LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16}


def exclusive(arrivals: str, **knobs: Any) -> Run:
    return run(Exclusive, ExclusiveConfig(**LIMITS | knobs), arrivals)


def test_prompts_are_let_in_when_as_few_as_the_threshold_decode() -> None:
    """Three decode; the fourth, of 23, waits until two have left at 48 under 1 of 4, until one has at 32 under 2."""
    arrivals = "0:1->2 0:1->3 0:1->4 23:2->1"
    low = exclusive(arrivals, threshold=0.25)
    assert low.items == [[(0, 1), (1, 1), (2, 1)], [(0, 1), (1, 1), (2, 1)], [(1, 1), (2, 1)], [(3, 2)], [(2, 1)]]
    assert blocked(low.records) == [(29, 3, "no_slot")]
    high = exclusive(arrivals, threshold=0.5)
    assert high.items[1:4] == [[(0, 1), (1, 1), (2, 1)], [(3, 2)], [(1, 1), (2, 1)]]


def test_a_prompt_longer_than_the_budget_is_computed_to_its_end_before_decodes_go_on() -> None:
    """Beside one that decodes, under the threshold: 16, 16 and 8 tokens of prompts, and no decode in these steps."""
    result = exclusive("0:1->3 1:40->1", threshold=0.5)
    assert result.items == [[(0, 1)], [(1, 16)], [(1, 16)], [(1, 8)], [(0, 1)], [(0, 1)]]


def test_decodes_are_leapt_to_the_step_before_the_next_end() -> None:
    """Also behind the step that ends the phase of prompts, where none waits."""
    assert leap_end_ns(Exclusive, ExclusiveConfig(**LIMITS), "0:4->20 0:4->30") == 190


def test_a_threshold_of_nothing_waits_until_none_decodes() -> None:
    """Who comes during the steps of prompts shares their phase, who comes at 12, in a step of decodes, does not."""
    assert exclusive("0:1->3 12:4->1", threshold=0.0).items == [[(0, 1)], [(0, 1)], [(0, 1)], [(1, 4)]]
    assert exclusive("0:1->3 11:4->1", threshold=0.0).items == [[(0, 1)], [(1, 4)], [(0, 1)], [(0, 1)]]


@pytest.mark.parametrize("knobs", [{"order": "prefill_first"}, {"preempt_after": 5, "waiting_order": "priority"}])
def test_knobs_that_have_no_place_in_exclusive_phases_are_refused(knobs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="order and preempt_after: phases are exclusive already"):
        ExclusiveConfig(**LIMITS | knobs)


@random_cases(25)
@given(crowds())
def test_every_driver_agrees(arrivals: Any) -> None:
    run_every_way(Exclusive, ExclusiveConfig(**LIMITS), arrivals, blocks=12)
