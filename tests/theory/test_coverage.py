"""The intervals that a run prints contain the truth as often as they say, where the truth is known."""

from __future__ import annotations

from math import exp, factorial

import numpy as np
import pytest

from tests.theory.coverage import METRICS, REQUESTS, by_engine, by_recursion, coverage
from tests.theory.waits import SERVICE_NS, SingleServer, md1_wait_cdf

LOW, HIGH = 0.92, 0.98  # of 400 trials, where 95 % ± 2.75 standard errors is 92 % to 98 %


LONG = 200_000  # requests; the test of the README's `python -m tests.theory.coverage` runs these


@pytest.mark.slow
@pytest.mark.parametrize(
    ("queue", "count"), [pytest.param(*case, id=str(case[0])) for case in REQUESTS.items() if case[1] < LONG]
)
def test_intervals_over_three_seeds_cover_the_truth(queue: SingleServer, count: int) -> None:
    """95 % intervals of the mean and the P99 wait contain theirs in 92 to 98 % of 400 trials."""
    found = coverage(queue, count)
    assert {metric: LOW <= found[metric].covered <= HIGH for metric in METRICS} == dict.fromkeys(METRICS, True), found


def test_runs_too_short_for_their_load_are_noticed() -> None:
    """A fiftieth of the requests leaves P99 at load 0.9 far too low, and its interval beside the truth too often."""
    queue = SingleServer(0.9, equal=False)
    found = coverage(queue, REQUESTS[queue] // 50)["queue_time_p99_s"]
    assert found.covered < 0.85
    assert found.bias < -0.05


@pytest.mark.parametrize("queue", [SingleServer(0.8, equal=False), SingleServer(0.9, equal=True)], ids=str)
def test_the_engine_follows_the_recursion_to_the_nanosecond(queue: SingleServer) -> None:
    """Every request waits as long as Lindley says, so that the metrics of both are the same."""
    arrivals_ns, waits_ns = queue.waits_ns(7, 4_000)
    requests = queue.station.run(7, 4_000).requests
    assert (requests["arrival_ns"] == arrivals_ns).all()
    assert (requests["scheduled_ns"] - requests["arrival_ns"] == waits_ns).all()
    engine, recursion = by_engine(queue, 7, 4_000).values, by_recursion(queue, 7, 4_000).values
    assert {metric: engine[metric] for metric in METRICS} == pytest.approx(recursion, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("equal", [False, True], ids=["M/M/1", "M/D/1"])
def test_the_engine_covers_what_the_recursion_covers(equal: bool) -> None:
    """Trials of the engine itself hit and miss exactly where those of the recursion do."""
    queue = SingleServer(0.5, equal)
    engine, recursion = (coverage(queue, 2_000, trials=30, how=how) for how in (by_engine, by_recursion))
    for metric in METRICS:
        assert engine[metric].covered == recursion[metric].covered
        assert engine[metric].bias == pytest.approx(recursion[metric].bias, rel=1e-9)


def test_the_law_of_the_md1_wait_is_exact() -> None:
    """It equals the closed form below one service, and the chain of the number in system at departures above."""
    load = 0.8
    assert md1_wait_cdf(load, 0.0) == pytest.approx(1 - load, rel=1e-12)
    assert md1_wait_cdf(load, 0.7) == pytest.approx((1 - load) * exp(load * 0.7), rel=1e-12)
    # Whoever finds n in the system waits for n - 1 services and the rest of one, so P(wait <= n) = P(at most n there).
    arrivals = [exp(-load) * load**k / factorial(k) for k in range(60)]
    number = [1 - load]
    for n in range(40):
        before = number[n] - number[0] * arrivals[n] - sum(number[k] * arrivals[n - k + 1] for k in range(1, n + 1))
        number.append(before / arrivals[0])
    for n in (1, 5, 20):
        assert md1_wait_cdf(load, float(n)) == pytest.approx(sum(number[: n + 1]), rel=1e-6)


@pytest.mark.slow
def test_the_law_of_the_md1_wait_stays_exact_in_its_tail() -> None:
    """Its mean, integrated to where one wait in 10^7 is longer, is Pollaczek and Khinchine's."""
    load = 0.9
    edges = np.linspace(0, 80, 1601)
    beyond = 1 - np.array([md1_wait_cdf(load, float(at)) for at in edges])
    assert np.trapezoid(beyond, edges) == pytest.approx(load / (2 * (1 - load)), rel=1e-3)
    truth = SingleServer(load, equal=True).truth_s()
    assert md1_wait_cdf(load, truth["queue_time_p99_s"] * 1e9 / SERVICE_NS) == pytest.approx(0.99, abs=1e-9)
