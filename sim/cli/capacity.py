"""`batchsim capacity`: the highest load each policy sustains within the SLO."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from batchsim.base.errors import ScenarioError
from batchsim.base.ranges import MAX_POINTS
from batchsim.cli.common import (
    AddressOption,
    AllowCodeOption,
    ExecutorOption,
    JobsOption,
    JsonOption,
    MaxMemoryOption,
    MaxPointsOption,
    TracesOption,
    limits_of,
    one_line_errors,
    print_json,
    read_scenario,
    where_points_run,
)
from batchsim.cli.runs import ProgressBar


@one_line_errors
def capacity(
    scenario: Annotated[str, typer.Argument(help="A YAML file, or the name of a shipped scenario.")],
    slo: Annotated[str | None, typer.Option(help="The objective, in place of the scenario's.")] = None,
    policy: Annotated[list[str] | None, typer.Option(metavar="LABEL", help="One policy, several times.")] = None,
    jobs: JobsOption = None,
    executor: ExecutorOption = "local",
    address: AddressOption = None,
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("results"),
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY.KEY=VALUE", help="Change a key.")] = None,
    precision: Annotated[str, typer.Option(help="Half of the interval that is narrow enough.")] = "3%",
    max_seeds: Annotated[int, typer.Option(min=3, max=10_000, help="Seeds of a probe at most.")] = 32,
    max_probes: Annotated[int, typer.Option(min=5, max=1000, help="Loads that a policy is tried at, at most.")] = 40,
    only_rates: Annotated[bool, typer.Option("--only-rates", help="Leave out what would change them.")] = False,
    traces: TracesOption = None,
    allow_code: AllowCodeOption = False,
    max_points: MaxPointsOption = MAX_POINTS,
    max_memory: MaxMemoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the highest load that each policy sustains within the SLO, what breaks first, and what would help.

    Loads near the boundary are repeated with more seeds until they are decided; every probe is kept and reused.

    Examples: batchsim capacity bursty --policy continuous; batchsim capacity chat --slo 'ttft<2s & tpot<50ms @ 99%'
    --jobs 2 --json
    """
    from dataclasses import replace

    from batchsim.base.units import parse_share
    from batchsim.report.pictures.capacity_picture import capacity_picture
    from batchsim.report.text.capacity_text import capacity_json, capacity_text
    from batchsim.report.text.summary_text import fit
    from batchsim.study.capacity.find import find_capacities
    from batchsim.study.capacity.keep_capacity import keep_capacity
    from batchsim.study.capacity.search import Effort
    from batchsim.study.sweep.points import Sweep, keeping

    overrides = [*(set_ or []), *([f"slo={json.dumps(slo)}"] if slo is not None else [])]
    loaded = read_scenario(scenario, overrides, traces, "capacity", allow_code=allow_code)
    try:
        share = parse_share(precision)
        if not 0.002 <= share <= 0.5:
            raise ValueError(f"{precision} is not from 0.2% to 50%. Write for example 3%.")
    except ValueError as error:
        raise ScenarioError(f"--precision: {error}") from None
    effort = Effort(precision=share, most=max_seeds, max_probes=max_probes)
    effort = replace(effort, fewest=min(effort.fewest, max_seeds))
    where = where_points_run(jobs, executor, address)
    with ProgressBar() as progress:
        sweep = Sweep(out / loaded.name, progress=progress, limits=limits_of(max_points, max_memory), **where)
        sweep.hold()
        study = find_capacities(loaded, sweep, policies=policy or [], effort=effort, extras=not only_rates)
    text = capacity_text(study)
    folder = keep_capacity(study, sweep, text, capacity_json(study))
    with keeping(sweep.home):
        capacity_picture(study, folder / "capacity.png")
    if as_json:
        print_json(capacity_json(study) | {"path": str(folder)})
    else:
        typer.echo(text)
        typer.echo(fit(f"{folder}/  capacity.csv  probes.csv  capacity.json  capacity.txt  capacity.png"))
