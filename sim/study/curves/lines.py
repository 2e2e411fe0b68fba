"""The curves of a run: every policy of the scenario, with each value of the key that the scenario varies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchsim.base.errors import ScenarioError
from batchsim.results.failed import Failed
from batchsim.scenario import Point, PolicySpec, Scenario
from batchsim.scenario.setup import Setup
from batchsim.workload.open_loop import OpenWorkload

ANY_LOAD = 1.0
"""A load that every axis has: one user, a request a second, the trace as it is."""


@dataclass(frozen=True)
class Line:
    """One curve: a policy, or a policy with one value of the varied key. `policy` is what results call it.

    `specs` are the variants of its `best_of`. `value` is None where the key is a knob of another policy.
    """

    policy: str
    label: str
    setup: Setup
    specs: tuple[PolicySpec, ...]
    value: Any = None

    def points(self, load: float) -> Iterator[tuple[Setup, Point]]:
        """The points to simulate for one load: every seed and variant, each with its setup."""
        for seed in range(self.setup.scenario.file.seeds):
            for spec in self.specs:
                yield self.setup, Point(spec, load, seed)

    def named(self, result: dict[str, Any] | Failed) -> dict[str, Any] | Failed:
        """A point's result under the name of this line, with the value of the varied key."""
        if self.policy == self.label:
            return result
        end = self.policy.removeprefix(self.label)
        if isinstance(result, Failed):
            return replace(result, policy=self.policy, name=result.name + end, vary=self.value)
        name = result["name"] + end
        return result | {"policy": self.policy, "name": name, "vary": self.value}


def lines_of(setup: Setup) -> list[Line]:
    """The curves that the scenario asks for, in its order. ScenarioError for a value with which it cannot run."""
    scenario = setup.scenario
    path = scenario.vary_key.split(".")
    variants = list(zip(_values(scenario), [_setup(scenario, variant) for variant in scenario.variants], strict=True))
    lines = []
    for label in scenario.file.policies:
        if not variants or (path[0] == "policies" and path[1] != label):
            lines.append(Line(label, label, setup, _specs(scenario, label)))
        else:
            lines += [
                Line(varied_name(label, scenario.vary_key, value), label, varied, _specs(varied.scenario, label), value)
                for value, varied in variants
            ]
    return lines


def varied_name(label: str, key: str, value: Any) -> str:
    """What results call a policy with a value of the varied key: `vllm, max_num_seqs=64`."""
    return f"{label}, {short_key(key)}={value}"


def short_key(key: str) -> str:
    """The end of a dotted key that says what it is: a knob's name, else its last two parts, three with a place of a
    list among them (`tiers.0.size`)."""
    path = key.split(".")
    if path[0] == "policies":
        return path[-1]
    return ".".join(path[-3:] if path[-2:-1] and path[-2].isdecimal() else path[-2:])


def same_requests(lines: Sequence[Line], load: float) -> bool:
    """Whether all lines serve the very same requests, whatever the varied key's value. Asked of the first seed."""
    setups = list({id(line.setup): line.setup for line in lines}.values())
    drawn = {id(s): (s.traffic, s.max_model_len) for s in setups}
    if all(how == drawn[id(setups[0])] for how in drawn.values()):
        return True
    built = [setup.workload(load, 0) for setup in setups]
    if not all(isinstance(workload, OpenWorkload) for workload in built):
        return False  # answers decide what is sent
    first, *others = (list(workload.arrivals()) for workload in built)
    return all(other == first for other in others)


def _values(scenario: Scenario) -> list[Any]:
    return (scenario.file.vary or {}).get(scenario.vary_key, [])


def _specs(scenario: Scenario, label: str) -> tuple[PolicySpec, ...]:
    return tuple(spec for spec in scenario.specs if spec.label == label)


def _setup(scenario: Scenario, variant: Scenario) -> Setup:
    """The setup of one value; an error says which."""
    value = _values(scenario)[scenario.variants.index(variant)]
    try:
        return Setup.of(variant)
    except ScenarioError as error:
        override = f"--set {scenario.vary_key}={json.dumps(value, ensure_ascii=False)}: "
        message = str(error).removeprefix(override)
        raise ScenarioError(f"{scenario.places['vary']}: vary {scenario.vary_key}, value {value}: {message}") from None
