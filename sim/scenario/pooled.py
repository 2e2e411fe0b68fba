"""The engines of a scenario whose prefill and decode are apart: what each side runs, and the links between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from batchsim.base.errors import ScenarioError
from batchsim.cost.base import Cost
from batchsim.deployment.model import ModelSpec
from batchsim.deployment.quantisation import ELEMENT_BYTES
from batchsim.kernel.kv_transfer import KvConnector
from batchsim.kernel.offload import NoPeers
from batchsim.policies.systems.vllm.connector_config import KvRole, VllmConnectorConfig
from batchsim.policies.systems.vllm.vllm_connector import VllmConnector
from batchsim.scenario.check_values import check_values
from batchsim.scenario.config import PolicySpec, Scenario, ScenarioFile
from batchsim.scenario.device import device_of
from batchsim.scenario.document import Document
from batchsim.scenario.request_kinds import features

_ROLES: dict[str, KvRole] = {"prefill": "kv_producer", "decode": "kv_consumer"}


def pooled(alone: Scenario, file: ScenarioFile, side: str, knobs: Mapping[str, Any]) -> Scenario:
    """The scenario of one engine of a `side`, prefill or decode, of which `file` states cost and memory: its policies
    have the `knobs` and, where neither these nor the scenario say otherwise, the defaults of its own GPU.

    ScenarioError for policies, knobs and costs that do not pass KV on.
    """
    if getattr(file.cost, "pp", 1) > 1:
        raise ScenarioError("pp: KV that is passed between pipelines is not simulated. Set it to 1.")
    others = features(file, "rollouts", "offline jobs", "LoRA adapters", "constrained answers")
    others |= features(file, "images, audios and videos", "models that make no tokens")
    others["groups of KV blocks"] = bool(file.kv.groups)
    for what in (what for what, asked in others.items() if asked):
        raise ScenarioError(f"{what} are not simulated where prefill and decode are apart. Drop them, or drop pools.")
    engine = getattr(file.cost, "engine", "")
    if engine not in ("", "vllm"):
        raise ScenarioError(f"engine {engine}: only vllm passes KV between engines here. Write engine: vllm.")
    device = device_of(file, alone.model_path)
    specs: list[PolicySpec] = []
    for spec in alone.specs:
        if spec.kind != "vllm":
            raise ScenarioError(
                f"{spec.name} is of kind {spec.kind}, and only vllm passes KV between engines here. Leave it out."
            )
        stated = {**spec.knobs, **knobs}
        by_device = {} if device is None else spec.config.device_defaults(device, stated)
        document = Document(alone.source, None, overrides={("knobs",): f"knobs of {spec.name}"})
        config = check_values(type(spec.config), {**spec.by_device, **by_device, **stated}, document, ("knobs",))
        try:
            own = VllmConnectorConfig.of(config, _ROLES[side], "fail")
        except (TypeError, ValueError) as error:
            raise ScenarioError(f"knobs of {spec.name}: {error}.".replace("..", ".")) from None
        specs.append(replace(spec, config=own, policy=VllmConnector, knobs=stated, by_device=by_device))
    return replace(alone, file=file, places={}, specs=tuple(specs))


def checked_connector(config: Any) -> KvConnector | None:
    """A connector for a policy whose knobs are only being checked; None for one that needs none."""
    return KvConnector(NoPeers()) if isinstance(config, VllmConnectorConfig) else None


def block_bytes(model: ModelSpec, cost: Cost, block_size: int) -> int:
    """Bytes of a KV block of all layers, on all GPUs of an engine together, in the type of KV that `cost` is of."""
    if cost.deployment is None:
        return model.kv_bytes_per_token * block_size
    element = ELEMENT_BYTES[cost.deployment.types.kv]
    return ceil(sum(each.count * each.attention.kv_bytes(1, element) for each in model.kinds)) * block_size
