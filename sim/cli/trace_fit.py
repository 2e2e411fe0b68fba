"""`batchsim trace` and its command `fit`: random traffic that stands for a recorded trace, and whether it does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchsim.base.errors import ScenarioError
from batchsim.base.files import ANY, write_text, writing
from batchsim.cli import option
from batchsim.cli.common import check_output, one_line_errors, print_json, read_scenario
from batchsim.cli.trace_reuse import reuse
from batchsim.cli.traces import example, inspect, rows_of, trace_config

if TYPE_CHECKING:
    from batchsim.scenario import Scenario
    from batchsim.workload.traces.trace_config import TraceConfig

_ENGINE = """\
model: llama-3.1-8b
cost: h200
workload:
  arrivals: {kind: poisson, mean_rate: 1/s}
  lengths: {prompt: {kind: fixed, tokens: 1}, output: {kind: fixed, tokens: 1}}
  output_cap: 64
  duration: 10s
policies: {vllm: {}}
slo: ttft<1s & tpot<50ms @ 99%
"""
"""The engine where no other is given: the workload only stands in the place of the fitted one."""


@one_line_errors
def fit(
    file: Annotated[Path, typer.Argument(help="CSV, JSON lines, JSON array or Parquet; text may be gzipped.")],
    format_: option.Format = "auto",
    columns: option.Columns = None,
    time_unit: option.TimeUnit = None,
    set_: option.TraceSet = None,
    jitter: Annotated[
        str | None, typer.Option(metavar="TIME", help="Spread arrivals over a tick of the trace's clock, like 1s.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(metavar="SCENARIO", help="The engine: its model, cost and first policy.", show_default="h200"),
    ] = None,
    draws: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=1000,
            help="Draws of the fit that the engine is given at each load; 0: none.",
            show_default="up to 19, until the trace lies among them",
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The scenario to write.")] = Path("load.yaml"),
    picture: Annotated[Path | None, typer.Option(help="The picture.", show_default="beside the scenario")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the scenario if it is there.")] = False,
    as_json: option.Json = False,
) -> None:
    """Fit arrivals, lengths and sessions to a trace, and write them as a scenario that needs the trace no more.

    Example: batchsim trace fit my.csv -o load.yaml --engine my.yaml
    """
    from batchsim.fit.traffic.engine_check import EngineCheck
    from batchsim.fit.traffic.goodness import DRAWS, compare, drawn, recorded
    from batchsim.fit.traffic.load_file import scenario_text
    from batchsim.fit.traffic.traffic_fit import fit_traffic
    from batchsim.report.pictures.traffic_fit_picture import KIND, traffic_fit_picture
    from batchsim.report.text.traffic_fit_text import engine_lines, heading, traffic_plain, traffic_text
    from batchsim.scenario.parse import parse_scenario
    from batchsim.scenario.setup import Setup

    if output.exists() and not force:
        raise ScenarioError(f"{output}: is there already. Write another with -o, or replace it with --force.")
    picture = output.with_suffix(".png") if picture is None else picture
    if picture.absolute() == output.absolute():
        raise ScenarioError(f"{output}: is to be the scenario and its picture. Give another path with --picture.")
    check_output(output, ANY, "Give another path with -o.")
    check_output(picture, KIND, "Give another path with --picture.")
    config = _jittered(trace_config(file, format_, columns, time_unit, set_), jitter)
    rows = rows_of(config)
    scenario = _engine(engine)
    if scenario.file.replicas is not None:
        raise ScenarioError(f"{scenario.source}: has replicas, and the fit is tried on one engine. Drop replicas.")
    longest, most = int(rows.output_tokens.max()), Setup.of(scenario).max_model_len
    if draws != 0 and longest > most:
        raise ScenarioError(
            f"{file}: an output of {longest:,} tokens is beyond max_model_len {most:,} of the engine that is to try the"
            " fit. Give an --engine that writes so much, or --draws 0, and none tries it."
        )
    traffic = fit_traffic(rows, lambda what: typer.echo(f"fitting {what} …", err=True))
    typer.echo(f"drawing the fit {DRAWS} times …", err=True)
    trace, samples = recorded(traffic), [drawn(traffic.workload, seed) for seed in range(DRAWS)]
    figures = compare(trace, samples)
    setup = Setup.of(parse_scenario(scenario_text(scenario.plain, traffic.workload, ()), str(output), output.parent))
    check = EngineCheck(setup, traffic, replace(config, rate_scale=None))  # which `rows` have
    checks = check.all_loads(draws, partial(typer.echo, err=True))
    comments = (heading(traffic), *(line.strip() for line in (engine_lines(checks) if checks else ())))
    with writing(output, "Give another path with -o."):
        write_text(output, scenario_text(scenario.plain, traffic.workload, comments), ANY)
    with writing(picture, "Give another path with --picture."):
        traffic_fit_picture(traffic, trace, samples, checks, picture)
    if as_json:
        print_json(traffic_plain(traffic, figures, checks))
        return
    typer.echo(traffic_text(traffic, figures, checks))
    typer.echo(f"{output} and {picture}   next: batchsim run {output}")


def _engine(name: str | None) -> Scenario:
    from batchsim.scenario.parse import parse_scenario

    if name is None:
        return parse_scenario(_ENGINE, "the engine", Path())
    return read_scenario(name, None, None, "trace fit", allow_code=False)


def _jittered(config: TraceConfig, jitter: str | None) -> TraceConfig:
    """`config` with this jitter."""
    from batchsim.base.units import parse_duration_ns

    try:
        return config if jitter is None else replace(config, jitter=parse_duration_ns(jitter))
    except ValueError as error:
        raise ScenarioError(f"--jitter: {error}") from None


trace_app = typer.Typer(
    help="Look at request traces, and fit laws to them.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
)
trace_app.command()(inspect)
trace_app.command()(fit)
trace_app.command()(reuse)
trace_app.command()(example)
