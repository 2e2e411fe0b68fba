"""Which inputs and which code made a result, and how it is written as text.

A point's hash covers what determines its records: the scenario, the policy's knobs (and source, if it is a user's own),
load, seed, the trace's bytes, batchsim's own code and the version of the library that draws.
"""

from __future__ import annotations

import csv
import hashlib
import inspect
import io
import json
import os
import platform
import subprocess
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from batchsim.base.files import file_hash, write_text
from batchsim.base.plain import to_plain
from batchsim.cost.drafter import draft_sources
from batchsim.results.fleet_inputs import energy_words
from batchsim.scenario import Point, PolicySpec
from batchsim.scenario.own_code import own_kinds
from batchsim.scenario.setup import Setup
from batchsim.workload.predictors import OwnPredictor

PROVENANCE = ("machine", "python", "packages", "code", "commit")
"""The keys of `provenance`: how a result was made, nothing of what it is."""
_SHOWN = 60  # letters of a version in a message
_AXES = ("policies", "load", "seeds", "vary", "plan")  # which points there are, not what one is


def identity(setup: Setup) -> dict[str, Any]:
    """Everything but policy, load and seed that determines a point's records and metrics."""
    scenario = setup.scenario
    trace = scenario.file.workload.trace
    shared = {key: value for key, value in scenario.plain.items() if key not in _AXES}
    return {
        "scenario": shared,
        "model": to_plain(setup.model),
        "cost": [str(source) for source in cost_sources(setup)],
        "own": [_source_hash(kind) for kind in own_kinds(scenario.file)],
        "trace": None if trace is None else _file_hash(scenario.base / trace.path),
        "code": code_hash(),
        "numpy": np.__version__,  # whose generators draw the requests
    }


def cost_sources(setup: Setup) -> list[str]:
    """Where the cost of steps comes from, of every group of replicas."""
    setups = [group.setup for group in setup.groups] or [setup]
    sources = [
        source
        for one in setups
        for source in (*one.cost.sources(), energy_words(one), *draft_sources(one.scenario.cost.draft))
    ]
    return list(dict.fromkeys(sources))


def point_hash(common: dict[str, Any], point: Point) -> str:
    return short_hash([common, spec_identity(point.spec), point.load, point.seed])


def spec_identity(spec: PolicySpec) -> list[Any]:
    """What determines how a policy acts, and how its points are called."""
    predictor = None if spec.predictor is None else asdict(spec.predictor)
    if isinstance(spec.predictor, OwnPredictor):
        predictor = [predictor, spec.predictor.kind, _source_hash(type(spec.predictor))]
    return [spec.kind, _source_hash(spec.policy), spec.knobs, predictor, spec.label, spec.variant]


def short_hash(value: Any) -> str:
    return hashlib.sha256(as_json(value, sort_keys=True).encode(errors="backslashreplace")).hexdigest()[:12]


@cache
def _source_hash(kind: Any) -> str | None:
    """The hash of the file of a user's own class; None for ours, which `code_hash` covers."""
    if kind.__module__.startswith("batchsim."):
        return None
    return _file_hash(Path(inspect.getfile(kind)))


@cache
def code_hash() -> str:
    """A fingerprint of batchsim's own source, so that a changed simulator never reuses old points."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    own = [path for path in root.rglob("*.py") if path.relative_to(root).parts[0] not in ("calibrate", "scenarios")]
    for path in sorted(own):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _file_hash(path: Path) -> str | None:
    """The hash of a trace file; None where it cannot be read, which reading it will report."""
    try:
        return file_hash(path)
    except OSError:
        return None


def provenance() -> dict[str, Any]:
    """Machine, Python, packages, code and commit that make a run here."""
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "packages": packages(),
        "code": code_hash(),
        "commit": _commit(),
    }


def other_version(made: dict[str, Any]) -> str:
    """How the batchsim and the packages that made a manifest differ from those here, in words; empty if they do not."""
    then = {"code": made.get("code", "unknown")}
    then |= made["packages"] if isinstance(made.get("packages"), dict) else {}
    here = {"code": code_hash(), **packages()}
    differ = {name: have for name, have in then.items() if have != here.get(name, have)}
    return ", ".join(f"{name} {str(have)[:_SHOWN]}, here {here[name]}" for name, have in differ.items())


@cache
def packages() -> dict[str, str]:
    """The versions of batchsim and of all that has a part in a result."""
    versions = {}
    for name in ("batchsim", "simpy", "numpy", "pandas", "scipy", "pyarrow"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions


@cache
def _commit() -> str | None:
    """The commit of a source checkout; None elsewhere."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    write_text(path, csv_text(rows))


def csv_text(rows: list[dict[str, Any]]) -> str:
    """The rows as CSV with the columns of the first; nothing stands for None."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows({key: "" if value is None else value for key, value in row.items()} for row in rows)
    return text.getvalue()


def as_json(value: Any, *, indent: int | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, indent=indent, sort_keys=sort_keys, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} cannot be written as JSON")
