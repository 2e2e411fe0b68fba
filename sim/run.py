"""Runs all points of a scenario and keeps their results; `sim.results` says where and reads them again."""

from __future__ import annotations

import time
from pathlib import Path

from sim.keep import keep_run
from sim.point import Setup
from sim.results import Results
from sim.scenario import Scenario
from sim.slo import parse_slo
from sim.sweep import Progress, Sweep, writing


def run_scenario(
    scenario: Scenario,
    *,
    out: Path = Path("results"),
    jobs: int = 1,
    force: bool = False,
    progress: Progress | None = None,
) -> Results:
    """Runs what is not there yet, writes summary.csv, points.csv and manifest.json, and returns the results.

    Points that failed are listed in the manifest's `failed`; PointsFailed if all did.
    """
    started = time.monotonic()
    setup = Setup.of(scenario)
    check_inputs(setup)
    home = out / scenario.name
    sweep = Sweep(home, jobs=jobs, force=force, progress=progress)
    found = sweep.attempt([(setup, point) for point in scenario.points()])
    facts = {"wall_s": round(time.monotonic() - started, 2), "jobs": jobs}
    with writing(home):
        return keep_run(setup, home, found, reused=sweep.reused, facts=facts)


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
