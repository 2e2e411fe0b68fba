"""Simulates measured points of real engines, and prints the errors beside aiconfigurator's own estimates.

    python -m tests.silicon [--engine vllm] [--model TEXT ...] [--limit N] [--out FOLDER] [--own FOLDER]
                            [--ranks | --pools]

Needs `pip install 'batchsim[gpus]' aiconfigurator`. Only deployments of one half are read (`rows.is_given`): the other
is kept for others to try. One point of each deployment, that nearest to a concurrency of 16, anchors it in a column of
its own, which then leaves that point out. `--own`: estimates from the points.csv of that folder, made before; with
`--model` all of other models is from there too, and only points of models with one of the texts in their names are
simulated. `--ranks`: the points of vLLM's attention data parallelism in the place of those of one scheduler, to
FOLDER/ranks.md and ranks.csv; none is anchored. `--pools`: those of engines that prefill and decode apart, to pools.md
and pools.csv, likewise.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from io import StringIO
from math import log
from pathlib import Path

import numpy as np

from batchsim.base.errors import BatchsimError
from batchsim.kernel.record import FINISHED
from batchsim.scenario import Point as Simulated
from batchsim.scenario.anchor import Form, first_met, forms_of
from batchsim.scenario.deployment_config import Anchor
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from tests.silicon.own import own_estimate
from tests.silicon.pools import PooledRow, given_pools, of_pools, pooled_points, pooled_text
from tests.silicon.rows import Row, given_rows, scenario_text
from tests.silicon.table import Point, tables

_Pair = tuple[float, float] | None
_ANCHOR = 16  # requests at a time
_HEAD = """# Simulated against measured silicon

Made by `python -m tests.silicon`. Points of `silicon_sample.csv` in aiconfigurator-core {core} (Apache-2.0, NVIDIA),
all measured by others, of the deployments whose SHA-256 is even. batchsim: kernel tables of that package, host and way
there by presets fitted to these very points; anchored: one point of each deployment besides, left out here.
aiconfigurator: its `cli_estimate`, mode `agg`, of aiconfigurator {own}. Errors in % of what was measured: median, 90th
percentile and mean of their size, and the mean with its sign.
"""
_RANKS = """These are points of vLLM's attention data parallelism (`--ranks`), ranks of one GPU each. Nothing was fitted
to them.

"""
_POOLS = """These are points of engines that prefill and decode apart (`--pools`), by SGLang 0.5.23's rules. Nothing was
fitted to them. Assumed are a link of 50 GB/s and 20 us for each pair of engines, and SGLang's defaults without its
radix cache; aiconfigurator's estimates are of its mode `disagg`, with the batch sizes that the points state.

What remains of TPOT is that of the kernel tables. TTFT is 55 to 293 ms short at four clients: neither the gateway's
time nor the handshake of two engines is simulated. It is shorter still where clients queue at one prefill engine, whose
knobs the points do not state: at 64 clients of one on B200s by 64 and 83 %.

