"""TGI, by hand: a step takes 10 ns, 1 more a prompt token, 2 a decode; a KV block holds 4 tokens, block 0 is kept.

"Rule n" is a numbered rule of the scheduler as its source has it, told again in the test.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.base.errors import ScenarioError
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.tokens import Segment, TokenIds, output_stream, prompt_stream
from batchsim.kernel.types import Arrival, Request
from batchsim.kv.radix_cache import RadixKV
from batchsim.policies.systems.tgi.tgi import Tgi
from batchsim.policies.systems.tgi.tgi_config import TgiConfig
from tests.plain.systems import Step, tgi
from tests.support.random_cases import random_cases
from tests.support.stepping import Run, crowds, run, run_every_way
from tests.support.whole_batches import BLOCK_SIZE, blocked, outcomes, steps, times, workloads


def chunked(arrivals: str, blocks: int = 2000, **knobs: Any) -> Run:
    return run(Tgi, TgiConfig(use_prefix_caching=False, **knobs), arrivals, blocks=blocks)


def unchunked(arrivals: str, blocks: int = 2000, **knobs: Any) -> Run:
    return chunked(arrivals, blocks, support_chunking=False, **knobs)


def padded(arrivals: str, blocks: int = 2000, **knobs: Any) -> Run:
    return unchunked(arrivals, blocks, requires_padding=True, **knobs)


# ---- the loop


def test_a_prefill_stops_the_decodes_and_a_decode_of_all_follows() -> None:
    """Rules 1, 2 and 8: the second prompt runs alone from 14 to 28; then both decode, and the ended one leaves."""
    result = unchunked("0:4->4 5:4->2")
    assert result.items == [[(0, 4)], [(1, 4)], [(0, 1), (1, 1)], [(0, 1)], [(0, 1)]]
    assert [row.start_ns for row in result.log] == [0, 14, 28, 42, 54]
    assert times(result.records, "first_token_ns", "last_token_ns") == [(14, 66), (28, 42)]


def test_prompts_and_decodes_are_one_forward_with_chunking() -> None:
    """Rule 4: the first request decodes beside the second's prompt."""
    result = chunked("0:4->4 5:4->2")
    assert result.items == [[(0, 4)], [(0, 1), (1, 4)], [(0, 1), (1, 1)], [(0, 1)]]
    assert [row.start_ns for row in result.log] == [0, 14, 30, 44]


@pytest.mark.parametrize(("support_chunking", "scheduled_ns"), [(False, 42), (True, 44)])
def test_after_a_prefill_for_a_running_batch_a_decode_comes_first(support_chunking: bool, scheduled_ns: int) -> None:
    """Rule 2: the queue is asked once before every decode; who comes during that prefill waits for the decode."""
    result = chunked("0:4->6 5:4->4 20:4->1", support_chunking=support_chunking)
    assert times(result.records, "scheduled_ns")[2] == (scheduled_ns,)
    assert blocked(result.records) == [(scheduled_ns - 14, 2, "decode_first")]


def test_an_idle_engine_asks_again_before_its_first_decode() -> None:
    """Rule 2: after the prefill that ends idleness the queue is asked before the decode, so two prefills meet."""
    assert unchunked("0:4->2 5:4->2").items[:3] == [[(0, 4)], [(1, 4)], [(0, 1), (1, 1)]]


# ---- without chunking


def test_fewer_than_the_ratio_of_the_running_wait() -> None:
    """Rule 3: with ratio 1 two running ones make one newcomer wait until a second is there, at 60."""
    result = unchunked("0:4->9 0:4->9 5:4->1 50:4->1", waiting_served_ratio=1.0)
    assert times(result.records, "scheduled_ns") == [(0,), (0,), (60,), (60,)]
    assert blocked(result.records) == [(18, 2, "batch_window")]


def test_the_ratio_is_rounded_down() -> None:
    """Rule 3: 0.9 of one running request is nobody, 1 of one is one: either way the newcomer comes in at once."""
    for ratio in (0.9, 1.0):
        assert times(unchunked("0:4->9 5:4->1", waiting_served_ratio=ratio).records, "scheduled_ns")[1] == (14,)
    assert times(unchunked("0:4->3 5:4->1", waiting_served_ratio=2.0).records, "scheduled_ns")[1] == (38,)


