"""Continuous batching, by hand: a step takes 10 ns, 1 more a prefill token, 2 a decode; a KV block holds 4 tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.base.errors import ScenarioError
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import BLOCKED, MISSING
from batchsim.kernel.types import Arrival
from batchsim.policies.families.continuous import Continuous, ContinuousConfig
from tests.support.random_cases import random_cases
from tests.support.stepping import Run, run, run_every_way
from tests.support.whole_batches import blocked, leap_end_ns, outcomes, times, workloads


def continuous(arrivals: str, blocks: int = 1000, seqs: int = 8, budget: int | None = None, **knobs: Any) -> Run:
    return run(Continuous, ContinuousConfig(seqs, budget, **knobs), arrivals, blocks=blocks)


def test_joins_at_the_next_step_and_leaves_when_done() -> None:
    """A request that comes during a step runs beside the others from the next one on; each ends on its own."""
    result = continuous("0:4->4 5:4->2")
    assert result.items == [[(0, 4)], [(0, 1), (1, 4)], [(0, 1), (1, 1)], [(0, 1)]]
    assert [row.start_ns for row in result.log] == [0, 14, 30, 44]
    assert times(result.records, "first_token_ns", "last_token_ns") == [(14, 56), (30, 44)]


def test_slots_bound_the_running() -> None:
    """With 2 slots the third request waits for the first end; with 3 all start together."""
    arrivals = "0:4->3 0:4->1 0:4->1"
    result = continuous(arrivals, seqs=2)
    assert times(result.records, "scheduled_ns") == [(0,), (0,), (18,)]
    assert blocked(result.records) == [(0, 2, "no_slot")]
    assert times(continuous(arrivals, seqs=3).records, "scheduled_ns") == [(0,), (0,), (0,)]


def test_chunks_fill_the_budget_beside_the_decodes() -> None:
    """Decodes take a token each of the 6, the prompt the rest, be it one; a budget of 10 holds both prompts whole."""
    arrivals = "0:4->4 0:6->1"
    assert continuous(arrivals, budget=5, seqs=2).items[:2] == [[(0, 4), (1, 1)], [(0, 1), (1, 4)]]
    assert continuous(arrivals, budget=8, seqs=2).items[:2] == [[(0, 4), (1, 4)], [(0, 1), (1, 2)]]
    assert continuous(arrivals, budget=6, seqs=2).items[:3] == [[(0, 4), (1, 2)], [(0, 1), (1, 4)], [(0, 1)]]
    assert continuous(arrivals, budget=10, seqs=2).items[0] == [(0, 4), (1, 6)]


def test_a_chunk_that_leaves_one_token_does_not_end_the_prompt() -> None:
    """The first token is emitted by the step that computes the last prompt token, not before."""
    result = continuous("0:5->2", budget=4, seqs=4)
    assert result.items == [[(0, 4)], [(0, 1)], [(0, 1)]]
    assert times(result.records, "first_token_ns", "last_token_ns") == [(25, 37)]


def test_without_chunks_a_prompt_waits_for_room_in_the_budget() -> None:
    """6 tokens beside one decode need a budget of 7; with 6 they wait until the decode has ended."""
    arrivals = "0:4->3 0:6->1"
    late = continuous(arrivals, budget=6, seqs=2, chunked_prefill=False)
    assert late.items == [[(0, 4)], [(0, 1)], [(0, 1)], [(1, 6)]]
    assert blocked(late.records) == [(0, 1, "token_budget")]
    assert continuous(arrivals, budget=7, seqs=2, chunked_prefill=False).items[1] == [(0, 1), (1, 6)]


def test_without_chunks_a_prompt_beyond_the_budget_is_rejected() -> None:
    """A prompt as long as the budget runs, one token more never could."""
    result = continuous("0:6->1 0:7->1", budget=6, seqs=2, chunked_prefill=False)
    assert outcomes(result.records) == [("finished", ""), ("rejected", "over_token_budget")]
    assert result.records.details == {
        "over_token_budget": "prompt of 7 tokens in one step, max_num_batched_tokens 6",
    }
    assert outcomes(continuous("0:7->1", budget=6, seqs=2).records) == [("finished", "")]


def test_prefill_first_stops_the_decodes_while_prompts_run() -> None:
    """Two chunks of the second prompt run alone; then both decode. With nobody to prefill nothing changes."""
    result = continuous("0:4->3 12:8->2", budget=5, seqs=2, order="prefill_first")
    assert result.items == [[(0, 4)], [(1, 5)], [(1, 3)], [(0, 1), (1, 1)], [(0, 1)]]
    assert [row.start_ns for row in result.log] == [0, 14, 29, 42, 56]
    assert continuous("0:4->3", order="prefill_first").items == continuous("0:4->3").items


def test_prefill_first_gives_the_whole_budget_to_prompts() -> None:
    """The decode that stands still takes no token of the budget."""
    assert continuous("0:4->3 12:5->1", budget=5, seqs=2, order="prefill_first").items[1] == [(1, 5)]
    assert continuous("0:4->3 12:5->1", budget=5, seqs=2).items[1] == [(0, 1), (1, 4)]


def test_a_head_that_lacks_tokens_names_the_prompt_that_takes_them() -> None:
    """The first prompt takes all 4 tokens of two steps; a head that lacks a slot or blocks is in nobody's way."""
    states = continuous("0:8->1 0:4->1", budget=4, seqs=2).records.states
    assert states[states["state"] == BLOCKED][["request_id", "blocker"]].tolist() == [(1, 0)]
    for limits in ({"seqs": 1}, {"blocks": 2}):
        states = continuous("0:8->1 0:4->1", **limits).records.states
        assert states[states["state"] == BLOCKED][["request_id", "blocker"]].tolist() == [(1, MISSING)]