"""
_COLUMNS = ("id", "kind", "measured_ms", "simulated_ms", "anchored_ms", "own_ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "sglang", "tensorrt_llm"), help="this one alone")
    parser.add_argument("--model", action="append", default=[], metavar="TEXT", help="simulate these alone")
    parser.add_argument("--limit", type=int, help="at most so many points of each engine")
    parser.add_argument("--out", type=Path, help="writes table.md and points.csv there")
    parser.add_argument("--own", type=Path, help="a folder with points.csv, whose estimates are taken over")
    others = parser.add_mutually_exclusive_group()
    others.add_argument("--ranks", action="store_true", help="points of vLLM's attention data parallelism")
    others.add_argument("--pools", action="store_true", help="points of engines that prefill and decode apart")
    args = parser.parse_args()
    try:
        rows = given_pools() if args.pools else given_rows(ranks=args.ranks)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    rows = [row for row in rows if args.engine in (None, row.engine)]
    if args.model and args.own is None:
        parser.error("--model needs --own, a folder with the points of the other models")
    kept = {} if args.own is None else _kept(args.own)
    points: list[Point] = []
    for number, mine in enumerate(_deployments(rows), 1):
        known = [Point(row, *kept[row.id]) for row in mine if row.id in kept]
        elsewhere = args.model and not any(text in mine[0].model for text in args.model)
        if elsewhere and len(known) == len(mine) and all(point.simulated for point in known):
            points += known
            continue
        points += _points(mine[: args.limit], {row: own for row, (*_, own) in kept.items()})
        print(f"{number}: {mine[0].deployment}, {len(points):,} of {len(rows):,} points", file=sys.stderr, flush=True)
    text = f"{_HEAD.format(core=version('aiconfigurator-core'), own=_own_version(args.own))}\n"
    text += f"{_RANKS if args.ranks else _POOLS if args.pools else ''}{tables(points)}"
    if args.pools:
        text += "\nOf the points that state both numbers of workers:\n\n"
        text += "\n".join(
            f"- {count} {what}" for what, count in sorted(Counter(map(of_pools, pooled_points())).items())
        )
    print(text)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        table, of_points = "ranks" if args.ranks else "pools" if args.pools else "table", "points"
        (args.out / f"{table}.md").write_text(text + "\n")
        (args.out / f"{of_points if table == 'table' else table}.csv").write_text(_csv(points))
    return 0


def _deployments(rows: Sequence[Row]) -> list[list[Row]]:
    """The points of each deployment as it is simulated, experts over GPUs being one, in the order of the file."""
    found: dict[tuple[str, int, bool], list[Row]] = {}
    for row in rows:
        found.setdefault((row.deployment, row.ep, row.gap), []).append(row)
    return list(found.values())


def _points(rows: Sequence[Row], kept: dict[str, _Pair]) -> Iterator[Point]:
    """The points of one deployment."""
    anchor = min(rows, key=lambda row: (abs(log(row.concurrency / _ANCHOR)), row.isl, row.osl, row.id))
    point, met = Anchor(anchor.concurrency, round(anchor.tpot_ms * 1e6)), None
    if anchor.ranks == 1 and not isinstance(anchor, PooledRow):
        with suppress(BatchsimError):  # out of reach, which its simulated points show, or not simulated, as they say
            met = _met(_setup(anchor), point)
    for row in rows:
        own = kept[row.id] if row.id in kept else own_estimate(row)
        try:
            found = simulated(_setup(row))
        except BatchsimError as error:
            yield Point(row, None, None, own, _short(str(error)))
            continue
        by_anchor = None
        if met is not None and row is not anchor:
            setup, (number, x) = _setup(row), met
            by_anchor = simulated(replace(setup, cost=_forms(setup, point)[number].at(x)))
        yield Point(row, found, by_anchor, own)


def _forms(setup: Setup, point: Anchor) -> tuple[Form, ...]:
    return forms_of(setup.cost, setup.preset(setup.scenario.specs[0].config), point)


def _met(setup: Setup, point: Anchor) -> tuple[int, float]:
    """In which form, and by how much, the steps of `setup` change to meet a measured point, as `deployment.anchor` has
    it."""
    engine = partial(setup.engine_of_users, setup.scenario.specs[0], point.concurrency)
    return first_met(engine, point, _forms(setup, point))


def _setup(row: Row) -> Setup:
    """The scenario of a point, its KV cache in 16 bits where there are no kernels for it in 8."""
    try:
        return Setup.of(parse_scenario(_text(row), row.id, Path(), ()))
    except BatchsimError:
        if not row.kv:
            raise
        return Setup.of(parse_scenario(_text(row, kv=""), row.id, Path(), ()))


def _text(row: Row, *, kv: str | None = None) -> str:
    return pooled_text(row, kv=kv) if isinstance(row, PooledRow) else scenario_text(row, kv=kv)


def simulated(setup: Setup) -> tuple[float, float]:
    """The means of TTFT and TPOT over all requests, in ms."""
    requests = simulate_point(setup, Simulated(setup.scenario.specs[0], 1.0, 0)).records.requests
    done = requests[(requests["outcome"] == FINISHED) & (requests["output_tokens"] > 1)]
    ttft = done["first_delivery_ns"] - done["sent_ns"]
    tpot = (done["delivered_ns"] - done["first_delivery_ns"]) / (done["output_tokens"] - 1)
    return float(np.mean(ttft)) / 1e6, float(np.mean(tpot)) / 1e6


def _short(text: str) -> str:
    return text.partition(": ")[2].partition(". ")[0][:160]


def _csv(points: Sequence[Point]) -> str:
    """Two lines a point, of TTFT and TPOT in ms; empty where there is none."""
    sink = StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for point in points:
        measured = (point.row.ttft_ms, point.row.tpot_ms)
        for which, kind in enumerate(("ttft", "tpot")):
            found = (values and values[which] for values in (measured, point.simulated, point.anchored, point.own))
            writer.writerow([point.row.id, kind, *("" if ms is None else f"{ms:.5g}" for ms in found)])
    return sink.getvalue()


def _kept(folder: Path) -> dict[str, tuple[_Pair, _Pair, _Pair]]:
    """TTFT and TPOT in ms as simulated, anchored and estimated by aiconfigurator, by the id of the point, as a run
    before has left them; None where it left none."""
    lines: dict[str, list[dict[str, str]]] = {}
    with (folder / "points.csv").open() as file:
        for plain in csv.DictReader(file):
            lines.setdefault(plain["id"], []).append(plain)

    def pair(of_point: list[dict[str, str]], column: str) -> _Pair:
        ttft, tpot = (plain[column] for plain in of_point)
        return (float(ttft), float(tpot)) if ttft and tpot else None

    return {
        row: (pair(of_point, "simulated_ms"), pair(of_point, "anchored_ms"), pair(of_point, "own_ms"))
        for row, of_point in lines.items()
    }


def _own_version(folder: Path | None) -> str:
    """The version of aiconfigurator that made the estimates: the installed one, or that of the kept table."""
    if folder is None:
        return version("aiconfigurator")
    stated = re.search(r"of aiconfigurator ([\w.]*\w)", (folder / "table.md").read_text())
    return stated[1] if stated else "of another version"


if __name__ == "__main__":
    sys.exit(main())
