"""Tasks of two requests on two engines against the fork-join queue: each is done when the later of the two is."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from batchsim.drive.fleet.fleet_plan import FleetPlan
from batchsim.drive.fleet.routing import ROUTERS
from batchsim.drive.fleet.simulate_fleet import simulate_fleet
from batchsim.kernel.batch import Batch
from batchsim.metrics.point_inputs import PointInputs
from batchsim.metrics.tasks import task_lives
from batchsim.workload.build import build_workload, task_of
from batchsim.workload.laws import FixedTokens, GammaTokens
from batchsim.workload.processes import PoissonArrivals
from batchsim.workload.task_config import Tasks, TaskStage
from batchsim.workload.workload_config import WorkloadConfig
from tests.theory.stations import BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS, Interval, Station, interval, slots

MEAN_TOKENS = 10_000
TOKEN_NS = 1_000
SERVICE_S = MEAN_TOKENS * TOKEN_NS / 1e9
REPLICATIONS = 10


class ByPrompt:
    """A step takes TOKEN_NS for each token of its prompts: service times as the prompts are drawn."""

    def step_ns(self, batch: Batch) -> int:
        return TOKEN_NS * batch.num_prefill_tokens


def mean_task_s(load: float, num_tasks: int, seed: int) -> float:
    """The mean time of a task on two engines, each with that load, leaving out the first tenth of the tasks."""
    stage = TaskStage(FixedTokens(1), GammaTokens(MEAN_TOKENS, 1.0), fan_out=2)  # a gamma of CV 1 is exponential
    rate = load / SERVICE_S
    config = WorkloadConfig(
        PoissonArrivals(2 * rate), "exact", duration=round(num_tasks / rate * 1e9), tasks=Tasks((stage,))
    )
    workload = build_workload(config, load={}, seed=seed, max_model_len=MAX_MODEL_LEN, base=Path())
    station = Station(slots(1), ByPrompt(), rate, lambda rng, count: rng.integers(1, 2, count))
    router = ROUTERS["round_robin"]().build(seed)  # each task's first request to the one, its second to the other
    run = simulate_fleet(lambda replica: station.engine(), router, FleetPlan(2), workload, feeds_back=True)
    inputs = PointInputs(
        run.records, workload.window_ns, NUM_BLOCKS, BLOCK_SIZE, streams=True, task_of=task_of(workload)
    )
    e2e_ns = task_lives(inputs).e2e_ns
    return float(e2e_ns[len(e2e_ns) // 10 :].mean()) / 1e9


def replicated(load: float, num_tasks: int) -> Interval:
    return interval(list(map(partial(mean_task_s, load, num_tasks), range(REPLICATIONS))))


@pytest.mark.slow
@pytest.mark.parametrize(("load", "num_tasks"), [(0.3, 3000), (0.6, 12_000)])
def test_two_servers_fork_and_join(load: float, num_tasks: int) -> None:
    """The mean is (12 - rho)/8 times that of one M/M/1 queue; not 3/2, as if the two queues were independent.

    Source: R. Nelson and A. N. Tantawi, Approximate analysis of fork/join synchronization in parallel queues, IEEE
    Transactions on Computers 37(6), 1988, after L. Flatto and S. Hahn, SIAM Journal on Applied Mathematics 44, 1984.
    """
    alone_s = SERVICE_S / (1 - load)
    measured = replicated(load, num_tasks)
    assert measured.relative < 0.04
    assert (12 - load) / 8 * alone_s in measured
    assert alone_s not in measured and (load < 0.5 or 1.5 * alone_s not in measured)
