"""`batchsim conform`: our schedulers against schedules recorded from real engines."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from batchsim.base.errors import BatchsimError, bounded
from batchsim.cli import option
from batchsim.cli.common import one_line_errors, print_json

PolicyOption = Annotated[
    str | None,
    typer.Option(help="The policy that must make the same schedule; unless given, that of the recorded scheduler."),
]
OrderOption = Annotated[
    Literal["exact", "arrival", "free"] | None,
    typer.Option(help="How the order within a batch counts; unless given, as the recording says: exact."),
]


@one_line_errors
def conform(
    files: Annotated[
        list[Path], typer.Argument(help="Recorded schedules, bucket lists, results of packers or routes, JSON.")
    ],
    policy: PolicyOption = None,
    order: OrderOption = None,
    as_json: option.Json = False,
) -> None:
    """Compare a policy with schedules recorded from the real engine, step by step, a packer with its bins, or a router.

    Says how many steps or bins were compared, or the first that differs, with both sides and the state around it.
    Exit code 0 if all are equal, 1 if any differs, 2 if any cannot be compared. Example: batchsim conform mine/*.json
    """
    from batchsim.check.conform import conform as compare

    rows: list[dict[str, Any]] = []
    differs = refused = False
    for path in files:
        try:
            verdict = compare(path, policy, order)
        except BatchsimError as error:
            typer.echo(bounded(str(error), [str(path)]), err=True)
            refused = True
            continue
        differs = differs or bool(verdict.difference)
        if as_json:
            rows.append(asdict(verdict) | {"path": str(path), "equal": not verdict.difference})
        else:
            typer.echo(str(verdict))
    if as_json:
        print_json(rows)
    if differs or refused:
        raise typer.Exit(1 if differs else 2)
