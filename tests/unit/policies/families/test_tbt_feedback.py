"""A limit moved by measured step times, by hand: a step takes 10 ns, 1 more a prefill token, 2 a decode."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.kernel.batch import Batch
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Request, Sequence
from batchsim.policies.families.tbt_feedback import TbtFeedback, TbtFeedbackConfig
from tests.support.random_cases import random_cases
from tests.support.stepping import Run, crowds, run, run_every_way

LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 20, "least": 2, "increase": 3, "backoff": 0.5}
SLOTS: dict[str, Any] = {"steers": "max_num_seqs", "least": 1, "increase": 1}


def fed_back(arrivals: str, **knobs: Any) -> Run:
    return run(TbtFeedback, TbtFeedbackConfig(**LIMITS | knobs), arrivals)


def test_a_mixed_step_beyond_the_objective_halves_the_budget_and_one_below_it_that_used_it_up_adds() -> None:
    """Steps with a decode: 31 ns for 19 tokens beside it are above 20 ns, so the budget is 10; 21 for nine are too, so
    it is 5; 16 for four are at most 18: it is 8, of which 7 take 19 ns, between 18 and 20, so that it stays."""
    result = fed_back("0:4->6 1:48->1", tbt=20, hysteresis=0.1)
    assert [dict(items).get(1, 0) for items in result.items] == [0, 19, 9, 4, 7, 7, 2]


def test_a_step_that_did_not_use_the_budget_up_adds_nothing_and_one_alone_with_prompts_does_not_count() -> None:
    """Halved to 10 by the 31 ns at 14, then short steps of 3 + 1 tokens leave it; a prompt of 20 alone is no miss."""
    result = fed_back("0:4->4 1:22->1 200:20->1 201:2->2", tbt=30, hysteresis=0.0)
    assert [[n for _, n in items] for items in result.items] == [[4], [1, 19], [1, 3], [1], [10], [10, *[]], [2], [1]]


def test_prompts_have_a_token_beside_more_decodes_than_the_budget() -> None:
    """The step of 17 tokens beside three decodes leaves a budget of 2: from then on the prompt gets a token a step."""
    result = fed_back("0:1->9 0:1->9 0:1->9 1:21->1", tbt=1, hysteresis=0.0, backoff=0.1)
    assert [dict(items).get(3, 0) for items in result.items[:6]] == [0, 17, 1, 1, 1, 1]


def test_a_step_as_long_as_the_objective_is_no_miss_and_one_at_the_band_s_end_adds() -> None:
    """31 ns for 19 tokens beside a decode leave the budget under 31 ns and halve it under 30; then 21 ns for nine, 30 %
    below 30, add three."""
    assert [dict(items).get(1, 0) for items in fed_back("0:4->6 1:48->1", tbt=31).items] == [0, 19, 19, 10, 0, 0]
    result = fed_back("0:4->6 1:60->1", tbt=30, hysteresis=0.3)
    assert [dict(items).get(1, 0) for items in result.items] == [0, 19, 9, 12, 12, 8]


@pytest.mark.parametrize(
    ("limit", "waits", "expected"), [(2.0, True, 3.0), (3.0, True, 3.0), (2.0, False, 2.0), (4.0, True, 4.0)]
)
def test_slots_are_added_where_all_are_taken_and_one_waits(limit: float, waits: bool, expected: float) -> None:
    """Two of two or of three slots, with or without a third request; and not beyond the stated four."""
    config = TbtFeedbackConfig(**LIMITS | SLOTS, tbt=20)
    scheduler = TbtFeedback(config, PolicyContext(CountingKV(99, 4), 64))
    for i in range(3 if waits else 2):
        scheduler.add(Sequence(Request(i, 0, 4, 9)), 0)
    scheduler.limit = 2.0
    scheduler.schedule(0, False)
    decodes = Batch(None, [], 0)
    decodes.num_decode = 2
    scheduler.limit = limit
    scheduler.observe(decodes, 18)
    assert scheduler.limit == expected


def test_only_a_limit_of_slots_stops_leaps_while_one_waits() -> None:
    """Of decodes alone a limit of tokens learns nothing."""
    for steers, settled in (({}, True), (SLOTS, False)):
        scheduler = TbtFeedback(TbtFeedbackConfig(**LIMITS | steers), PolicyContext(CountingKV(99, 4), 64))
        assert scheduler.is_settled()
        scheduler.add(Sequence(Request(0, 0, 4, 9)), 0)
        assert scheduler.is_settled() is settled


def test_of_slots_any_decode_counts_and_only_a_full_house_with_a_queue_adds() -> None:
    """Two of two decode in 14 ns: above 13 the cap falls to one, so that the third waits for both to end; below 15 it
    rises to 3 of at most 4 while the third waits, which comes in at the next step."""
    arrivals = "0:1->3 0:1->3 0:1->1 0:1->1"
    knobs = SLOTS | {"max_num_seqs": 2}
    assert [len(items) for items in fed_back(arrivals, tbt=13, **knobs).items] == [2, 2, 2, 1, 1]
    assert [len(items) for items in fed_back(arrivals, tbt=15, **knobs).items] == [2, 2, 2, 2]


def test_a_least_above_the_limit_that_it_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match="least 5 must be at most max_num_seqs 4, which it bounds"):
        TbtFeedbackConfig(**LIMITS | SLOTS | {"least": 5})


@random_cases(25)
@given(crowds(), st.sampled_from([{}, SLOTS]))
def test_every_driver_agrees(arrivals: Any, steers: dict[str, Any]) -> None:
    run_every_way(TbtFeedback, TbtFeedbackConfig(**LIMITS | steers, tbt=19), arrivals, blocks=12)
