"""What a live run would leave if its steps took what a cost says: the live driver in virtual time."""

from __future__ import annotations

import numpy as np

from batchsim.calibrate.engine.session import LiveResult
from batchsim.cost.base import Cost
from batchsim.drive.live import VirtualClock, live
from batchsim.scenario import PolicySpec
from batchsim.scenario.setup import Setup


def predict(setup: Setup, policy: PolicySpec, load: float, seed: int, cost: Cost) -> LiveResult:
    """The result of a point whose steps take what `cost` says, which is to be equal to `simulate`'s, bit for bit."""
    workload = setup.workload(load, seed)
    core = setup.simulator(policy, workload, cost)
    run = live(core, workload, VirtualClock())
    core.check_returned()
    none = np.empty(0, np.int64)
    return LiveResult(
        policy=policy.name,
        load=load,
        seed=seed,
        repeat=0,
        records=core.recorder.records(),
        kernel_ns=none,
        host_ns=none,
        rested=np.array(run.rested, np.int64),
        end_ns=run.end_ns,
        window_ns=workload.window_ns,
        num_offered=workload.num_offered,
        streams=core.scheduler.streams,
        reason=run.reason,
        num_blocks=setup.kv.num_blocks,
        made={"device": "none: predicted"},
        error=run.error,
    )
