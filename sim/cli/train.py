"""`batchsim train`: an epoch of training with each packer, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from batchsim.base.errors import ScenarioError
from batchsim.base.files import writing
from batchsim.cli import complete, option
from batchsim.cli.common import check_out, one_line_errors, print_json, progress_bar


@one_line_errors
def train(
    scenario: Annotated[
        str | None,
        typer.Argument(
            help="A YAML file with a training block, or the name of a shipped one.",
            autocompletion=complete.training,
            show_default=False,
        ),
    ] = None,
    packers: Annotated[bool, typer.Option("--packers", help="List the packers and end.")] = False,
    out: option.Out = Path("results"),
    set_: option.Set = None,
    traces: option.Traces = None,
    as_json: option.Json = False,
) -> None:
    """Pack a training set with each packer of a scenario, and compare padding, balance, step times and MFU.

    Example: batchsim train packing --set training.micro_batch=2
    """
    from batchsim.report.layout import fit
    from batchsim.report.text.training_text import packers_text

    if packers:
        typer.echo(packers_text())
        return
    if scenario is None:
        raise ScenarioError("no scenario is named. Give one, like batchsim train packing, or --packers for a list.")
    from batchsim.report.pictures.training_picture import FILES, write_training
    from batchsim.report.text.training_text import training_text
    from batchsim.training.load import load_training, run_training

    loaded = load_training(scenario, set_ or [], [traces] if traces else [])
    folder = out / loaded.name / "train"
    check_out(folder)
    with progress_bar() as progress:
        runs = run_training(loaded, progress)
    with writing(folder, "Give another folder with --out."):
        result = write_training(loaded, runs, folder)
    if as_json:
        print_json(result | {"path": str(folder)})
    else:
        typer.echo(training_text(loaded.name, runs))
        typer.echo(fit(f"{folder}/  {'  '.join(FILES)}"))
