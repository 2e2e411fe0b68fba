"""The configurations that a plan's `free` spans: every combination of the values that it lists."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, fields
from math import prod
from typing import Any

from batchsim.base.errors import ScenarioError, nearest
from batchsim.base.ranges import MAX_CHOICES
from batchsim.drive.fleet.routing import ROUTERS
from batchsim.scenario import Scenario, changed
from batchsim.scenario.deployment_config import DeploymentConfig
from batchsim.scenario.tiered import TIERED_KINDS
from batchsim.study.planning.probe import TIERS, GpuGroup, is_of_tiers, policy_alone
from batchsim.study.planning.split import DEPLOYED, POOLS, check_split, split_of

GPU, POLICY, ROUTER = "gpu", "policy", "router"


@dataclass(frozen=True)
class Space:
    """All configurations, each as a group of one replica, in the order in which `free` lists its values; and what is
    free, by name with its values."""

    groups: tuple[GpuGroup, ...]
    free: dict[str, list[Any]]


def space_of(scenario: Scenario) -> Space:
    """The configurations of the scenario's plan. ScenarioError, with the place of `plan`, for an unknown name, a value
    that its config refuses, or more configurations than a report can show."""
    plan = scenario.file.plan
    assert plan is not None and plan.free is not None, "asked of plans that search"
    free = dict(plan.free)
    gpus = _chosen(scenario, GPU, free.pop(GPU, list(plan.gpus)), list(plan.gpus))
    labels = list(dict.fromkeys(spec.label for spec in scenario.specs))
    kept = _chosen(scenario, POLICY, free.pop(POLICY, labels), labels)
    policies = [spec.name for spec in scenario.specs if spec.label in kept]
    knobs = {name: _checked(scenario, name, values, gpus, policies) for name, values in free.items()}
    count = len(gpus) * len(policies) * prod(len(values) for values in knobs.values())
    if count > MAX_CHOICES:
        raise _error(scenario, f"spans {count:,} configurations. List values for at most {MAX_CHOICES:,}.")
    groups = [
        GpuGroup(gpu, policy, 1, tuple((name, _json(value)) for name, value in zip(knobs, picked, strict=True)))
        for gpu in gpus
        for policy in policies
        for picked in itertools.product(*knobs.values())
    ]
    different = dict.fromkeys(without_router(group) if group.is_apart else group for group in groups)
    return Space(tuple(different), {GPU: gpus, POLICY: policies, **knobs})


def without_router(group: GpuGroup) -> GpuGroup:
    """The group without a choice of router, which one replica alone has no use for, nor have pools, whose engines are
    taken in turn."""
    return GpuGroup(group.gpu, group.policy, group.replicas, tuple(knob for knob in group.knobs if knob[0] != ROUTER))


def _chosen(scenario: Scenario, name: str, values: list[Any], known: list[str]) -> list[str]:
    for value in values:
        if value not in known:
            raise _error(scenario, f"{name} has {value}, which the scenario has not. {nearest(str(value), known)}")
    return values


def _checked(scenario: Scenario, name: str, values: list[Any], gpus: list[str], policies: list[str]) -> list[Any]:
    """The values of a key that is free, routers written out. ScenarioError where a GPU or policy has no such key."""
    plan = scenario.file.plan
    assert plan is not None, "checked before"
    if name == ROUTER:
        return [_router(scenario, value) for value in values]
    if name == POOLS:
        return [_split(scenario, value, gpus) for value in values]
    if name in DEPLOYED:
        for gpu in gpus:
            cost = plan.gpus[gpu].cost
            if not isinstance(cost, DeploymentConfig):
                advice = "Write a deployment in its place, like {engine: vllm, gpu: h100_sxm}, or leave it out."
                raise _error(scenario, f"{name}: the cost of {gpu} is of kind {cost.kind} and has no {name}. {advice}")
            if plan.gpus[gpu].kv_tokens is not None and len(values) > 1:
                raise _error(
                    scenario,
                    f"{name} changes the KV memory of a replica, and plan.gpus.{gpu}.kv_tokens states"
                    f" {plan.gpus[gpu].kv_tokens:,} for all. Drop kv_tokens: it is derived then.",
                )
        return values
    if is_of_tiers(name):
        return _tiers(scenario, name, values, policies)
    for policy in policies:
        spec = next(spec for spec in scenario.specs if spec.name == policy)
        known = [each.name for each in fields(spec.config)]
        if name not in known:
            others = [GPU, POLICY, ROUTER, POOLS, *DEPLOYED, f"{TIERS}.0.size"]
            raise _error(scenario, f"{name}: {policy} has no such knob. {nearest(name, [*known, *others])}")
        for value in values:
            text = f"policies={_json(policy_alone(scenario, policy, {name: value}))}"
            try:
                variant = changed(scenario, [text])
            except ScenarioError as error:
                message = str(error).removeprefix(f"--set {text}: ")
                raise _error(scenario, f"{name}, value {_json(value)}: {message}") from None
            if len(variant.specs) > 1:
                raise _error(scenario, f"{name}, value {_json(value)} is a list of values. Put each in free.{name}.")
    return values


def _tiers(scenario: Scenario, name: str, values: list[Any], policies: list[str]) -> list[Any]:
    """The values of `kv.tiers` or a key of them. ScenarioError where there are none, or a policy does not keep KV in
    them."""
    plan, tiers = scenario.file.plan, scenario.file.kv.tiers
    if name != TIERS and not tiers:
        raise _error(
            scenario,
            f"{name}: the scenario has no kv.tiers. Write kv: {{tiers: [{{kind: host, size: 256GB}}]}}, or list whole"
            f" ones: {TIERS}: [[], [{{kind: host, size: 256GB}}]].",
        )
    for policy in policies:
        spec = next(spec for spec in scenario.specs if spec.name == policy)
        if spec.kind not in TIERED_KINDS:
            only = f"only tiers of {', '.join(TIERED_KINDS)} are searched"
            raise _error(scenario, f"{name}: {policy} is of kind {spec.kind}, and {only}.")
    sizes = set[int]()
    for value in values:
        text = f"{name}={_json(value)}"
        try:
            tiers_of = changed(scenario, [text]).file.kv.tiers or ()
            sizes.add(sum(tier.size or 0 for tier in tiers_of))  # without one is refused where it has a price
        except ScenarioError as error:
            message = str(error).removeprefix(f"--set {text}: ")
            raise _error(scenario, f"{name}, value {_json(value)}: {message}") from None
    if len(sizes) > 1 and plan is not None and plan.host_memory_price is None:
        raise _error(
            scenario,
            f"{name}: its sizes have prices, and none is stated. Write plan.host_memory_price: 1.50/GB/month, or"
            " 0/GB/month where the prices of the GPUs hold the memory.",
        )
    return values


def _split(scenario: Scenario, value: Any, gpus: list[str]) -> Any:
    """A number of engines that prefill and one that decode, or `mixed`. ScenarioError for what is neither, or cannot be
    built on a GPU."""
    plan = scenario.file.plan
    assert plan is not None, "checked before"
    try:
        check_split(value)
    except ValueError as error:
        raise _error(scenario, f"{POOLS}: {error}") from None
    sides = split_of(value) or {}
    if sides and plan.transfer is None:
        raise _error(scenario, f"{POOLS} needs plan.transfer. Write transfer: {{bandwidth: 50GB/s, latency: 20us}}.")
    stated = dict.fromkeys(key for side in sides.values() for key in side.stated)
    for key in stated:
        _checked(scenario, key, [side.stated.get(key) for side in sides.values()], gpus, [])
    return value


def _router(scenario: Scenario, value: Any) -> dict[str, Any]:
    """A router written out. ScenarioError for a kind that there is not."""
    router = value if isinstance(value, dict) else {"kind": value}
    kind = router.get("kind")
    if not isinstance(kind, str) or (kind not in ROUTERS and ":" not in kind):
        raise _error(
            scenario, f"{ROUTER} has {_json(value)}, and there is no such router. {nearest(str(kind), ROUTERS)}"
        )
    return router


def _error(scenario: Scenario, message: str) -> ScenarioError:
    return ScenarioError(f"{scenario.places.get('plan', scenario.source)}: plan.free: {message}")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
