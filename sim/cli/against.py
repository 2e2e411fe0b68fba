"""`batchsim validate --against`: a scenario's engine simulated beside measured runs of a real one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from batchsim.base.errors import ScenarioError
from batchsim.cli.common import chosen_policies
from batchsim.cli.validation import Asked, made_of

if TYPE_CHECKING:
    from batchsim.check.measured.run import MeasuredRun
    from batchsim.check.validation.comparison import Comparison
    from batchsim.scenario import Scenario


def against(asked: Asked, files: Sequence[Path], *, parts: Sequence[str], shift: bool) -> None:
    """Replays the runs of `files` through the scenario's policies, prints the errors and writes NAME.json, .md, .png.

    Runs of the same name in several files are repeats of one. `parts`: texts of which a run's name must hold one.
    """
    from batchsim.check.measured.read import read_measured
    from batchsim.check.validation.against import compare
    from batchsim.report.validation_report import Validation
    from batchsim.results.heading import heading
    from batchsim.scenario.setup import Setup

    scenario = asked.load()
    setup = Setup.of(scenario)
    specs = chosen_policies(scenario, asked.policies)
    runs = [run for file in files for run in _own_log(scenario, file) or read_measured(file)]
    groups = _repeats(runs, parts, setup.model.name)
    stem = asked.path("against", f"{scenario.name}-{files[0].stem}")
    asked.check_validation(stem)
    points: list[Comparison] = []
    for number, runs in enumerate(groups, 1):
        for spec in specs:
            typer.echo(f"{spec.name}, {runs[0].name}: {number} of {len(groups)}", err=True)
            points.append(compare(setup, spec, runs, shift=shift))
    cost, names = setup.cost.sources(), [str(file) for file in files]
    validation = Validation(
        name=stem.name,
        scenario=scenario.name,
        heading=f"{heading(setup)} · beside {', '.join(file.name for file in files)}",
        made=made_of(scenario, cost=cost, kv_blocks=setup.kv.num_blocks, files=names),
        points=tuple(points),
    )
    asked.write(validation, stem)


def _own_log(scenario: Scenario, file: Path) -> list[MeasuredRun]:
    """The scenario's own trace as a measured run, where `file` is that and has latencies; [] for others."""
    from batchsim.check.measured.client_faults import with_faults
    from batchsim.check.measured.log import measured_log, tells_latencies
    from batchsim.workload.traces.read_trace import read_trace

    trace = scenario.file.workload.trace
    if trace is None or not file.exists() or not (scenario.base / trace.path).exists():
        return []
    if not (scenario.base / trace.path).samefile(file):
        return []
    rows = read_trace(replace(trace, rate_scale=None, jitter=0), scenario.base)
    return [with_faults(measured_log(rows))] if tells_latencies(rows) else []


def _repeats(runs: Sequence[MeasuredRun], parts: Sequence[str], model: str) -> list[list[MeasuredRun]]:
    """The runs whose part holds one of `parts`, of files of several models those of `model`, those of one part
    together. ScenarioError where no part does, MeasuredError where none is of the model."""
    from batchsim.check.measured.select import runs_of_model

    named = [run for run in runs if not parts or any(text in run.part for text in parts)]
    if not named:
        known = ", ".join(dict.fromkeys(run.part or "one without a name" for run in runs[:12]))
        raise ScenarioError(f"--part {parts[0]}: no run is so called. There are {known}. Write a piece of a name.")
    groups: dict[str, list[MeasuredRun]] = {}
    for run in runs_of_model(named, model):
        groups.setdefault(run.part, []).append(run)
    return list(groups.values())
