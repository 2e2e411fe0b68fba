"""`batchsim timeline`: a run to look at step by step, in Perfetto."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchsim.base.errors import ScenarioError
from batchsim.base.files import writing
from batchsim.cli import option
from batchsim.cli.common import check_output, one_line_errors, read_results

if TYPE_CHECKING:
    from batchsim.kernel.record import Records
    from batchsim.results.read import Results


@one_line_errors
def timeline(
    results: option.Results,
    policy: Annotated[
        str | None, typer.Option(help="A policy's label; may be left out where there is one policy.")
    ] = None,
    load: Annotated[float | None, typer.Option(help="A tested load; the one of the table by default.")] = None,
    seed: Annotated[int, typer.Option(help="Which repetition.")] = 0,
    replica: Annotated[int | None, typer.Option(help="Which of several replicas: the file is of one.")] = None,
    start: Annotated[str, typer.Option("--from", help="Where to begin, like 10s.")] = "0s",
    end: Annotated[
        str | None, typer.Option("--to", help="Where to stop, like 12s; by default the end of the run.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write; one that ends in .gz is compressed.")
    ] = Path("trace.json"),
) -> None:
    """Write a run as a trace of steps, requests, queue and KV use, to be opened at ui.perfetto.dev.

    Example: batchsim timeline results/bursty --policy continuous --from 60s --to 90s -o trace.json
    """
    from batchsim.base.units import parse_duration_ns
    from batchsim.explain.step_terms import device_rows, step_terms
    from batchsim.report.reading import check_load, load_to_show
    from batchsim.results.read import blocks_by_replica, scenario_of
    from batchsim.results.timeline_events import KIND, timeline_events, write_timeline

    loaded = read_results(results)
    check_output(output, KIND, "Give another file with -o.")
    known = list(dict.fromkeys(str(name) for name in loaded.points["policy"]))
    if policy not in known and (policy is not None or len(known) > 1):
        asked = f"has no policy {policy}" if policy is not None else f"has {len(known)} policies, a trace is of one"
        raise ScenarioError(f"{loaded.path}: {asked}. Write --policy and one of {', '.join(known)}.")
    policy = policy or known[0]
    load = load_to_show(loaded, policy) if load is None else load
    check_load(loaded, load, policy)
    records = loaded.records(policy, load, seed)
    window = _window(start, end, int(records.requests["ended_ns"].max()))
    lives = _lives(loaded, records, replica)
    frontend = scenario_of(loaded, policy)["workload"].get("frontend") or {}
    per_chunk_ns = parse_duration_ns(frontend.get("per_chunk", "0s"))
    blocks = blocks_by_replica(loaded, policy)[replica or 0]
    facts = {"replica": replica} if replica is not None else {}
    facts |= {"batchsim": loaded.manifest["heading"], "policy": policy, "load": load, "seed": seed}
    lane, parts = 1, []
    for life in lives:  # none overlaps another, but the requests in them may
        terms = step_terms(loaded, life, policy, replica)
        rows = device_rows(loaded, life, policy, replica) if len(life.lanes) else None
        more = timeline_events(life, blocks, window, terms, rows=rows, per_chunk_ns=per_chunk_ns, first_lane=lane)
        parts.append(more)
        lane += len(life.requests)
    events = chain.from_iterable(parts)
    with writing(output, "Give another file with -o."):
        counts = write_timeline(events, output, facts)
    size = output.stat().st_size / 1e6
    typer.echo(
        f"{output}  {size:.1f} MB, {counts.get('B', 0):,} slices and {counts.get('C', 0):,} counter values of {policy}"
    )
    typer.echo("Open it at https://ui.perfetto.dev", err=True)


def _lives(results: Results, records: Records, replica: int | None) -> list[Records]:
    """The records of `replica`, one for each time it was started; for a run of one engine, those of the run."""
    from batchsim.drive.fleet.fleet_records import by_engine

    if records.replicas is None:
        if replica is not None:
            raise ScenarioError(f"--replica {replica}: {results.path} is of one engine. Drop it.")
        return [records]
    engines = list(by_engine(records))
    known = sorted({engine.replica for engine in engines if engine.records.num_steps})
    if replica not in known:
        asked = "has replicas, a trace is of one" if replica is None else f"ran no step on replica {replica}"
        raise ScenarioError(f"{results.path}: {asked}. Write --replica and one of {', '.join(map(str, known))}.")
    return [engine.records for engine in engines if engine.replica == replica]


def _window(start: str, end: str | None, last_ns: int) -> tuple[int, int] | None:
    """(start, end) in ns of the part asked for; None for the whole run. ScenarioError if the run has nothing there."""
    from batchsim.base.units import format_duration, parse_duration_ns

    try:
        start_ns = parse_duration_ns(start)
        end_ns = None if end is None else parse_duration_ns(end)
    except ValueError as error:
        raise ScenarioError(f"--from {start} --to {end or 'the end'}: {error}") from None
    if start_ns >= min(last_ns, last_ns if end_ns is None else end_ns):
        whole = f"the run goes from 0 to {format_duration(last_ns)}"
        raise ScenarioError(f"--from {start} --to {end or 'the end'}: {whole}. Choose a part of it.")
    if end_ns is None:
        return None if start_ns == 0 else (start_ns, 1 << 62)
    return start_ns, end_ns
