"""Whether a queue grows for as long as requests come, and whether a cost is known well enough to judge."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from batchsim.cost.cost_error import CostError
from batchsim.kernel.record import FINISHED
from batchsim.metrics.point_inputs import between

UNSTABLE_COMPLETED_SHARE = 0.98  # of the arrivals of the window's second half
"""Completions below it do not keep up with arrivals; growth of the number in system must confirm it."""

LONGEST_RUNNING_SHARE = 0.25
"""A share of the arrival window: the second half then sees at least two generations of requests."""

JUDGED = ("ttft_mean_s", "e2e_mean_s")
"""By whose means it is judged whether a load lies within the error of saturation."""


def is_within_error(
    error: CostError,
    fast: Mapping[str, float | None],
    slow: Mapping[str, float | None],
    *,
    fast_grows: bool,
    slow_grows: bool,
) -> bool:
    """Whether a load lies within the cost's `error` of saturation, by the metrics with the shortest and the longest
    steps that this allows: the queue grows at one end alone, or a mean latency differs by far more than the steps."""
    return fast_grows != slow_grows or any(error.is_steep(fast.get(name), slow.get(name)) for name in JUDGED)


def is_unstable(requests: NDArray[np.void], window_ns: tuple[int, int]) -> bool:
    """Whether the queue grows: over the second half of the arrival window, completions < 0.98 × arrivals, and the
    number in system grows.

    It grows when its mean over the last quarter of the window exceeds that over the third by more than chance does at
    balance: a random walk of A arrivals and A departures over two quarters has a variance of 2A/3 in the difference of
    its means over them. A stable queue moves less than such a walk. Rejected and cancelled requests leave the system.
    A window in which the engine only fills up says nothing: see `is_too_short`.
    """
    if is_too_short(requests, window_ns):
        return False
    start, end = window_ns
    middle = (start + end) // 2
    sent, left = requests["sent_ns"], np.maximum(requests["delivered_ns"], requests["ended_ns"])
    arrivals = int(between(sent, (middle, end)).sum())
    finished = requests["outcome"] == FINISHED
    completions = int((between(left, (middle, end)) & finished).sum())
    if completions >= UNSTABLE_COMPLETED_SHARE * arrivals:
        return False
    edges = np.array([middle, (middle + end) // 2, end])
    if (np.diff(edges) <= 0).any():
        return False  # a window of a few ns
    third, last = np.diff(_time_in_system(sent, left, edges)) / np.diff(edges)
    return bool(last - third > np.sqrt(2 * arrivals / 3))


def is_too_short(requests: NDArray[np.void], window_ns: tuple[int, int]) -> bool:
    """Whether the median finished request runs, from its first step on, for over a quarter of the arrival window."""
    finished = requests[requests["outcome"] == FINISHED]
    if not len(finished):
        return False
    running = np.median(finished["last_token_ns"] - finished["scheduled_ns"])
    return bool(running > LONGEST_RUNNING_SHARE * (window_ns[1] - window_ns[0]))


def _time_in_system(sent: NDArray[np.int64], left: NDArray[np.int64], times: NDArray[np.int64]) -> NDArray[np.float64]:
    """The integral of the number in system up to each time, in request · ns."""
    return np.array([np.maximum(t - sent, 0).sum() - np.maximum(t - left, 0).sum() for t in times], dtype=np.float64)
