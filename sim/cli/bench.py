"""`batchsim calibrate --bench`: what an engine's steps cost, from files of benchmarks that were run against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from batchsim.base.errors import MeasuredError, ScenarioError
from batchsim.base.files import write_text, writing
from batchsim.cli.common import check_output, chosen_policies, read_scenario

if TYPE_CHECKING:
    from batchsim.check.measured.run import MeasuredRun
    from batchsim.fit.engine_fit import EngineFit
    from batchsim.scenario.config import PolicySpec, Scenario

SUFFIXES = (".json", ".jsonl", ".csv")
"""Of the files that are read of a folder."""
REFUSED_EXIT = 1


@dataclass(frozen=True)
class FitOptions:
    """The options that every way of `calibrate` has which fits an engine: the scenario that describes it, its changes
    and its policy, and the file to write."""

    scenario: str | None
    out: Path | None
    policy: str | None
    set_: list[str] | None
    force: bool
    allow_code: bool

    def path(self, way: str) -> Path:
        """The file that the option `way` writes. ScenarioError where none is given, or it cannot be written."""
        from batchsim.scenario.fit_file import KIND

        if self.out is None:
            raise ScenarioError(f"calibrate {way}: -o is missing. Give the file to write, like -o mine.json.")
        if self.out.suffix != ".json":
            raise ScenarioError(
                f"-o {self.out}: does not end in .json, by which a cost is known as a file. Give a name that does."
            )
        check_output(self.out, KIND, "Give -o another path.")
        return self.out

    def load(self, way: str) -> Scenario:
        """The scenario. ScenarioError where none is given, or it cannot be read."""
        if self.scenario is None:
            raise ScenarioError(
                f"calibrate {way}: --scenario is missing. Give one that says engine, model, cost and KV."
            )
        return read_scenario(self.scenario, self.set_, None, "calibrate", allow_code=self.allow_code)

    def write(self, engine_fit: EngineFit, text: str, out: Path, judge: str) -> None:
        """Prints a fit as `text` and writes it to `out`, where it keeps what it claims; `judge` is the option of
        `validate` that holds it against other measurements.

        typer.Exit with REFUSED_EXIT, and nothing written, where it does not, unless --force is given.
        """
        from batchsim.results.provenance import provenance
        from batchsim.scenario.fit_file import KIND

        typer.echo(text)
        for line in engine_fit.violations:
            typer.echo(line, err=True)
        if engine_fit.violations and not self.force:
            typer.echo(
                f"{out}: not written: {len(engine_fit.violations)} errors are above what the fit claims, or can claim."
                " Look at its runs and the scenario, or write it all the same with --force.",
                err=True,
            )
            raise typer.Exit(REFUSED_EXIT)
        with writing(out, "Give -o another path."):
            write_text(out, engine_fit.to_json(provenance()), KIND)
        typer.echo(f"{out}: use it with cost: {out}, hold it against other runs with batchsim validate {judge}")


def calibrate_bench(
    options: FitOptions,
    files: Sequence[Path],
    parts: Sequence[str],
    hold_out: Sequence[str],
    notes: Sequence[str] = (),
) -> None:
    """Fits the engine of the scenario to the runs of `files`, prints the fit and writes it; `notes`, of how the files
    were measured, go into both."""
    from batchsim.fit.engine_fit import fit_engine
    from batchsim.report.text.fit_text import report
    from batchsim.scenario.setup import Setup

    loaded, path = options.load("--bench"), options.path("--bench")
    setup = Setup.of(loaded)
    runs, held = chosen(files, parts, hold_out, setup.model.name)
    specs = policy_of(loaded, options.policy, [*runs, *held])
    engine_fit = fit_engine(setup, lambda run: specs[run.name], runs, held, lambda text: typer.echo(text, err=True))
    engine_fit = replace(engine_fit, notes=(*engine_fit.notes, *notes))
    options.write(engine_fit, report(engine_fit), path, "--against")


def policy_of(scenario: Scenario, label: str | None, runs: Sequence[MeasuredRun]) -> dict[str, PolicySpec]:
    """By a run's name its policy: the only one, that of `label`, or the one whose name is in the run's, between commas.

    ScenarioError where none is, or there is no policy of that label.
    """
    specs = chosen_policies(scenario, [label] if label else [])
    names = ", ".join(spec.name for spec in scenario.specs)
    by_run: dict[str, PolicySpec] = {}
    for run in runs:
        words = [word.strip() for word in run.part.split(",")]
        named = [spec for spec in specs if len(specs) == 1 or {spec.name, spec.label} & {*words}]
        if len(named) != 1:
            raise ScenarioError(
                f"{scenario.source}: has {len(specs)} policies ({names}), and {run.name} does not name one. Say which"
                " with --policy, or keep one."
            )
        by_run[run.name] = named[0]
    return by_run


def chosen(
    files: Sequence[Path], parts: Sequence[str], hold_out: Sequence[str], model: str
) -> tuple[list[MeasuredRun], list[MeasuredRun]]:
    """(given, held out) of the runs of `files`, folders among them meaning all their SUFFIXES, whose names hold one of
    `parts`; where they are of several models, of those of `model`. Each `hold_out` is a file, or a piece of names;
    without one the rule of `batchsim.fit.measured_loads` applies."""
    from batchsim.check.measured.read import read_measured
    from batchsim.check.measured.select import runs_of_model
    from batchsim.fit.measured_loads import split

    runs = [run for file in files_of(files) for run in read_measured(file)]
    if parts:
        runs = [run for run in runs if any(text in run.name for text in parts)]
        if not runs:
            raise ScenarioError(f"--part {parts[0]}: no run is so called. Write a piece of a name.")
    runs = runs_of_model(runs, model)
    if not hold_out:
        return split(runs)
    held: list[MeasuredRun] = []
    for text in hold_out:
        there = Path(text)
        if there.exists():
            named = runs_of_model([run for file in files_of([there]) for run in read_measured(file)], model)
        else:
            named = [run for run in runs if text in run.name]
        if not named:
            names = ", ".join(run.name for run in runs[:6])
            raise ScenarioError(f"--hold-out {text}: is no file, and no run is so called. There are {names}.")
        held += named
    apart = {(Path(run.source).resolve(), run.part) for run in held}
    given = [run for run in runs if (Path(run.source).resolve(), run.part) not in apart]
    if not given:
        raise MeasuredError(f"--hold-out {hold_out[0]}: no run is left to fit to. Hold out fewer, or give more files.")
    return given, [*{run.name: run for run in held}.values()]


def is_beside(path: Path) -> bool:
    """Whether a file of a folder is no run of its own: what aiperf writes beside the records of its requests."""
    return path.name.startswith("profile_export_aiperf.") and path.with_name("profile_export.jsonl").is_file()


def files_of(given: Sequence[Path], suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """The files, and those of folders that end in one of `suffixes`, by name. MeasuredError for a folder without any,
    and for a file given twice."""
    files: list[Path] = []
    for path in given:
        inside = sorted(one for one in path.iterdir() if one.suffix in suffixes) if path.is_dir() else [path]
        inside = [one for one in inside if not (path.is_dir() and is_beside(one))]
        if not inside:
            raise MeasuredError(f"{path}: holds no {', '.join(suffixes)} file. Give the folder of measured runs.")
        files += inside
    real = [path.resolve() for path in files]
    for number, path in enumerate(real):
        if path in real[:number]:
            raise MeasuredError(f"{files[number]}: is given twice, and would count twice. Give it once.")
    return files
