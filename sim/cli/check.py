"""`batchsim check`: an extension against what all of its kind must keep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from batchsim.base.errors import ScenarioError, bounded, cut
from batchsim.cli import option
from batchsim.cli.common import one_line_errors, print_json

Kind = Literal["policy", "router", "cost", "autoscaler", "arrivals", "predictor", "reader"]
_MOST_TEXT = 200


@one_line_errors
def check(
    name: Annotated[str, typer.Argument(help="Your own as module:Class, or the name of a shipped one.")],
    kind: Annotated[Kind | None, typer.Option(help="What it is, where its name does not say.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KNOB=VALUE", help="Fix a knob; the others are random. Repeatable."),
    ] = None,
    cases: Annotated[int, typer.Option(min=1, max=10_000, help="Random cases of each check.")] = 20,
    file: Annotated[Path | None, typer.Option(help="The file that a trace reader is to read.")] = None,
    as_json: option.Json = False,
) -> None:
    """Check a policy, router, cost, autoscaler, arrivals, predictor or trace reader: yours, or a shipped one.

    Runs the code that it names. Exit code 0 if all checks hold, 1 if any does not, 2 if it cannot be checked.
    Example: batchsim check my_module:MyPolicy
    """
    try:
        from batchsim.testing.extension import checks_of, extension
    except ModuleNotFoundError as error:
        raise ScenarioError(str(error)) from None
    knobs = dict[str, str]()
    for each in set_ or []:
        knob, equals, value = each.partition("=")
        if not equals:
            raise ScenarioError(f"--set {cut(each)}: write KNOB=VALUE.")
        knobs[knob] = value
    rows = list[dict[str, str]]()
    for one in checks_of(*extension(name, kind or ""), knobs=knobs, cases=cases, file=file):
        row = {"check": one.name, "result": "deviates" if one.deviation else "holds", "why": one.deviation}
        try:
            one()
        except Exception as error:  # a user's code may raise anything
            said = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            row |= {"result": "fails", "why": bounded(said), "case": "; ".join(getattr(error, "__notes__", []))}
        rows.append(row)
        if not as_json:
            typer.echo(f"{row['result']:<8}  {one.name:<25}{row['why']}".rstrip())
            if case := row.get("case"):
                typer.echo(f"          {cut(case, _MOST_TEXT)}")
    if as_json:
        print_json(rows)
    if any(row["result"] == "fails" for row in rows):
        raise typer.Exit(1)
