"""The options and arguments that several commands have, and the sections in which --help lists them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from batchsim.base.ranges import MAX_JOBS
from batchsim.cli import complete

OUTPUT = "Output"
PRECISION = "Precision"
CLUSTER = "Ray cluster"
LIMITS = "Limits and permissions"
SECTIONS = ("Arguments", "Options", OUTPUT, PRECISION, LIMITS, CLUSTER)
"""The sections of --help in their order: the `rich_help_panel` of an option, which stands under Options without one."""


class SectionedCommand(TyperCommand):
    """A command whose --help lists its options in sections. In plain text: it goes through pipes, and needs no Rich,
    whose import takes longer than all else that --help does."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {name: [] for name in SECTIONS}
        for each in self.get_params(ctx):
            if record := each.get_help_record(ctx):
                default = "Arguments" if each.param_type_name == "argument" else "Options"
                sections[getattr(each, "rich_help_panel", None) or default].append(record)
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


Scenario = Annotated[
    str, typer.Argument(help="A YAML file, or the name of a shipped scenario.", autocompletion=complete.scenarios)
]
Results = Annotated[Path, typer.Argument(help="The folder that `batchsim run` or `live` printed.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY.KEY=VALUE", help="Change a key of the scenario. Repeatable.")
]
Out = Annotated[Path, typer.Option(help="Folder for results.")]
Html = Annotated[
    bool,
    typer.Option("--html", rich_help_panel=OUTPUT, help="Also write report.html, one file that any browser opens."),
]
Json = Annotated[bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print JSON instead of text.")]
Traces = Annotated[
    Path | None,
    typer.Option(envvar="BATCHSIM_TRACES", help="Folder where relative trace paths are looked for too."),
]
Columns = Annotated[
    str | None,
    typer.Option(metavar="arrival=A,prompt=P,output=O", help="The columns of a format batchsim does not know."),
]
TimeUnit = Annotated[str | None, typer.Option(help="Unit of the arrival times: ns, us, ms, s or iso.")]
TracePicture = Annotated[
    Path | None, typer.Option(help="The picture; without --json, FILE's name in this folder by default.")
]
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
        min=1,
        max=10**9,
        rich_help_panel=LIMITS,
        help="Simulations at most: a scenario that asks for more is refused before the first.",
    ),
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        rich_help_panel=LIMITS,
        help="Memory that simulations side by side may need, by estimate, like 32GB.",
        show_default="this machine's",
    ),
]
Executor = Annotated[
    Literal["local", "ray"],
    typer.Option(rich_help_panel=CLUSTER, help="Where points run: here, or on a Ray cluster that is there already."),
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        rich_help_panel=CLUSTER,
        help="The Ray cluster; with --executor ray. By default that of RAY_ADDRESS, or the one this machine is in.",
    ),
]
AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code", rich_help_panel=LIMITS, help="Let the scenario import and run code of its own, module:Class."
    ),
]
Format = Annotated[str, typer.Option("--format", help="The format, where it cannot be told from the file.")]
