"""The folklore of batching, tested: where each saying holds under stated conditions, and where not.

    python -m tools.claims [--only NAME] [--jobs N] [--out DIR] [--set KEY.KEY=VALUE] [--json]

`nouns` is what a claim is, `measures` what runs say, `folklore` the sayings.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from batchsim.base.errors import ScenarioError
from batchsim.base.files import write_text, writing
from batchsim.base.ranges import MAX_JOBS, MAX_POINTS
from batchsim.cli import option
from batchsim.cli.common import OneLineGroup, check_out, limits_of, one_line_errors, print_json, progress_bar
from tools.claims.claims_picture import claims_picture
from tools.claims.claims_text import claims_as_json, claims_text
from tools.claims.folklore import FOLKLORE
from tools.claims.nouns import check_claims

app = typer.Typer(cls=OneLineGroup, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
@one_line_errors
def claims(
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help="One of the claims, several times.")] = None,
    jobs: Annotated[int, typer.Option(min=1, max=MAX_JOBS, help="Simulations at a time.")] = os.cpu_count() or 1,
    out: option.Out = Path("results"),
    set_: option.Set = None,
    allow_code: option.AllowCode = False,
    max_points: option.MaxPoints = MAX_POINTS,
    max_memory: option.MaxMemory = None,
    as_json: option.Json = False,
) -> None:
    """Test sayings about batching under stated conditions: where each holds and where not.

    Example: python -m tools.claims --only 24x --set cost.profile=h200-llama-3.1-8b-aiconfigurator
    """
    names = [claim.name for claim in FOLKLORE]
    unknown = [name for name in only or [] if name not in names]
    if unknown:
        raise ScenarioError(f"--only {unknown[0]}: is no claim. Write one of {', '.join(names)}.")
    chosen = [claim for claim in FOLKLORE if not only or claim.name in only]
    limits = limits_of(max_points, max_memory)
    check_out(out)
    with progress_bar() as progress:
        findings, heading = check_claims(
            chosen,
            "claims",
            overrides=tuple(set_ or ()),
            out=out,
            jobs=jobs,
            progress=progress,
            limits=limits,
            allow_code=allow_code,
        )
    picture = out / "claims" / "claims.png"
    text = claims_text(findings, heading)
    with writing(picture.parent, "Give another folder with --out."):
        claims_picture(findings, heading, picture)
        if not as_json:
            write_text(picture.with_suffix(".txt"), text + "\n")
    if as_json:
        print_json(claims_as_json(findings, heading))
        return
    typer.echo(f"{text}\n{picture.parent}/  {picture.name}  claims.txt")


if __name__ == "__main__":
    app()
