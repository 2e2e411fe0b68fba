"""The parts of a scenario that no engine on a real GPU can run here: they can only be simulated."""

from __future__ import annotations

from batchsim.base.errors import ScenarioError
from batchsim.cost.base import Cost
from batchsim.cost.shapes.config import ShapesConfig
from batchsim.deployment.memory import KvBudget
from batchsim.scenario.adapters import check_no_adapters
from batchsim.scenario.config import Scenario
from batchsim.scenario.request_kinds import check_real_requests
from batchsim.scenario.structured import check_unconstrained
from batchsim.workload.workload_config import WorkloadConfig


def check_one_can_be_real(
    scenario: Scenario,
    traffic: WorkloadConfig,
    kv: KvBudget,
    cost: Cost,
    power_cap: float | None,
    shapes: ShapesConfig | None,
) -> None:
    """ScenarioError if no real engine could run the one of `scenario`: asked for `traffic`, its KV in `kv`, its steps
    as `cost` says, and its cost stating the most W that each GPU may draw, `power_cap`, and compiled `shapes`."""
    if kv.layout is not None:
        raise ScenarioError(
            f"{scenario.source}: a model with groups of KV blocks can only be simulated, a real run has one of"
            " full attention. Write kv: {tokens: N} in their place."
        )
    if kv.pools is not None:
        raise ScenarioError(
            f"{scenario.source}: a pool of windows apart can only be simulated, a real run has one for all layers."
            " Leave kv.pools out."
        )
    check_real_requests(traffic, scenario.places["workload"])
    check_no_adapters(scenario)
    check_unconstrained(scenario)
    with scenario.at("cost"):
        if (stages := cost.stages) > 1:
            raise ScenarioError(
                f"pp {stages}: a pipeline can only be simulated, a real run has one stage. Set it to 1."
            )
        if power_cap is not None:
            raise ScenarioError(
                f"power_cap {power_cap:g}W can only be simulated: it is set on a real GPU by nvidia-smi -pl. Remove it."
            )
        if (deployment := cost.deployment) is not None and deployment.tp > 1:
            raise ScenarioError(
                f"tp {deployment.tp}: several GPUs can only be simulated, a real run has one. Set it to 1."
            )
        if shapes is not None:
            raise ScenarioError(
                f"shapes {shapes.preset}: compiled shapes can only be simulated, a real run has its own."
                " Leave shapes out."
            )
    with scenario.at("cost_factor"):
        if (factor := scenario.file.cost_factor) != 1:
            raise ScenarioError(
                f"cost_factor {factor:g} stretches simulated steps, and these would be real. Remove it."
            )
