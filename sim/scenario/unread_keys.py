"""Keys that are not read because another stands in their place: to set one would do nothing, so it is an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from batchsim.base.errors import ScenarioError
from batchsim.base.plain import value_at

if TYPE_CHECKING:
    from batchsim.scenario.config import Scenario

LOADED = {
    "mean_rate": "workload.arrivals.mean_rate",
    "users": "workload.arrivals.users",
    "rate_scale": "workload.trace.rate_scale.factor",
}
"""By load axis, the key that it replaces. Arrivals need a rate or users all the same, so a file may hold both."""

PLANNED = {
    "load": "plan.target",
    "workload.arrivals.mean_rate": "plan.target",
    "workload.trace.rate_scale": "plan.target",
    "cost": "plan.gpus",
    "deployment": "plan.gpus",
}
"""By key of other commands, the key of the `plan:` block that `batchsim plan` reads in its place."""


def replaced_by(key: str, plain: Mapping[str, Any]) -> str:
    """The key of the scenario `plain` that is read in the place of `key`; "" where `key` itself is read."""
    for axis, replaced in LOADED.items():
        if key == replaced and value_at(plain, ("load", axis)) is not None:
            return f"load.{axis}"
    owner, _, name = key.rpartition(".")
    stated = f"{owner}.tokens"
    memory = name == "utilisation" and owner.rpartition(".")[2] == "kv"
    return stated if memory and value_at(plain, stated.split(".")) is not None else ""


def check_replaced(scenario: Scenario) -> None:
    """ScenarioError, with its place, for a key that is set or varied to no effect, or KV memory stated twice."""
    for i, text in enumerate(scenario.overrides):
        for later in scenario.overrides[i + 1 :]:
            if f"{_key(text)}.".startswith(f"{_key(later)}."):
                raise ScenarioError(f"--set {text}: --set {later} replaces it. Drop one of them.")
        if other := replaced_by(_key(text), scenario.plain):
            raise ScenarioError(f"--set {text}: {other} stands in its place. Change that, or drop one of them.")
    if other := replaced_by(scenario.vary_key, scenario.plain):
        where, key = scenario.places["vary"], scenario.vary_key
        raise ScenarioError(f"{where}: vary names {key}, in whose place {other} stands. Drop one of them.")
    for each in (scenario, *scenario.variants):
        for key in _memories(each.plain):
            if value_at(each.plain, key.split(".")) is not None and (other := replaced_by(key, each.plain)):
                where = scenario.places.get(key.partition(".")[0], scenario.source)
                if value_at(each.plain, ("replicas", "transfer")) is not None:  # written as sides
                    key, other = (name.removeprefix("replicas.groups.") for name in (key, other))
                raise ScenarioError(f"{where}: {key} is not read beside {other}. Drop one of them.")


def check_planned(scenario: Scenario) -> None:
    """ScenarioError for a key that is set for a plan, which does not read it."""
    for text in scenario.overrides:
        for key, other in PLANNED.items():
            if f"{_key(text)}.".startswith(f"{key}."):
                raise ScenarioError(f"--set {text}: a plan reads {other} in its place. Change that.")


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def _memories(plain: Mapping[str, Any]) -> Iterator[str]:
    """Every key that may say which share of a GPU's memory an engine takes."""
    yield "kv.utilisation"
    for name in value_at(plain, ("replicas", "groups")) or ():
        yield f"replicas.groups.{name}.kv.utilisation"
