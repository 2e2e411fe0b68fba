"""Simulates measured points of real engines, and prints the errors beside aiconfigurator's own estimates.

    python -m tests.silicon [--engine vllm] [--limit N] [--out FOLDER] [--own FOLDER]

Needs `pip install 'batchsim[gpus]' aiconfigurator`. Only deployments of one half are read (`rows.is_given`): the other
is kept for others to try. One point of each deployment, that nearest to a concurrency of 16, anchors it in a column of
its own, which then leaves that point out. `--own`: estimates from the points.csv of that folder, made before.
"""

from __future__ import annotations

import argparse
import csv
import sys
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
from tests.silicon.rows import Row, given_rows, scenario_text
from tests.silicon.table import Point, tables

_ANCHOR = 16  # requests at a time
_HEAD = """# Simulated against measured silicon

Made by `python -m tests.silicon`. Points of `silicon_sample.csv` in aiconfigurator-core {core} (Apache-2.0, NVIDIA),
all measured by others, of the deployments whose SHA-256 is even. batchsim: kernel tables of that package, host and way
there by presets fitted to these very points; anchored: one point of each deployment besides, left out here.
aiconfigurator: its `cli_estimate`, mode `agg`, of aiconfigurator {own}. Errors in % of what was measured: median, 90th
percentile and mean of their size, and the mean with its sign.
"""
_COLUMNS = ("id", "kind", "measured_ms", "simulated_ms", "anchored_ms", "own_ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "sglang", "tensorrt_llm"), help="this one alone")
    parser.add_argument("--limit", type=int, help="at most so many points of each engine")
    parser.add_argument("--out", type=Path, help="writes table.md and points.csv there")
    parser.add_argument("--own", type=Path, help="a folder with points.csv, whose estimates are taken over")
    args = parser.parse_args()
    try:
        rows = given_rows()
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    rows = [row for row in rows if args.engine in (None, row.engine)]
    kept = {} if args.own is None else _kept(args.own)
    points: list[Point] = []
    for number, mine in enumerate(_deployments(rows), 1):
        points += _points(mine[: args.limit], kept)
        print(f"{number}: {mine[0].deployment}, {len(points):,} of {len(rows):,} points", file=sys.stderr, flush=True)
    text = f"{_HEAD.format(core=version('aiconfigurator-core'), own=version('aiconfigurator'))}\n{tables(points)}"
    print(text)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "table.md").write_text(text + "\n")
        (args.out / "points.csv").write_text(_csv(points))
    return 0


def _deployments(rows: Sequence[Row]) -> list[list[Row]]:
    """The points of each deployment as it is simulated, experts over GPUs being one, in the order of the file."""
    found: dict[tuple[str, int, bool], list[Row]] = {}
    for row in rows:
        found.setdefault((row.deployment, row.ep, row.gap), []).append(row)
    return list(found.values())


def _points(rows: Sequence[Row], kept: dict[str, tuple[float, float]]) -> Iterator[Point]:
    """The points of one deployment."""
    anchor = min(rows, key=lambda row: (abs(log(row.concurrency / _ANCHOR)), row.isl, row.osl, row.id))
    point, met = Anchor(anchor.concurrency, round(anchor.tpot_ms * 1e6)), None
    with suppress(BatchsimError):  # out of reach, which its simulated points show, or not to be simulated, as they say
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
        return Setup.of(parse_scenario(scenario_text(row), row.id, Path(), ()))
    except BatchsimError:
        if not row.kv:
            raise
        return Setup.of(parse_scenario(scenario_text(row, kv=""), row.id, Path(), ()))


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


def _kept(folder: Path) -> dict[str, tuple[float, float]]:
    """aiconfigurator's estimates by the id of the point, as a run before has left them."""
    found: dict[str, list[str]] = {}
    with (folder / "points.csv").open() as file:
        for plain in csv.DictReader(file):
            found.setdefault(plain["id"], []).append(plain["own_ms"])
    return {row: (float(ms[0]), float(ms[1])) for row, ms in found.items() if all(ms)}


if __name__ == "__main__":
    sys.exit(main())
