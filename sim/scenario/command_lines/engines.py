"""The servers of all engines, and the command line that a scenario's deployment is started with."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from batchsim.base.errors import ScenarioError
from batchsim.deployment.catalog import hugging_face_id, read_model
from batchsim.scenario.command_lines.flags import Engine, Keys
from batchsim.scenario.command_lines.lines import Read, Written, read_line, write_line
from batchsim.scenario.command_lines.sglang import SGLANG
from batchsim.scenario.command_lines.tensorrt_llm import TENSORRT_LLM
from batchsim.scenario.command_lines.vllm import VLLM
from batchsim.scenario.config import PolicySpec, Scenario
from batchsim.scenario.deployment_config import DeploymentConfig

SERVERS: dict[str, Engine] = {engine.name: engine for engine in (VLLM, SGLANG, TENSORRT_LLM)}
"""By the name that a deployment has for the engine."""

_TOLD = ("tp", "pp", "ep", "dp_attention", "weights", "moe", "kv", "activations", "power_cap")


def read_command(line: str, engine: str) -> Read:
    """What the command line of `engine` says to a scenario. Raises what `read_line` raises."""
    return read_line(line, SERVERS[engine])


def of_checkpoint(read: Read, model: str) -> Read:
    """`read` with `model` as its checkpoint, whose own types stand where its flag names the same method.

    ScenarioError where that flag says of the checkpoint what its config.json does not, or the model is not known.
    """
    keys, flag = {**read.keys, "model": model}, read.quantised
    if not flag and keys.get("deployment.weights") != "fp8":
        return replace(read, keys=keys)
    checkpoint = read_model(model).quantised
    types = {checkpoint.weights, checkpoint.attention, checkpoint.experts} - {""}
    title = SERVERS[read.engine].title
    if flag and not types:
        raise ScenarioError(
            f"{title}: {flag} is of a checkpoint that is quantised so, and what is known of {model} is not quantised."
            " Give the checkpoint's own config.json: --model PATH."
        )
    if not flag and types - {"fp8", "fp8_block"}:
        raise ScenarioError(
            f"{title}: fp8 is not how {model} is quantised ({checkpoint}), and engines refuse another way."
            " Leave it out."
        )
    if not flag and types:
        del keys["deployment.weights"]  # the engine reads the checkpoint's scales, by tensor or by block
    return replace(read, keys=keys)


def write_command(keys: Keys, engine: str) -> Written:
    """The command line of `engine` that says `keys`. Raises what `write_line` raises."""
    return write_line(keys, SERVERS[engine])


def command_of(scenario: Scenario, policy: str | None = None) -> Written:
    """The command line that starts the engine of a scenario's deployment, with the knobs of `policy` (by default the
    first) if it is the engine's own; policies without a flag are unsaid. ScenarioError if there is no deployment."""
    specs = [spec for spec in scenario.specs if policy in (None, spec.name)]
    written, own = write_command(keys_of(scenario, policy), deployment_of(scenario).engine), _own(scenario, policy)
    others = tuple(f"policy {spec.name}" for spec in specs if spec is not own)
    return replace(written, unsaid=(*written.unsaid, *others))


def command_of_side(scenario: Scenario, side: str, plain: Mapping[str, Any]) -> Written:
    """The command line that starts an engine of a `side`, prefill or decode, of `plain`, a scenario where these are
    apart; `scenario` is that of such an engine."""
    own = plain["replicas"]["groups"][side].get("kv") or plain.get("kv")
    scenario = replace(scenario, plain={**plain, "kv": own})
    spec = next(spec for spec in scenario.specs if spec.kind == deployment_of(scenario).engine)
    if spec.kind == "sglang":
        apart = [name for name in spec.knobs if "disaggregation" in name or name == "num_reserved_decode_tokens"]
        plain_knobs = {name: value for name, value in spec.knobs.items() if name not in apart}
        written = command_of(replace(scenario, specs=(replace(spec, knobs=plain_knobs),)))
        flags = [f"--disaggregation-mode {side}"]
        flags += [f"--{name.replace('_', '-')} {spec.knobs[name]}" for name in apart if name != "disaggregation_mode"]
        return replace(written, line=" ".join([written.line, *flags]))
    passes = json.dumps({"kv_connector": "NixlConnector", "kv_role": spec.config.kv_role}, separators=(",", ":"))
    written = command_of(scenario)
    return replace(written, line=f"{written.line} --kv-transfer-config {shlex.quote(passes)}")


def deployment_of(scenario: Scenario) -> DeploymentConfig:
    """The deployment of `scenario`; ScenarioError if it states a cost instead."""
    if not isinstance(scenario.cost, DeploymentConfig):
        where = scenario.places.get("cost", scenario.source)
        raise ScenarioError(
            f"{where}: cost of kind {scenario.cost.kind} names no engine. Write a deployment in its place:"
            " {engine: vllm, gpu: h100_sxm, tp: 4}."
        )
    return scenario.cost


def keys_of(scenario: Scenario, policy: str | None = None) -> Keys:
    """The keys of `scenario` that differ from an engine's own choice, flat, for `write_command`; of `policy` alone, or
    of the first policy that is the engine's own."""
    config, file, plain = deployment_of(scenario), scenario.file, scenario.plain
    keys: Keys = {"model": hugging_face_id(file.model)}
    for name in _TOLD:
        if (value := getattr(config, name)) not in (None, 1):
            keys[f"deployment.{name}"] = value
    for key in ("max_model_len", "max_waiting"):
        if (value := getattr(file, key)) is not None:
            keys[key] = value
    keys |= {f"kv.{name}": value for name, value in (plain.get("kv") or {}).items() if name != "source"}
    if file.workload.lora_rank is not None:
        keys["enable_lora"] = True
    own = _own(scenario, policy)
    keys |= {f"policy.{knob}": value for knob, value in (own.knobs if own else {}).items()}
    return keys


def _own(scenario: Scenario, policy: str | None) -> PolicySpec | None:
    """The first policy, of that name where one is given, that is the deployment's engine's; None if there is none."""
    engine = deployment_of(scenario).engine
    return next((spec for spec in scenario.specs if spec.kind == engine and policy in (None, spec.name)), None)