def test_after_max_waiting_tokens_any_number_will_do() -> None:
    """Rule 3: the count starts at 1 after a prefill and grows with every decode; it is 3 at 46."""
    arrivals = "0:4->9 0:4->9 5:4->1"
    for most, scheduled_ns in ((1, 18), (2, 32), (3, 46), (20, 130)):
        result = unchunked(arrivals, waiting_served_ratio=1.0, max_waiting_tokens=most)
        assert times(result.records, "scheduled_ns")[2] == (scheduled_ns,)


def test_a_leap_ends_where_any_number_will_do() -> None:
    """Rule 3: decodes that are not scheduled one by one count as well: each of 14 ns from 18 on, and the prefill."""
    for most in range(1, 9):
        config = TgiConfig(False, False, False, waiting_served_ratio=1.0, max_waiting_tokens=most)
        result = run(Tgi, config, "0:4->12 0:4->12 5:4->1", blocks=2000, how="leap")
        assert times(result.records, "scheduled_ns")[2] == (18 + 14 * (most - 1),)


def test_a_batch_that_comes_out_too_small_is_put_back() -> None:
    """Rule 3: two wait as the ratio asks, but only one finds blocks, so neither comes in; all blocks are free again."""
    result = unchunked("0:4->9 0:4->9 5:4->1 5:8->9", blocks=9, waiting_served_ratio=1.0)
    assert times(result.records, "scheduled_ns") == [(0,), (0,), (130,), (130,)]
    assert blocked(result.records) == [(18, 2, "kv_blocks")]
    assert [row.free for row in result.log[:3]] == [3, 3, 3]


def test_max_batch_size_bounds_running_and_new_together() -> None:
    """Rule 3: with 2 places the third waits for the first end."""
    result = unchunked("0:4->3 0:4->2 5:4->1", max_batch_size=2)
    assert times(result.records, "scheduled_ns") == [(0,), (0,), (32,)]
    assert blocked(result.records) == [(18, 2, "no_slot")]
    assert blocked(unchunked("0:4->3 0:4->2 0:4->1", max_batch_size=2).records) == [(0, 2, "no_slot")]
    full = unchunked("0:4->5 0:4->5 5:4->1", blocks=5, max_batch_size=2)
    assert blocked(full.records)[0] == (18, 2, "no_slot")  # first of all, though no block is free either


# ---- with chunking


def test_chunking_ignores_ratio_and_batch_size_once_a_batch_runs() -> None:
    """Rule 4: an idle engine takes one, as max_batch_size says; the others join it at 14."""
    result = chunked("0:4->4 0:4->2 0:4->2", max_batch_size=1, waiting_served_ratio=9.0)
    assert result.items[:2] == [[(0, 4)], [(0, 1), (1, 4), (2, 4)]]


def test_the_last_prompt_is_cut_to_fill_the_budget() -> None:
    """Rules 4 and 5: 8 less one decode are 7, rounded up to 8; the rest of 2 runs in the decode that follows."""
    result = chunked("0:4->4 5:10->1 5:1->1", max_batch_prefill_tokens=8)
    assert result.items == [[(0, 4)], [(0, 1), (1, 8)], [(0, 1), (1, 2)], [(0, 1), (2, 1)]]
    assert blocked(result.records)[0] == (14, 1, "token_budget") or blocked(result.records)[0] == (
        14,
        2,
        "token_budget",
    )


def test_further_chunks_leave_a_token_for_each_decode() -> None:
    """Rule 4: 8 less the other one of the batch are 7; while they are full nobody else comes in."""
    result = chunked("0:4->9 5:30->1 5:1->1", max_batch_prefill_tokens=8)
    assert [dict(items).get(1) for items in result.items[1:6]] == [8, 7, 7, 7, 1]
    assert times(result.records, "scheduled_ns")[2] == (result.log[5].start_ns,)


