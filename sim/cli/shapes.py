"""`batchsim shapes`: the buckets that waste least on a scenario's traffic."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from batchsim.base.errors import ScenarioError
from batchsim.base.files import writing
from batchsim.cli import complete, option
from batchsim.cli.common import check_output, chosen_policies, one_line_errors, print_json, read_scenario


@one_line_errors
def shapes(
    scenario: option.Scenario,
    buckets: Annotated[int, typer.Option(min=1, max=1024, help="Buckets of each list at most.")] = 8,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="LABEL", help="The policy; the scenario's first unless given.", autocompletion=complete.policies
        ),
    ] = None,
    load: Annotated[float | None, typer.Option(help="A load of the scenario; its highest by default.")] = None,
    set_: option.Set = None,
    traces: option.Traces = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Draw sizes and buckets here, as PNG.")] = None,
    allow_code: option.AllowCode = False,
    as_json: option.Json = False,
) -> None:
    """Find the lists of buckets that pad a scenario's steps least: exactly, over the sizes that its traffic makes.

    Examples: batchsim shapes trainium --buckets 8; batchsim shapes trainium --policy '8 slots' --load 1 -o sizes.png
    """
    loaded = read_scenario(scenario, set_, traces, "shapes", allow_code=allow_code)
    spec = chosen_policies(loaded, [policy] if policy else [])[0]
    if loaded.auto:
        raise ScenarioError("load: auto finds loads by simulating them all. Write a list of loads.")
    if load is not None and load not in loaded.loads:
        tested = ", ".join(f"{each:g}" for each in loaded.loads)
        raise ScenarioError(f"--load {load:g}: is not one of the scenario's loads. Write one of {tested}.")
    from batchsim.report.text.shapes_text import best_text
    from batchsim.scenario.setup import Setup
    from batchsim.study.sweep.shapes_seen import seen_sizes, shapes_of_lists

    if output is not None:
        from batchsim.report.pictures.shapes_picture import KIND

        check_output(output, KIND)
    at = max(loaded.loads) if load is None else load
    setup = Setup.of(loaded)
    lists = seen_sizes(setup, spec, at, range(loaded.file.seeds), buckets)
    if output is not None:
        from batchsim.report.pictures.shapes_picture import shapes_picture

        with writing(output, "Give another path with -o."):
            shapes_picture(setup, spec, at, lists, output)
    if as_json:
        by_name = {each.name: asdict(each) for each in lists}
        print_json({"policy": spec.name, "load": at, "shapes": shapes_of_lists(lists), "lists": by_name})
        return
    typer.echo(best_text(loaded, spec, at, lists))
    if output is not None:
        typer.echo(str(output))
