"""Real engines on this machine's CPU, with tiny models of random weights.

    python -m tools.real_engines judge ENGINE -o FOLDER    calibrates it and judges what is then predicted (`judge`)
    python -m tools.real_engines serve ENGINE              starts it and says its address and its scenario, until Ctrl-C

ENGINE is llama_cpp (`pip install '.[engines]'`) or vllm (`make real-engines`). judge exits with 0 where all bounds are
met, 1 where one is not, 3 where nothing could be judged.
"""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from batchsim.cli.common import one_line_errors
from tools.real_engines.engines import engine_of, serving, version
from tools.real_engines.judge import judge

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)


@app.command("judge")
@one_line_errors
def judge_command(
    engine: str,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for what is measured, and the judgement.")],
    minutes: Annotated[float, typer.Option(help="Time that calibrate is given.")] = 5.0,
    seconds: Annotated[float, typer.Option(help="How long requests of each load are sent.")] = 30.0,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each load.")] = 3,
) -> None:
    """Calibrates an engine, predicts loads that it was not shown, and measures them."""
    found = judge(engine_of(engine), out, minutes=minutes, seconds=seconds, repeats=repeats, say=typer.echo)
    typer.echo("\n".join(found.lines()))
    if found.word != "met":
        raise typer.Exit(1 if found.word == "NOT MET" else 3)


@app.command()
@one_line_errors
def serve(engine: str) -> None:
    """Starts an engine's server, until Ctrl-C."""
    chosen = engine_of(engine)
    with tempfile.TemporaryDirectory() as folder, serving(chosen, Path(folder)) as server:
        typer.echo(f"{version(chosen)} on {server.url}, log {server.log}. Its scenario:\n{chosen.scenario()}")
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    app()
