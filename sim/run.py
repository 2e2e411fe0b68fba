"""Runs all points of a scenario and keeps their results; `sim.results` says where and reads them again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.errors import ScenarioError
from sim.keep import keep_point, keep_run, kept_point, point_inputs, sweep_unfinished
from sim.point import Setup, simulate_point
from sim.pool import run_all
from sim.provenance import identity, point_hash
from sim.results import POINTS, Results
from sim.scenario import Point, Scenario
from sim.slo import parse_slo

Progress = Callable[[int, int, str], None]
"""Called with points done, points in all, and what was done last."""


@dataclass(frozen=True)
class Task:
    """What a worker needs for one point."""

    scenario: Scenario
    point: Point
    folder: Path


def run_point(task: Task) -> dict[str, Any]:
    """Simulates, measures and writes one point; returns what its point.json holds."""
    setup = Setup.of(task.scenario)
    run = simulate_point(setup, task.point)
    return keep_point(setup, run, point_inputs(setup, run), task.folder)


def run_scenario(
    scenario: Scenario,
    *,
    out: Path = Path("results"),
    jobs: int = 1,
    force: bool = False,
    progress: Progress | None = None,
) -> Results:
    """Runs what is not there yet, writes summary.csv, points.csv and manifest.json, and returns the results."""
    started = time.monotonic()
    setup = Setup.of(scenario)
    check_inputs(setup)
    home = out / scenario.name
    common = identity(setup)
    tasks = [Task(scenario, point, home / POINTS / point_hash(common, point)) for point in scenario.points()]
    try:
        (home / POINTS).mkdir(parents=True, exist_ok=True)
        sweep_unfinished(home / POINTS)
        done = (
            {} if force else {i: kept for i, task in enumerate(tasks) if (kept := kept_point(task.folder)) is not None}
        )
        reused = len(done)
        todo = [i for i in range(len(tasks)) if i not in done]
        for number, result in run_all(run_point, [tasks[i] for i in todo], jobs):
            i = todo[number]
            done[i] = result
            if progress is not None:
                point = tasks[i].point
                progress(len(done), len(tasks), f"{point.spec.name} at {point.load:g}, seed {point.seed}")
    except OSError as error:
        raise ScenarioError(f"{out}: cannot be written: {error.strerror}. Give another folder with --out.") from None
    facts = {"wall_s": round(time.monotonic() - started, 2), "jobs": jobs}
    return keep_run(setup, home, [done[i] for i in range(len(tasks))], reused=reused, facts=facts)


def check_inputs(setup: Setup) -> None:
    """Finds, before anything is written, what would make every point fail: a broken trace, a class's wrong SLO."""
    scenario = setup.scenario
    with scenario.at("slo"):
        parse_slo(scenario.file.slo)
    for traffic in scenario.file.workload.classes.values():
        if traffic.slo is not None:
            with scenario.at("workload"):
                parse_slo(traffic.slo)
    setup.workload(min(scenario.loads), seed=0)
