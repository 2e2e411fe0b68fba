"""Arrival times of the open-loop processes.

Each process is drawn at unit rate and a clock (`clocks.py`) makes its time that of the run, so that at every load
request i is the same request and bursts come in the same places.
"""

from __future__ import annotations

import math

import numpy as np

from batchsim.base.errors import ScenarioError
from batchsim.base.units import MAX_TIME_NS, NS_PER_S
from batchsim.workload.clocks import Floats, clock_of
from batchsim.workload.offline_config import MAX_REQUESTS
from batchsim.workload.processes import (
    ConstantArrivals,
    GammaArrivals,
    OwnArrivals,
    Process,
    ProfiledArrivals,
    WeibullArrivals,
)
from batchsim.workload.traces.random_stream import random_stream
from batchsim.workload.traces.trace_rows import Ints


def arrival_times_ns(process: Process, seed: int, duration_ns: int | None, requests: int | None) -> Ints:
    """The arrival times in ns from 0, sorted, as int64: all before `duration_ns`, or the first `requests`.

    Gamma gaps start with a full gap, not in the midst of one. ScenarioError if none arrives, or too many to hold.
    """
    rate_per_ns = process.mean_rate / NS_PER_S
    expected = rate_per_ns * duration_ns if duration_ns is not None else float(requests or 0)
    check_count(expected)
    if isinstance(process, ConstantArrivals):
        times_ns = np.arange(math.ceil(expected) + 1) / rate_per_ns
    elif isinstance(process, OwnArrivals):
        times_ns = _own_times_ns(process, seed, duration_ns, requests)
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


def _random_times_ns(process: Process, seed: int, duration_ns: int | None, expected: float) -> Floats:
    rng = random_stream(seed, "gaps")
    clock = clock_of(process, seed, expected)
    # Gaps are taken from the stream in order, so how many are asked for at once changes nothing.
    ask = math.ceil(expected) if duration_ns is None else math.ceil(expected + 4 * math.sqrt(expected)) + 16
    gaps = np.empty(0)
    while True:
        gaps = np.concatenate((gaps, _unit_gaps(process, rng, ask)))
        times_ns = clock.times_ns(np.cumsum(gaps), math.inf if duration_ns is None else duration_ns)
        if duration_ns is None or times_ns[-1] >= duration_ns:
            return times_ns
        ask = len(gaps)
        check_count(2 * len(gaps))


def _unit_gaps(process: Process, rng: np.random.Generator, size: int) -> Floats:
    """`size` gaps of mean 1."""
    if isinstance(process, WeibullArrivals):
        return rng.weibull(process.shape, size) / math.gamma(1 + 1 / process.shape)
    cv = process.cv if isinstance(process, GammaArrivals | ProfiledArrivals) else 1.0
    if cv == 1 and not isinstance(process, GammaArrivals):
        return rng.standard_exponential(size)
    shape = cv**-2
    return rng.standard_gamma(shape, size) / shape


def _own_times_ns(process: OwnArrivals, seed: int, duration_ns: int | None, requests: int | None) -> Floats:
    """What a user's own process says, up to the end. ScenarioError where it ends sooner, or runs back in time."""
    times_s: list[float] = []
    last_s = 0.0
    for time_s in process.times_s(random_stream(seed, "gaps")):
        if not last_s <= time_s < math.inf:
            raise ScenarioError(
                f"workload.arrivals: {process.kind}.times_s gives {time_s:g} s after {last_s:g} s, as arrival"
                f" {len(times_s):,}. Times are finite and never decrease, from 0 on."
            )
        if (duration_ns is not None and time_s * NS_PER_S >= duration_ns) or len(times_s) == requests:
            break
        check_count(len(times_s) + 1)
        times_s.append(time_s)
        last_s = time_s
    else:
        raise ScenarioError(
            f"workload.arrivals: {process.kind}.times_s ends after {len(times_s):,} arrivals, at {last_s:g} s, before"
            " the arrivals do. It must go on for ever."
        )
    return np.array(times_s) * NS_PER_S
