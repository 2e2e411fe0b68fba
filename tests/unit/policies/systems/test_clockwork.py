"""Clockwork's batches, by hand: a step takes 10 us, arrivals are in us, and requests have 15 ms at least."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from batchsim.policies.systems.clockwork import Clockwork, ClockworkConfig, SizeQueue
from tests.support.microseconds import US, blocked_us, busy, ends_us, outcomes, records_of, starts_us, steps, times
from tests.support.random_cases import random_cases

LATE = ("rejected", "misses_slo")


def clockwork(arrivals: str, *exec_us: int, slo_us: int = 15_000, blocks: int = 1000, **knobs: Any) -> Any:
    """With sizes 1, 2, 4 and so on, as many as there are expected durations, or all."""
    if exec_us:
        knobs["exec_durations"] = tuple(us * US for us in exec_us)
        knobs["batch_sizes"] = tuple(2**i for i in range(len(exec_us)))
    return records_of(Clockwork, ClockworkConfig(default_slo=slo_us * US, **knobs), arrivals, blocks)


def test_a_free_gpu_takes_the_largest_size_that_is_full() -> None:
    """Seven are four, two and one; nothing is padded to a size, and no batch waits for more."""
    records = clockwork("0:4->1 " * 7)
    assert starts_us(records) == [0, 0, 0, 0, 10, 10, 20]
    assert steps(records, "num_chunks", "pad_prefill_rows") == [(4, 0), (2, 0), (1, 0)]


@pytest.mark.parametrize(
    ("slo_us", "exec_us", "outcome"),
    [(1, 15_000, ("finished", "")), (1, 15_001, LATE), (20_000, 15_001, LATE), (20_001, 15_001, ("finished", ""))],
)
def test_who_cannot_end_5_ms_before_its_slo_is_rejected_at_once(
    slo_us: int, exec_us: int, outcome: tuple[str, str]
) -> None:
    """15 ms are left to a request in any case."""
    records = clockwork("0:4->1", exec_us, slo_us=slo_us)
    assert outcomes(records) == [outcome]
    assert ends_us(records) == [0 if outcome == LATE else 10]


def test_a_batch_that_is_in_time_passes_over_those_that_would_be_late_in_it() -> None:
    """At 100 two are expected to end at 15.05 ms: one that came at 49 has until 15.049, and leaves with the two."""
    assert outcomes(clockwork("0:4->10 49:4->1 90:4->1 90:4->1", 14_900, 14_950)) == [
        ("finished", ""),
        LATE,
        ("finished", ""),
        ("finished", ""),
    ]
    records = clockwork("0:4->10 49:4->1 90:4->1 90:4->1", 14_900, 14_950)
    assert starts_us(records) == [0, None, 100, 100]
    assert records.details == {"misses_slo": "waited 51 us, default_slo 15 ms"}
    assert starts_us(clockwork("0:4->10 50:4->1 90:4->1 90:4->1", 14_900, 14_950)) == [0, 100, 100, 110]


def test_a_size_is_out_of_reach_behind_one_that_would_be_late() -> None:
    """Two would be late, so that four, which would not, are taken one by one."""
    assert starts_us(clockwork("0:4->1 " * 4, 100, 15_001, 100)) == [0, 10, 20, 30]
    assert starts_us(clockwork("0:4->1 " * 4, 100, 15_000, 100)) == [0, 0, 0, 0]


def test_one_that_would_be_late_alone_waits_for_a_second_until_its_deadline() -> None:
    """Two at a time are faster than one, as measured: with the second it starts, without it is rejected."""
    assert starts_us(clockwork("0:4->1 40:4->1", 15_001, 100)) == [40, 40]
    alone = clockwork("0:4->1", 15_001, 100)
    assert (outcomes(alone), ends_us(alone)) == ([LATE], [15_000])


def test_a_batch_is_expected_to_take_what_the_longest_of_the_last_ten_took() -> None:
    queue = SizeQueue(1, 70)
    expected = [queue.expected_ns]
    for taken_ns in (50, *[20] * 9, 30):
        queue.add(taken_ns)
        expected.append(queue.expected_ns)
    assert expected == [70, *[50] * 10, 30]


def test_a_size_is_expected_to_take_what_it_took_from_its_first_batch_on() -> None:
    """At 8.01 ms a batch of one took 10 us: the second, with 14.995 ms left, is in time, and by the 15 ms stated would
    not be. A batch that a cancel ended then has not been timed."""
    assert starts_us(clockwork("8000:4->1 8005:4->1", 15_000)) == [8000, 8010]
    assert outcomes(clockwork("8000:4->2c8004 8005:4->1", 15_000)) == [("cancelled", "client_cancel"), LATE]


def test_a_size_that_does_not_fit_the_kv_is_not_taken() -> None:
    """Three blocks hold two rows of one and not four, two blocks one row of two; the rows cut off wait for KV."""
    records = clockwork("0:4->1 " * 4, blocks=3)
    assert starts_us(records) == [0, 0, 10, 10]
    assert blocked_us(records)[0] == (0, 2, "kv_blocks")
    assert starts_us(clockwork("0:4->2 " * 2, blocks=2)) == [0, 20]
    assert blocked_us(clockwork("0:4->1 " * 3))[0] == (0, 2, "batch_running")


def test_rows_are_padded_and_compute_on_until_the_batch_ends_and_answers_are_whole() -> None:
    """Of prompts of 8 and 4 tokens and answers of 1 and 3: 4 tokens of padding, then one row of it."""
    records = clockwork("0:8->1 0:4->3")
    assert steps(records, "pad_prefill_tokens", "pad_decode_rows") == [(4, 0), (0, 1), (0, 1)]
    assert times(records, "delivered_ns") == [(30 * US,)] * 2


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"batch_sizes": (2, 4)}, r"batch_sizes \[2, 4\] must ascend from 1"),
        ({"batch_sizes": (1, 4, 2)}, r"batch_sizes \[1, 4, 2\] must ascend from 1"),
        ({"batch_sizes": ()}, r"batch_sizes \[\] must ascend from 1"),
        ({"exec_durations": (1, 1)}, "exec_durations has 2 and batch_sizes 5. Write one for each"),
    ],
)
def test_sizes_that_are_none_are_refused(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ClockworkConfig(default_slo=1, **knobs)


@random_cases(15)
@given(busy())
def test_every_driver_agrees(arrivals: Any) -> None:
    config = ClockworkConfig(default_slo=1, batch_sizes=(1, 2, 4), exec_durations=(15_000_000, 14_990_000, 14_950_000))
    records_of(Clockwork, config, arrivals, blocks=30)