def test_a_budget_used_up_by_decodes_admits_nobody() -> None:
    """Rule 5: with a budget of 2 and two running ones the third waits for an end."""
    result = chunked("0:1->3 0:1->3 0:1->1", max_batch_prefill_tokens=2, blocks=9)
    assert result.items[0] == [(0, 1), (1, 1), (2, 1)]  # the idle engine's budget is rounded up to a block
    late = chunked("0:1->3 0:1->3 5:1->1", max_batch_prefill_tokens=2, blocks=9)
    assert times(late.records, "scheduled_ns")[2] == (40,)
    assert blocked(late.records) == [(12, 2, "token_budget")]
    full = chunked("0:1->3 0:1->3 5:1->1", max_batch_prefill_tokens=2, blocks=3)
    assert blocked(full.records) == [(12, 2, "token_budget")]  # first of all, though no block is free either


# ---- what fits


@pytest.mark.parametrize("support_chunking", [False, True])
def test_a_request_takes_the_blocks_of_its_whole_life(support_chunking: bool) -> None:
    """Rules 5 and 6: 4 + 5 - 1 tokens are 2 blocks; beside block 0, 4 hold two requests, 3 only one."""
    arrivals = "0:4->1/5 0:4->1/5"
    assert times(chunked(arrivals, 5, support_chunking=support_chunking).records, "scheduled_ns") == [(0,), (0,)]
    result = chunked(arrivals, 4, support_chunking=support_chunking)
    assert times(result.records, "scheduled_ns") == [(0,), (14,)]
    assert blocked(result.records) == [(0, 1, "kv_blocks")]


def test_nobody_overtakes_the_head() -> None:
    """Rule 5: the third request would fit beside the first; it waits behind the second."""
    result = chunked("0:8->5 0:12->1 0:1->1", blocks=6)
    assert times(result.records, "scheduled_ns") == [(0,), (66,), (66,)]


def test_a_prompt_over_the_prefill_budget_goes_back_without_chunking() -> None:
    """Rule 5: of a budget of 8, 4 are taken and 6 do not fit; a budget of 6 is rounded up to the block, 8."""
    assert unchunked("0:4->1 0:6->1", max_batch_prefill_tokens=8).items == [[(0, 4)], [(1, 6)]]
    assert unchunked("0:4->1 0:4->1", max_batch_prefill_tokens=6).items == [[(0, 4), (1, 4)]]


def test_max_batch_total_tokens_may_be_less_than_the_memory() -> None:
    """Rule 5: 16 tokens are 4 blocks, one of them block 0, whatever else the pool has."""
    result = chunked("0:4->1/5 0:4->1/5", max_batch_total_tokens=16, max_batch_prefill_tokens=16)
    assert times(result.records, "scheduled_ns") == [(0,), (14,)]


def test_padded_prompts_cost_as_much_as_the_longest() -> None:
    """Rule 5: two prompts cost 2 x 4 of a budget of 8, three would cost 12; padding is computed."""
    result = padded("0:4->1 0:2->1 0:2->1", max_batch_prefill_tokens=8)
    assert result.items == [[(0, 4), (1, 2)], [(2, 2)]]
    assert steps(result.records, "num_prefill_tokens", "pad_prefill_tokens") == [(6, 2), (2, 0)]
    assert blocked(result.records) == [(0, 2, "token_budget")]


def test_padded_rows_are_read_as_long_as_the_longest() -> None:
    """Rule 5: a context of 2 beside one of 4 reads 2 tokens of padding in every step until the longer one ends."""
    result = padded("0:4->3 0:2->4")
    assert steps(result.records, "context_tokens", "pad_context_tokens")[1:] == [(6, 2), (8, 2), (4, 0)]
    without = unchunked("0:4->3 0:2->4").records
    assert steps(without, "pad_prefill_tokens", "pad_context_tokens") == [(0, 0)] * 4


def test_padded_batches_fit_at_their_worst() -> None:
    """Rule 5: rows x longest + outputs to come: 2 x 4 + 8 are 16 tokens, 15 hold one request only; no block is kept."""
    arrivals = "0:4->1/4 0:4->1/4"
    knobs = {"max_batch_prefill_tokens": 8, "blocks": 4}
    assert times(padded(arrivals, max_batch_total_tokens=16, **knobs).records, "scheduled_ns") == [(0,), (0,)]
    result = padded(arrivals, max_batch_total_tokens=15, **knobs)
    assert times(result.records, "scheduled_ns") == [(0,), (14,)]
    assert blocked(result.records) == [(0, 1, "kv_blocks")]


