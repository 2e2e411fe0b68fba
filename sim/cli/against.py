"""`batchsim validate --against`: a scenario's engine simulated beside measured runs of a real one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from batchsim.base.errors import ScenarioError
from batchsim.base.files import Kind, check_replaceable, write_text, writing
from batchsim.cli.common import check_out, check_output, read_scenario

if TYPE_CHECKING:
    from batchsim.check.measured.run import MeasuredRun
    from batchsim.scenario import Scenario


def against(
    scenario: str,
    files: Sequence[Path],
    *,
    parts: Sequence[str],
    policies: Sequence[str],
    shift: bool,
    set_: list[str] | None,
    name: str | None,
    out: Path,
    json_file: Path | None,
    traces: Path | None,
    allow_code: bool,
) -> None:
    """Replays the runs of `files` through the scenario's policies, prints the errors and writes NAME.json, .md, .png.

    Runs of the same name in several files are repeats of one. `parts`: texts of which a run's name must hold one.
    """
    from batchsim.check.measured.read import read_measured
    from batchsim.check.validation.against import compare
    from batchsim.report.pictures.against_plots import KIND, draw_against
    from batchsim.report.text.against_text import JSON, PAGE, markdown, report, to_json
    from batchsim.results.heading import heading
    from batchsim.results.provenance import provenance
    from batchsim.scenario.point import Setup

    loaded = read_scenario(scenario, set_, traces, "validate", allow_code=allow_code)
    setup = Setup.of(loaded)
    chosen = [spec for spec in loaded.specs if not policies or {spec.name, spec.label} & set(policies)]
    if unknown := set(policies) - {text for spec in loaded.specs for text in (spec.name, spec.label)}:
        known = ", ".join(spec.name for spec in loaded.specs)
        raise ScenarioError(f"--policy {sorted(unknown)[0]}: the scenario has {known}. Write one of them.")
    runs = [run for file in files for run in _own_log(loaded, file) or read_measured(file)]
    groups = _repeats(runs, parts, setup.model.name)
    stem = out / f"against-{name or f'{loaded.name}-{files[0].stem}'}"
    check_out(out)
    check_files({f"{stem}.json": JSON, f"{stem}.md": PAGE, f"{stem}.png": KIND}, json_file)
    found = []
    for number, runs in enumerate(groups, 1):
        for spec in chosen:
            typer.echo(f"{spec.name}, {runs[0].name}: {number} of {len(groups)}", err=True)
            found.append(compare(setup, spec, runs, shift=shift))
    facts = {"cost": setup.cost.sources(), "kv_blocks": setup.kv.num_blocks, "scenario": loaded.plain}
    made = provenance() | facts | {"files": [str(file) for file in files]}
    title = f"{heading(setup)} · beside {', '.join(file.name for file in files)}"
    text = to_json(stem.name, title, found, made)
    picture = stem.with_name(f"{stem.name}.png")
    with writing(out, "Give another folder with --out."):
        out.mkdir(parents=True, exist_ok=True)
        draw_against(title, found, picture)
        write_text(stem.with_name(f"{stem.name}.json"), text, JSON)
        write_text(stem.with_name(f"{stem.name}.md"), markdown(stem.name, title, found, made, picture.name), PAGE)
    if json_file is not None:
        with writing(json_file, "Give another path with --json."):
            write_text(json_file, text, JSON)
    typer.echo("  ".join(f"{stem}{end}" for end in (".json", ".md", ".png")), err=True)
    typer.echo(report(title, found))


def check_files(files: Mapping[str, Kind], json_file: Path | None) -> None:
    """ScenarioError where one of `files` to be written, or the `json_file` of the kind of the first, would replace what
    is of another kind: asked before the work."""
    for path, kind in files.items():
        with writing(path, "Give another --name, or another folder with --out."):
            check_replaceable(path, kind)
    if json_file is not None:
        check_output(json_file, next(iter(files.values())), "Give another path with --json.")


def _own_log(scenario: Scenario, file: Path) -> list[MeasuredRun]:
    """The scenario's own trace as a measured run, where `file` is that and tells latencies; [] for others."""
    from batchsim.check.measured.client_faults import with_faults
    from batchsim.check.measured.log import measured_log, tells_latencies
    from batchsim.workload.traces import read_trace

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
