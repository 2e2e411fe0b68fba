"""`batchsim run`: simulates a scenario, prints its table, writes its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchsim.base.errors import BatchsimError, ScenarioError
from batchsim.base.ranges import MAX_POINTS
from batchsim.cli import option
from batchsim.cli.common import limits_of, one_line_errors, print_json, progress_lines, where_points_run
from batchsim.cli.view import PORT, show

if TYPE_CHECKING:
    from batchsim.results.read import Results
    from batchsim.scenario.config import Scenario
    from batchsim.scenario.setup import Setup
    from batchsim.study.curves.lines import Line
    from batchsim.study.curves.precision import Precision

FEW_REQUESTS = 2_000
"""Requests of all simulations below which a run takes one process: others need longer for their imports."""
_shown = partial(typer.Option, rich_help_panel=option.OUTPUT)
_precise = partial(typer.Option, rich_help_panel=option.PRECISION)


@one_line_errors
def run(
    scenario: option.Scenario,
    jobs: option.Jobs = None,
    executor: option.Executor = "local",
    address: option.Address = None,
    out: option.Out = Path("results"),
    set_: option.Set = None,
    load: Annotated[float | None, _shown(help="The load that the table shows.")] = None,
    columns: Annotated[
        str | None,
        _shown(
            metavar="METRIC,...",
            help="What the table shows, like preemptions,makespan,hit: any metric of summary.csv.",
            show_default="latencies, SLO, rates",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Run points again that are there already.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", rich_help_panel=option.LIMITS, help="A rejected request is an error.")
    ] = False,
    pictures: Annotated[bool, _shown("--pictures/--no-pictures", help="Whether to draw; takes a few seconds.")] = True,
    html: option.Html = False,
    view: Annotated[bool, _shown("--view", help="Then serve a page to look around in, until Ctrl-C.")] = False,
    port: Annotated[
        int | None,
        _shown(min=0, max=65535, help="Of --view: the port at 127.0.0.1; 0: any free.", show_default=str(PORT)),
    ] = None,
    traces: option.Traces = None,
    precision: Annotated[
        str | None,
        _precise(metavar="SHARE", help="Add seeds until half the interval is this share of the mean, like 5%."),
    ] = None,
    metric: Annotated[
        str | None, _precise(help="Of --precision: a column of summary.csv.", show_default="ttft_p99_s")
    ] = None,
    max_seeds: Annotated[
        int | None, _precise(help="Of --precision: at most so many a point.", show_default="20")
    ] = None,
    allow_code: option.AllowCode = False,
    max_points: option.MaxPoints = MAX_POINTS,
    max_memory: option.MaxMemory = None,
    as_json: option.Json = False,
) -> None:
    """Run a scenario and compare its policies.

    Examples: batchsim run bursty; batchsim run my.yaml --jobs 2 --set seeds=5 --set 'policies={continuous:
    {max_num_seqs: 64, max_num_batched_tokens: 4096}}'; batchsim run chat --precision 5% --metric e2e_mean_s;
    batchsim run chat --executor ray --address 10.0.0.4:6379
    """
    from batchsim.scenario import load_scenario

    where = where_points_run(jobs, executor, address)
    if as_json and columns is not None:
        raise ScenarioError(f"--columns {columns}: is of the table, which --json replaces. Drop one of them.")
    _check_view(view, port)
    folders = [traces] if traces else []
    loaded = load_scenario(scenario, overrides=set_ or [], trace_folders=folders, allow_code=allow_code)
    from batchsim.study.sweep.pool import start_early  # the rest once the scenario can be read: it takes seconds

    if jobs is None and not allow_code and _drawn_requests(loaded) < FEW_REQUESTS:
        where["jobs"] = 1
    if where["jobs"] > 1 and not where["ray"]:
        start_early("batchsim.study.sweep.points")  # while this process goes on importing
    from batchsim.report.layout import fit
    from batchsim.report.text.run_table import asked_columns
    from batchsim.report.text.summary_text import report
    from batchsim.results.failed import Failed, points_failed
    from batchsim.study.curves.run import run_scenario
    from batchsim.study.sweep.points import keeping

    if load is not None and load not in loaded.loads and not loaded.auto:
        tested = ", ".join(f"{x:g}" for x in loaded.loads)
        raise ScenarioError(f"--load {load:g}: is not one of the scenario's loads. Write one of {tested}.")
    shown = [] if columns is None else asked_columns(columns, loaded.file.workload.classes)
    asked = _precision(precision, metric, max_seeds)
    with progress_lines() as progress:
        limits = limits_of(max_points, max_memory)
        results = run_scenario(
            loaded,
            out=out,
            **where,
            force=force,
            progress=progress,
            precision=asked,
            limits=limits,
            begin=None if as_json else partial(_open, jobs=None if where["ray"] else where["jobs"]),
        )
    if reused := results.manifest["points_reused"]:
        points = "1 point was" if reused == 1 else f"{reused:,} points were"
        typer.echo(f"{points} there already; --force simulates them again", err=True)
    _check_rejections(results, strict)
    with keeping(results.path.parent):
        drawn, lacks = _drawn(results, load, pictures, html)
    if as_json:
        print_json(results.as_json())
    else:
        typer.echo(report(results, load, shown, opened=True))
        tables = ["summary.csv", *(["replicas.csv"] if results.replicas() is not None else [])]
        tables += ["trainings.csv"] if results.trainings() is not None else []
        tables += ["adapters.csv"] if results.adapters() is not None else []
        typer.echo(fit(f"{results.path}/  {'  '.join([*tables, *(p.name for p in drawn)])}"))
        if lacks:
            keep = results.scenario["keep"]
            typer.echo(fit(f"not drawn, since keep is {keep}: {', '.join(lacks)}. For these --set keep=all."))
    if results.manifest["failed"]:
        manifest, failed = results.manifest, [Failed(**entry) for entry in results.manifest["failed"]]
        raise points_failed(failed, manifest["points_run"] + manifest["points_reused"] + len(failed))
    if view:
        show(results, PORT if port is None else port, traces, allow_code=allow_code)


def _drawn_requests(scenario: Scenario) -> float:
    """How many requests all simulations of the scenario have together; inf where its rates and times do not say so."""
    workload = scenario.file.workload
    if scenario.auto or scenario.variants or scenario.load_name != "mean_rate" or workload.tasks is not None:
        return inf
    requests = sum(map(workload.requests_at, scenario.loads))
    return requests * len(scenario.specs) * scenario.file.seeds


def _drawn(results: Results, load: float | None, pictures: bool, html: bool) -> tuple[list[Path], list[str]]:
    """(The files of the pictures and the page asked for, the pictures that cannot be drawn). Matplotlib is imported for
    these alone."""
    drawn, lacks = list[Path](), list[str]()
    if pictures:
        from batchsim.report.pictures.plots import lacking, write_pictures

        drawn, lacks = write_pictures(results, load), lacking(results)
    if html:
        from batchsim.report.page.run_page import write_run_page

        drawn = [*drawn, write_run_page(results, drawn, load)]
    return drawn, lacks


def _open(setup: Setup, curves: Sequence[Line], *, jobs: int | None) -> None:
    """Prints what holds before the first point: the heading, the KV memory, and how long its points may take on `jobs`
    processes of this machine, None where they run elsewhere."""
    from batchsim.report.layout import fit
    from batchsim.report.text.summary_text import opening
    from batchsim.results.heading import engine_kv_text, heading, kv_text
    from batchsim.study.sweep.size import estimated_s

    pools = [engine_kv_text(curve.setup) for curve in curves if setup.scenario.vary_key]
    typer.echo(opening(heading(setup), kv_text(setup), pools))
    scenario, seeds = setup.scenario, setup.scenario.file.seeds
    each = [(curve.setup, load, len(curve.specs) * seeds) for curve in curves for load in scenario.loads]
    if jobs is None or scenario.auto or (seconds := estimated_s(each, jobs)) is None:
        return
    least, most = _roughly(max(seconds[0], 1.0)), _roughly(max(seconds[1], 2.0))
    count = sum(number for _, _, number in each)
    many = f"{count:,} point{'s' * (count > 1)}"
    typer.echo(fit(f"{many} to simulate: some {least} to {most} of an idle machine, less for what is kept already"))


def _roughly(seconds: float) -> str:
    """A time to one digit, `20 s` or `5 min`."""
    number, unit = (seconds, "s") if seconds < 60 else (seconds / 60, "min")
    return f"{float(f'{number:.1g}'):,.0f} {unit}"


def _check_view(view: bool, port: int | None) -> None:
    """ScenarioError, before the run, where the page could not be served after it."""
    if view:
        from batchsim.view.view_server import check_port

        check_port(PORT if port is None else port)
    elif port is not None:
        raise ScenarioError(f"--port {port}: is of --view, which is not given. Add --view.")


def _precision(share: str | None, metric: str | None, max_seeds: int | None) -> Precision | None:
    """The precision asked for by three options, None without; ScenarioError if they do not make sense."""
    from batchsim.base.units import parse_share
    from batchsim.study.curves.precision import MAX_SEEDS, METRIC, Precision

    if share is None:
        for flag, given in (("--metric", metric), ("--max-seeds", max_seeds)):
            if given is not None:
                raise ScenarioError(f"{flag} {given}: is of --precision, which is not given. Add --precision 5%.")
        return None
    try:
        asked = parse_share(share)
    except ValueError as error:
        raise ScenarioError(f"--precision {share}: {error}") from None
    return Precision(asked, METRIC if metric is None else metric, MAX_SEEDS if max_seeds is None else max_seeds)


def _check_rejections(results: Results, strict: bool) -> None:
    """ScenarioError if no policy accepted any request, or with `strict` if any was rejected."""
    rows = [row for row in results.summary.to_dict("records") if not row["failed"]]
    nothing = all(row["rejected"] == row["submitted"] for row in rows)
    for row in rows:
        rejected, submitted = row["rejected"], row["submitted"]
        if rejected and (strict or nothing):
            where = f"{row['label']} at load {row['load']:g}"
            cases = results.manifest["details"].get(row["label"], {})
            every = [one for one in results.manifest["outcomes"][row["label"]] if one["load"] == row["load"]]
            reasons = dict.fromkeys(reason for one in every for reason in one["rejected_by_reason"])
            details = "; ".join(f"{reason} ({cases[reason]})" if reason in cases else reason for reason in reasons)
            raise BatchsimError(
                f"{where}: {rejected:,.0f} of {submitted:,.0f} requests rejected: {details}."
                " Correct what the reason names, in the policy or the workload."
            )
