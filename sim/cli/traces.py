"""`batchsim trace inspect` and `example`: what a trace holds, and one to look at."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from batchsim.base.errors import ScenarioError, TraceError
from batchsim.base.files import Kind, write_text, writing
from batchsim.base.ranges import INT32_MAX
from batchsim.cli import option
from batchsim.cli.common import check_output, one_line_errors, print_json

if TYPE_CHECKING:
    from batchsim.workload.traces.trace_config import TraceConfig
    from batchsim.workload.traces.trace_rows import TraceRows


@one_line_errors
def inspect(
    file: Annotated[Path, typer.Argument(help="CSV, JSON lines, JSON array or Parquet; text may be gzipped.")],
    format_: option.Format = "auto",
    columns: option.Columns = None,
    time_unit: option.TimeUnit = None,
    set_: option.TraceSet = None,
    out: option.TracePicture = None,
    as_json: option.Json = False,
) -> None:
    """Show a trace's rate, burstiness and lengths, and draw them.

    Example: batchsim trace inspect my.csv --columns arrival=ts,prompt=in_tok,output=out_tok --time-unit ms
    """
    from batchsim.report.pictures.trace_picture import KIND, trace_picture
    from batchsim.report.text.trace_text import trace_text
    from batchsim.workload.traces.inspect import summary

    config = trace_config(file, format_, columns, time_unit, set_)
    if out is None and not as_json:
        out = Path(f"{file.name.partition('.')[0]}.trace.png")
    if out is not None:
        check_output(out, KIND, "Give another path with --out.")
    rows = rows_of(config, tolerant=True)
    figures = summary(rows)
    if out is not None:
        with writing(out, "Give another path with --out."):
            trace_picture(rows, figures, out)
    if as_json:
        print_json(figures)
        return
    typer.echo(trace_text(figures))
    typer.echo(out)


@one_line_errors
def example(
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("log.csv"),
    seed: Annotated[int, typer.Option(min=0, max=INT32_MAX, help="Another seed makes another log.")] = 0,
) -> None:
    """Write a made log of half an hour of requests, with classes and conversations, to try the other commands with.

    Example: batchsim trace example -o log.csv
    """
    from batchsim.workload.traces.example_log import COLUMNS, HEADER, example_log

    kind = Kind("made log", HEADER.encode())
    check_output(output, kind)
    text = example_log(seed)
    with writing(output, "Give another path with -o."):
        write_text(output, text, kind)
    count = text.count("\n") - 1
    typer.echo(f"{output}  {count:,} requests in half an hour, all of it invented; next:")
    typer.echo(f"batchsim trace inspect {output} --columns {COLUMNS} --time-unit s")


def trace_config(
    file: Path, format_: str, columns: str | None, time_unit: str | None, set_: list[str] | None = None
) -> TraceConfig:
    """The trace block of a scenario that the options make; ScenarioError names the option that is wrong."""
    from batchsim.scenario.check_values import check_values
    from batchsim.scenario.document import Document
    from batchsim.scenario.long_forms import override
    from batchsim.workload.traces.trace_config import FormatName, TimeUnit, TraceConfig

    there = file.expanduser()
    if there.is_dir() or not there.exists():
        raise ScenarioError(f"{file}: {'not a' if there.is_dir() else 'no such'} file. Give the file of a trace.")
    for flag, value, known in (("--format", format_, FormatName), ("--time-unit", time_unit, TimeUnit)):
        if value is not None and value not in get_args(known):
            raise ScenarioError(f"{flag} {value}: not known. Write one of {', '.join(get_args(known))}.")
    plain = {"path": str(file), "format": format_, "time_unit": time_unit}
    document = Document(str(file), plain if columns is None else {**plain, "columns": _column_names(columns)})
    for text in set_ or ():
        key = text.partition("=")[0].strip().removeprefix("workload.").removeprefix("trace.").partition(".")[0]
        if key in ("path", "reader"):
            why = "the file is named already. Drop it." if key == "path" else "runs code. Write a scenario with it."
            raise ScenarioError(f"--set {text}: {why}")
        override(document, text.strip().removeprefix("workload.").removeprefix("trace."))
    with options_advised():
        try:
            return check_values(TraceConfig, document.value, document, ())
        except ScenarioError as error:
            raise ScenarioError(str(error).replace(f"{file}:1: ", f"{file}: ", 1)) from None


def rows_of(config: TraceConfig, *, tolerant: bool = False) -> TraceRows:
    """The rows of the trace that the options describe, at the rate that they ask for."""
    from batchsim.workload.traces.read_trace import read_trace
    from batchsim.workload.traces.scale import rescale

    with options_advised():
        rows = read_trace(config, Path(), tolerant=tolerant)
        return rows if config.rate_scale is None else rescale(rows, config.rate_scale, 0)


@contextmanager
def options_advised() -> Iterator[None]:
    """Where an error advises a key of a scenario's trace, says which option of a command says it."""
    from batchsim.workload.traces.trace_config import TraceConfig

    own = {"format": "--format", "time_unit": "--time-unit", "columns": "--columns"}
    known = "|".join(each.name for each in fields(TraceConfig))
    try:
        yield
    except (ScenarioError, TraceError) as error:
        text = str(error).partition(": ")[2]
        advice = text.partition(". ")[2]
        form = rf"\btrace\.({known})\b|\b({known})(?=: |\.[a-z])"
        named = re.findall(form, advice) or re.findall(form, text)
        options = dict.fromkeys(own.get(key, f"--set {key}=VALUE") for key in map("".join, named))
        here = f" Here: {' or '.join(options)}." if options and "--" not in advice else ""
        raise type(error)(f"{error}{here}") from None


def _column_names(text: str) -> dict[str, str]:
    from batchsim.workload.traces.trace_config import Columns

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
