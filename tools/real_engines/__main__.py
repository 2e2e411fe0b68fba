"""Real engines on this machine's CPU, with tiny models of random weights, calibrated, predicted and judged (`judge`).

    python -m tools.real_engines ENGINE -o FOLDER

ENGINE is llama_cpp (`pip install '.[engines]'`) or vllm (`make real-engines`). Exits with 0 where all bounds are met, 1
where one is not, 3 where nothing could be judged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from batchsim.cli.common import one_line_errors
from tools.real_engines.engines import engine_of
from tools.real_engines.judge import judge


@one_line_errors
def main(
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


if __name__ == "__main__":
    typer.run(main)
