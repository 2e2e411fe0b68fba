"""Dynamic batching, by hand: a step takes 10 ns, a KV block holds 4 tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.kernel.record import Records
from batchsim.policies.families.dynamic import Dynamic, DynamicConfig
from tests.support.engine import Constant
from tests.support.random_cases import random_cases
from tests.support.stepping import run, run_every_way
from tests.support.whole_batches import (
    blocked,
    leap_end_ns,
    outcomes,
    steps,
    times,
    workloads,
)

LATER = " 900:1->1"  # keeps the run from draining


def dynamic(arrivals: str, blocks: int = 1000, **knobs: Any) -> Records:
    return run(Dynamic, DynamicConfig(**knobs), arrivals, blocks=blocks, cost=Constant(), how="leap").records


def starts(records: Any) -> list[int]:
    return [at for (at,) in times(records, "scheduled_ns")]


# ---- size and delay


def test_a_full_batch_starts_at_once() -> None:
    """max_batch_size requests do not wait for the delay; the one too many does, from its own arrival."""
    records = dynamic("0:4->1 5:4->1 5:4->1" + LATER, max_batch_size=2, max_queue_delay=100)
    assert starts(records)[:3] == [5, 5, 105]
    assert blocked(records)[:3] == [(0, 0, "batch_window"), (5, 2, "batch_running"), (15, 2, "batch_window")]


def test_the_delay_of_the_oldest_starts_a_partial_batch_on_its_nanosecond() -> None:
    """An age equal to the delay is enough; who comes at that instant is in, a nanosecond later is out."""
    records = dynamic("3:4->1 20:4->1 33:4->1 34:4->1" + LATER, max_batch_size=8, max_queue_delay=30)
    assert starts(records)[:4] == [33, 33, 33, 64]


def test_a_delay_that_passed_during_a_batch_counts() -> None:
    """At the end of a batch a request as old as the delay goes at once, one a nanosecond younger waits that long."""
    assert starts(dynamic("0:4->4 0:4->4 5:4->1" + LATER, max_batch_size=2, max_queue_delay=35))[2] == 40
    assert starts(dynamic("0:4->4 0:4->4 5:4->1" + LATER, max_batch_size=2, max_queue_delay=36))[2] == 41


def test_a_delay_that_passed_sends_no_more_than_a_full_batch() -> None:
    """Three have waited the delay and more; two go."""
    records = dynamic("0:4->2 0:4->2 1:4->1 2:4->1 3:4->1" + LATER, max_batch_size=2, max_queue_delay=5)
    assert starts(records)[2:5] == [20, 20, 30]


def test_no_delay_takes_what_waits() -> None:
    """With the default delay of 0 an idle engine never waits."""
    assert starts(dynamic("0:4->2 1:4->1 2:4->1 3:4->1" + LATER, max_batch_size=2))[:4] == [0, 20, 20, 30]


def test_the_drain_flushes_a_partial_batch() -> None:
    """When no arrival is left the delay has nothing to wait for."""
    assert starts(dynamic("0:4->1 5:4->1", max_batch_size=4, max_queue_delay=1000)) == [5, 5]


# ---- preferred sizes


def test_a_preferred_size_starts_before_the_maximum() -> None:
    """Two of at most eight are enough; the third waits for its delay."""
    records = dynamic(
        "0:4->1 7:4->1 7:4->1" + LATER, max_batch_size=8, preferred_batch_sizes=(2, 4), max_queue_delay=50
    )
    assert starts(records)[:3] == [7, 7, 57]


def test_the_largest_preferred_size_among_the_pending_is_sent_and_the_rest_stays() -> None:
    """Of five pending, four go; the fifth goes alone once its delay is over."""
    arrivals = "0:4->2 0:4->2 1:4->1 2:4->1 3:4->1 4:4->1 5:4->1" + LATER
    records = dynamic(arrivals, max_batch_size=8, preferred_batch_sizes=(2, 4), max_queue_delay=50)
    assert starts(records)[:7] == [0, 0, 20, 20, 20, 20, 55]


def test_an_exceeded_delay_sends_all_pending_past_the_preferred_size() -> None:
    """At an age of 19 = the delay all five go; with a delay of 20 only the preferred four."""
    arrivals = "0:4->2 0:4->2 1:4->1 2:4->1 3:4->1 4:4->1 5:4->1" + LATER
    knobs: dict[str, Any] = {"max_batch_size": 8, "preferred_batch_sizes": (2, 4)}
    assert starts(dynamic(arrivals, max_queue_delay=19, **knobs))[:7] == [0, 0, 20, 20, 20, 20, 20]
    assert starts(dynamic(arrivals, max_queue_delay=20, **knobs))[:7] == [0, 0, 20, 20, 20, 20, 30]


def test_with_no_delay_preferred_sizes_go_first() -> None:
    """A delay of 0 is never exceeded: three pending are sent as two and then one."""
    records = dynamic("0:4->2 1:4->1 1:4->1 1:4->1" + LATER, max_batch_size=8, preferred_batch_sizes=(2,))
    assert starts(records)[:4] == [0, 20, 20, 30]


def test_a_full_scan_that_reached_no_preferred_size_is_sent() -> None:
    """KV takes three, four are preferred: the batch cannot grow, so it does not wait."""
    knobs: dict[str, Any] = {"max_batch_size": 8, "preferred_batch_sizes": (4,), "max_queue_delay": 500}
    arrivals = "0:4->1 1:4->1 2:4->1 3:4->1 30:4->1" + LATER
    records = dynamic(arrivals, blocks=3, **knobs)
    assert starts(records)[:4] == [3, 3, 3, 503]
    assert blocked(records)[1:3] == [(3, 3, "kv_blocks"), (13, 3, "batch_window")]
    assert starts(dynamic(arrivals, blocks=4, **knobs))[:4] == [3, 3, 3, 3]


def test_a_preferred_size_below_what_kv_takes_is_not_blamed_on_kv() -> None:
    """KV takes three of four and two are preferred: the others wait for the batch, also when the third gives up."""
    arrivals = "0:4->2 1:4->4 1:4->4 1:4->4c35 1:4->4" + LATER
    records = dynamic(arrivals, blocks=6, max_batch_size=8, preferred_batch_sizes=(2,))
    assert starts(records)[:3] == [0, 20, 20]
    assert (20, 3, "batch_running") in blocked(records)
    assert (40, 4, "batch_running") in blocked(records)


# ---- priorities


def test_a_lower_priority_number_goes_first() -> None:
    """The batch takes level 0 before level 1 and keeps the order of arrival within a level."""
    arrivals = "0:4->2 1:4->1p1 2:4->1p1 3:4->1p0 4:4->1p0" + LATER
    records = dynamic(arrivals, max_batch_size=3, priority_levels=2)
    assert starts(records)[:5] == [0, 20, 30, 20, 20]
    assert blocked(records)[:2] == [(10, 3, "batch_running"), (20, 2, "batch_running")]


def test_without_levels_priorities_are_ignored() -> None:
    """One queue, whatever the numbers say."""
    assert starts(dynamic("0:4->2 1:4->1p1 2:4->1p-7" + LATER, max_batch_size=1))[:3] == [0, 20, 30]


def test_a_priority_outside_the_levels_is_rejected() -> None:
    """Levels 2 means 0 and 1; nothing is clamped."""
    records = dynamic("0:4->1p1 0:4->1p2 0:4->1p-1", max_batch_size=8, priority_levels=2)
    assert outcomes(records) == [("finished", ""), *[("rejected", "unknown_priority")] * 2]
    assert records.details == {"unknown_priority": "priority 2, the levels are 0 to 1"}


def test_the_delay_is_that_of_the_oldest_of_any_level() -> None:
    """A request of a low level that has waited the delay starts the batch of all."""
    records = dynamic("0:4->1p1 20:4->1p0" + LATER, max_batch_size=8, max_queue_delay=30, priority_levels=2)
    assert starts(records)[:2] == [30, 30]


# ---- queue timeouts


def test_an_idle_engine_rejects_on_the_nanosecond_of_the_timeout() -> None:
    """The timeout wakes the scheduler before the delay does; at the same instant it still comes first."""
    for delay in (25, 100):
        records = dynamic("5:4->1" + LATER, max_batch_size=2, max_queue_delay=delay, max_queue_time=25)
        assert outcomes(records)[0] == ("rejected", "queue_timeout")
        assert times(records, "ended_ns")[0] == (30,)
    assert records.details == {"queue_timeout": "waited 25 ns, max_queue_time 25 ns"}


def test_a_request_sent_just_before_its_timeout_is_served() -> None:
    """The timeout applies only while queued."""
    records = dynamic("5:4->9" + LATER, max_batch_size=2, max_queue_delay=24, max_queue_time=25)
    assert outcomes(records)[0] == ("finished", "")
    assert times(records, "scheduled_ns")[0] == (29,)


@pytest.mark.parametrize("how", ["leap", "step", "live"])
def test_a_running_batch_sees_a_timeout_at_the_first_boundary_at_or_after_it(how: str) -> None:
    """Due at 40 on a boundary, and at 41 between two; leaping over steps does not hide it."""
    config = DynamicConfig(max_batch_size=1, max_queue_time=30)
    records = run(Dynamic, config, "0:4->20 10:4->1 11:4->1" + LATER, cost=Constant(), how=how).records
    assert times(records, "ended_ns")[1:3] == [(40,), (50,)]
    assert [waiting for (waiting,) in steps(records, "num_waiting")][:6] == [0, 1, 2, 2, 1, 0]
    assert blocked(records) == [(10, 1, "batch_running"), (40, 2, "batch_running")]


def test_timeouts_hold_in_every_level() -> None:
    """A request in a lower level expires behind a younger one in a higher level."""
    arrivals = "0:4->9 1:4->1p1 40:4->1p0" + LATER
    records = dynamic(arrivals, max_batch_size=1, priority_levels=2, max_queue_time=60)
    assert outcomes(records)[1:3] == [("rejected", "queue_timeout"), ("finished", "")]
    assert times(records, "ended_ns")[1] == (70,)


def test_a_leap_ends_at_the_boundary_at_which_a_timeout_is_due() -> None:
    """The steps that end before the timeout are repeated, the first that ends at or after it is the last."""
    config = DynamicConfig(max_batch_size=1, max_queue_time=75)
    assert leap_end_ns(Dynamic, config, "0:4->20 0:4->1") == 80
    assert leap_end_ns(Dynamic, DynamicConfig(max_batch_size=1), "0:4->20 0:4->1") == 190


# ---- the batch, as in static


def test_padding_and_held_rows_are_counted() -> None:
    """Prompts 5 and 2 padded to 5; the second ends first and its row computes on."""
    records = dynamic("0:5->3 0:2->1", max_batch_size=2)
    columns = ("pad_prefill_tokens", "num_decode", "pad_decode_rows", "pad_context_tokens")
    assert steps(records, *columns) == [(3, 0, 0, 0), (0, 1, 1, 5), (0, 1, 1, 6)]
    dropped = dynamic("0:5->3 0:2->1", max_batch_size=2, finished_rows="drop", padding="none")
    assert steps(dropped, *columns) == [(0, 0, 0, 0), (0, 1, 0, 0), (0, 1, 0, 0)]


def test_responses_leave_with_the_batch_or_with_the_row() -> None:
    """batch_end holds the first until the second ends; row_end streams."""
    assert times(dynamic("0:4->1 0:4->3", max_batch_size=2), "delivered_ns") == [(30,), (30,)]
    columns = ("first_delivery_ns", "delivered_ns")
    assert times(dynamic("0:4->1 0:4->3", max_batch_size=2, respond="row_end"), *columns) == [(10, 10), (10, 30)]


def test_cancels_while_waiting_running_and_held() -> None:
    """A waiting one leaves its level, a running one its step; held responses go out when the last row is cancelled."""
    records = dynamic("0:4->1 0:4->9c15 1:4->1p1c9 2:4->1p1" + LATER, max_batch_size=2, priority_levels=2)
    assert [outcome for outcome, _ in outcomes(records)[:4]] == ["finished", "cancelled", "cancelled", "finished"]
    assert times(records, "delivered_ns")[:4] == [(20,), (-1,), (-1,), (30,)]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"max_batch_size": 4, "preferred_batch_sizes": (2, 5)}, r"preferred_batch_sizes \[2, 5\]"),
        ({"max_batch_size": 4, "preferred_batch_sizes": (4, 2)}, r"\[4, 2\]"),
        ({"max_batch_size": 4, "preferred_batch_sizes": (2, 2)}, r"\[2, 2\]"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(knobs: dict[str, Any], message: str) -> None:
    """Each wrong knob is named with its value."""
    with pytest.raises(ValueError, match=message):
        DynamicConfig(**knobs)


configs = st.builds(
    DynamicConfig,
    max_batch_size=st.integers(4, 6),
    max_queue_delay=st.sampled_from([0, 7, 20, 60]),
    preferred_batch_sizes=st.sampled_from([(), (2,), (1, 3), (2, 4)]),
    priority_levels=st.none() | st.just(2),
    max_queue_time=st.none() | st.integers(5, 150),
    padding=st.sampled_from(["longest", "none"]),
    finished_rows=st.sampled_from(["hold", "drop"]),
    respond=st.sampled_from(["batch_end", "row_end"]),
)


@random_cases(120)
@given(config=configs, arrivals=workloads(priorities=(0, 0, 1, 1, 2)), blocks=st.integers(9, 40))
def test_every_driver_gives_the_same_records(config: DynamicConfig, arrivals: Any, blocks: int) -> None:
    """Leaping, stepping, the wall-clock driver and both KV managers agree; every request ends once."""
    run_every_way(Dynamic, config, arrivals, blocks=blocks, cost=Constant())
