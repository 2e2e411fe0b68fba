"""The LoRA adapters of a scenario: whether a policy serves them, and what they cost its engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchsim.base.errors import ScenarioError
from batchsim.cost.adapters import AdapterTimes, AdapterWeights, adapter_times
from batchsim.kernel.core import EngineCore
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.scenario.config import PolicySpec, Scenario
from batchsim.workload.workload_config import WorkloadConfig

if TYPE_CHECKING:
    from batchsim.cost.base import Cost
    from batchsim.deployment.model import ModelSpec
    from batchsim.workload.build import BuiltWorkload

SERVING = "vllm or sglang"
"""The policies that serve adapters, in words."""


def check_adapters(spec: PolicySpec, workload: WorkloadConfig) -> None:
    """ScenarioError where the policy serves no adapters of the workload's rank, or states knobs for adapters and the
    workload has none."""
    rank, memory = workload.lora_rank, spec.config.traits.adapters
    if rank is None:
        _check_unused(spec)
        return
    if memory is None:
        raise ScenarioError(
            f"{spec.kind} serves no LoRA adapters, and requests ask for some. Drop workload.loras, or use {SERVING}."
        )
    if memory.max_rank is not None and rank > memory.max_rank:
        raise ScenarioError(
            f"{spec.kind}: adapters of rank {rank} are above max_lora_rank {memory.max_rank}. Raise it, or lower"
            " loras.rank."
        )


def _check_unused(spec: PolicySpec) -> None:
    """ScenarioError for a knob of adapters that would do nothing."""
    for name in spec.knobs:
        if "lora" in name:
            raise ScenarioError(
                f"{spec.kind}: {name} is for LoRA adapters, and the workload has none. Write workload.loras, or drop"
                f" {name}."
            )


def check_no_adapters(scenario: Scenario) -> None:
    """ScenarioError where a workload that is to be played to a real model asks for adapters."""
    if scenario.file.workload.lora_rank is not None:
        raise ScenarioError(
            f"{scenario.places['workload']}: LoRA adapters can only be simulated: a real run here has one model. Drop"
            " loras, and trace.columns.lora."
        )


def adapter_times_of(scenario: Scenario, model: ModelSpec, cost: Cost) -> AdapterTimes | None:
    """What adapters of the workload cost beside `model`, whose steps take what `cost` says; None where it has none.

    ScenarioError where their bytes or the link are not known, or a pipeline would load them.
    """
    lora, rank = scenario.file.lora_cost, scenario.file.workload.lora_rank
    if lora is None or rank is None:
        return None
    if cost.stages > 1:
        raise ScenarioError(f"adapters in a pipeline of {cost.stages} stages are not simulated. Set pp to 1.")
    return adapter_times(lora, rank, model, cost.deployment)


def take_adapters(core: EngineCore, times: AdapterTimes | None, spec: PolicySpec, workload: BuiltWorkload) -> None:
    """Gives an engine under `spec` the names of the adapters of `workload`, and a simulated one what they cost.

    ScenarioError where there are more than the engine takes.
    """
    names = core.journal.adapter_names = workload.source.adapter_names
    memory = spec.config.traits.adapters
    if memory is not None and memory.most is not None and len(names) > memory.most:
        raise ScenarioError(
            f"{spec.kind}: {len(names)} LoRA adapters are more than max_loaded_loras {memory.most}, which is refused"
            " there. Raise it, or leave it out."
        )
    if memory is not None and times is not None and isinstance(core.executor, SimExecutor):
        core.executor.adapters = AdapterWeights(memory, times, len(names))
