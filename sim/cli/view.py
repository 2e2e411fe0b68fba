"""`batchsim view`: a run's results as a page to look around in, on this machine."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchsim.base.errors import ScenarioError
from batchsim.cli import option
from batchsim.cli.common import one_line_errors, read_results

if TYPE_CHECKING:
    from batchsim.results.read import Results

PORT = 8765


@one_line_errors
def view(
    results: option.Results,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port at 127.0.0.1; 0: any free one.")] = PORT,
    traces: Annotated[
        Path | None,
        typer.Option(envvar="BATCHSIM_TRACES", help="Folder where a changed simulation looks for traces too."),
    ] = None,
    allow_code: option.AllowCode = False,
) -> None:
    """Look around in a run in a browser: curves, steps, queue and KV, one request's life, two points, one change.

    The page is served to this machine alone, until Ctrl-C. Example: batchsim view results/bursty
    """
    if traces is not None and not traces.is_dir():
        raise ScenarioError(f"{traces}: no such folder to look for traces in. Correct --traces, or leave it out.")
    show(read_results(results), port, traces, allow_code=allow_code)


def show(results: Results, port: int, traces: Path | None, *, allow_code: bool) -> None:
    """Serves the page of `results` until Ctrl-C; says on stderr where. ScenarioError where the port is taken."""
    from batchsim.view.page_data import PageData
    from batchsim.view.view_server import ViewServer

    folders = [Path.cwd(), *([traces] if traces else [])]
    with ViewServer(PageData(results, folders, allow_code), port) as server:
        typer.echo(f"{server.address}  Ctrl-C ends it", err=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
