"""`batchsim why`: where the time of slow requests went."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sim.cli.common import JsonOption, one_line_errors, print_json
from sim.errors import ScenarioError


@one_line_errors
def why(
    results: Annotated[Path, typer.Argument(help="The folder that `batchsim run` printed.")],
    policy: Annotated[str | None, typer.Option(help="A label of the scenario; all by default.")] = None,
    load: Annotated[float | None, typer.Option(help="A tested load; the one of the table by default.")] = None,
    seed: Annotated[int, typer.Option(help="Which repetition.")] = 0,
    request: Annotated[int | None, typer.Option(help="Only this request: it is the same under every policy.")] = None,
    slowest: Annotated[int, typer.Option(min=0, help="How many of the slowest requests.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """Show why requests were slow: the parts of their lives, largest first, and the mean over all.

    Example: batchsim why results/bursty/3f9a0c12d4e5 --policy continuous --slowest 3
    """
    from sim.report.reading import check_load, load_to_show
    from sim.report.why import why as explain
    from sim.report.why import why_text
    from sim.results import load_results

    loaded = load_results(results)
    load = load_to_show(loaded) if load is None else load
    check_load(loaded, load)
    known = list(dict.fromkeys(loaded.points["policy"]))
    if policy is not None and policy not in known:
        raise ScenarioError(f"{loaded.path}: has no policy {policy}. Write one of {', '.join(known)}.")
    chosen = known if policy is None else [policy]
    found = [explain(loaded, name, load, seed, slowest=slowest, request=request) for name in chosen]
    if as_json:
        print_json(found)
    else:
        typer.echo("\n".join(why_text(loaded, one) for one in found))
