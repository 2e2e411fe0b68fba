"""The command line `batchsim`: a thin skin. Stdout is data, stderr is talk; heavy imports are inside the commands."""

from __future__ import annotations

import typer

from sim.cli.calibrate import calibrate_app
from sim.cli.capacity import capacity
from sim.cli.claims import claims
from sim.cli.common import OneLineGroup
from sim.cli.conform import conform
from sim.cli.explain import explain
from sim.cli.lists import catalog, policies, schema
from sim.cli.live import live, resolve
from sim.cli.plan import plan
from sim.cli.runs import run
from sim.cli.timeline import timeline
from sim.cli.traces import init, inspect
from sim.cli.validate import validate

app = typer.Typer(
    name="batchsim",
    cls=OneLineGroup,
    help="Simulates how batching policies serve LLM requests. Start with: batchsim run bursty",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    run,
    plan,
    capacity,
    claims,
    explain,
    timeline,
    init,
    live,
    validate,
    resolve,
    policies,
    catalog,
    schema,
    conform,
):
    app.command()(command)

trace_app = typer.Typer(help="Looks at request traces.", no_args_is_help=True, rich_markup_mode=None)
trace_app.command()(inspect)
app.add_typer(trace_app, name="trace")
app.add_typer(calibrate_app, name="calibrate")

__all__ = ["app"]
