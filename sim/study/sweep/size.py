"""Size of a sweep, estimated before it runs: the number of points, and the memory of concurrent ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from batchsim.base.errors import ScenarioError
from batchsim.base.ranges import MAX_POINTS
from batchsim.base.units import NS_PER_S
from batchsim.scenario.setup import Setup
from batchsim.workload.build import apply_load
from batchsim.workload.lengths import Lengths, ListLengths, PairLengths, StepLengths
from batchsim.workload.rollout_config import Rollout
from batchsim.workload.traces.trace_rows import TraceRows
from batchsim.workload.workload_config import AllAtOnce, ClosedLoop, TraceArrivals, WorkloadConfig

REQUEST_BYTES, STEP_BYTES = 1_000, 450
"""What requests and steps take of the memory of the process that simulates and measures them: its peak less what it is
without any, over piles of 20,000 and 100,000 requests and three hours of `chat` (1.4 million steps)."""
KEPT_STEP_BYTES = 150
"""The same of steps of several replicas that are not kept: each is measured by itself."""
BLOCK_BYTES = 52
"""A block's id, its content's key and its users: three places of lists and a number."""

POINT_S, REQUEST_S, STEP_S = 0.05, 80e-6, 2e-6
LEAST_OF_EXPECTED, MOST_OF_EXPECTED = 1.0, 8.0
"""Seconds that a point, a request and a step take to be simulated, on one core of the machine of docs/speed.md, and the
range of what seven shipped scenarios took: engines with more rules take longer, and near saturation a point is
simulated at both ends of the cost's error as well."""


@dataclass(frozen=True)
class Limits:
    """Bounds of a sweep: its simulations, and the bytes of the concurrent ones on this machine; None: no bound."""

    points: int = MAX_POINTS
    memory_bytes: int | None = None


def check_size(points: int, largest: Iterable[tuple[Setup, float]], *, jobs: int, limits: Limits, where: str) -> None:
    """ScenarioError, which begins with `where`, if a sweep would be beyond its limits.

    `points` is how many there will be at most, `largest` has the setups and loads with the most requests a point.
    """
    if points > limits.points:
        raise ScenarioError(
            f"{where}: up to {points:,} simulations are asked for, policies times loads times seeds, and"
            f" {limits.points:,} are allowed. Ask for fewer, or allow them with --max-points {points}."
        )
    if limits.memory_bytes is None:
        return
    at_a_time = min(jobs, points)
    for setup, load in largest:
        requests, steps = expected(setup, load)
        keeps = setup.scenario.file.keep == "all" or not setup.groups
        step_bytes = STEP_BYTES if keeps else KEPT_STEP_BYTES
        needed = at_a_time * (requests * REQUEST_BYTES + steps * step_bytes + _pool_bytes(setup))
        if needed > limits.memory_bytes:
            has = f"{requests:,.0f} requests" + (f" and up to {steps:,.0f} steps" if steps else "")
            raise ScenarioError(
                f"{where}: a simulation at load {load:g} has some {has}; {at_a_time} at a time take"
                f" {needed / 1e9:,.3g} GB of memory, and"
                f" {limits.memory_bytes / 1e9:,.3g} GB are allowed. Ask for fewer requests or --jobs,"
                f"{' keep only minutes (--set keep=minutes),' if keeps and setup.groups else ''} or allow it with"
                f" --max-memory {ceil(needed / 1e9)}GB."
            )


def largest_load(setup: Setup) -> float:
    """The highest load of the scenario; where none is listed, that of the workload as it is written."""
    arrivals, trace = setup.traffic.arrivals, setup.traffic.trace
    if setup.loads:
        return max(setup.loads)
    if isinstance(arrivals, ClosedLoop):
        return float(arrivals.users)
    if isinstance(arrivals, TraceArrivals):
        assert trace is not None and trace.rate_scale is not None, "checked by the load axis"
        return trace.rate_scale.factor
    assert not isinstance(arrivals, AllAtOnce | Rollout), "has no load axis"
    return arrivals.mean_rate


def expected(setup: Setup, load: float) -> tuple[float, float]:
    """(requests, steps) of a point at `load`. Steps at most: one an output token, none shorter than that of one token.

    Of a closed loop that ends with a duration the requests are its users, the least. Steps are not counted where
    nothing says how long the requests come.
    """
    workload = apply_load(setup.traffic, {setup.load_name: load} if setup.load_name else {})
    rows = setup.trace_rows(0)
    arrivals, span_ns = workload.arrivals, float(workload.duration or 0)
    if isinstance(arrivals, TraceArrivals):
        assert rows is not None and workload.trace is not None, "checked by the config"
        scale = workload.trace.rate_scale
        grown = 1.0 if scale is None or scale.by == "compress" else scale.factor
        requests = workload.requests or grown * len(rows)
        span_ns = span_ns or float(0 if rows.arrival_ns is None else rows.arrival_ns[-1])
    elif isinstance(arrivals, ClosedLoop):
        requests = workload.requests or arrivals.users
    elif isinstance(arrivals, AllAtOnce):
        requests = workload.requests or 0
    elif isinstance(arrivals, Rollout):
        requests = arrivals.updates * arrivals.scheme.required(arrivals.prompts) * arrivals.answers
        return requests, requests * _output_tokens(workload, rows)
    else:
        requests = workload.requests_at(arrivals.mean_rate)
        span_ns = span_ns or requests / arrivals.mean_rate * NS_PER_S
    busy_steps = setup.num_engines * span_ns / setup.cost.recompute_ns(1)
    return requests, min(busy_steps, requests * _output_tokens(workload, rows))


def estimated_s(each: Iterable[tuple[Setup, float, int]], jobs: int) -> tuple[float, float] | None:
    """(least, most) seconds in which `jobs` processes simulate and measure points, by the requests and steps that are
    expected; None where these are not known. `each` has setups, loads and how many points there are of the two."""
    seconds, points = 0.0, 0
    for setup, load, count in each:
        traffic = setup.traffic
        ends_by_time = isinstance(traffic.arrivals, ClosedLoop) and not traffic.requests
        if ends_by_time or traffic.sessions is not None or traffic.tasks is not None:
            return None
        requests, steps = expected(setup, load)
        seconds += count * (POINT_S + requests * REQUEST_S + steps * STEP_S)
        points += count
    at_a_time = min(jobs, points)
    return LEAST_OF_EXPECTED * seconds / at_a_time, MOST_OF_EXPECTED * seconds / at_a_time


def _pool_bytes(setup: Setup) -> float:
    """The bytes of the block ids of all engines, which policies that cache prefixes keep."""
    caches = any(policy.config.traits.prefix_cache for policy in setup.scenario.specs)
    return setup.num_engines * setup.kv.num_blocks * BLOCK_BYTES if caches else 0


def _output_tokens(workload: WorkloadConfig, rows: TraceRows | None) -> float:
    """The mean output of a request, of the class with the longest."""
    if workload.tasks is not None:
        return max(stage.output.mean_tokens for stage in workload.tasks.stages)
    lengths = [workload.lengths, *(traffic.lengths for traffic in workload.classes.values())]
    means = [each.output.mean_tokens for each in lengths if isinstance(each, Lengths)]
    means += [each.mean_output_tokens for each in lengths if isinstance(each, PairLengths | StepLengths | ListLengths)]
    return max([*means, *([] if rows is None else [float(rows.output_tokens.mean())])])