def test_a_padded_newcomer_fits_beside_the_running_at_their_worst() -> None:
    """Rule 5: after its prompt the first is 5 long with 7 to come: of 20 tokens 8 are left, a newcomer of 4 + 4 fits;
    one of 4 + 5 waits.
    """
    knobs = {"max_batch_total_tokens": 20, "max_batch_prefill_tokens": 20}
    assert times(padded("0:4->8 5:4->4", **knobs).records, "scheduled_ns")[1] == (14,)
    assert times(padded("0:4->8 5:4->5", **knobs).records, "scheduled_ns")[1] == (98,)


def test_all_the_running_count_at_their_worst() -> None:
    """Rule 5: after their prompts two are 5 long with 7 to come each, 24 tokens: one of 4 + 4 fits 32, not 31."""
    for total, scheduled_ns in ((32, 18), (31, 116)):
        result = padded("0:4->8 0:4->8 5:4->4", max_batch_total_tokens=total, max_batch_prefill_tokens=20)
        assert times(result.records, "scheduled_ns")[2] == (scheduled_ns,)


# ---- the prefix cache


def talk(*rows: tuple[int, list[Segment], int]) -> list[Arrival]:
    """Requests (arrival, segments of the prompt, output tokens)."""
    tokens = [TokenIds.of(segments) for _, segments, _ in rows]
    return [
        Arrival(Request(i, at, ids.num_tokens, output, tokens=ids), output)
        for i, ((at, _, output), ids) in enumerate(zip(rows, tokens, strict=True))
    ]


TEXT = prompt_stream(0)
OTHER = prompt_stream(1)


def cached(arrivals: list[Arrival], blocks: int = 2000, **knobs: Any) -> Run:
    return run(Tgi, TgiConfig(**knobs), arrivals, blocks=blocks, kv=RadixKV)


def test_the_prompt_of_an_ended_request_is_found() -> None:
    """Rule 6: of 12 tokens the first 8 were another's prompt, which ended at 30: 4 are left to compute."""
    result = cached(talk((0, [(TEXT, 0, 8)], 2), (50, [(TEXT, 0, 8), (OTHER, 0, 4)], 1)))
    assert result.items == [[(0, 8)], [(0, 1)], [(1, 4)]]
    assert times(result.records, "cached_tokens") == [(0,), (8,)]


def test_the_prompt_of_one_that_still_runs_is_not_found() -> None:
    """Rule 6: blocks are cached as they are given back, so the same prompt at 18 is computed anew, and again at 41."""
    result = cached(talk((0, [(TEXT, 0, 8)], 9), (5, [(TEXT, 0, 8)], 9)))
    assert result.items[1] == [(0, 1), (1, 8)]
    assert times(result.records, "cached_tokens") == [(0,), (0,)]


def test_of_a_prompt_cached_to_its_end_the_last_token_is_computed() -> None:
    """Rule 6: 8 of 8 tokens are found; one is computed nevertheless, in the cached block."""
    result = cached(talk((0, [(TEXT, 0, 8)], 1), (50, [(TEXT, 0, 8)], 2)))
    assert result.items == [[(0, 8)], [(1, 1)], [(1, 1)]]
    assert times(result.records, "cached_tokens") == [(0,), (7,)]


def test_what_was_generated_is_not_cached() -> None:
    """Rule 6: the next turn finds the 8 tokens of the prompt, not the 4 of the answer."""
    turn = [(TEXT, 0, 8), (output_stream(0), 0, 4), (OTHER, 0, 1)]
    result = cached(talk((0, [(TEXT, 0, 8)], 9), (200, turn, 1)))
    assert result.items[-1] == [(1, 5)]


def test_what_is_cached_costs_nothing_of_the_prefill_budget() -> None:
    """Rule 5: two prompts of 8 with 4 cached fit a budget of 8; without the cache each fills it."""
    turns = [(50, [(TEXT, 0, 4), (prompt_stream(i), 0, 4)], 1) for i in (2, 3)]
    arrivals = talk((0, [(TEXT, 0, 4)], 1), *turns)
    knobs = {"support_chunking": False, "max_batch_prefill_tokens": 8}
    result = cached(arrivals, **knobs)
    assert result.items == [[(0, 4)], [(1, 4), (2, 4)]]
    assert times(result.records, "cached_tokens") == [(0,), (4,), (4,)]
    assert cached(arrivals, use_prefix_caching=False, **knobs).items == [[(0, 4)], [(1, 8)], [(2, 8)]]


