"""The models of a scenario that take turns on a GPU: which each engine runs, and that every request has one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from batchsim.base.errors import ScenarioError, nearest
from batchsim.deployment.model import GpuSpec
from batchsim.scenario.config import Scenario, ScenarioFile
from batchsim.scenario.replicas_config import ReplicasConfig
from batchsim.workload.rollout_config import Rollout


def with_model(alone: Scenario, model: str | None) -> Scenario:
    """The scenario of one engine of another `model`, a name or a file; itself with None."""
    if model is None:
        return alone
    path = Path(alone.source).parent / model
    return replace(
        alone, file=replace(alone.file, model=model), model_path=str(path) if os.path.exists(path) else model
    )


def check_models(replicas: ReplicasConfig, file: ScenarioFile, gpus: Mapping[str, tuple[int, GpuSpec | None]]) -> None:
    """ScenarioError where it is not said of which model a request is, requests are ones that sleep cannot keep, or
    models that share a GPU are not on the same one. `gpus`: of each model, how many and which."""
    workload = file.workload
    models, classes = replicas.groups or {}, workload.classes
    if not classes:
        raise ScenarioError(
            "replicas.sleep: a request is of the model that its class is named after, and the workload has no classes."
            f" Write classes: {{{', '.join(models)}}}, each with a share, or with workload.popularity."
        )
    for name in classes:
        if name not in models:
            raise ScenarioError(f"replicas.groups has no model for the class {name}. {nearest(name, models)}")
    for name in models:
        if name not in classes:
            raise ScenarioError(f"replicas.groups.{name}: no class asks for it. {nearest(name, classes)}")
    others = {
        "LoRA adapters": workload.lora_rank is not None,
        "max_waiting": file.max_waiting is not None,
        "tiers of KV": bool(file.kv.tiers) or any(each.kv is not None and each.kv.tiers for each in models.values()),
        "a rollout": isinstance(workload.arrivals, Rollout),
        "offline jobs": workload.offline_class is not None,
    }
    for what in (what for what, asked in others.items() if asked):
        raise ScenarioError(f"{what} beside models that take turns on a GPU: not simulated. Drop one of the two.")
    first, *sharing = (name for name, group in models.items() if not group.own_gpu)
    for name in sharing:
        if gpus[name] != gpus[first]:
            texts = (
                f"{each} is on {count} × {'an unnamed GPU' if gpu is None else gpu.name}"
                for each, (count, gpu) in ((first, gpus[first]), (name, gpus[name]))
            )
            raise ScenarioError(f"{' and '.join(texts)}: they cannot share it. Write the same, or own_gpu: true.")
