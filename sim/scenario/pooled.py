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
from batchsim.drive.fleet.transfer import TransferConfig
from batchsim.kernel.kv_rooms import Room, RoomConnector
from batchsim.kernel.kv_transfer import KvConnector
from batchsim.kernel.offload import NoPeers
from batchsim.kernel.policy_config import Device
from batchsim.policies.systems.sglang.pd_config import PdMode, SglangPdConfig
from batchsim.policies.systems.sglang.sglang_decode import SglangDecode
from batchsim.policies.systems.sglang.sglang_prefill import SglangPrefill
from batchsim.policies.systems.vllm.connector_config import KvRole, OnFailure, VllmConnectorConfig
from batchsim.policies.systems.vllm.vllm_connector import VllmConnector
from batchsim.scenario.check_values import check_values
from batchsim.scenario.config import PolicySpec, Scenario, ScenarioFile
from batchsim.scenario.device import device_of
from batchsim.scenario.document import Document
from batchsim.scenario.replicas_config import ReplicasConfig
from batchsim.scenario.request_kinds import features

_ROLES: dict[str, KvRole] = {"prefill": "kv_producer", "decode": "kv_consumer"}
_MODES: dict[str, PdMode] = {"prefill": "prefill", "decode": "decode"}
_SGLANG = {"prefill": SglangPrefill, "decode": SglangDecode}
_PASSING = ("vllm", "sglang")
_AND = " and ".join(_PASSING)


def pooled(alone: Scenario, file: ScenarioFile, side: str, replicas: ReplicasConfig) -> Scenario:
    """The scenario of one engine of a `side`, prefill or decode, of which `file` states cost and memory: its policies
    have the knobs of that group of `replicas` and, where neither these nor the scenario say otherwise, the defaults of
    its own GPU.

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
    if engine not in ("", *_PASSING):
        raise ScenarioError(f"engine {engine}: only {_AND} pass KV between engines here. Write engine: vllm.")
    device, knobs = device_of(file, alone.model_path), (replicas.groups or {})[side].knobs or {}
    specs: list[PolicySpec] = []
    transfer = replicas.transfer
    assert transfer is not None, "sides have KV to pass on"
    for spec in alone.specs:
        if spec.kind not in _PASSING:
            raise ScenarioError(
                f"{spec.name} is of kind {spec.kind}, and only {_AND} pass KV between engines here. Leave it out."
            )
        if engine not in ("", spec.kind):
            raise ScenarioError(
                f"{spec.name} is of kind {spec.kind}, and engine {engine} passes KV to its like alone. Write engine:"
                f" {spec.kind}, or leave {spec.name} out."
            )
        if spec.kind == "sglang" and replicas.local_prefill is not None:
            raise ScenarioError("local_prefill: SGLang's decode engines compute no prompts. Leave it out.")
        if spec.kind == "sglang" and (transfer.on_failure, transfer.lease) != ("fail", TransferConfig.lease):
            raise ScenarioError(
                "transfer: SGLang ends requests whose transfer fails, and both sides free their blocks at once. Leave"
                " on_failure and lease out."
            )
        specs.append(_passing(alone, spec, side, knobs, device, transfer.on_failure))
    return replace(alone, file=file, places={}, specs=tuple(specs))


def _passing(
    alone: Scenario,
    spec: PolicySpec,
    side: str,
    knobs: Mapping[str, Any],
    device: Device | None,
    on_failure: OnFailure,
) -> PolicySpec:
    """The policy `spec` of an engine of a `side`, with its `knobs`; `on_failure` is that of transfers."""
    stated = {**spec.knobs, **knobs}
    by_device = {} if device is None else spec.config.device_defaults(device, stated)
    document = Document(alone.source, None, overrides={("knobs",): f"knobs of {spec.name}"})
    kind = SglangPdConfig if spec.kind == "sglang" else type(spec.config)
    try:
        config = check_values(kind, {**spec.by_device, **by_device, **stated}, document, ("knobs",))
        if spec.kind == "sglang":
            own, policy = SglangPdConfig.of(config, _MODES[side], knobs), _SGLANG[side]
        else:
            own, policy = VllmConnectorConfig.of(config, _ROLES[side], on_failure), VllmConnector
    except (TypeError, ValueError) as error:
        raise ScenarioError(f"knobs of {spec.name}: {error}.".replace("..", ".")) from None
    return replace(spec, config=own, policy=policy, knobs=stated, by_device=by_device)


def checked_connector(config: Any) -> KvConnector | None:
    """A connector for a policy whose knobs are only being checked; None for one that needs none."""
    if isinstance(config, SglangPdConfig):
        return RoomConnector(_Unlinked())
    return KvConnector(NoPeers()) if isinstance(config, VllmConnectorConfig) else None


def block_bytes(model: ModelSpec, cost: Cost, block_size: int) -> int:
    """Bytes of a KV block of all layers, on all GPUs of an engine together, in the type of KV that `cost` is of."""
    if cost.deployment is None:
        return model.kv_bytes_per_token * block_size
    element = ELEMENT_BYTES[cost.deployment.types.kv]
    return ceil(sum(each.count * each.attention.kv_bytes(1, element) for each in model.kinds)) * block_size


class _Unlinked(NoPeers):
    """Stands for a link between rooms while knobs are being checked."""

    def address(self, room: Room, now_ns: int) -> None:
        raise AssertionError("no request has blocks while knobs are checked")

    def refuse(self, room: Room, detail: str, now_ns: int) -> None:
        raise AssertionError("no request comes while knobs are checked")

    def send(self, room: Room, num_blocks: int, ready_ns: int, *, last: bool) -> None:
        raise AssertionError("nothing is sent while knobs are checked")

    def take_in(self, room: Room, now_ns: int) -> None:
        raise AssertionError("nothing comes while knobs are checked")
