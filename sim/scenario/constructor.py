"""A scenario from Python: a file's, a shipped one's, of a mapping, or of typed objects."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

from batchsim.base.errors import ScenarioError
from batchsim.cost.base import Cost
from batchsim.cost.lora_cost import LoraCost
from batchsim.cost.structured_cost import StructuredCost
from batchsim.kernel.policy_config import PolicyConfig
from batchsim.scenario.config import Keep, LoadConfig, Scenario
from batchsim.scenario.deployment_config import DeploymentConfig
from batchsim.scenario.kv_config import KvConfig
from batchsim.scenario.load import load_scenario
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.plan_config import PlanConfig
from batchsim.scenario.replicas_config import PoolsConfig, ReplicasConfig
from batchsim.scenario.unread_keys import check_replaced
from batchsim.scenario.written import as_written
from batchsim.workload.workload_config import WorkloadConfig

Plain = Mapping[str, Any]
_NAME = re.compile(r"[\w.+-]*\w[\w.+-]*")


def scenario(
    source: str | Path | Plain | None = None,
    /,
    *,
    name: str = "scenario",
    model: str | None = None,
    deployment: DeploymentConfig | Plain | None = None,
    cost: Cost | Plain | str | None = None,
    workload: WorkloadConfig | Plain | None = None,
    slo: str | None = None,
    policies: Mapping[str, PolicyConfig | Plain | None] | None = None,
    load: LoadConfig | Plain | None = None,
    seeds: int | None = None,
    kv: KvConfig | Plain | None = None,
    replicas: ReplicasConfig | Plain | None = None,
    pools: PoolsConfig | Plain | None = None,
    dp_attention: int | Plain | None = None,
    max_model_len: int | None = None,
    max_waiting: int | None = None,
    cost_factor: float | None = None,
    lora_cost: LoraCost | Plain | None = None,
    structured_cost: StructuredCost | Plain | None = None,
    plan: PlanConfig | Plain | None = None,
    vary: Mapping[str, Sequence[Any]] | None = None,
    keep: Keep | None = None,
    overrides: Sequence[str] = (),
    trace_folders: Sequence[Path] = (),
    allow_code: bool = False,
) -> Scenario:
    """The checked scenario of a YAML file, of one shipped under a name, of a mapping, or of its keys.

    Keys mean what they mean in a file, and may be mappings, as there, or typed objects: `workload=Workload(...)`. In a
    typed object a quantity is a text with its unit, `"8/s"`; a bare number is in batchsim's own: ns, requests/s, bytes,
    a fraction. `name` is that of its folder of results; a file has its own. Relative paths start from a file's folder,
    else from the current one. `overrides` are those of --set. Raises ScenarioError in one line: where, what, what to
    do.

    >>> scenario = batchsim.Scenario(
    ...     model="llama-3.1-8b",
    ...     cost={"kind": "constant", "step": "10ms"},
    ...     kv=batchsim.Kv(tokens=16_000),
    ...     workload=batchsim.Workload(
    ...         batchsim.Poisson("20/s"),
    ...         lengths=batchsim.Lengths(batchsim.Fixed(100), batchsim.Uniform(2, 12)),
    ...         output_cap=16,
    ...         duration="10s",
    ...     ),
    ...     policies={"static": {"batch_size": 4, "max_wait": "100ms"}, "vllm": {"max_num_seqs": 8}},
    ...     slo="ttft<500ms @ 90%",
    ...     load=batchsim.Load(mean_rate=["10/s", "20/s"]),
    ...     seeds=2,
    ...     name="tiny",
    ... )
    >>> scenario.loads
    (10.0, 20.0)
    """
    keys = {
        "model": model,
        "deployment": deployment,
        "cost": cost,
        "workload": workload,
        "slo": slo,
        "policies": policies,
        "load": load,
        "seeds": seeds,
        "kv": kv,
        "replicas": replicas,
        "pools": pools,
        "dp_attention": dp_attention,
        "max_model_len": max_model_len,
        "max_waiting": max_waiting,
        "cost_factor": cost_factor,
        "lora_cost": lora_cost,
        "structured_cost": structured_cost,
        "plan": plan,
        "vary": vary,
        "keep": keep,
    }
    given = {key: value for key, value in keys.items() if value is not None}
    if isinstance(overrides, str):
        raise ScenarioError(f"Scenario: overrides is the text {overrides!r}. Write a list: overrides=[{overrides!r}].")
    if is_dataclass(workload) and not isinstance(workload, WorkloadConfig):
        raise ScenarioError(
            f"Scenario: workload is {workload!r} alone. Write batchsim.Workload of it, with lengths, output_cap and"
            " duration."
        )
    if source is not None and given:
        raise ScenarioError(
            f"Scenario: {', '.join(given)} beside {'a mapping' if isinstance(source, Mapping) else source}, which has"
            " keys of its own. Write overrides=['seeds=1'], or give the keys alone."
        )
    if isinstance(source, str | Path):
        if name != "scenario":
            raise ScenarioError(f"Scenario: name {name!r} beside {source}, which has its own. Leave name out.")
        folders = list(trace_folders)
        return load_scenario(str(source), overrides=overrides, trace_folders=folders, allow_code=allow_code)
    if source is not None and not isinstance(source, Mapping):
        raise ScenarioError(f"Scenario: is given a {type(source).__name__}. Give a file, a shipped name or a mapping.")
    if not _NAME.fullmatch(name):
        raise ScenarioError(f"Scenario: name {name!r} is no name of a folder. Write letters, digits, -, _ and dots.")
    try:
        plain = as_written(given if source is None else source)
    except ValueError as error:
        raise ScenarioError(f"{name}: {error}") from None
    return _checked(plain, name, tuple(overrides), tuple(trace_folders), allow_code)


def _checked(
    plain: dict[str, Any], name: str, overrides: tuple[str, ...], trace_folders: tuple[Path, ...], allow_code: bool
) -> Scenario:
    """The scenario of plain values. Its errors name no lines, since there is no file."""
    text = json.dumps(plain, indent=1, ensure_ascii=False) + "\n"  # which is YAML whose texts stay texts
    lines = re.compile(rf"(?<![^\s]){re.escape(name)}:\d+(?=:)")
    try:
        checked = parse_scenario(text, name, Path(), overrides, trace_folders, allow_code)
        checked = replace(
            checked, places={key: lines.sub(name, f"{place}:")[:-1] for key, place in checked.places.items()}
        )
        check_replaced(checked)
    except ScenarioError as error:
        raise type(error)(lines.sub(name, str(error))) from None
    return checked
