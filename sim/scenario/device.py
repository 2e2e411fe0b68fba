"""The GPU that the defaults of a scenario's policies go by."""

from __future__ import annotations

from dataclasses import replace

from batchsim.base.errors import CalibrationError, ScenarioError
from batchsim.deployment.catalog import read_model
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
        its = {} if device is None else spec.config.device_defaults(device, spec.knobs)
        config = replace(spec.config, **its)
        if device is not None and config != spec.config:
            knobs = [name for name in its if getattr(config, name) != getattr(spec.config, name)]
            differ = [f"{name} {getattr(config, name)}, not {getattr(spec.config, name)}" for name in knobs]
            raise ScenarioError(
                f"{spec.name} has by default on {device.name} {', and '.join(differ)} as by the scenario's own cost."
                f" State {' and '.join(knobs)}."
            )
