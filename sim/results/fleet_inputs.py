"""What the metrics need to know of the engines besides their records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchsim.base.units import NS_PER_S
from batchsim.cost.base import Cost
from batchsim.cost.work import work_columns
from batchsim.drive.fleet.fleet_plan import UP
from batchsim.kernel.policy_config import PolicyConfig
from batchsim.kernel.record import Records, Replicas
from batchsim.metrics.point_inputs import FleetInputs
from batchsim.scenario.point import Run
from batchsim.scenario.setup import Setup


def cost_terms(setup: Setup, records: Records, config: PolicyConfig) -> dict[str, NDArray[np.float64]]:
    """By term, for every step, what its time is made of by the cost of the replica that ran it; terms that all have.

    `config` is the policy's. Where its engine is ahead, a step's time is the GPU's alone, without the host's part.
    """
    if records.replicas is None or len(setup.groups) == 1:
        one = setup.groups[0].setup if setup.groups else setup
        return _of_steps(one, config).explain(work_columns(records.step_columns))
    of_step = _groups_of_steps(setup, records.replicas)
    parts = []
    for number, group in enumerate(setup.groups):
        steps = np.flatnonzero(of_step == number)
        parts.append((steps, _of_steps(group.setup, config).explain(work_columns(records.steps[steps]))))
    terms = {}
    for name in parts[0][1]:
        if all(name in explained for _, explained in parts):
            terms[name] = np.empty(records.num_steps)
            for steps, explained in parts:
                terms[name][steps] = explained[name]
    return terms


def _groups_of_steps(setup: Setup, replicas: Replicas) -> NDArray[np.int64]:
    """The number of the group whose replica ran each step."""
    return np.array([setup.groups.index(setup.group_of(n)) for n in range(setup.num_engines)])[replicas.steps]


def watts(energy: Mapping[str, Any] | None, samples: Iterable[Mapping[str, Any]]) -> dict[str, float] | None:
    """The power in W of the steps whose energy a profile measured, `decode` and `prefill`: joules over the step's time.

    None where it measured none, or not the time of these steps.
    """
    by_name = {}
    for name in ("decode", "prefill"):
        entry = (energy or {}).get(name) or {}
        joules, step = entry.get("joules"), entry.get("step") or {}
        same = [sample for sample in samples if step and all(sample.get(key) == step[key] for key in step)]
        if not joules or not same or not same[0].get("ns"):
            return None
        by_name[name] = joules / (same[0]["ns"] / NS_PER_S)
    return by_name


def step_watts(setup: Setup, records: Records) -> NDArray[np.float64] | None:
    """The power in W of the GPUs in every step, by the profile of the replica that ran it; None unless all are known.

    A step of decodes alone takes the power of the measured decode step, any other that of the measured prefill step.
    """
    known: list[dict[str, float]] = []
    for one in [group.setup for group in setup.groups] or [setup]:
        profile = one.cost.profile
        power = None if profile is None else watts(profile.energy, profile.samples)
        if power is None:
            return None
        known.append(power)
    of_step = 0 if records.replicas is None or len(known) == 1 else _groups_of_steps(setup, records.replicas)
    prompts = (records.step_columns["num_prefill_tokens"] > 0).astype(np.int64)
    return np.array([[power["decode"], power["prefill"]] for power in known])[of_step, prompts]


def _of_steps(setup: Setup, config: PolicyConfig) -> Cost:
    """The cost of one engine's steps under a policy: without the host's part where it is beside the device."""
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
