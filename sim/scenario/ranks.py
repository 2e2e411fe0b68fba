"""What ranks of one model that step together need of a scenario."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from batchsim.base.errors import ScenarioError
from batchsim.cost.base import Cost
from batchsim.cost.calibrated import Calibrated
from batchsim.cost.one_group import of_one_group
from batchsim.cost.scaled import Scaled
from batchsim.deployment.memory import KvBudget
from batchsim.deployment.model import ModelSpec
from batchsim.scenario.config import PolicySpec, Scenario
from batchsim.scenario.deployment_config import DeploymentConfig
from batchsim.scenario.rank_forms import KEY
from batchsim.scenario.request_kinds import features


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
    _check_cost(file.cost, cost, replicas.total)
    for spec in scenario.specs:
        _check_policy(spec)
    others = features(file, "LoRA adapters", "images, audios and videos", "models that make no tokens")
    others |= features(file, "constrained answers", "tasks", "rollouts", "offline jobs")
    others |= {"groups of KV blocks": kv.layout is not None, "pools of KV apart": kv.pools is not None}
    others["tiers of KV"] = bool(file.kv.tiers)
    for what in (what for what, asked in others.items() if asked):
        raise ScenarioError(f"{what} are not simulated for ranks that step together. Drop them, or {KEY}.")


def check_one_scheduler(scenario: Scenario, cost: Cost) -> None:
    """ScenarioError if the deployment has attention groups that schedule for themselves, and they are no ranks."""
    replicas, deployment = scenario.file.replicas, cost.deployment
    if deployment is not None and (replicas is None or replicas.lockstep is None):
        deployment.check_one_scheduler()


def shares_experts(cost: Cost) -> bool:
    """Whether `cost` is of a deployment with attention groups that share experts."""
    return cost.deployment is not None and cost.deployment.dp_attention > 1


def of_one_rank(cost: Cost) -> Cost:
    """`cost` for the steps of one rank: where its deployment has several attention groups, without their experts."""
    if not shares_experts(cost):
        return cost
    if isinstance(cost, Scaled):
        return replace(cost, cost=of_one_rank(cost.cost))
    assert isinstance(cost, Calibrated), "checked by check_ranks"
    return of_one_group(cost)


def _check_cost(stated: Any, cost: Cost, ranks: int) -> None:
    deployment = cost.deployment
    if deployment is not None and (cost.profile is None or deployment.dp_attention > 1):
        apart = cost.profile is not None and cost.profile.costs.experts is not None
        if not isinstance(stated, DeploymentConfig) or not apart:
            raise ScenarioError(
                f"{KEY} needs what the ranks' experts take apart from the rest of their steps, which a roofline and a"
                " profile of other attention groups do not tell. Write deployment: {engine: vllm, gpu: h200_sxm,"
                f" {KEY}: {ranks}, ep: {ranks}}}, or the cost of one rank's steps: cost: {{kind: linear, ...}}."
            )
    elif isinstance(stated, DeploymentConfig):
        raise ScenarioError(
            f"{KEY} has {ranks} ranks, and the deployment one attention group. Write {KEY}: {ranks} in the deployment."
        )
    for key in ("anchor", "power_cap"):
        if getattr(stated, key, None) is not None:
            raise ScenarioError(f"{key} is not simulated for ranks that step together. Leave it out, or {KEY}.")
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
