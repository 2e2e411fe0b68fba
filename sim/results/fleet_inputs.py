"""What the metrics need to know of the engines besides their records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchsim.base.units import NS_PER_S
from batchsim.cost.base import Cost
from batchsim.cost.power import power_law, step_power_w
from batchsim.cost.work import work_columns
from batchsim.drive.fleet.fleet_plan import UP
from batchsim.kernel.policy_config import PolicyConfig
from batchsim.kernel.record import Records, Replicas
from batchsim.metrics.point_inputs import FleetInputs
from batchsim.policies.systems.vllm.connector_config import VllmConnectorConfig
from batchsim.scenario.point import Run
from batchsim.scenario.setup import Setup


def cost_terms(setup: Setup, records: Records, config: PolicyConfig) -> dict[str, NDArray[np.float64]]:
    """By term, for every step, what its time is made of by the cost of the replica that ran it; terms that all have.

    `config` is the policy's. Where its engine is ahead, a step's time is the GPU's alone, without the host's part.
    """
    if records.replicas is None or len(setup.groups) == 1:
        one = setup.groups[0].setup if setup.groups else setup
        return cost_of_steps(one, config).explain(work_columns(records.step_columns))
    of_step = _groups_of_steps(setup, records.replicas)
    parts = []
    for number, group in enumerate(setup.groups):
        steps = np.flatnonzero(of_step == number)
        parts.append((steps, cost_of_steps(group.setup, config).explain(work_columns(records.steps[steps]))))
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


def step_watts(setup: Setup, records: Records, terms: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64] | None:
    """The power in W of the GPUs in every step, by the replica that ran it; None unless all are known.

    Where the replica's profile measured energy, a step of decodes alone takes the power of the measured decode step,
    any other that of the measured prefill step. Else it is estimated by the power law of its GPUs from the `flops` and
    `bytes` in `terms`, those of the steps.
    """
    if _shares(setup):
        return None  # steps wait for others, whose power is not theirs
    setups = [group.setup for group in setup.groups] or [setup]
    of_step = np.zeros(records.num_steps, np.int64)
    if records.replicas is not None and len(setups) > 1:
        of_step = _groups_of_steps(setup, records.replicas)
    power_w = np.empty(records.num_steps)
    for number, one in enumerate(setups):
        steps = np.flatnonzero(of_step == number)
        columns = {name: records.step_columns[name][steps] for name in _STEP_COLUMNS}
        power = _watts_of(one, columns, {name: terms[name][steps] for name in ("flops", "bytes") if name in terms})
        if power is None:
            return None
        power_w[steps] = power
    return power_w


_STEP_COLUMNS = ("num_prefill_tokens", "num_decode_tokens", "duration_ns")


def _watts_of(
    one: Setup, columns: Mapping[str, NDArray[np.int64]], work: Mapping[str, NDArray[np.float64]]
) -> NDArray[np.float64] | None:
    """The power in W of one engine's GPUs in steps with these columns and this work; None where it is not known."""
    cost = one.cost
    measured = None if cost.profile is None else watts(cost.profile.energy, cost.profile.samples)
    if measured is not None:
        prompts = columns["num_prefill_tokens"] > 0
        return np.where(prompts, measured["prefill"], measured["decode"])
    law, deployment = power_law(cost.deployment), cost.deployment
    if law is None or deployment is None or len(work) < 2:
        return None
    computes = columns["num_prefill_tokens"] + columns["num_decode_tokens"] > 0
    if not work["bytes"][computes].all():
        return None  # a cost that does not count the work of its steps
    power = step_power_w(law, deployment, work["flops"], work["bytes"], columns["duration_ns"])
    cap = one.power_cap
    return power if cap is None else np.minimum(power, cap * deployment.num_gpus)


def idle_watts(setup: Setup) -> float | None:
    """The power in W of all GPUs of one engine between steps, by the law of its GPUs; None where it is not known."""
    law = power_law(setup.cost.deployment)
    return None if law is None else law.idle_w * setup.num_gpus


def energy_words(setup: Setup) -> str:
    """Where the power of one engine's steps comes from, in words; that it is unknown, and why, where it is."""
    cost = setup.cost
    if cost.profile is not None and watts(cost.profile.energy, cost.profile.samples):
        return f"power of {cost.profile.name}: measured by its profile, in a step of decodes and in one of prompts"
    deployment, law = cost.deployment, power_law(cost.deployment)
    if deployment is None or deployment.gpu is None:
        return "power: unknown, no GPU of the catalog is meant"
    if law is None:
        why = "steps of a pipeline overlap" if deployment.pp > 1 else "no power law"
        return f"power of {deployment.gpu.name}: unknown, {why}"
    return law.words(deployment.gpu)


def cost_of_steps(setup: Setup, config: PolicyConfig) -> Cost:
    """The cost of one engine's steps under a policy: without the host's part where it is beside the device."""
    cost = setup.cost_under(config)
    is_pooled = isinstance(setup.scenario.specs[0].config, VllmConnectorConfig)  # whose loop is always ahead
    return cost.without_host() if is_pooled or config.traits.loop.over(cost.stages).is_ahead else cost


def num_blocks(setup: Setup) -> list[int]:
    """The KV blocks of every replica there can be, by its number."""
    return [setup.group_of(replica).setup.kv.num_blocks for replica in range(setup.num_engines)]


def _sleeps(setup: Setup) -> bool:
    """Whether the replicas are models that take turns on a GPU."""
    replicas = setup.scenario.file.replicas
    return replicas is not None and replicas.sleep is not None


def _shares(setup: Setup) -> bool:
    """Whether the replicas are models awake side by side on a GPU."""
    replicas = setup.scenario.file.replicas
    return replicas is not None and replicas.share is not None


def is_lasting(setup: Setup, run: Run) -> bool:
    """Whether the same replicas were up from the start to the end, or took turns all along: else nothing is steady."""
    if _sleeps(setup):
        return True
    return all(span.state == UP for span in run.spans) and len({span.start_ns for span in run.spans}) < 2


def fleet_inputs(setup: Setup, run: Run) -> FleetInputs:
    """What the metrics need to know of the replicas of a point that was run."""
    groups = [setup.group_of(replica) for replica in range(setup.num_engines)]
    setups = [group.setup for group in groups]
    gpus = [s.gpu for s in setups]
    known = [gpu for gpu in gpus if gpu is not None]
    idle = [idle_watts(each) for each in setups]
    num_gpus, replicas = np.array([s.num_gpus for s in setups]), setup.scenario.file.replicas

    def peaks(values: list[float]) -> NDArray[np.float64] | None:
        return np.array(values) * num_gpus if len(known) == len(gpus) else None

    counted = num_gpus
    if replicas is not None and replicas.share is not None:
        _, *others = (number for number, g in enumerate(groups) if not (replicas.groups or {})[g.name].own_gpu)
        counted = np.where(np.isin(np.arange(len(groups)), others), 0, num_gpus)

    return FleetInputs(
        group=tuple(group.name for group in groups),
        num_blocks=np.array(num_blocks(setup)),
        num_gpus=counted,
        peak_flops=peaks([gpu.peak_flops for gpu in known]),
        memory_bandwidth=peaks([gpu.memory_bandwidth for gpu in known]),
        idle_watts=None if None in idle or _shares(setup) else np.array(idle, np.float64),
        spans=run.spans,
        are_ranks=setup.are_ranks,
        sleeps=_sleeps(setup),
        shares=_shares(setup),
    )
