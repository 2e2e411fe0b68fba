"""`batchsim record`: the scheduler of an installed engine, recorded on the requests of a scenario."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from batchsim.base.errors import ScenarioError
from batchsim.base.files import writing
from batchsim.cli import option
from batchsim.cli.common import check_loads, check_output, chosen_policies, one_line_errors, read_scenario


@one_line_errors
def record(
    scenario: option.Scenario,
    engine: Annotated[Literal["vllm"], typer.Option(help="The engine whose scheduler is recorded.")] = "vllm",
    output: Annotated[Path, typer.Option("--output", "-o", help="The recording to write.")] = Path("recording.json"),
    policy: Annotated[
        str | None, typer.Option(help="The policy whose knobs the scheduler gets, where the scenario has several.")
    ] = None,
    load: Annotated[float | None, typer.Option(help="A load of the scenario, where it has several.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=10**9, help="Which repetition of the requests.")] = 0,
    python: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            rich_help_panel=option.LIMITS,
            help="The interpreter that has the engine installed.",
            show_default="the one that runs batchsim",
        ),
    ] = None,
    scheduler_cls: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE.CLASS", rich_help_panel=option.LIMITS, help="A scheduler of your own instead of vLLM's."
        ),
    ] = None,
    set_: option.Set = None,
    traces: option.Traces = None,
    allow_code: option.AllowCode = False,
) -> None:
    """Record what the scheduler of your installed vLLM does with a scenario's requests, in virtual time.

    `batchsim conform` compares the recording with the policy. Example: batchsim record chat --python
    .vllm/bin/python --set workload.duration=20s -o rec.json; batchsim conform rec.json
    """
    loaded = read_scenario(scenario, set_, traces, "record", allow_code=allow_code)
    check_loads(loaded)
    from batchsim.check.record.record import KIND, engine_spec, record_engine
    from batchsim.scenario.setup import Setup

    check_output(output, KIND)
    specs = chosen_policies(loaded, [policy] if policy else [])
    if len(specs) > 1:
        names = ", ".join(spec.name for spec in specs)
        raise ScenarioError(f"{scenario}: has the policies {names}, a recording is of one. Write --policy and one.")
    loads = list(loaded.loads) if load is None else [load]
    if len(loads) > 1 or loads[0] not in loaded.loads:
        known = ", ".join(f"{each:g}" for each in loaded.loads)
        raise ScenarioError(f"{scenario}: has the loads {known}, a recording is of one. Write --load and one.")
    made = record_engine(Setup.of(loaded), engine_spec(specs[0], python, scheduler_cls), loads[0], seed)
    with writing(output, "Give another path with -o."):
        made.write(output)
    data = made.data
    typer.echo(f"{output}  {len(data['requests']):,} requests, {len(data['steps']):,} steps of {engine} {made.version}")
