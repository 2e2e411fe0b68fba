"""The command line `batchsim`: a thin skin. Stdout is data, stderr is talk; heavy imports are inside the commands."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import typer

from batchsim.base.version import VERSION
from batchsim.cli.calibrate import calibrate_app
from batchsim.cli.capacity import capacity
from batchsim.cli.common import OneLineGroup
from batchsim.cli.conform import conform
from batchsim.cli.doctor import doctor
from batchsim.cli.explain import explain
from batchsim.cli.init import init, show
from batchsim.cli.lists import catalog, policies, schema
from batchsim.cli.live import live
from batchsim.cli.plan import plan
from batchsim.cli.runs import run
from batchsim.cli.serve import serve
from batchsim.cli.timeline import timeline
from batchsim.cli.trace_fit import fit
from batchsim.cli.traces import inspect
from batchsim.cli.validate import validate
from batchsim.cli.view import view

app = typer.Typer(
    name="batchsim",
    cls=OneLineGroup,
    help="Simulates how batching policies serve LLM requests. Start with: batchsim run bursty",
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    """Prints the version, and whether it is the accelerated wheel's, and ends the program, if that was asked for."""
    if asked:
        kernel = find_spec("batchsim.kernel.core")
        compiled = kernel is not None and not str(kernel.origin).endswith(".py")
        typer.echo(f"batchsim {VERSION}{' (compiled)' if compiled else ''}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """What may stand before the command."""


for command in (
    run,
    plan,
    capacity,
    explain,
    timeline,
    view,
    init,
    show,
    live,
    serve,
    validate,
    policies,
    catalog,
    schema,
    conform,
    doctor,
):
    app.command()(command)

trace_app = typer.Typer(
    help="Look at request traces, and fit laws to them.", no_args_is_help=True, rich_markup_mode=None
)
trace_app.command()(inspect)
trace_app.command()(fit)
app.add_typer(trace_app, name="trace")
app.add_typer(calibrate_app, name="calibrate")

__all__ = ["app"]
