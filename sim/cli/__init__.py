"""The command line `batchsim`: a thin skin. Stdout is data, stderr is talk; heavy imports are inside the commands."""

from __future__ import annotations

from collections import UserDict
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from batchsim.base.version import VERSION
from batchsim.cli.common import OneLineGroup
from batchsim.cli.option import SectionedCommand

COMMANDS = {
    "run": "runs", "plan": "plan", "capacity": "capacity", "shapes": "shapes", "explain": "explain",
    "timeline": "timeline", "view": "view", "init": "init", "show": "init", "live": "live", "serve": "serve",
    "validate": "validate", "policies": "lists",
    "catalog": "catalog", "schema": "lists", "conform": "conform", "record": "record", "check": "check",
    "doctor": "doctor", "trace": "trace_fit:trace_app", "train": "train", "cite": "cite",
    "calibrate": "calibrate:calibrate_app",
}  # fmt: skip
"""By command the module here that has a function of its name, or, where there are commands below it, this Typer."""


class _Commands(UserDict[str, Any]):
    """The commands by name, each made when it is read first: all of them take longer than most errors."""

    def __getitem__(self, name: str) -> Any:
        if isinstance(command := self.data[name], str):
            command = self.data[name] = typer.main.get_command(registered(name))
            command.name = name
        return command


class _Root(OneLineGroup):
    def __init__(self, **given: Any) -> None:
        given["commands"] = _Commands(COMMANDS)
        super().__init__(**given)


def registered(name: str) -> typer.Typer:
    """What Typer makes the command `name` from."""
    module, _, there = COMMANDS[name].partition(":")
    app = getattr(import_module(f"batchsim.cli.{module}"), there or name)
    if not isinstance(app, typer.Typer):
        command, app = app, typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(name, cls=SectionedCommand)(command)
    return app


app = typer.Typer(
    name="batchsim",
    cls=_Root,
    help="Simulates how batching policies serve LLM requests. Start with: batchsim run bursty",
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
