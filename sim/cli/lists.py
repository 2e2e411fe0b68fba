"""The commands that list what there is."""

from __future__ import annotations

import sys
from dataclasses import MISSING, Field
from typing import Any

import typer

from batchsim.base.units import counted
from batchsim.cli import option
from batchsim.cli.common import one_line_errors, print_json


@one_line_errors
def policies(as_json: option.Json = False) -> None:
    """List the policies, those of installed packages too and `engine`, where each comes from, and its knobs.

    Example: batchsim policies --json
    """
    from dataclasses import fields

    from batchsim.base.installed import installed
    from batchsim.engines.engine_config import PASSED, EngineConfig
    from batchsim.kernel.policy_config import Device
    from batchsim.policies.evidence import FOLLOWED
    from batchsim.policies.registry import POLICIES
    from batchsim.scenario.build import ENGINE

    rows: list[dict[str, Any]] = []
    for name, (config, policy) in POLICIES.items():
        doc = (sys.modules[policy.__module__].__doc__ or "").strip().splitlines()[0]
        knobs = {f.name: _default(f) for f in fields(config)}
        row: dict[str, Any] = {"policy": name, "evidence": policy.evidence, "what": doc, "knobs": knobs}
        if by_gpu := list(config.device_defaults(Device("", 1, 1), {})):
            row["by_gpu"] = by_gpu
        if name in FOLLOWED:
            followed = FOLLOWED[name]
            row |= {"engine": followed.engine, "engine_version": followed.version}
            row |= {"equal_schedules": followed.schedules} if policy.evidence == "recorded" else {}
            if followed.recorded_with is not None:
                row["equal_schedules_with"] = dict([followed.recorded_with])
        rows.append(row)
    for name, target in installed("policies", POLICIES).items():
        rows.append({"policy": name, "evidence": "installed", "what": target, "knobs": {}})
    own = [
        f for f in fields(EngineConfig) if f.name in (*PASSED, "engine", "async_scheduling", "python", "scheduler_cls")
    ]
    what = "The scheduler itself of a vLLM that is installed, step by step"
    rows.append({"policy": ENGINE, "evidence": "the engine", "what": what, "knobs": {f.name: _default(f) for f in own}})
    if as_json:
        print_json(rows)
        return
    from batchsim.report.layout import filled

    indent = " " * 19
    for row in rows:
        lines = filled(row["what"], indent, f"{row['policy']:<18} {row['evidence']:<13} ")
        if "equal_schedules" in row:
            count = counted(row["equal_schedules"], "schedule")
            text = f"equal in every step to {count} recorded from {row['engine']} {row['engine_version']}"
            text += "".join(f", all with {knob}={value}" for knob, value in row.get("equal_schedules_with", {}).items())
            lines += filled(text, indent, indent)
        knobs = ", ".join(f"{k}={v}" if v != "required" else k for k, v in row["knobs"].items())
        knobs += f"; {' and '.join(row['by_gpu'])} by the GPU where one is known" if "by_gpu" in row else ""
        typer.echo("\n".join([*lines, *(filled(knobs, indent, indent) if knobs else ())]))


def _default(field: Field[Any]) -> Any:
    """The value of a policy's knob that is not set."""
    from batchsim.base.plain import to_plain

    if field.default_factory is not MISSING:
        return to_plain(field.default_factory())
    return "required" if field.default is MISSING else field.default


@one_line_errors
def schema() -> None:
    """Print the JSON schema of a scenario file. Example: batchsim schema > batchsim.schema.json"""
    from batchsim.scenario.schema import schema_text

    typer.echo(schema_text(), nl=False)
