"""TensorFlow Serving's batches, by hand; rules are those of its specification, section 5. A step takes 10 us."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.base.errors import ScenarioError
from batchsim.kernel.batch import Idle
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Request, Sequence
from batchsim.policies.systems.tf_serving import TfServing, TfServingConfig
from tests.support.microseconds import blocked_us, busy, ends_us, outcomes, records_of, starts_us, steps, times
from tests.support.random_cases import random_cases


def serving(arrivals: str, blocks: int = 1000, **knobs: Any) -> Any:
    return records_of(TfServing, TfServingConfig(num_batch_threads=1, **knobs), arrivals, blocks)


def test_rule_1_a_full_open_batch_is_closed_by_the_next_request() -> None:
    """One a batch: while the first runs the second is open, the third closes it, each runs alone."""
    assert starts_us(serving("0:4->2 1:4->1 2:4->1", max_batch_size=1)) == [0, 20, 30]


def test_rule_1_beyond_max_enqueued_batches_requests_are_rejected() -> None:
    """Two batches of one are enqueued at 3; the running one does not count, and at 20 there is room again."""
    records = serving("0:4->2 1:4->1 2:4->1 3:4->1 25:4->1", max_batch_size=1, max_enqueued_batches=2)
    assert [reason for _, reason in outcomes(records)] == ["", "", "", "queue_full", ""]
    assert starts_us(records) == [0, 20, 30, None, 40]
    assert records.details == {"queue_full": "2 batches enqueued, max_enqueued_batches 2"}


def test_rule_1_an_open_batch_with_room_is_never_full() -> None:
    """With one batch enqueued at most, two still join the open one; the third is rejected."""
    records = serving("0:4->2 1:4->1 2:4->1 3:4->1", max_batch_size=2, max_enqueued_batches=1)
    assert starts_us(records) == [0, 20, 20, None]


def test_rule_1_splitting_sets_the_size_that_runs() -> None:
    """Batches of at most 2, though a request could bring 8 rows."""
    knobs: dict[str, Any] = {"max_batch_size": 8, "enable_large_batch_splitting": True, "max_execution_batch_size": 2}
    assert starts_us(serving("0:4->2 1:4->1 1:4->1 1:4->1", **knobs)) == [0, 20, 20, 30]


def test_rule_2_the_open_batch_goes_when_full_or_when_its_first_request_is_old_enough() -> None:
    """Four of at most four at 8; then the one from 9 waits until 39, and who comes at that instant is in."""
    arrivals = "0:4->1 5:4->1 8:4->1 8:4->1 9:4->1 39:4->1 40:4->1"
    assert starts_us(serving(arrivals, max_batch_size=4, batch_timeout_micros=30)) == [8, 8, 8, 8, 39, 39, 70]


def test_rule_2_a_timeout_is_in_microseconds_from_the_first_request() -> None:
    """Three in batches of two, the first of which waits in a closed batch and the last in the open one: all wait."""
    config = TfServingConfig(num_batch_threads=1, max_batch_size=2, batch_timeout_micros=30)
    scheduler = TfServing(config, PolicyContext(CountingKV(9, 4), 64))
    scheduler.add(Sequence(Request(0, 7, 4, 1)), 7)
    assert scheduler.schedule(8, drain=False) == Idle(30_007)
    for i in (1, 2):
        scheduler.add(Sequence(Request(i, 9, 4, 1)), 9)
    assert (len(scheduler.closed.batches), len(scheduler.open), scheduler.num_waiting) == (1, 1, 3)


def test_who_gives_up_in_a_waiting_batch_is_no_row_of_the_running_one() -> None:
    """1, in the closed batch, gives up at 15; the one that runs has no padding for it."""
    records = serving("0:4->4 1:4->1c15 2:4->1", max_batch_size=1)
    assert starts_us(records) == [0, None, 40]
    assert steps(records, "pad_decode_rows", "pad_context_tokens") == [(0, 0)] * 5


def test_rule_3_the_timeout_does_not_cut_a_batch_while_the_thread_is_busy() -> None:
    """Busy from 5 to 45: those of 10, 20 and 40 go together at 45, although the first timed out at 15."""
    assert starts_us(serving("0:4->4 10:4->1 20:4->1 40:4->1", max_batch_size=4, batch_timeout_micros=5)) == [
        5,
        45,
        45,
        45,
    ]


def test_rule_2_a_full_open_batch_goes_when_the_thread_is_free_and_each_has_its_own_time() -> None:
    """The one filled at 9 goes at 11, long before its timeout at 32; the one opened at 39 waits until 69."""
    records = serving("0:4->1 1:4->1 2:4->1 9:4->1 39:4->1", max_batch_size=2, batch_timeout_micros=30)
    assert starts_us(records) == [1, 1, 11, 11, 69]
    assert blocked_us(records)[0] == (0, 0, "batch_window")


def test_rule_3_a_timeout_of_zero_dispatches_at_once() -> None:
    """The default: an idle thread takes what is there, later ones go when it is free."""
    assert starts_us(serving("0:4->2 1:4->1 2:4->1")) == [0, 20, 20]


def test_rule_5_a_batch_is_padded_up_to_an_allowed_size_with_copies_of_its_last_row() -> None:
    """Three of 4 tokens become four rows: 4 tokens of prefill more, then a row that reads 4 and 5."""
    records = serving("0:4->3 0:4->3 0:4->3", max_batch_size=4, allowed_batch_sizes=(2, 4))
    columns = ("num_prefill_tokens", "pad_prefill_tokens", "num_decode", "pad_decode_rows", "pad_context_tokens")
    assert steps(records, *columns) == [(12, 4, 0, 0, 0), (0, 0, 3, 1, 4), (0, 0, 3, 1, 5)]
    assert steps(records, "num_chunks", "pad_prefill_rows") == [(3, 1), (0, 0), (0, 0)]


def test_rule_5_copies_are_as_long_as_the_padded_rows() -> None:
    """Prompts 2, 6 and 3 padded to 6, and one copy of 6; the ended row computes on beside it."""
    records = serving(
        "0:2->1 0:6->2 0:3->2", max_batch_size=4, allowed_batch_sizes=(4,), pad_variable_length_inputs=True
    )
    columns = ("pad_prefill_tokens", "pad_prefill_rows", "num_decode", "pad_decode_rows", "pad_context_tokens")
    assert steps(records, *columns) == [(4 + 3 + 6, 1, 0, 0, 0), (0, 0, 2, 2, 3 + 6 + 6)]


def test_more_padding_than_a_column_holds_is_an_error() -> None:
    """Half a billion rows of 8 tokens are 2^32 tokens of padding, which the policy is told in one line."""
    size = 2**29
    with pytest.raises(ScenarioError, match=r"a step of 8 tokens .* 4,294,967,288 of padding is more than"):
        serving("0:8->1", max_batch_size=size, allowed_batch_sizes=(size,))


def test_rule_5_batch_down_leaves_what_passes_an_allowed_size() -> None:
    """Three at 30 of sizes 2 or 4: two go; the third's batch counts as begun two thirds of the way to 30, so at 50."""
    arrivals = "0:4->1 0:4->1 0:4->1"
    knobs: dict[str, Any] = {"max_batch_size": 4, "allowed_batch_sizes": (2, 4), "batch_timeout_micros": 30}
    assert starts_us(serving(arrivals, batch_padding_policy="BATCH_DOWN", **knobs)) == [30, 30, 50]
    assert starts_us(serving(arrivals, **knobs)) == [30, 30, 30]
    later = arrivals.replace("0:", "12:")
    assert starts_us(serving(later, batch_padding_policy="BATCH_DOWN", **knobs)) == [42, 42, 62]


