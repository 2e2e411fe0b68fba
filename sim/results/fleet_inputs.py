"""What the metrics need to know of replicas besides their records."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchsim.cost import Cost
from batchsim.cost.work import work_columns
from batchsim.drive.fleet.fleet_plan import UP
from batchsim.kernel.policy_config import PolicyConfig
from batchsim.kernel.record import Records
from batchsim.metrics.point_inputs import FleetInputs
from batchsim.scenario.point import Run, Setup


def cost_terms(setup: Setup, records: Records, config: PolicyConfig) -> dict[str, NDArray[np.float64]]:
    """By term, for every step, what its time is made of by the cost of the replica that ran it; terms that all have.

    `config` is the policy's. Where its engine is ahead, a step's time is the GPU's alone, without the host's part.
    """
    if records.replicas is None or len(setup.groups) == 1:
        one = setup.groups[0].setup if setup.groups else setup
        return _of_steps(one, config).explain(work_columns(records.step_columns))
    of_step = np.array([setup.groups.index(setup.group_of(n)) for n in range(setup.num_engines)])
    of_step = of_step[records.replicas.steps]
    parts = []
    for number, group in enumerate(setup.groups):
        mine = np.flatnonzero(of_step == number)
        parts.append((mine, _of_steps(group.setup, config).explain(work_columns(records.steps[mine]))))
    terms = {}
    for name in parts[0][1]:
        if all(name in explained for _, explained in parts):
            terms[name] = np.empty(records.num_steps)
            for mine, explained in parts:
                terms[name][mine] = explained[name]
    return terms


def _of_steps(setup: Setup, config: PolicyConfig) -> Cost:
    """What of the cost of one engine is in the durations of its steps under a policy."""
    cost = setup.cost_under(config)
    return cost.without_host() if config.traits.loop.over(cost.stages).is_ahead else cost


def num_blocks(setup: Setup) -> list[int]:
    """The KV blocks of every replica there can be, by its number."""
    return [setup.group_of(replica).setup.kv.num_blocks for replica in range(setup.num_engines)]


def is_lasting(run: Run) -> bool:
    """Whether the replicas that were up at the start were so to the end, and no others: else nothing is steady."""
    return all(span.state == UP for span in run.spans) and len({span.start_ns for span in run.spans}) < 2


def fleet_inputs(setup: Setup, run: Run) -> FleetInputs:
    """What the metrics need to know of the replicas of a point that was run."""
    groups = [setup.group_of(replica) for replica in range(setup.num_engines)]
    setups = [group.setup for group in groups]
    gpus = [s.gpu for s in setups]
    known = [gpu for gpu in gpus if gpu is not None]
    num_gpus = np.array([s.num_gpus for s in setups])

    def peaks(values: list[float]) -> NDArray[np.float64] | None:
        return np.array(values) * num_gpus if len(known) == len(gpus) else None

    return FleetInputs(
        group=tuple(group.name for group in groups),
        num_blocks=np.array(num_blocks(setup)),
        num_gpus=num_gpus,
        peak_flops=peaks([gpu.peak_flops for gpu in known]),
        memory_bandwidth=peaks([gpu.memory_bandwidth for gpu in known]),
        spans=run.spans,
    )
