"""Stations behind a router against queueing theory, within 99 % t-intervals over independent replications."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from batchsim.cost.constant import Constant
from batchsim.kernel.record import Records
from tests.theory.laws import (
    mmc_time_in_system,
    pollaczek_khinchine_wait,
    round_robin_time_in_system,
    shortest_of_two_time_in_system,
)
from tests.theory.stations import Draw, Interval, Station, interval, mean_e2e_ns, mean_queue_ns, slots

STEP_NS = 1_000_000
MEAN_STEPS = 100
SERVICE_NS = MEAN_STEPS * STEP_NS
REPLICATIONS = 10


def geometric(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """As good as exponential: a step is short beside it."""
    return rng.geometric(1 / MEAN_STEPS, count)


def fixed(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    return np.full(count, MEAN_STEPS)


def behind(
    router: str,
    replicas: int,
    load: float,
    draw: Draw,
    measure: Callable[[Records], float] = mean_e2e_ns,
    count: int = 8_000,
) -> Interval:
    """One request at a time on each replica, which is busy for `load` of the time."""
    station = Station(slots(1), Constant(STEP_NS), load * replicas / SERVICE_NS, draw)
    return interval([measure(station.run_behind(router, replicas, seed, count)) for seed in range(REPLICATIONS)])


@pytest.mark.slow
def test_a_random_split_of_poisson_arrivals_is_independent_queues() -> None:
    """Each replica is an M/D/1, and an M/M/1, of its share of the arrivals."""
    rate, certain = 0.7 / SERVICE_NS, np.array([float(SERVICE_NS)])
    wait = behind("random", 3, 0.7, fixed, mean_queue_ns)
    assert pollaczek_khinchine_wait(rate, certain) in wait
    assert pollaczek_khinchine_wait(1.1 * rate, certain) not in wait
    time = behind("random", 3, 0.7, geometric)
    assert mmc_time_in_system(rate, SERVICE_NS, 1) in time
    assert mmc_time_in_system(3 * rate, SERVICE_NS, 3) not in time


@pytest.mark.slow
def test_random_replicas_know_nothing_of_each_other() -> None:
    """Equal shares, and numbers at one replica that do not go with those at another; the shortest queue ties them."""
    station = Station(slots(1), Constant(STEP_NS), 0.7 * 2 / SERVICE_NS, geometric)
    random = station.run_behind("random", 2, 0, 40_000)
    assert random.replicas is not None
    share = float((random.replicas.requests == 0).mean())
    assert abs(share - 0.5) < 3 * 0.5 / np.sqrt(40_000)
    assert abs(_correlation(random)) < 0.1
    assert _correlation(station.run_behind("shortest_queue", 2, 0, 40_000)) > 0.5


def _correlation(records: Records) -> float:
    """Of the numbers of requests at two replicas, looked at every five services."""
    assert records.replicas is not None
    times = np.arange(0, int(records.requests["arrival_ns"].max()), 5 * SERVICE_NS)
    numbers = []
    for replica in (0, 1):
        mine = records.requests[records.replicas.requests == replica]
        arrived, gone = (np.searchsorted(np.sort(mine[name]), times) for name in ("arrival_ns", "ended_ns"))
        numbers.append(arrived - gone)
    return float(np.corrcoef(numbers)[0, 1])


@pytest.mark.slow
def test_round_robin_smooths_what_random_does_not() -> None:
    """Each third of Poisson arrivals is Erlang distributed, so each replica is an E_3/M/1, better than an M/M/1."""
    rate = 3 * 0.7 / SERVICE_NS
    time = behind("round_robin", 3, 0.7, geometric, count=4_000)
    assert round_robin_time_in_system(rate, SERVICE_NS, 3) in time
    assert mmc_time_in_system(rate / 3, SERVICE_NS, 1) > 1.2 * (time.mean + time.half_width)


@pytest.mark.slow
def test_joining_the_shorter_of_two_queues_follows_its_markov_chain() -> None:
    """Two replicas: the mean is that of join-shortest-queue, not that of one queue for both."""
    rate = 2 * 0.8 / SERVICE_NS
    time = behind("shortest_queue", 2, 0.8, geometric, count=20_000)
    assert shortest_of_two_time_in_system(rate, SERVICE_NS) in time
    assert mmc_time_in_system(rate, SERVICE_NS, 2) not in time


@pytest.mark.slow
def test_join_shortest_queue_lies_between_pooling_and_a_random_split() -> None:
    """Five replicas: no router beats one queue for all, M/M/5; knowing the queues beats every router that does not."""
    rate = 5 * 0.8 / SERVICE_NS
    time = behind("shortest_queue", 5, 0.8, geometric)
    assert mmc_time_in_system(rate, SERVICE_NS, 5) < time.mean - time.half_width
    blind = round_robin_time_in_system(rate, SERVICE_NS, 5)
    assert time.mean + time.half_width < 0.7 * blind < 0.7 * mmc_time_in_system(rate / 5, SERVICE_NS, 1)
