"""`batchsim trace inspect`: what a trace holds."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from batchsim.base.errors import ScenarioError
from batchsim.base.files import writing
from batchsim.cli import option
from batchsim.cli.common import check_output, one_line_errors, print_json

if TYPE_CHECKING:
    from batchsim.workload.traces import TraceConfig


@one_line_errors
def inspect(
    file: Annotated[Path, typer.Argument(help="CSV, JSON lines, JSON array or Parquet; text may be gzipped.")],
    format_: option.Format = "auto",
    columns: option.Columns = None,
    time_unit: option.TimeUnit = None,
    out: Annotated[
        Path | None, typer.Option(help="The picture; without --json, FILE's name in this folder by default.")
    ] = None,
    as_json: option.Json = False,
) -> None:
    """Show a trace's rate, burstiness and lengths, and draw them.

    Example: batchsim trace inspect my.csv --columns arrival=ts,prompt=in_tok,output=out_tok --time-unit ms
    """
    from batchsim.report.pictures.trace_picture import KIND, trace_picture
    from batchsim.report.text.trace_text import trace_text
    from batchsim.workload.traces import read_trace
    from batchsim.workload.traces.inspect import summary

    config = trace_config(file, format_, columns, time_unit)
    if out is None and not as_json:
        out = Path(f"{file.name.partition('.')[0]}.trace.png")
    if out is not None:
        check_output(out, KIND, "Give another path with --out.")
    rows = read_trace(config, Path(), tolerant=True)
    figures = summary(rows)
    if out is not None:
        with writing(out, "Give another path with --out."):
            trace_picture(rows, figures, out)
    if as_json:
        print_json(figures)
        return
    typer.echo(trace_text(figures))
    typer.echo(out)


def trace_config(file: Path, format_: str, columns: str | None, time_unit: str | None) -> TraceConfig:
    """The trace block of a scenario that the options make; ScenarioError names the option that is wrong."""
    from batchsim.workload.traces import Columns, TraceConfig
    from batchsim.workload.traces.trace_config import FormatName, TimeUnit

    there = file.expanduser()
    if there.is_dir() or not there.exists():
        raise ScenarioError(f"{file}: {'not a' if there.is_dir() else 'no such'} file. Give the file of a trace.")
    for flag, value, known in (("--format", format_, FormatName), ("--time-unit", time_unit, TimeUnit)):
        if value is not None and value not in get_args(known):
            raise ScenarioError(f"{flag} {value}: not known. Write one of {', '.join(get_args(known))}.")
    try:
        chosen = None if columns is None else Columns(**_column_names(columns))
        return TraceConfig(str(file), format_, chosen, time_unit)  # type: ignore[arg-type]
    except ValueError as error:
        raise ScenarioError(f"{file}: {error}") from None


def _column_names(text: str) -> dict[str, str]:
    from batchsim.workload.traces import Columns

    pairs = [part.partition("=") for part in text.split(",")]
    names = {role.strip(): name.strip() for role, _, name in pairs}
    known = {each.name for each in fields(Columns)}
    if not {"prompt", "output"} <= set(names) <= known or not all(names.values()) or len(names) != len(pairs):
        others = ", ".join(sorted(known - {"arrival", "prompt", "output"}))
        raise ScenarioError(
            f"--columns {text}: write prompt=NAME,output=NAME and, with times, arrival=NAME; what else rows may tell is"
            f" {others}."
        )
    return names
