"""Static batching, by hand: a step takes 10 ns, a KV block holds 4 tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.base.errors import ScenarioError
from batchsim.kernel.batch import Batch
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import Records
from batchsim.kernel.types import Sequence
from batchsim.policies.families.static import Static, StaticConfig
from tests.support.engine import Constant
from tests.support.random_cases import random_cases
from tests.support.stepping import run, run_every_way
from tests.support.whole_batches import (
    blocked,
    leap_end_ns,
    outcomes,
    requests,
    steps,
    times,
    workloads,
)

LATER = " 900:1->1 901:1->1"  # keeps the run from draining; forms a batch of its own


def static(arrivals: str, blocks: int = 1000, **knobs: Any) -> Records:
    return run(Static, StaticConfig(**knobs), arrivals, blocks=blocks, cost=Constant(), how="leap").records


# ---- when a batch starts


def test_waits_until_the_batch_is_full() -> None:
    """Nothing runs before batch_size requests wait; then they run together to the end of the longest."""
    records = static("0:4->3 25:2->2" + LATER, batch_size=2)
    assert times(records, "scheduled_ns", "last_token_ns", "delivered_ns")[:2] == [(25, 55, 55), (25, 45, 55)]
    assert blocked(records)[0] == (0, 0, "batch_window")


def test_nobody_joins_a_running_batch() -> None:
    """A request that comes while a batch runs waits for its end, though a row is free."""
    records = static("0:4->3 0:4->1 5:4->1 5:4->1" + LATER, batch_size=2)
    assert times(records, "scheduled_ns")[:4] == [(0,), (0,), (30,), (30,)]
    assert blocked(records)[0] == (10, 2, "batch_running")


def test_one_request_short_of_a_batch_waits_for_the_drain() -> None:
    """The rest that fills no batch is flushed as soon as no arrival is left, here at the last arrival."""
    records = static("0:4->1 0:4->1 0:4->1 40:4->1 41:4->1", batch_size=4)
    assert times(records, "scheduled_ns") == [(40,), (40,), (40,), (40,), (50,)]


def test_max_wait_of_the_oldest_starts_a_partial_batch_on_its_nanosecond() -> None:
    """The wait is counted from the oldest arrival; a request at that very instant still gets in."""
    records = static("3:4->1 20:4->1 33:4->1 34:4->1" + LATER, batch_size=4, max_wait=30)
    assert times(records, "scheduled_ns")[:4] == [(33,), (33,), (33,), (64,)]


def test_max_wait_that_passed_during_a_batch_starts_the_next_at_once() -> None:
    """A request older than max_wait at the end of a batch does not wait for company."""
    records = static("0:4->4 0:4->4 5:4->1" + LATER, batch_size=2, max_wait=35)
    assert times(records, "scheduled_ns")[2] == (40,)
    assert times(static("0:4->4 0:4->4 5:4->1" + LATER, batch_size=2, max_wait=36), "scheduled_ns")[2] == (41,)


def test_without_wait_for_full_the_engine_takes_what_waits() -> None:
    """An idle engine starts with one request; those that came meanwhile go next, at most batch_size."""
    records = static("0:4->2 1:4->1 2:4->1 3:4->1" + LATER, batch_size=2, wait_for_full=False)
    assert times(records, "scheduled_ns")[:4] == [(0,), (20,), (20,), (30,)]


# ---- padding


def test_padding_and_held_rows_are_counted_to_the_token() -> None:
    """Prompts 5 and 2 padded to 5; the second ends first and its row computes on, its context growing."""
    records = static("0:5->4 0:2->2", batch_size=2)
    columns = ("num_prefill_tokens", "pad_prefill_tokens", "num_decode", "context_tokens")
    assert steps(records, *columns, "pad_decode_rows", "pad_context_tokens") == [
        (7, 3, 0, 0, 0, 0),
        (0, 0, 2, 7, 0, 3),  # 5 + 2 read, 3 more of padding
        (0, 0, 1, 6, 1, 6),  # the ended row reads 5 of its prompt and 1 decoded
        (0, 0, 1, 7, 1, 7),
    ]


def test_every_row_that_has_ended_counts() -> None:
    """Prompts 5, 2 and 3 padded to 5: the second ends, then the third; either reads 5 and what it decodes."""
    records = static("0:5->4 0:2->2 0:3->3", batch_size=3)
    assert steps(records, "pad_prefill_tokens", "num_decode", "pad_decode_rows", "pad_context_tokens") == [
        (5, 0, 0, 0),
        (0, 3, 0, 5),
        (0, 2, 1, 8),  # 2 of the third's padding, 5 and 1 of the second
        (0, 1, 2, 14),  # 5 and 2 of either
    ]


def test_dropped_rows_cost_nothing_but_their_kv_stays() -> None:
    """Under drop the ended row leaves the step; its blocks return at the end of the batch."""
    records = static("0:5->4 0:2->2", batch_size=2, finished_rows="drop", blocks=10)
    assert steps(records, "num_decode", "pad_decode_rows", "pad_context_tokens", "free_blocks") == [
        (0, 0, 0, 6),
        (2, 0, 3, 6),
        (1, 0, 0, 6),
        (1, 0, 0, 6),
    ]


def test_without_padding_rows_are_as_long_as_their_prompts() -> None:
    """No prompt padding; a held row still reads its own 2 prompt tokens and what it decoded."""
    records = static("0:5->3 0:2->1", batch_size=2, padding="none")
    columns = ("pad_prefill_tokens", "context_tokens", "pad_decode_rows", "pad_context_tokens")
    assert steps(records, *columns) == [(0, 0, 0, 0), (0, 5, 1, 2), (0, 6, 1, 3)]


def test_equal_prompts_and_outputs_waste_nothing() -> None:
    """The boundary of padding: a batch of equals has none, whatever the batch before it had."""
    records = static("0:5->3 0:2->1 0:5->3 0:5->3", batch_size=2)
    padding = steps(records, "pad_prefill_tokens", "pad_decode_rows", "pad_context_tokens")
    assert padding == [(3, 0, 0), (0, 1, 5), (0, 1, 6), (0, 0, 0), (0, 0, 0), (0, 0, 0)]


def test_only_rows_that_have_not_ended_count_as_running() -> None:
    """A held row is padding and no running request."""
    assert steps(static("0:5->3 0:2->1", batch_size=2), "num_running") == [(2,), (1,), (1,)]


# ---- responses


def test_batch_end_sends_whole_responses_together() -> None:
    """The first token is delivered with the last, when the batch ends."""
    records = static("0:4->3 0:4->1", batch_size=2)
    assert times(records, "last_token_ns", "first_delivery_ns", "delivered_ns") == [(30, 30, 30), (10, 30, 30)]


def test_row_end_streams() -> None:
    """Tokens are delivered as they are made and the response closes with its row."""
    records = static("0:4->3 0:4->1", batch_size=2, respond="row_end")
    assert times(records, "last_token_ns", "first_delivery_ns", "delivered_ns") == [(30, 10, 30), (10, 10, 10)]
    assert steps(records, "pad_decode_rows") == [(0,), (1,), (1,)]


# ---- KV


def test_kv_cuts_the_padded_batch() -> None:
    """Three rows of 8 + 5 - 1 = 12 tokens need 9 blocks: 9 take them, 8 cut the batch and name the reason."""
    arrivals = "0:8->1 0:2->5 0:2->1"
    assert times(static(arrivals, batch_size=3, blocks=9), "scheduled_ns") == [(0,), (0,), (0,)]
    records = static(arrivals, batch_size=3, blocks=8)
    assert times(records, "scheduled_ns") == [(0,), (0,), (50,)]
    assert blocked(records) == [(0, 2, "kv_blocks")]


def test_without_padding_the_rows_are_reserved_by_their_own_prompts() -> None:
    """12 + 6 + 6 tokens, each with the longest output of the batch, take 3 + 2 + 2 blocks."""
    arrivals = "0:8->1 0:2->5 0:2->1"
    assert steps(static(arrivals, batch_size=3, blocks=7, padding="none"), "free_blocks")[0] == (0,)
    assert times(static(arrivals, batch_size=3, blocks=6, padding="none"), "scheduled_ns")[2] == (50,)


def test_the_reservation_knows_the_cap_and_not_the_length() -> None:
    """A request that ends after 1 token of a cap of 5 holds blocks for 8 + 5 - 1."""
    assert steps(static("0:8->1/5", batch_size=1, blocks=3), "free_blocks") == [(0,)]


def test_the_reservation_stops_at_the_model_length() -> None:
    """A cap beyond max_model_len 64 reserves 63 tokens, as the last is never computed."""
    assert outcomes(static("0:60->4/20", batch_size=1, blocks=16)) == [("finished", "")]
    assert outcomes(static("0:60->4/20", batch_size=1, blocks=15)) == [("rejected", "never_fits")]


def test_a_batch_that_kv_cuts_is_full() -> None:
    """It starts without waiting for requests that could not join it anyway."""
    records = static("0:8->1 7:8->1 8:8->1" + LATER, batch_size=3, blocks=4)
    assert times(records, "scheduled_ns")[:3] == [(8,), (8,), (901,)]


def test_a_request_that_fits_no_empty_pool_is_rejected() -> None:
    """One block more than the pool is refused on arrival; the pool itself is not."""
    records = static("0:8->9 0:8->10", batch_size=2, blocks=4)
    assert outcomes(records) == [("finished", ""), ("rejected", "never_fits")]


def test_reserve_tokens_gives_every_row_a_fixed_slot() -> None:
    """Slots of 16 tokens: two in 8 blocks, however short the requests; one that needs 17 is rejected."""
    knobs: dict[str, Any] = {"batch_size": 3, "reserve_tokens": 16, "padding": "none", "finished_rows": "drop"}
    records = static("0:1->1 0:8->9 0:1->1 0:8->10", blocks=8, **knobs)
    assert times(records, "scheduled_ns")[:3] == [(0,), (0,), (90,)]
    assert outcomes(records)[3] == ("rejected", "never_fits")
    assert records.details == {"never_fits": "17 tokens need KV, reserve_tokens 16"}


# ---- grouping


def test_grouping_picks_the_lengths_nearest_to_the_oldest() -> None:
    """Of those that wait, the oldest goes with its likes; among equals the older goes."""
    arrivals = "0:9->2 0:9->2 1:3->1 1:20->1 1:4->1 1:2->1"
    records = static(arrivals, batch_size=2, group_by_length=True)
    assert times(records, "scheduled_ns")[2:] == [(20,), (30,), (20,), (30,)]
    assert times(static(arrivals, batch_size=2), "scheduled_ns")[2:] == [(20,), (20,), (30,), (30,)]


def test_grouping_keeps_the_batch_in_order_of_arrival() -> None:
    """The choice is by length; the rows stand as they came, so equal finishers end in that order."""
    scheduler = Static(StaticConfig(3, group_by_length=True), PolicyContext(CountingKV(100, 4), 64))
    for arrival in requests("0:5->1 1:9->1 2:7->1 3:6->1"):
        scheduler.add(Sequence(arrival.request), 3)
    batch = scheduler.schedule(3, False)
    assert isinstance(batch, Batch)
    assert [seq.request.id for seq, _ in batch.items()] == [0, 2, 3]


def test_grouping_starves_nobody() -> None:
    """An outlier among a flood of equals goes with the next batch once it is the oldest."""
    flood = " ".join(f"{i}:4->1" for i in range(2, 40))
    records = static("0:4->1 0:4->1 1:20->1 " + flood, batch_size=2, group_by_length=True)
    assert times(records, "scheduled_ns")[2] == (10,)


# ---- cancels


def test_a_cancelled_waiting_request_leaves_the_queue() -> None:
    """It no longer counts toward a full batch."""
    records = static("0:4->1c5 10:4->1 20:4->1" + LATER, batch_size=2)
    assert outcomes(records)[0] == ("cancelled", "client_cancel")
    assert times(records, "scheduled_ns")[:3] == [(-1,), (20,), (20,)]


@pytest.mark.parametrize(("finished_rows", "pad_rows"), [("hold", 1), ("drop", 0)])
def test_a_cancelled_row_is_padding_and_keeps_its_kv(finished_rows: Any, pad_rows: int) -> None:
    """From the next step boundary on it counts as an ended row; its blocks return with the batch."""
    records = static("0:4->4 0:4->9c15", batch_size=2, finished_rows=finished_rows, blocks=6)
    assert steps(records, "num_decode", "pad_decode_rows", "free_blocks") == [
        (0, 0, 0),
        (2, 0, 0),
        (1, pad_rows, 0),
        (1, pad_rows, 0),
    ]
    assert times(records, "output_tokens", "delivered_ns") == [(4, 40), (2, -1)]


def test_a_batch_whose_rows_are_all_cancelled_ends_at_once() -> None:
    """The next batch starts at the boundary at which the last cancel takes effect."""
    records = static("0:4->9c12 0:4->9c15 1:4->1 1:4->1", batch_size=2)
    assert times(records, "scheduled_ns")[2:] == [(20,), (20,)]


def test_held_responses_go_out_when_the_last_live_row_is_cancelled() -> None:
    """The batch ends with the cancel, so what it held is delivered then and not lost."""
    records = static("0:4->1 0:4->9c15", batch_size=2)
    assert outcomes(records) == [("finished", ""), ("cancelled", "client_cancel")]
    assert times(records, "last_token_ns", "delivered_ns")[0] == (10, 20)


def test_a_client_that_gives_up_on_a_held_response_is_cancelled() -> None:
    """Its row has ended, its response waits for the batch: at 15 ms nobody waits for it any more."""
    records = static("0:4->1c15 0:4->3", batch_size=2)
    assert [outcome for outcome, _ in outcomes(records)] == ["cancelled", "finished"]
    assert times(records, "delivered_ns")[0] == (-1,)


# ---- the rest


def test_a_batch_is_leapt_to_the_step_before_its_next_end() -> None:
    """Repeating goes on while a queue waits, up to the last but one step of the row that ends first."""
    assert leap_end_ns(Static, StaticConfig(2), "0:4->20 0:4->30 0:4->1") == 190


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"batch_size": 2, "max_wait": 5, "wait_for_full": False}, "needs wait_for_full"),
        ({"batch_size": 2, "reserve_tokens": 16}, "padding: none"),
        ({"batch_size": 2, "reserve_tokens": 16, "padding": "none"}, "finished_rows: drop"),
        ({"batch_size": 2, "reserve_tokens": 16, "finished_rows": "drop"}, "padding: none"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(knobs: dict[str, Any], message: str) -> None:
    """Each wrong knob is named with its value."""
    with pytest.raises(ValueError, match=message):
        StaticConfig(**knobs)


def test_a_slot_larger_than_the_pool_is_refused() -> None:
    """Otherwise no batch could ever start; one as large as the pool runs alone."""
    knobs: dict[str, Any] = {"reserve_tokens": 16, "padding": "none", "finished_rows": "drop"}
    assert times(static("0:1->1 0:1->1", blocks=4, batch_size=2, **knobs), "scheduled_ns") == [(0,), (10,)]
    config = StaticConfig(2, reserve_tokens=17, padding="none", finished_rows="drop")
    with pytest.raises(ScenarioError, match="needs 5 KV blocks, 4 in the pool"):
        Static(config, PolicyContext(CountingKV(4, 4), 64))


configs = st.builds(
    StaticConfig,
    batch_size=st.integers(1, 5),
    max_wait=st.none() | st.integers(0, 60),
    padding=st.sampled_from(["longest", "none"]),
    finished_rows=st.sampled_from(["hold", "drop"]),
    respond=st.sampled_from(["batch_end", "row_end"]),
    group_by_length=st.booleans(),
) | st.builds(
    StaticConfig,
    batch_size=st.integers(1, 5),
    wait_for_full=st.just(False),
    padding=st.just("none"),
    finished_rows=st.just("drop"),
    reserve_tokens=st.none() | st.integers(16, 36),
)


@random_cases(120)
@given(config=configs, arrivals=workloads(), blocks=st.integers(9, 40))
def test_every_driver_gives_the_same_records(config: StaticConfig, arrivals: Any, blocks: int) -> None:
    """Leaping, stepping, the wall-clock driver and both KV managers agree; every request ends once."""
    run_every_way(Static, config, arrivals, blocks=blocks, cost=Constant())
