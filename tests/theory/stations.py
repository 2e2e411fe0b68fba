"""Queueing stations built from the simulator, and t-intervals over independent replications of them.

Every replication draws from its own seeded generator. Arrivals are Poisson, rounded to whole nanoseconds; the formulas
they are compared with take the integer step durations as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from batchsim.drive.fleet.fleet_plan import FleetPlan
from batchsim.drive.fleet.routing import ROUTERS
from batchsim.drive.fleet.simulate_fleet import simulate_fleet
from batchsim.drive.simulate import simulate
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import CostModel, PolicyContext, Scheduler
from batchsim.kernel.record import FINISHED, Recorder, Records
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival, Request
from batchsim.policies.families.continuous import Continuous, ContinuousConfig
from tests.support.whole_batches import Listed

CONFIDENCE = 0.99
NUM_BLOCKS = 1 << 30  # KV memory is no limit unless a test wants it to be
BLOCK_SIZE = 16
MAX_MODEL_LEN = 1 << 20
UNLIMITED = 1 << 30

Draw = Callable[[np.random.Generator, int], NDArray[np.int64]]
Policy = Callable[[PolicyContext], Scheduler]


def slots(max_num_seqs: int) -> Policy:
    """Iteration-level batching with that many slots, prompts and outputs as the slots allow."""
    return partial(Continuous, ContinuousConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=None))


@dataclass(frozen=True)
class Station:
    """A policy and a cost under Poisson arrivals of `rate_per_ns`, lengths drawn in tokens."""

    policy: Policy
    cost: CostModel
    rate_per_ns: float
    draw_output: Draw
    draw_prompt: Draw = lambda rng, count: np.ones(count, np.int64)
    num_blocks: int = NUM_BLOCKS

    def requests(self, seed: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Arrival times in ns, prompts and outputs of one replication."""
        rng = np.random.default_rng([20_231, seed])
        arrivals_ns = np.cumsum(rng.exponential(1 / self.rate_per_ns, count)).astype(np.int64)
        return arrivals_ns, self.draw_prompt(rng, count), self.draw_output(rng, count)

    def run(self, seed: int, count: int) -> Records:
        """The records of one replication of `count` requests; all of them finish."""
        core = self.engine()
        simulate(core, Listed(self.arrivals(seed, count)))
        return _all_finished(core.recorder.records())

    def run_behind(self, router: str, replicas: int, seed: int, count: int) -> Records:
        """The same with that many stations behind a router, the rate being that of all arrivals."""
        plan, workload = FleetPlan(replicas), Listed(self.arrivals(seed, count))
        chosen = ROUTERS[router]().build(seed)
        run = simulate_fleet(lambda replica: self.engine(), chosen, plan, workload, feeds_back=False)
        return _all_finished(run.records)

    def arrivals(self, seed: int, count: int) -> list[Arrival]:
        """The requests of one replication."""
        columns = self.requests(seed, count)
        return [
            Arrival(Request(i, int(at_ns), int(prompt), int(output)), int(output))
            for i, (at_ns, prompt, output) in enumerate(zip(*columns, strict=True))
        ]

    def engine(self) -> EngineCore:
        """An empty station."""
        context = PolicyContext(CountingKV(self.num_blocks, BLOCK_SIZE), MAX_MODEL_LEN)
        executor = SimExecutor(self.cost, MAX_MODEL_LEN)
        return EngineCore(self.policy(context), executor, Recorder(), max_model_len=MAX_MODEL_LEN)

    def replicate(self, measure: Callable[[Records], float], replications: int, count: int) -> Interval:
        """The interval of `measure` over runs with seeds 0 .. replications-1."""
        return interval([measure(self.run(seed, count)) for seed in range(replications)])


def _all_finished(records: Records) -> Records:
    assert (records.requests["outcome"] == FINISHED).all()
    return records


@dataclass(frozen=True)
class Interval:
    """A two-sided t-interval of level CONFIDENCE around the mean of independent replications."""

    mean: float
    half_width: float

    def __contains__(self, value: float) -> bool:
        return abs(value - self.mean) <= self.half_width

    @property
    def relative(self) -> float:
        """Half-width as a share of the mean; a wide interval would hold any theory."""
        return self.half_width / self.mean


def interval(samples: list[float]) -> Interval:
    values = np.asarray(samples)
    t = stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)
    return Interval(float(values.mean()), float(t * values.std(ddof=1) / np.sqrt(len(values))))


def mean_queue_ns(records: Records) -> float:
    """Mean time from arrival to the first step, leaving out the first tenth, which finds the station emptier."""
    steady = _steady(records)
    return float((steady["scheduled_ns"] - steady["arrival_ns"]).mean())


def mean_e2e_ns(records: Records) -> float:
    """Mean time from arrival to the last token, leaving out the first tenth."""
    steady = _steady(records)
    return float((steady["ended_ns"] - steady["arrival_ns"]).mean())


def _steady(records: Records) -> NDArray[np.void]:
    requests = records.requests
    return requests[len(requests) // 10 :]
