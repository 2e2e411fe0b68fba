"""MSER-5 finds the beginning that a steady state does not look like, and finds none where there is none."""

from __future__ import annotations

import numpy as np
import pytest

from batchsim.metrics.warmup import mser5
from tests.theory.waits import SingleServer


def by_hand(series: list[float]) -> int:
    """The definition, batch by batch."""
    batches = [sum(series[i : i + 5]) / 5 for i in range(0, len(series) - 4, 5)]
    errors = []
    for left_out in range(len(batches) // 2 + 1):
        rest = batches[left_out:]
        mean = sum(rest) / len(rest)
        errors.append(sum((each - mean) ** 2 for each in rest) / len(rest) ** 2)
    return 5 * errors.index(min(errors))


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_definition(seed: int) -> None:
    """The sums give the same truncation as squares taken anew for each."""
    rng = np.random.default_rng(seed)
    series = rng.exponential(1.0, 403) + 5 * np.exp(-np.arange(403) / 40)
    assert mser5(series) == by_hand(series.tolist())


def test_a_step_at_the_start_is_left_out_whole() -> None:
    """Noise around 5 for 100 observations, then around 1: exactly these 100 go, whatever is added to all of them."""
    rng = np.random.default_rng(0)
    series = np.where(np.arange(2_000) < 100, 5.0, 1.0) + rng.normal(0, 0.1, 2_000)
    assert mser5(series) == 100
    assert mser5(series + 1e9) == 100


@pytest.mark.parametrize(("slow", "left_out"), [(45, 45), (50, 50), (55, 50)])
def test_at_most_half_is_left_out(slow: int, left_out: int) -> None:
    """Of 20 batches ten, however long the beginning."""
    series = np.where(np.arange(100) < slow, 5.0, 1.0) + np.arange(100) % 10 // 5
    assert mser5(series) == left_out


def test_a_short_series_says_nothing() -> None:
    """Fewer than 20 batches of 5 have no truncation."""
    assert mser5(np.ones(99)) is None
    assert mser5(np.ones(100)) == 0


def test_it_needs_more_where_the_queue_starts_full() -> None:
    """An M/M/1 at load 0.5 drains 200 that wait while about 200 more come; one that starts empty needs no warm-up."""
    queue = SingleServer(0.5, equal=False)
    empty, full = [], []
    for seed in range(20):
        arrivals_ns, prompts, _ = queue.station.requests(seed, 4_000)
        work_ns = prompts[:-1] * 1_000 - np.diff(arrivals_ns)
        for backlog, needed in ((0, empty), (200, full)):
            free = np.concatenate(([backlog * 10_000_000], work_ns)).cumsum()
            waits_ns = free - np.minimum(np.minimum.accumulate(free), 0)
            needed.append(mser5(waits_ns.astype(float)))
    assert np.median(empty) < 50
    assert 150 < np.median(full) < 400