def test_rule_5_batch_down_pads_below_the_smallest_size_and_leaves_closed_batches() -> None:
    """One of sizes 3 or 4 is padded to 3; a batch of four that was closed meanwhile runs whole."""
    knobs: dict[str, Any] = {"max_batch_size": 4, "allowed_batch_sizes": (3, 4), "batch_padding_policy": "BATCH_DOWN"}
    records = serving("0:4->2 1:4->1 1:4->1 1:4->1 1:4->1 1:4->1", **knobs)
    assert starts_us(records) == [0, 20, 20, 20, 20, 30]
    assert steps(records, "pad_prefill_tokens", "pad_decode_rows") == [(8, 0), (0, 2), (0, 0), (8, 0)]


def test_rule_5_unequal_inputs_fail_their_batch_unless_they_are_padded() -> None:
    """Prompts of 4 and 5 tokens fail together at 20, the equal ones behind them run; padded, nobody fails."""
    arrivals = "0:4->2 1:4->1 1:5->1 2:6->1 2:6->1"
    records = serving(arrivals, max_batch_size=2)
    assert [reason for _, reason in outcomes(records)] == ["", "unequal_lengths", "unequal_lengths", "", ""]
    assert ends_us(records) == [20, 20, 20, 30, 30]
    detail = "prompts of 4 to 5 tokens in a batch, pad_variable_length_inputs: false"
    assert records.details == {"unequal_lengths": detail}
    padded = serving(arrivals, max_batch_size=2, pad_variable_length_inputs=True)
    assert starts_us(padded) == [0, 20, 20, 30, 30]
    assert steps(padded, "pad_prefill_tokens")[2] == (1,)


