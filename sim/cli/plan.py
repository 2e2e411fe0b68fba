"""`batchsim plan`: how many GPUs of which kind, at what cost, and how sure that is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from batchsim.base.errors import ScenarioError
from batchsim.base.files import writing
from batchsim.base.ranges import MAX_POINTS
from batchsim.cli import complete, option
from batchsim.cli.common import (
    check_out,
    limits_of,
    one_line_errors,
    print_json,
    progress_lines,
    read_scenario,
    where_points_run,
)


@one_line_errors
def plan(
    scenario: Annotated[
        str,
        typer.Argument(
            help="A YAML file with a plan, or the name of a shipped scenario.", autocompletion=complete.scenarios
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the report; results/SCENARIO/plan by default.")
    ] = None,
    jobs: option.Jobs = None,
    executor: option.Executor = "local",
    address: option.Address = None,
    out: Annotated[Path, typer.Option(help="Folder for the simulations, which are reused.")] = Path("results"),
    set_: option.Set = None,
    traces: option.Traces = None,
    allow_code: option.AllowCode = False,
    max_points: option.MaxPoints = MAX_POINTS,
    max_memory: option.MaxMemory = None,
    as_json: option.Json = False,
) -> None:
    """Find the cheapest group of replicas that keeps the SLO under the traffic of a plan, and write a report of it.

    Example: batchsim plan plan -o my-plan --set plan.target.rate=40/s
    """
    where = where_points_run(jobs, executor, address)
    limits = limits_of(max_points, max_memory)
    loaded = read_scenario(scenario, set_, traces, "plan", allow_code=allow_code)
    from batchsim.report.layout import fit
    from batchsim.report.page.plan_page import check_own, write_report
    from batchsim.report.page.plan_text import plan_json, plan_text
    from batchsim.study.planning.plan_tables import plan_tables

    folder = output or out / loaded.name / "plan"
    check_out(folder, "Give another folder with -o.")
    with writing(folder, "Give another folder with -o."):
        check_own(folder)
    with progress_lines() as progress:
        tables = plan_tables(loaded, out=out, **where, progress=progress, tell=_to_stderr, limits=limits)
    currency = loaded.file.plan.currency if loaded.file.plan is not None else ""
    with writing(folder, "Give another folder with -o."):
        files = write_report(tables, loaded.name, currency, folder)
    if as_json:
        print_json(plan_json(tables, currency))
    else:
        typer.echo(plan_text(tables, currency))
        names = "  ".join(file.name for file in files if file.suffix != ".json")
        typer.echo(fit(f"{folder}/  {names}"))
    if "recommendation" not in tables:
        reasons = "; ".join(f"{row['gpu']}, {row['policy']}: {row['why_not']}" for row in tables["configurations"])
        raise ScenarioError(f"{loaded.source}: no configuration holds the traffic. {reasons}. {folder} has the tables.")


def _to_stderr(text: str) -> None:
    from batchsim.report.layout import fit

    typer.echo(fit(text), err=True)