def test_shared_blocks_count_for_each_who_shares_them() -> None:
    """Rule 5: two of 3 blocks share 2 of them and take 4 of 6, yet claim 6: the last waits for their end, at 104."""
    shared = [(50, [(TEXT, 0, 8), (prompt_stream(i), 0, 1)], 4) for i in (2, 3)]
    result = cached(talk((0, [(TEXT, 0, 8)], 1), *shared, (55, [(OTHER, 0, 1)], 1)), blocks=6)
    assert times(result.records, "cached_tokens", "scheduled_ns") == [(0, 0), (8, 50), (8, 50), (0, 104)]
    assert blocked(result.records) == [(62, 3, "kv_blocks")]


@pytest.mark.parametrize(("number", "cached_tokens"), [(2, 0), (3, 3)])
def test_block_0_is_kept_when_the_cache_makes_room(number: int, cached_tokens: int) -> None:
    """Rule 6: of 6 blocks 2 are cached, and the third request needs the other 4: the older prompt makes room."""
    rows = [(0, [(prompt_stream(2), 0, 4)], 1), (50, [(prompt_stream(3), 0, 4)], 1), (100, [(TEXT, 0, 16)], 1)]
    result = cached(talk(*rows, (200, [(prompt_stream(number), 0, 4)], 1)), blocks=6)
    assert times(result.records, "cached_tokens")[3] == (cached_tokens,)


def test_one_that_finds_too_few_blocks_leaves_the_cache_empty() -> None:
    """Rule 6: blocks are taken from the cache before it is known whether they suffice: the 8 cached tokens are lost to
    the last request, though the one that took their blocks still waits.
    """
    arrivals = talk(
        (0, [(TEXT, 0, 8)], 1),
        (50, [(prompt_stream(2), 0, 16)], 6),
        (70, [(prompt_stream(3), 0, 8)], 9),
        (300, [(TEXT, 0, 8)], 1),
    )
    assert times(cached(arrivals, blocks=9).records, "cached_tokens")[3] == (0,)
    without = [arrivals[0], arrivals[1], arrivals[3]]
    assert times(cached(without, blocks=9).records, "cached_tokens")[2] == (7,)


# ---- who is turned away


def test_more_than_max_concurrent_requests_are_turned_away() -> None:
    """Rule 7: with 2 in the engine the third is rejected; one that comes after an end is not."""
    result = chunked("0:4->2 0:4->2 5:4->1 33:4->1", max_concurrent_requests=2)
    assert outcomes(result.records)[2] == ("rejected", "queue_full")
    assert outcomes(result.records)[3] == ("finished", "")
    assert result.records.details == {"queue_full": "max_concurrent_requests 2 are in the engine already"}


def test_what_block_0_leaves_no_room_for_is_rejected() -> None:
    """Rule 6: 12 tokens are 3 blocks; a pool of 4 has them, one of 3 has not."""
    assert outcomes(chunked("0:8->5", blocks=4).records) == [("finished", "")]
    assert outcomes(chunked("0:8->5", blocks=3).records) == [("rejected", "never_fits")]
    assert chunked("0:8->5", blocks=2).records.details == {
        "never_fits": "3 KV blocks needed for 12 tokens, 2 in the pool"
    }
    result = chunked("0:8->5", max_batch_total_tokens=15, max_batch_prefill_tokens=8)
    assert result.records.details == {
        "never_fits": "13 tokens in 3 KV blocks, max_batch_total_tokens 15 in 2 usable blocks"
    }


def test_a_padded_request_has_all_of_max_batch_total_tokens() -> None:
    """Rule 5: 4 + 12 tokens are 16, one more is too many."""
    result = padded("0:4->12 0:4->13", max_batch_total_tokens=16, max_batch_prefill_tokens=16)
    assert outcomes(result.records) == [("finished", ""), ("rejected", "never_fits")]


def test_a_prompt_over_every_prefill_budget_is_rejected_without_chunking() -> None:
    """Rule 5: 9 tokens never fit a prefill of 8; with chunks they do."""
    result = unchunked("0:9->1", max_batch_prefill_tokens=8)
    assert outcomes(result.records) == [("rejected", "over_token_budget")]
    detail = "prompt of 9 tokens in one step, max_batch_prefill_tokens 8"
    assert result.records.details == {"over_token_budget": detail}
    assert outcomes(chunked("0:9->1", max_batch_prefill_tokens=8).records) == [("finished", "")]


