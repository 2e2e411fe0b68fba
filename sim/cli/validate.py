"""`batchsim validate`: the same requests simulated and live, and the error between the two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchsim.base.errors import BatchsimError, ScenarioError
from batchsim.base.files import writing
from batchsim.base.ranges import INT32_MAX
from batchsim.cli import complete, option
from batchsim.cli.against import against as compare_files
from batchsim.cli.common import check_loads, one_line_errors, require_torch
from batchsim.cli.live import INTERRUPTED_EXIT, check_kv_stated, load_runner, prepare_machine
from batchsim.cli.steps import validate_steps
from batchsim.cli.validation import Asked, made_of

if TYPE_CHECKING:
    from batchsim.calibrate.engine.session import LiveResult
    from batchsim.check.validation.live_runs import Played, ValidationSetup
    from batchsim.check.validation.planned_points import PlannedPoint
    from batchsim.report.validation_report import Validation
    from batchsim.scenario.setup import Setup

_NONE_WITH = {
    "steps": ("at loads from_ against part device repeats seed shift", "compares recorded steps alone"),
    "against": ("at loads from_ device repeats seed", "the file says the loads, and nothing runs live"),
    "from_": ("at loads device repeats seed shift", "judges the live runs saved there, as they were made"),
}
"""By the option that says what is compared, those without effect beside it, and why."""


@one_line_errors
def validate(
    context: typer.Context,
    scenario: option.Scenario,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu or cuda.")] = "cpu",
    policy: Annotated[
        list[str] | None,
        typer.Option(help="A policy's label; all by default. Repeatable.", autocompletion=complete.policies),
    ] = None,
    at: Annotated[
        str | None, typer.Option(metavar="50%,80%", help="Loads as shares of each policy's saturation.")
    ] = None,
    loads: Annotated[str | None, typer.Option(metavar="2,4", help="Loads on the scenario's own axis.")] = None,
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="Live runs of every point, for their spread.")] = 3,
    seed: Annotated[int, typer.Option(min=0, max=INT32_MAX, help="Which draw of the requests.")] = 0,
    set_: option.Set = None,
    from_: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Judge the live runs saved there; nothing runs live.")
    ] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="A measured run of a real engine to compare with; nothing runs live. Repeatable."
        ),
    ] = None,
    part: Annotated[
        list[str] | None,
        typer.Option(help="Of --against: the runs whose name holds this; all by default. Repeatable."),
    ] = None,
    steps: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="LOG", help="A log with an engine's own steps to compare step times with; nothing runs. Repeatable."
        ),
    ] = None,
    shift: Annotated[
        bool, typer.Option(help="Of --against: find also by how much load the simulation is off; 17 simulations a run.")
    ] = True,
    name: Annotated[str | None, typer.Option(help="NAME of the files written; the scenario's by default.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for validation-NAME.*")] = Path("results/reference"),
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the JSON here.")] = None,
    traces: option.Traces = None,
    allow_code: option.AllowCode = False,
) -> None:
    """Simulate a scenario and run it live on the same requests; report by how much the simulation was wrong.

    Latencies, step times, the shift along the load axis and the first step that differs, with the spread of the live
    runs beside each. By default at 50 % and 80 % of every policy's saturation.

    With --against nothing runs live: the requests of a benchmark's file (vllm bench serve, SGLang, guidellm, aiperf,
    inference-perf, a table of your own, or the scenario's own trace where its columns tell ttft or e2e) are simulated,
    whatever the scenario's workload and load. With --steps neither is: the time of every step in a log of vLLM, SGLang
    or Dynamo is predicted from its contents.

    Examples: batchsim validate live-demo --set cost=my-cpu.json; batchsim validate chat --device cuda --policy vllm
    --at 50%,80%,95%; batchsim validate chat --from campaign/runs; batchsim validate mine.yaml --against result.json;
    batchsim validate mine.yaml --steps vllm.log
    """
    _check_given(context)
    asked = Asked(scenario, set_, traces, allow_code, policy or [], name, out, json_file)
    if steps:
        validate_steps(asked, steps)
    elif against:
        compare_files(asked, against, parts=part or [], shift=shift)
    elif part:
        raise ScenarioError(f"--part {part[0]}: names runs of --against. Add that, or drop it.")
    elif not shift:
        raise ScenarioError("--no-shift: is of --against. Add that, or drop it.")
    else:
        _compare_live(asked, device=device, at=at, loads=loads, repeats=repeats, seed=seed, saved=from_)


def _compare_live(
    asked: Asked, *, device: str, at: str | None, loads: str | None, repeats: int, seed: int, saved: Path | None
) -> None:
    """Runs the scenario live, or reads the runs `saved` in a folder; writes and prints how its simulation compares."""
    loaded = asked.load()  # before what takes long to import
    from batchsim.check.validation.live_runs import ValidationSetup
    from batchsim.check.validation.planned_points import (
        check_profile,
        parse_loads,
        parse_shares,
        plan,
        planned,
        saturations,
    )
    from batchsim.scenario.setup import Setup

    shares = None if at is None else parse_shares(at)
    stated = None if loads is None else parse_loads(loads)
    if loaded.load_name != "mean_rate" and stated is None and saved is None:
        check_loads(loaded)  # without saturations to take shares of, the loads must be stated
    setup = Setup.of(loaded)
    setup.check_can_be_real()
    check_profile(setup.cost)
    chosen = [loaded.find(label) for label in asked.policies] or list(loaded.specs)
    case = ValidationSetup(setup, seed)
    stem = asked.path("validation", loaded.name)
    asked.check_validation(stem, steps=True)
    if saved is not None:
        case, by_point = _saved(case, saved, [policy.name for policy in chosen])
        runs = list(by_point.values())
        labels = dict.fromkeys(label for label, _ in by_point)
        saturation = saturations(case, [loaded.find(label) for label in labels], _not_known)
        points = [planned(loaded.find(label), load, saturation) for label, load in by_point]
    else:
        saturation = saturations(case, chosen, None if stated is None else _not_known)
        points = plan(case, chosen, saturation, shares=shares, loads=stated)
        check_kv_stated(setup)  # a live run needs a number that holds
        folder = stem.with_name(f"{stem.name}-runs")
        runs = _live(setup, case, points, device, repeats, folder)
    asked.write(_judged(setup, case, points, runs, saturation, stem), stem)


def _check_given(context: typer.Context) -> None:
    """ScenarioError that names the options given which have no effect beside --steps, --against or --from."""
    way = next((name for name in _NONE_WITH if context.params[name]), None)
    if way is None:
        return
    without, why = _NONE_WITH[way]
    given = []
    for name in without.split():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            off = "no-" if context.params[name] is False else ""
            given.append(f"--{off}{name.strip('_')}")
    if given:
        raise ScenarioError(f"--{way.strip('_')}: {why}. Drop {', '.join(given)}.")


def _not_known(error: ScenarioError) -> None:
    typer.echo(f"share of saturation not known: {error}", err=True)


def _saved(
    case: ValidationSetup, folder: Path, policies: Sequence[str]
) -> tuple[ValidationSetup, dict[tuple[str, float], list[Played]]]:
    """The live runs saved in `folder`: the case they are of, and the runs by policy and load."""
    from batchsim.calibrate.engine.session import digest_of, load_result
    from batchsim.check.validation.planned_points import sort_saved

    files = sorted(folder.glob("*.npz"))
    if not files:
        raise ScenarioError(f"--from {folder}: holds no live runs (*.npz). Give the folder of a campaign.")
    results, profile = [load_result(path) for path in files], case.setup.cost.profile
    fitted = {} if profile is None else profile.made.get("live_runs_fitted", {})
    judging_itself = [path.name for path in files if fitted and digest_of(path) in fitted]
    if judging_itself:
        raise ScenarioError(
            f"--from {folder}: the cost was fitted to {', '.join(judging_itself)}, which cannot judge it. Take out of"
            " the folder what the cost was fitted to."
        )
    saved = sort_saved(case, results, policies)
    if saved.num_others:
        typer.echo(f"{saved.num_others} of {len(files)} live runs are of other scenarios or policies", err=True)
    return saved.case, saved.points


def _live(
    setup: Setup, case: ValidationSetup, points: Sequence[PlannedPoint], device: str, repeats: int, folder: Path
) -> list[list[Played]]:
    """Runs every point `repeats` times, keeps each run in `folder`, and returns the runs of each point.

    All points run once, then all again, so that drift of the machine shows in the spread of a point.
    """
    require_torch("validate")
    from batchsim.calibrate.engine.session import run_live, step_limits
    from batchsim.calibrate.profile.this_machine import Sentinel
    from batchsim.check.validation.live_runs import void
    from batchsim.drive.live import INTERRUPTED

    graphs = prepare_machine(setup, device)
    limits = [step_limits(case.setup, (point.policy,), point.load, case.seed) for point in points]
    runner = load_runner(case.setup, limits, device=device, weights=None, graphs=graphs)
    with writing(folder, "Give another folder with --out."):
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob("[0-9][0-9]-*[0-9].npz"):  # runs of an earlier validation of this name
            stale.unlink()
    sentinel = None if setup.cost.profile is None else Sentinel.of(setup.cost.profile)
    runs: list[list[Played]] = [[] for _ in points]
    counting = [0] * len(points)
    for repeat in range(2 * repeats):  # the second half stands in for runs that do not count
        for number, point in enumerate(points):
            if counting[number] >= min(repeat + 1, repeats):
                continue
            typer.echo(f"{point.policy.name} at load {point.load:.4g}, {counting[number] + 1} of {repeats}", err=True)
            where = (case.setup, point.policy, point.load, case.seed)
            run: LiveResult = run_live(*where, runner, repeat=repeat, estimator=case.setup.cost, sentinel=sentinel)
            run.save(folder / f"{number:02}-{repeat}.npz")
            if run.reason == INTERRUPTED:
                typer.echo(f"interrupted. The live runs that were done are kept in {folder}.", err=True)
                raise typer.Exit(INTERRUPTED_EXIT)
            if run.error is not None and not isinstance(run.error, BatchsimError):
                raise run.error  # a bug; the run up to it is kept
            runs[number].append(run)
            why = void(run)
            counting[number] += not why
            if why:
                typer.echo(f"  does not count: {why}", err=True)
    return runs


def _judged(
    setup: Setup,
    case: ValidationSetup,
    points: Sequence[PlannedPoint],
    runs: Sequence[Sequence[Any]],
    saturation_rps: dict[str, float],
    stem: Path,
) -> Validation:
    """Every point judged by its live runs."""
    from batchsim.check.validation.live_runs import judge
    from batchsim.check.validation.verdicts import BOUNDS
    from batchsim.report.validation_report import Judged, Validation
    from batchsim.results.heading import heading

    made = runs[0][0].made
    machine = made["hardware"].get("gpu") or made["hardware"].get("cpu")
    on = f"{machine}, torch {made['software'].get('torch')}, weights {made['weights']}"
    facts = {"live": made, "cost": setup.cost.sources(), "kv_blocks": case.setup.kv.num_blocks, "seed": case.seed}
    return Validation(
        name=stem.name.removeprefix("validation-"),
        scenario=setup.scenario.name,
        heading=f"{heading(setup)} · live on {made['device']}: {on}",
        made=made_of(setup.scenario, **facts),
        points=tuple(judge(case, p.policy, p.load, p.share, lives) for p, lives in zip(points, runs, strict=True)),
        judged=Judged(case.setup.load_name, BOUNDS[made["device"]], saturation_rps),
    )
