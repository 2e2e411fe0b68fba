"""The options and arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from batchsim.base.ranges import MAX_JOBS
from batchsim.cli import complete

Scenario = Annotated[
    str, typer.Argument(help="A YAML file, or the name of a shipped scenario.", autocompletion=complete.scenarios)
]
Results = Annotated[Path, typer.Argument(help="The folder that `batchsim run` or `live` printed.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY.KEY=VALUE", help="Change a key of the scenario. Repeatable.")
]
Out = Annotated[Path, typer.Option(help="Folder for results.")]
Html = Annotated[bool, typer.Option("--html", help="Also write report.html, one file that any browser opens.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Traces = Annotated[
    Path | None,
    typer.Option(envvar="BATCHSIM_TRACES", help="Folder where relative trace paths are looked for too."),
]
Columns = Annotated[
    str | None,
    typer.Option(metavar="arrival=A,prompt=P,output=O", help="The columns of a format batchsim does not know."),
]
TimeUnit = Annotated[str | None, typer.Option(help="Unit of the arrival times: ns, us, ms, s or iso.")]
TraceSet = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="What a scenario's trace says besides, like zero_lengths=prefill_only or rows=[0,1000]. Repeatable.",
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_JOBS, help="Simulations at a time on this machine.", show_default="all cores"),
]
MaxPoints = Annotated[
    int,
    typer.Option(
        min=1, max=10**9, help="Simulations at most: a scenario that asks for more is refused before the first."
    ),
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory that simulations side by side may need, by estimate, like 32GB.",
        show_default="this machine's",
    ),
]
Executor = Annotated[
    Literal["local", "ray"], typer.Option(help="Where points run: here, or on a Ray cluster that is there already.")
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="The Ray cluster; with --executor ray. By default that of RAY_ADDRESS, or the one this machine is in.",
    ),
]
AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="Let the scenario import and run code of its own, module:Class.")
]
Format = Annotated[str, typer.Option("--format", help="The format, where it cannot be told from the file.")]
