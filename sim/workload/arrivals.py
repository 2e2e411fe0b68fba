"""Arrival times of the open-loop processes.

Each process is drawn at unit rate and its time scaled, so that at every load request i is the same request and bursts
come in the same places.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import ScenarioError
from batchsim.base.units import MAX_TIME_NS, NS_PER_S
from batchsim.workload.traces.random_stream import random_stream
from batchsim.workload.traces.trace_rows import Ints
from batchsim.workload.workload_config import (
    MAX_REQUESTS,
    ConstantArrivals,
    GammaArrivals,
    OnOffArrivals,
    PoissonArrivals,
)

Floats = NDArray[np.float64]
Process = PoissonArrivals | GammaArrivals | ConstantArrivals | OnOffArrivals


def arrival_times_ns(process: Process, seed: int, duration_ns: int | None, requests: int | None) -> Ints:
    """The arrival times in ns from 0, sorted, as int64: all before `duration_ns`, or the first `requests`.

    Gamma gaps start with a full gap, not in the midst of one. ScenarioError if none arrives, or too many to hold.
    """
    rate_per_ns = process.mean_rate / NS_PER_S
    expected = rate_per_ns * duration_ns if duration_ns is not None else float(requests or 0)
    check_count(expected)
    if isinstance(process, ConstantArrivals):
        times_ns = np.arange(math.ceil(expected) + 1) / rate_per_ns
    else:
        times_ns = _random_times_ns(process, seed, duration_ns, expected)
    if duration_ns is None:
        times_ns = times_ns[:requests]
        if times_ns[-1] > MAX_TIME_NS:
            raise ScenarioError(
                f"workload: {requests} requests take {times_ns[-1] / NS_PER_S:.3g} s at {process.mean_rate:g}/s."
                " Ask for fewer or raise the rate."
            )
        return np.rint(times_ns).astype(np.int64)
    whole_ns = np.rint(times_ns[times_ns < duration_ns]).astype(np.int64)
    whole_ns = whole_ns[: np.searchsorted(whole_ns, duration_ns)]
    if not len(whole_ns):
        raise ScenarioError(
            f"workload: no request arrives in {duration_ns / NS_PER_S:g} s at {process.mean_rate:g}/s"
            f" ({expected:.3g} expected). Raise the duration or the rate."
        )
    return whole_ns


def check_count(requests: float) -> None:
    """ScenarioError if `requests` are more than a run can hold, MAX_REQUESTS."""
    if requests > MAX_REQUESTS:
        raise ScenarioError(
            f"workload: {requests:.3g} requests asked, at most {MAX_REQUESTS:,} are possible."
            " Lower the rate or end the arrivals sooner."
        )


def _random_times_ns(
    process: PoissonArrivals | GammaArrivals | OnOffArrivals, seed: int, duration_ns: int | None, expected: float
) -> Floats:
    rng = random_stream(seed, "gaps")
    mean_gap_ns = NS_PER_S / process.mean_rate
    clock = None
    if isinstance(process, OnOffArrivals):
        clock = _OnOffClock(process, seed, expected * mean_gap_ns)
        mean_gap_ns *= process.on / (process.on + process.off)
    # Gaps are taken from the stream in order, so how many are asked for at once changes nothing.
    ask = math.ceil(expected) if duration_ns is None else math.ceil(expected + 4 * math.sqrt(expected)) + 16
    gaps = np.empty(0)
    while True:
        gaps = np.concatenate((gaps, _unit_gaps(process, rng, ask)))
        times_ns = np.cumsum(gaps) * mean_gap_ns
        if clock is not None:
            times_ns = clock.times_ns(times_ns, math.inf if duration_ns is None else duration_ns)
        if duration_ns is None or times_ns[-1] >= duration_ns:
            return times_ns
        ask = len(gaps)
        check_count(2 * len(gaps))


def _unit_gaps(process: Process, rng: np.random.Generator, size: int) -> Floats:
    if isinstance(process, GammaArrivals):
        shape = process.cv**-2
        return rng.standard_gamma(shape, size) / shape
    return rng.standard_exponential(size)


class _OnOffClock:
    """Converts time spent in the on state of an on/off process to time of the run; begins in the stationary state."""

    def __init__(self, process: OnOffArrivals, seed: int, span_ns: float) -> None:
        cycles = span_ns / (process.on + process.off)
        if cycles > MAX_REQUESTS:
            raise ScenarioError(f"workload: on and off change {cycles:.3g} times in the run. Make them longer.")
        self._means_ns = np.array([process.on, process.off], float)
        self._rng = random_stream(seed, "sojourns")
        self._sojourns = np.empty((0, 2))
        start = random_stream(seed, "first sojourn")
        begins_on = start.random() < process.on / (process.on + process.off)
        self._first_off_ns = 0.0 if begins_on else start.standard_exponential() * process.off
        self._ask = math.ceil(cycles) + 16

    def times_ns(self, on_ns: Floats, end_ns: float) -> Floats:
        """The times in ns at which the process has been on for `on_ns` (sorted); inf where surely after `end_ns`."""
        inside = on_ns[: np.searchsorted(on_ns, end_ns)]
        times_ns = np.full(len(on_ns), np.inf)
        if len(inside):
            while self._sojourns[:, 0].sum() <= inside[-1]:
                more = self._rng.standard_exponential((self._ask, 2)) * self._means_ns
                self._sojourns = np.concatenate((self._sojourns, more))
            on_so_far, off_so_far = np.cumsum(self._sojourns, axis=0).T
            off_before = self._first_off_ns + np.concatenate(([0.0], off_so_far[:-1]))
            times_ns[: len(inside)] = inside + off_before[np.searchsorted(on_so_far, inside, side="right")]
        return times_ns
