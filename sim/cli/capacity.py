"""`batchsim capacity`: the highest load each policy sustains within the SLO."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from batchsim.base.ranges import MAX_POINTS
from batchsim.cli import complete, option
from batchsim.cli.common import limits_of, one_line_errors, print_json, progress_lines, read_scenario, where_points_run

_precise = partial(typer.Option, rich_help_panel=option.PRECISION)


@one_line_errors
def capacity(
    scenario: option.Scenario,
    slo: Annotated[str | None, typer.Option(help="The objective, in place of the scenario's.")] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL",
            help="A policy's label; all by default. Repeatable.",
            autocompletion=complete.policies,
        ),
    ] = None,
    jobs: option.Jobs = None,
    executor: option.Executor = "local",
    address: option.Address = None,
    out: option.Out = Path("results"),
    set_: option.Set = None,
    precision: Annotated[str, _precise(help="Add seeds until half the interval is this share of the capacity.")] = "3%",
    max_seeds: Annotated[int, _precise(min=3, max=10_000, help="Most seeds of a load.")] = 32,
    max_probes: Annotated[int, _precise(min=5, max=1000, help="Most loads at which a policy is tried.")] = 40,
    only_rates: Annotated[
        bool, typer.Option("--only-rates", help="Only find the loads, not the changes that would raise them.")
    ] = False,
    html: option.Html = False,
    traces: option.Traces = None,
    allow_code: option.AllowCode = False,
    max_points: option.MaxPoints = MAX_POINTS,
    max_memory: option.MaxMemory = None,
    as_json: option.Json = False,
) -> None:
    """Find the highest load that each policy sustains within the SLO, what breaks first, and what would help.

    Loads near the boundary are repeated with more seeds until they are decided; every probe is kept and reused.

    Examples: batchsim capacity bursty --policy continuous; batchsim capacity chat --slo 'ttft<2s & tpot<50ms @ 99%'
    --jobs 2 --json
    """
    overrides = [*(set_ or []), *([f"slo={json.dumps(slo)}"] if slo is not None else [])]
    loaded = read_scenario(scenario, overrides, traces, "capacity", allow_code=allow_code)
    from batchsim.api.studies import capacity_effort
    from batchsim.report.page.capacity_page import write_capacity_page
    from batchsim.report.pictures.capacity_picture import capacity_picture
    from batchsim.report.text.capacity_text import capacity_json, capacity_text
    from batchsim.report.text.summary_text import fit
    from batchsim.study.capacity.capacities import keep_capacity
    from batchsim.study.capacity.find import find_capacities
    from batchsim.study.sweep.points import Sweep, keeping

    effort = capacity_effort(precision, max_seeds, max_probes, "--precision")
    where = where_points_run(jobs, executor, address)
    with progress_lines() as progress:
        sweep = Sweep(out / loaded.name, progress=progress, limits=limits_of(max_points, max_memory), **where)
        sweep.hold()
        study = find_capacities(loaded, sweep, policies=policy or [], effort=effort, extras=not only_rates)
    text = capacity_text(study)
    folder = keep_capacity(study, sweep, text, capacity_json(study))
    with keeping(sweep.home):
        capacity_picture(study, folder / "capacity.png")
        page = [write_capacity_page(study, folder).name] if html else []
    if as_json:
        print_json(capacity_json(study) | {"path": str(folder)})
    else:
        typer.echo(text)
        files = ["capacity.csv", "probes.csv", "capacity.json", "capacity.txt", "capacity.png", *page]
        typer.echo(fit(f"{folder}/  {'  '.join(files)}"))
