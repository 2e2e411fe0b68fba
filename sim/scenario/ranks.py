"""What ranks of one model that step together need of a scenario."""

from __future__ import annotations

from typing import Any

from batchsim.base.errors import ScenarioError
from batchsim.cost.base import Cost
from batchsim.deployment.memory import KvBudget
from batchsim.deployment.model import ModelSpec
from batchsim.scenario.config import PolicySpec, Scenario
from batchsim.scenario.rank_forms import KEY
from batchsim.workload.rollout_config import Rollout
from batchsim.workload.structured import is_structured


def check_ranks(scenario: Scenario, model: ModelSpec, cost: Cost, kv: KvBudget) -> None:
    """ScenarioError for what is not simulated of ranks that step together, if the scenario has some."""
    file = scenario.file
    replicas = file.replicas
    if replicas is None or replicas.lockstep is None:
        return
    if not any(kind.mlp.kind == "experts" for kind in model.kinds):
        raise ScenarioError(
            f"{model.name} has no experts, and vLLM's data-parallel ranks of it are engines that do not wait for each"
            f" other. Write replicas: {{count: {replicas.count}, router: shortest_queue}} instead of {KEY}."
        )
    _check_cost(file.cost, cost)
    for spec in scenario.specs:
        _check_policy(spec)
    traffic = file.workload
    others = {
        "LoRA adapters": traffic.lora_rank is not None,
        "images, audios and videos": bool(traffic.all_items),
        "models that make no tokens": traffic.makes_no_tokens,
        "constrained answers": is_structured(traffic),
        "groups of KV blocks": kv.layout is not None,
        "pools of KV apart": kv.pools is not None,
        "tiers of KV": bool(file.kv.tiers),
        "tasks": traffic.tasks is not None,
        "rollouts": isinstance(traffic.arrivals, Rollout),
        "offline jobs": any(each.offline for each in traffic.classes.values()),
    }
    for what in (what for what, asked in others.items() if asked):
        raise ScenarioError(f"{what} are not simulated for ranks that step together. Drop them, or {KEY}.")


def _check_cost(stated: Any, cost: Cost) -> None:
    if (cost.deployment is not None and cost.profile is None) or getattr(stated, "kind", "") == "deployment":
        raise ScenarioError(
            f"{KEY} needs the cost of one rank's steps, which a deployment or a roofline does not give: experts are"
            " shared by all ranks. State it: cost: {kind: linear, ...}, or a profile measured on a rank."
        )
    if cost.stages > 1:
        raise ScenarioError(f"pp {cost.stages}: ranks that are pipelines are not simulated. Set pp to 1.")
    if getattr(stated, "shapes", None) is not None:
        raise ScenarioError(f"shapes: ranks are padded to vLLM's own sizes of CUDA graphs. Leave shapes out, or {KEY}.")


def _check_policy(spec: PolicySpec) -> None:
    if spec.kind != "vllm":
        raise ScenarioError(
            f"{spec.name} is of kind {spec.kind}, and only vllm's ranks are simulated to step together. Leave it out,"
            f" or {KEY}."
        )
    if spec.config.traits.speculation is not None:
        raise ScenarioError(f"{spec.name}: drafts are not simulated for ranks. Leave out speculative_config, or {KEY}.")
