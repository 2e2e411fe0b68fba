"""TensorFlow's adaptive shared-batch scheduler, by hand: a step takes 10 us; limits of whole numbers draw nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Request, Sequence
from batchsim.policies.systems.tf_adaptive import TfAdaptive, TfAdaptiveConfig
from batchsim.policies.systems.tf_batch_threads import TaskBatch
from tests.support.microseconds import busy, outcomes, records_of, starts_us
from tests.support.random_cases import random_cases


def adaptive(arrivals: str, limit: int, **knobs: Any) -> Any:
    knobs = {"num_batch_threads": 8, "initial_in_flight_batches_limit": limit} | knobs
    return records_of(TfAdaptive, TfAdaptiveConfig(**knobs), arrivals)


def test_a_batch_stays_open_while_as_many_as_the_limit_are_in_flight() -> None:
    """Under 1 three go together when the first ends; under 2 the second is taken alone and waits for the device."""
    arrivals = "0:4->1 1:4->1 2:4->1 3:4->1"
    assert starts_us(adaptive(arrivals, 1)) == [0, 10, 10, 10]
    assert starts_us(adaptive(arrivals, 2)) == [0, 10, 20, 20]


def test_a_timeout_is_how_old_a_batch_is_when_taken() -> None:
    """Those of 0 and 5 go at 30, that of 40 at 70; who comes at the instant of the taking is in."""
    assert starts_us(adaptive("0:4->1 5:4->1 40:4->1", 1, batch_timeout_micros=30)) == [30, 30, 70]
    assert starts_us(adaptive("0:4->1 30:4->1 31:4->1", 1, batch_timeout_micros=30)) == [30, 30, 61]


def test_threads_take_batches_within_a_step() -> None:
    """The batch of 8 comes of age at 13 and is taken, so that 14 opens another, though steps end at 15 and 25."""
    arrivals = "0:4->4 2:4->1 8:4->1 14:4->1"
    assert starts_us(adaptive(arrivals, 2, batch_timeout_micros=5)) == [5, 5, 45, 55]


def test_full_batches_go_as_express_ones_beyond_the_limit_while_there_are_threads() -> None:
    """Of two threads one is to spare: 1 and 2 are in flight too, and 5 finds the batch of 3 and 4 enqueued."""
    knobs: dict[str, Any] = {"num_batch_threads": 2, "max_batch_size": 2, "max_enqueued_batches": 1}
    records = adaptive("0:4->1 1:4->1 2:4->1 3:4->1 4:4->1 5:4->1", 1, **knobs)
    assert starts_us(records) == [0, 10, 10, 20, 20, None]
    assert outcomes(records)[5] == ("rejected", "queue_full")
    assert records.details == {"queue_full": "1 batches enqueued, max_enqueued_batches 1"}


def test_an_express_batch_that_ends_makes_room_for_a_full_one() -> None:
    """Of two threads the express one is through with 1 and 2 at 30 and takes 5 and 6; so two more batches have room."""
    knobs: dict[str, Any] = {"num_batch_threads": 2, "max_batch_size": 2, "max_enqueued_batches": 2}
    arrivals = "0:4->2 1:4->1 2:4->1 3:4->1 4:4->1 5:4->1 6:4->1 35:4->1 35:4->1 35:4->1 35:4->1"
    assert starts_us(adaptive(arrivals, 1, **knobs)) == [0, 20, 20, 30, 30, 40, 40, 50, 50, 60, 60]


def test_a_limit_between_two_numbers_is_a_probability() -> None:
    """Under 1.25 the first batch is taken, a second one by a draw in a quarter of cases, within four deviations."""
    taken = 0
    for seed in range(400):
        scheduler = _scheduler(seed=seed)
        scheduler.limit = 1.25
        for i in range(2):
            scheduler.add(Sequence(Request(i, 0, 4, 1)), 0)
        taken += len(scheduler.in_flight) == 2
    assert abs(taken - 100) < 4 * (400 * 0.25 * 0.75) ** 0.5


def test_the_limit_goes_on_while_ages_fall_and_turns_when_they_do_not() -> None:
    """The first mean is not below 0: down by an eighth. It falls: half the step; again: twice; it rises: up again."""
    scheduler = _scheduler(batches_to_average_over=1)
    limits = []
    for age_ns in (300, 200, 100, 500):
        scheduler.ended(TaskBatch(0), age_ns, is_run=True)
        limits.append(scheduler.limit)
    assert limits == [1.75, 1.640625, 1.435546875, 1.614990234375]


def test_ages_are_averaged_over_as_many_batches_as_said() -> None:
    """The mean of 300 and 100 is 200, and that of 50 and 180 is less: the limit goes on, by half the step."""
    scheduler = _scheduler(batches_to_average_over=2)
    limits = []
    for age_ns in (300, 100, 50, 180):
        scheduler.ended(TaskBatch(0), age_ns, is_run=True)
        limits.append(scheduler.limit)
    assert limits == [2.0, 1.75, 1.75, 1.640625]


def test_the_limit_stays_within_its_bounds() -> None:
    """From 2 down to 1.9 at least, or up to 2 threads at most."""
    scheduler = _scheduler(batches_to_average_over=2, min_in_flight_batches_limit=2)
    for at_ns in (100, 100, 100):
        scheduler.ended(TaskBatch(0), at_ns, is_run=True)
    assert (scheduler.limit, scheduler.direction) == (2.0, -1)
    scheduler = _scheduler(batches_to_average_over=1, num_batch_threads=2)
    for at_ns in (100, 200):
        scheduler.ended(TaskBatch(0), at_ns, is_run=True)
    assert (scheduler.limit, scheduler.direction) == (1.96875, 1)
    scheduler.ended(TaskBatch(0), 150, is_run=True)
    assert scheduler.limit == 2.0


def _scheduler(**knobs: Any) -> TfAdaptive:
    knobs = {"num_batch_threads": 8, "initial_in_flight_batches_limit": 2} | knobs
    return TfAdaptive(TfAdaptiveConfig(**knobs), PolicyContext(CountingKV(99, 4), 64))


def test_the_fuller_of_two_goes_first_where_full_ones_are_boosted() -> None:
    """The batch of 7, half full, is older by 2 us than the full one; a boost of 100 us by its share outweighs that."""
    first, full = TaskBatch(7000, dict.fromkeys([object()])), TaskBatch(9000, dict.fromkeys([object(), object()]))  # type: ignore[list-item]
    for boost, chosen in ((0, first), (3, first), (5, full)):
        scheduler = _scheduler(max_batch_size=2, full_batch_scheduling_boost_micros=boost)
        scheduler.enqueued = [first, full]
        assert scheduler.best(9000, 0) is chosen


def test_limits_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="must be min_in_flight_batches_limit 1 <= initial_in_flight_batches_limit 3"):
        TfAdaptiveConfig(num_batch_threads=2)


@random_cases(25)
@given(busy())
def test_every_driver_agrees(arrivals: Any) -> None:
    config = TfAdaptiveConfig(
        num_batch_threads=3, max_batch_size=3, batch_timeout_micros=13, batches_to_average_over=1, seed=1
    )
    records_of(TfAdaptive, config, arrivals, blocks=30)