def test_kv_is_reserved_for_prompt_and_output_cap() -> None:
    """4 + 5 - 1 tokens take 2 blocks each, though one token is made: 4 blocks hold two, 3 only one."""
    arrivals = "0:4->1/5 0:4->1/5"
    assert times(continuous(arrivals, blocks=4).records, "scheduled_ns") == [(0,), (0,)]
    result = continuous(arrivals, blocks=3)
    assert times(result.records, "scheduled_ns") == [(0,), (14,)]
    assert blocked(result.records) == [(0, 1, "kv_blocks")]


def test_nobody_overtakes_a_blocked_head() -> None:
    """The third request would fit beside the first; it waits behind the second."""
    result = continuous("0:8->5 0:12->1 0:1->1", blocks=5)
    assert times(result.records, "scheduled_ns") == [(0,), (66,), (66,)]


def test_reserve_tokens_is_one_size_for_all() -> None:
    """Slots of 16 tokens: 7 blocks hold one however short, 8 hold two; a request of 17 is rejected."""
    arrivals = "0:1->1 0:1->1 0:8->10"
    result = continuous(arrivals, blocks=7, reserve_tokens=16)
    assert times(result.records, "scheduled_ns")[:2] == [(0,), (11,)]
    assert outcomes(result.records)[2] == ("rejected", "never_fits")
    assert result.records.details == {"never_fits": "17 tokens need KV, reserve_tokens 16"}
    assert times(continuous(arrivals, blocks=8, reserve_tokens=16).records, "scheduled_ns")[:2] == [(0,), (0,)]
    assert outcomes(continuous("0:8->9", reserve_tokens=16).records) == [("finished", "")]


def test_a_request_that_fits_no_empty_pool_is_rejected() -> None:
    """16 tokens fit 4 blocks, 17 do not; the queue goes on behind it."""
    result = continuous("0:8->10 0:8->9", blocks=4)
    assert outcomes(result.records) == [("rejected", "never_fits"), ("finished", "")]


def test_decodes_are_leapt_to_the_step_before_the_next_end() -> None:
    """Also while a head waits for a slot."""
    assert leap_end_ns(Continuous, ContinuousConfig(2, None), "0:4->20 0:4->30 0:4->1") == 190


def test_a_cancel_in_the_middle_of_a_prompt_frees_its_slot_and_blocks() -> None:
    """The next request starts at the step boundary of the cancel."""
    result = continuous("0:12->1c5 0:12->1", blocks=3, budget=4, seqs=1)
    assert outcomes(result.records) == [("cancelled", "client_cancel"), ("finished", "")]
    assert times(result.records, "scheduled_ns") == [(0,), (14,)]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ((8, 7), "max_num_batched_tokens 7 must be at least max_num_seqs 8"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(knobs: Any, message: str) -> None:
    """Each wrong knob is named with its value."""
    with pytest.raises(ValueError, match=message):
        ContinuousConfig(*knobs)


def test_a_slot_larger_than_the_pool_is_refused() -> None:
    """17 tokens need 5 blocks; nobody could ever start. 16 need the whole pool."""
    assert times(continuous("0:1->1", blocks=4, reserve_tokens=16).records, "scheduled_ns") == [(0,)]
    with pytest.raises(ScenarioError, match="takes 5 KV blocks, 4 are in the pool"):
        Continuous(ContinuousConfig(2, None, reserve_tokens=17), PolicyContext(CountingKV(4, 4), 64))


@random_cases(60)
@given(
    arrivals=workloads(),
    seqs=st.integers(1, 5),
    budget=st.sampled_from([None, 5, 8]),
    chunked=st.booleans(),
    order=st.sampled_from(["decode_first", "prefill_first"]),
    reserve=st.sampled_from([None, 20, 30]),
    blocks=st.integers(8, 20),
)
def test_every_driver_agrees_and_the_limits_hold(
    arrivals: list[Arrival],
    seqs: int,
    budget: int | None,
    chunked: bool,
    order: Any,
    reserve: int | None,
    blocks: int,
) -> None:
    """Bit-equal records under every driver, leap and KV manager; slots and budget kept; nobody is ever preempted."""
    config = ContinuousConfig(seqs, budget, chunked, order, reserve)
    result = run_every_way(Continuous, config, arrivals, blocks=blocks)
    for row in result.log:
        assert len(row.items) <= seqs
        assert sum(n for _, n in row.items) <= (budget or 1000)
        assert not (row.preempted or row.swap_in)
        assert order == "decode_first" or row.decodes in (0, len(row.items))