def test_the_defaults_are_the_launchers() -> None:
    """Rule 7: the router binary's ratio is 1.2, the launcher's 0.3."""
    config = TgiConfig()
    assert (config.waiting_served_ratio, config.max_waiting_tokens, config.max_batch_size) == (0.3, 20, None)
    assert (config.max_concurrent_requests, config.max_batch_prefill_tokens) == (128, 4096)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"requires_padding": True, "use_prefix_caching": False}, "chunks and the prefix cache need paged attention"),
        ({"requires_padding": True, "support_chunking": False}, "needs support_chunking: false and use_prefix_caching"),
        ({"max_batch_prefill_tokens": 9, "max_batch_total_tokens": 8}, "must be <= max_batch_total_tokens 8"),
    ],
)
def test_a_config_that_tgi_refuses_is_refused(knobs: Any, message: str) -> None:
    """Each wrong knob is named with its value."""
    with pytest.raises(ValueError, match=message):
        TgiConfig(**knobs)


def test_a_memory_that_does_not_do_is_refused() -> None:
    """17 tokens in a pool of 16; a pool of one block, which is block 0; a pool that caches nothing."""
    with pytest.raises(ScenarioError, match="max_batch_total_tokens 17 is above the 16 tokens"):
        Tgi(TgiConfig(max_batch_total_tokens=17, max_batch_prefill_tokens=9), PolicyContext(RadixKV(4, 4), 64))
    with pytest.raises(ScenarioError, match="leaves no KV block"):
        Tgi(TgiConfig(), PolicyContext(RadixKV(1, 4), 64))
    assert Tgi(TgiConfig(), PolicyContext(RadixKV(2, 4), 64)).usable_blocks == 1
    with pytest.raises(ScenarioError, match="needs a RadixKV, not a CountingKV"):
        Tgi(TgiConfig(), PolicyContext(CountingKV(4, 4), 64))


@random_cases(80)
@given(
    arrivals=st.one_of(workloads(), crowds()),
    kind=st.sampled_from([(True, False), (False, False), (False, True)]),
    ratio=st.sampled_from([0.3, 1.0]),
    most=st.integers(0, 4),
    size=st.sampled_from([None, 1, 3]),
    budget=st.sampled_from([3, 8, 24]),
    blocks=st.integers(9, 16),
)
def test_every_driver_agrees_and_the_limits_hold(
    arrivals: list[Arrival], kind: Any, ratio: float, most: int, size: int | None, budget: int, blocks: int
) -> None:
    """Bit-equal records under every driver, leap and KV manager; slots kept; phases apart without chunking."""
    chunking, padding = kind
    config = TgiConfig(chunking, padding, False, ratio, most, size, budget)
    result = run_every_way(Tgi, config, arrivals, blocks=blocks)
    for row in result.log:
        assert chunking or len(row.items) <= (size or 100)
        assert chunking or row.decodes in (0, len(row.items))
        assert not row.preempted


@random_cases(200)
@given(
    arrivals=crowds(),
    chunking=st.booleans(),
    ratio=st.sampled_from([0.3, 1.0, 2.0]),
    most=st.integers(0, 6),
    size=st.sampled_from([None, 1, 3]),
    budget=st.sampled_from([3, 8, 17, 24]),
    blocks=st.integers(10, 16),
)
def test_the_steps_are_those_of_the_plain_loops(
    arrivals: list[Arrival], chunking: bool, ratio: float, most: int, size: int | None, budget: int, blocks: int
) -> None:
    """Step by step the same starts, work and free blocks as TGI's nested loops over all requests."""
    config = TgiConfig(chunking, False, False, ratio, most, size, budget if chunking else max(budget, 16))
    arrivals = [replace(arrival, cancel_ns=None) for arrival in arrivals]
    log = run(Tgi, config, arrivals, blocks=blocks).log
    found: list[Step] = [(row.start_ns, row.items, row.preempted, row.free) for row in log]
    assert found == tgi(config, arrivals, blocks, BLOCK_SIZE)
