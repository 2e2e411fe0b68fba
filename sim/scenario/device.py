"""What the GPU of a scenario decides: the KV memory of an engine, and the defaults of its policies."""

from __future__ import annotations

from dataclasses import replace

from batchsim.base.errors import CalibrationError, ScenarioError
from batchsim.cost.base import Cost
from batchsim.cost.fitted import Fitted
from batchsim.deployment.catalog import read_model
from batchsim.deployment.memory import STEP_REQUESTS, STEP_TOKENS, KvBudget
from batchsim.deployment.model import GpuSpec, ModelSpec
from batchsim.kernel.policy_config import Device
from batchsim.scenario.config import Scenario, ScenarioFile
from batchsim.scenario.deployment_config import DeploymentConfig


def device_of(file: ScenarioFile, model_path: str) -> Device | None:
    """The GPU of `file`'s cost; None where it is not in the catalog, or where building the model or cost raises an
    error, which is left to the builder."""
    try:
        model = read_model(model_path)
        gpu = _gpu_of(file, model)
    except (ScenarioError, CalibrationError):
        return None
    if gpu is None:
        return None
    return Device(gpu.name, gpu.memory_bytes, file.max_model_len or model.max_position_embeddings)


def _gpu_of(file: ScenarioFile, model: ModelSpec) -> GpuSpec | None:
    if isinstance(file.cost, DeploymentConfig):  # whose GPU is known before its step times are
        return file.cost.gpu_spec()
    deployment = file.cost.build(model, block_size=file.kv.block_size).deployment
    return None if deployment is None else deployment.gpu


def check_same_defaults(scenario: Scenario, file: ScenarioFile) -> None:
    """ScenarioError if a policy of `scenario` has other defaults on the GPU of `file`, that of a group of replicas."""
    device = device_of(file, scenario.model_path)
    for spec in scenario.specs:
        defaults = {} if device is None else spec.config.device_defaults(device, spec.knobs)
        config = replace(spec.config, **defaults)
        if device is not None and config != spec.config:
            knobs = [name for name in defaults if getattr(config, name) != getattr(spec.config, name)]
            differ = [f"{name} {getattr(config, name)}, not {getattr(spec.config, name)}" for name in knobs]
            raise ScenarioError(
                f"{spec.name} has by default on {device.name} {', and '.join(differ)} as by the scenario's own cost."
                f" State {' and '.join(knobs)}."
            )


def kv_budget(scenario: Scenario, model: ModelSpec, cost: Cost) -> KvBudget:
    """The KV blocks of one engine: as stated, else as measured by a profile, else what model and GPU leave room for.

    They are the same for every policy, beside the largest step that any of them may take.
    """
    kernel = cost.kernel if isinstance(cost, Fitted) else None
    kv, deployment, profile = scenario.file.kv, cost.deployment, (kernel or cost).profile
    if kv.tokens is not None:
        return KvBudget(kv.tokens // kv.block_size, kv.block_size, "stated in the scenario")
    if deployment is None:
        raise ScenarioError(f"cost {scenario.cost.kind} has no GPU to derive KV memory from. Add kv: tokens.")
    if profile is not None and profile.num_blocks is not None and profile.block_size == kv.block_size:
        if (scenario.plain.get("kv") or {}).get("utilisation") is not None:
            raise ScenarioError(
                f"kv.utilisation is not read: profile {profile.name} has its KV memory measured. Drop it, or write"
                " kv.tokens in its place."
            )
        return KvBudget(profile.num_blocks, kv.block_size, f"measured, profile {profile.name}")
    if profile is not None and deployment.gpu is None:
        raise ScenarioError(
            f"profile {profile.name} has no KV memory measured in blocks of {kv.block_size}, and names no GPU of the"
            " catalog to derive it from. Add kv: tokens."
        )
    own = replace(deployment, model=model)  # of the same shape, under the name that the scenario has for it
    if isinstance(scenario.cost, DeploymentConfig) and scenario.cost.version:
        own = replace(own, version=scenario.cost.version)  # the tables may be of another, by whose rule no memory goes
    traits = [spec.config.traits for spec in scenario.specs]
    budget = own.derive_kv(
        utilisation=kv.utilisation,
        block_size=kv.block_size,
        step_tokens=max((each.max_num_batched_tokens or 0 for each in traits), default=0) or STEP_TOKENS,
        step_requests=max((each.max_num_seqs or 0 for each in traits), default=0) or STEP_REQUESTS,
    )
    most = scenario.file.max_model_len
    if (
        own.engine == "vllm"
        and isinstance(scenario.cost, DeploymentConfig)
        and most is not None
        and budget.tokens < most
    ):
        raise ScenarioError(
            f"{scenario.source}: vLLM does not start with KV memory of {budget.tokens:,} tokens ({budget.terms}), fewer"
            f" than max_model_len {most:,}. Lower max_model_len, raise kv.utilisation, or use more GPUs."
        )
    return budget