def test_rule_7_all_answers_leave_when_the_batch_is_done() -> None:
    """One and three tokens: both delivered at 30, first token and last."""
    records = serving("0:4->1 0:4->3")
    assert [at // 1000 for (at,) in times(records, "first_delivery_ns")] == [30, 30]


def test_rule_7_the_queue_is_strictly_first_come_first_served() -> None:
    """A more important request that comes later waits its turn."""
    assert starts_us(serving("0:4->2 1:4->1p5 2:4->1p0", max_batch_size=1)) == [0, 20, 30]


def test_a_batch_larger_than_the_kv_pool_runs_in_parts() -> None:
    """Three rows of 2 blocks each and a pool of 4: the third runs next, padded on its own."""
    records = serving("0:8->1 0:8->1 0:8->1", blocks=4, max_batch_size=4, allowed_batch_sizes=(2, 4))
    assert starts_us(records) == [0, 0, 10]
    assert steps(records, "pad_prefill_tokens", "pad_prefill_rows") == [(0, 0), (8, 1)]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"num_batch_threads": 4}, "num_batch_threads 4: more than one batch in flight"),
        ({"max_batch_size": 4, "allowed_batch_sizes": (2, 8)}, "the last one equal max_batch_size 4"),
        ({"max_batch_size": 4, "allowed_batch_sizes": (4, 4)}, "increasing"),
        ({"max_batch_size": 8, "max_execution_batch_size": 4}, "equal to it without enable_large_batch_splitting"),
        ({"enable_priority_queue": True}, "enable_priority_queue True .* not simulated"),
        ({"batch_padding_policy": "MINIMIZE_TPU_COST_PER_REQUEST"}, "MINIMIZE_TPU_COST_PER_REQUEST"),
        (
            {
                "max_batch_size": 8,
                "enable_large_batch_splitting": True,
                "max_execution_batch_size": 4,
                "allowed_batch_sizes": (8,),
            },
            "the last one equal max_execution_batch_size 4",
        ),
    ],
)
def test_a_config_that_the_server_or_we_refuse(knobs: dict[str, Any], message: str) -> None:
    """Each wrong knob is named with its value."""
    with pytest.raises(ValueError, match=message):
        TfServingConfig(**{"num_batch_threads": 1} | knobs)


configs = st.builds(
    TfServingConfig,
    num_batch_threads=st.just(1),
    max_batch_size=st.just(5),
    batch_timeout_micros=st.sampled_from([0, 7, 20, 60]),
    max_enqueued_batches=st.integers(1, 4),
    allowed_batch_sizes=st.sampled_from([(), (5,), (2, 5), (1, 3, 5)]),
    batch_padding_policy=st.sampled_from(["PAD_UP", "BATCH_DOWN"]),
    pad_variable_length_inputs=st.sampled_from([True, True, False]),
)


@random_cases(80)
@given(config=configs, arrivals=busy(), blocks=st.integers(9, 40))
def test_every_driver_gives_the_same_records(config: TfServingConfig, arrivals: Any, blocks: int) -> None:
    """Leaping, stepping, the wall-clock driver and both KV managers agree; every request ends once."""
    records_of(TfServing, config, arrivals, blocks)
