"""The models of a scenario that share a GPU: which each engine runs, that every request has one, and that they fit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from batchsim.base.errors import ScenarioError, nearest
from batchsim.base.units import percent
from batchsim.cost.base import Cost
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.model import GpuSpec
from batchsim.scenario.config import Scenario, ScenarioFile
from batchsim.scenario.kv_config import KvConfig
from batchsim.scenario.replicas_config import ReplicasConfig
from batchsim.scenario.request_kinds import features


def with_model(alone: Scenario, model: str | None) -> Scenario:
    """The scenario of one engine of another `model`, a name or a file; itself with None."""
    if model is None:
        return alone
    path = Path(alone.source).parent / model
    return replace(
        alone, file=replace(alone.file, model=model), model_path=str(path) if os.path.exists(path) else model
    )


class Placed(Protocol):
    """A model's engine: its GPUs, its step costs and its part of the scenario."""

    @property
    def num_gpus(self) -> int: ...

    @property
    def gpu(self) -> GpuSpec | None: ...

    @property
    def cost(self) -> Cost: ...

    @property
    def scenario(self) -> Scenario: ...


def check_models(replicas: ReplicasConfig, file: ScenarioFile, engines: Mapping[str, Placed]) -> None:
    """ScenarioError where it is not said of which model a request is, requests are ones that sleep cannot keep, or
    models that share a GPU are not on the same one, or do not fit there."""
    gpus = {name: (each.num_gpus, each.gpu) for name, each in engines.items()}
    models, classes = replicas.groups or {}, file.workload.classes
    if not classes:
        raise ScenarioError(
            f"replicas.{'share' if replicas.sleep is None else 'sleep'}: a request is of the model that its class is"
            " named after, and the workload has no classes."
            f" Write classes: {{{', '.join(models)}}}, each with a share, or with workload.popularity."
        )
    for name in classes:
        if name not in models:
            raise ScenarioError(f"replicas.groups has no model for the class {name}. {nearest(name, models)}")
    for name in models:
        if name not in classes:
            raise ScenarioError(f"replicas.groups.{name}: no class asks for it. {nearest(name, classes)}")
    others = {
        **features(file, "LoRA adapters", "rollouts", "offline jobs"),
        "max_waiting": file.max_waiting is not None,
        "tiers of KV": bool(file.kv.tiers) or any(each.kv is not None and each.kv.tiers for each in models.values()),
        "constrained answers": replicas.share is not None and file.structured_cost is not None,
    }
    for what in (what for what, asked in others.items() if asked):
        how = "are side by side" if replicas.sleep is None else "take turns"
        raise ScenarioError(f"{what} beside models that {how} on a GPU: not simulated. Drop one of the two.")
    first, *sharing = (name for name, group in models.items() if not group.own_gpu)
    for name in sharing:
        if gpus[name] != gpus[first]:
            texts = (
                f"{each} is on {count} × {'an unnamed GPU' if gpu is None else gpu.name}"
                for each, (count, gpu) in ((first, gpus[first]), (name, gpus[name]))
            )
            raise ScenarioError(f"{' and '.join(texts)}: they cannot share it. Write the same, or own_gpu: true.")
    if replicas.share is not None:
        beside = {name: engines[name] for name in (first, *sharing)}
        check_shares({name: (each.scenario.file.kv, each.cost.deployment) for name, each in beside.items()})


def check_shares(engines: Mapping[str, tuple[KvConfig, Deployment | None]]) -> None:
    """ScenarioError where it is not said how much of the GPU's memory each of several models side by side has, or where
    they have more than all of it. `engines`: of each that shares the GPU, its KV memory and its deployment."""
    shares: dict[str, float] = {}
    for name, (kv, deployment) in engines.items():
        where = f"replicas.groups.{name}"
        if deployment is not None and deployment.pp > 1:
            raise ScenarioError(f"{where}: pp {deployment.pp} beside other models on its GPUs: not simulated. Write 1.")
        if kv.tokens is not None or kv.memory is not None or kv.num_blocks is not None or kv.log:
            continue
        if deployment is not None and deployment.engine not in ("", "vllm"):
            raise ScenarioError(
                f"{where}: {deployment.engine} shares the memory that is free as it starts, after the others' start,"
                " which is not known. Write its kv: {tokens: ...}."
            )
        if kv.utilisation is None:
            raise ScenarioError(
                f"{where}.kv.utilisation is missing: models side by side each have a share of the GPU's memory. Write"
                f" one, like {percent(0.9 / len(engines))}."
            )
        shares[name] = kv.utilisation
    if sum(shares.values()) > 1:
        texts = (f"{name} {percent(share)}" for name, share in shares.items())
        raise ScenarioError(f"kv.utilisation: {' and '.join(texts)} are more than all of the GPU's memory. Lower one.")
