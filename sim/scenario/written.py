"""Typed objects back to the plain values that a scenario file writes for them: `8.0` of a rate as `8.0/s`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any

from batchsim.base.ranges import written_numbers
from batchsim.kernel.policy_config import PolicyConfig
from batchsim.policies.registry import POLICIES
from batchsim.scenario.deployment_config import DeploymentConfig


def as_written(value: Any, where: str = "") -> Any:
    """`value`, in which configs may stand, as texts, numbers, lists and mappings that are read as the same again.

    Fields at their defaults are left out. ValueError, which begins with the path below `where`, for what no scenario
    can hold.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return _record(value, where)
    if isinstance(value, Mapping):
        return {_key(key, item, where): as_written(item, f"{where}.{key}".strip(".")) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_written(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, PurePath):
        return str(value)
    if value is None or isinstance(value, bool | str | int | float):
        return value
    raise ValueError(
        f"{where or 'the scenario'} is of type {type(value).__name__}, which no scenario holds. Write numbers, texts,"
        " lists, mappings or batchsim's own classes."
    )


def _record(config: Any, where: str) -> dict[str, Any]:
    plain = {} if isinstance(config, DeploymentConfig) else _kind(config, where)
    numbers = written_numbers(config)
    for field in fields(config):
        if not field.init or field.name == "kind":
            continue
        value = getattr(config, field.name)
        at_default = value == field.default or (callable(field.default_factory) and value == field.default_factory())
        if not at_default:
            written = numbers.get(field.name, value)
            plain[_key(field.name, value, where)] = as_written(written, f"{where}.{field.name}".strip("."))
    return plain


def _kind(config: Any, where: str) -> dict[str, Any]:
    """The `kind` of a config; of a policy's, which has none in itself, its name in the registry."""
    if not isinstance(config, PolicyConfig):
        return {"kind": config.kind} if any(field.name == "kind" for field in fields(config)) else {}
    for name, (registered, _) in POLICIES.items():
        if registered is type(config):
            return {"kind": name}
    raise ValueError(f"{where} is a {type(config).__name__}, of no policy of batchsim's. Write kind: 'module:Class'.")


def _key(key: object, value: object, where: str) -> str:
    """The key under which a scenario writes `value`: a deployment has one of its own, wherever a cost may stand."""
    if isinstance(key, str):
        return "deployment" if key == "cost" and isinstance(value, DeploymentConfig) else key
    raise ValueError(f"{where or 'the scenario'} has the key {key!r}, which is no text. Write it as a text.")
