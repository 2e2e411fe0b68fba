"""The constrained answers of a scenario: whether a policy samples them, and what their masks cost its engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchsim.base.errors import ScenarioError
from batchsim.cost.masks import MaskTimes
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.scenario.config import PolicySpec, Scenario, ScenarioFile
from batchsim.scenario.request_kinds import features
from batchsim.workload.structured import is_structured

if TYPE_CHECKING:
    from batchsim.cost.base import Cost


def check_structured(spec: PolicySpec, file: ScenarioFile, stages: int) -> None:
    """ScenarioError where answers of the workload of `file` are constrained and an engine of `stages` stages under the
    policy of `spec` does not sample such, or has beside them what is not simulated."""
    if not is_structured(file.workload):
        return
    traits = spec.config.traits
    if getattr(spec.config, "disable_consecutive_prefill_overlap", False):
        raise ScenarioError(
            f"{spec.kind}: disable_consecutive_prefill_overlap beside constrained answers is not simulated. Drop one of"
            " the two."
        )
    if not traits.masks:
        raise ScenarioError(
            f"{spec.kind} constrains no answers here, and workload.structured asks for some. Drop structured, or use"
            " vllm or sglang."
        )
    others = {
        "drafts": traits.speculation is not None,
        **features(file, "LoRA adapters", "compiled shapes"),
        f"a pipeline of {stages} stages": stages > 1,
    }
    for what in (what for what, there in others.items() if there):
        raise ScenarioError(f"{spec.kind}: constrained answers beside {what} are not simulated. Drop one of the two.")


def check_unconstrained(scenario: Scenario) -> None:
    """ScenarioError where answers of a real model were to be constrained."""
    if is_structured(scenario.file.workload):
        raise ScenarioError(
            f"{scenario.places['workload']}: constrained answers can only be simulated: no model here samples by a"
            " grammar. Drop structured, and trace.columns.structured."
        )


def take_masks(executor: SimExecutor, scenario: Scenario, spec: PolicySpec, cost: Cost) -> None:
    """Gives the executor of an engine under `spec`, whose steps take what `cost` says, the times of masks."""
    stated, of = scenario.file.structured_cost, spec.config.traits.masks
    if stated is not None and of:
        executor.masks = MaskTimes(stated, of, cost.host_part)
