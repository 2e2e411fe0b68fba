"""TensorFlow's serial-device scheduler, by hand: a step takes 10 us, an idle thread first sleeps for 1,000."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from batchsim.drive.simulate import simulate
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.policies.systems.tf_serial_device import TfSerialDevice, TfSerialDeviceConfig
from tests.support.microseconds import TenMicroseconds, busy, in_us, outcomes, records_of, starts_us
from tests.support.random_cases import random_cases
from tests.support.whole_batches import Listed, requests


def serial(arrivals: str, limit: int = 3, **knobs: Any) -> Any:
    knobs = {"num_batch_threads": 8, "initial_in_flight_batches_limit": limit} | knobs
    return records_of(TfSerialDevice, TfSerialDeviceConfig(**knobs), arrivals)


def test_a_thread_that_is_through_takes_what_is_there_and_one_that_found_none_sleeps() -> None:
    """Three look at 0, one finds a batch. It takes the next at 10; that of 500 waits for those that sleep to 1,000."""
    assert starts_us(serial("0:4->1 5:4->1 7:4->1 500:4->1")) == [0, 10, 10, 1000]


def test_a_thread_that_wakes_at_the_instant_of_an_arrival_sees_it() -> None:
    """At 1,000, not a microsecond before the arrival at 1,001, which waits for 2,000."""
    assert starts_us(serial("1000:4->1")) == [1000]
    assert starts_us(serial("1001:4->1")) == [2000]


def test_a_taken_batch_is_closed_while_it_waits_for_the_device() -> None:
    """Two threads look at 990 and find the batches of one: the second waits for the device, the third is open."""
    assert starts_us(serial("990:4->3 990:4->1 1001:4->1 1001:4->1", max_batch_size=1)) == [1000, 1030, 1040, 1050]
    assert starts_us(serial("990:4->3 990:4->1 1001:4->1 1001:4->1", 2)) == [1000, 1000, 1030, 1030]


def test_beyond_the_enqueued_batches_requests_are_rejected() -> None:
    """A thread has the first; of batches of one, one may wait."""
    records = serial("0:4->2 1:4->1 2:4->1", 1, max_batch_size=1, max_enqueued_batches=1)
    assert [reason for _, reason in outcomes(records)] == ["", "", "queue_full"]


@pytest.mark.parametrize(
    ("first", "target", "most", "expected"), [(1, 2, 8, 3), (1, 1, 8, 2), (5, 2, 8, 3), (1, 5, 4, 4)]
)
def test_threads_are_added_and_end_until_as_many_batches_as_asked_wait(
    first: int, target: int, most: int, expected: int
) -> None:
    """Of one thread none, of five four are left at the device when a batch ends; the limit moves by the difference."""
    config = TfSerialDeviceConfig(
        num_batch_threads=most,
        max_batch_size=1,
        max_enqueued_batches=999,
        initial_in_flight_batches_limit=first,
        target_pending=target,
        batches_to_average_over=20,
    )
    scheduler = TfSerialDevice(config, PolicyContext(CountingKV(1000, 4), 64))
    core = EngineCore(scheduler, SimExecutor(TenMicroseconds(), 64), Recorder(), max_model_len=64)
    simulate(core, Listed(in_us(requests("0:4->1 " * 60))))
    assert scheduler.limit == expected


def test_low_traffic_changes_no_limit() -> None:
    """One request every 2,000 us: threads look in vain more often than once in ten batches."""
    config = TfSerialDeviceConfig(num_batch_threads=8, initial_in_flight_batches_limit=1, batches_to_average_over=2)
    scheduler = TfSerialDevice(config, PolicyContext(CountingKV(1000, 4), 64))
    core = EngineCore(scheduler, SimExecutor(TenMicroseconds(), 64), Recorder(), max_model_len=64)
    simulate(core, Listed(in_us(requests(" ".join(f"{2000 * i}:4->1" for i in range(6))))))
    assert (scheduler.limit, scheduler.period_ns) == (1, 0)


def test_a_limit_above_the_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="initial_in_flight_batches_limit 3 must be at most num_batch_threads 2"):
        TfSerialDeviceConfig(num_batch_threads=2)


@random_cases(25)
@given(busy())
def test_every_driver_agrees(arrivals: Any) -> None:
    config = TfSerialDeviceConfig(num_batch_threads=3, max_batch_size=2, batches_to_average_over=2, target_pending=1)
    records_of(TfSerialDevice, config, arrivals, blocks=30)
