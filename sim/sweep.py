"""Simulates points and keeps them under `results/<scenario>/points`: what is there already is read, not redone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.errors import ScenarioError
from sim.keep import keep_point, kept_point, point_inputs, sweep_unfinished
from sim.point import Setup, simulate_point
from sim.pool import run_all
from sim.provenance import identity, point_hash
from sim.results import POINTS
from sim.scenario import Point, Scenario

Progress = Callable[[int, int, str], None]
"""Called with points done, points in all, and what was done last."""


@dataclass(frozen=True)
class Task:
    """What a worker needs for one point."""

    scenario: Scenario
    point: Point
    folder: Path


class Sweep:
    """Runs points of one scenario, or of variants of it, on `jobs` processes; their results lie in `home`.

    `force` simulates anew what is there. `reused` counts the points that were not simulated.
    """

    def __init__(self, home: Path, *, jobs: int = 1, force: bool = False, progress: Progress | None = None) -> None:
        self.home = home
        self.jobs = jobs
        self.force = force
        self.progress = progress
        self.reused = 0

    def run(self, wanted: Sequence[tuple[Setup, Point]]) -> list[dict[str, Any]]:
        """What point.json holds, for every point in the order asked. ScenarioError if `home` cannot be written."""
        try:
            return self._run(wanted)
        except OSError as error:
            out = self.home.parent
            raise ScenarioError(
                f"{out}: cannot be written: {error.strerror}. Give another folder with --out."
            ) from None

    def _run(self, wanted: Sequence[tuple[Setup, Point]]) -> list[dict[str, Any]]:
        points = self.home / POINTS
        points.mkdir(parents=True, exist_ok=True)
        sweep_unfinished(points)
        common = {id(setup): identity(setup) for setup, _ in wanted}
        tasks = [Task(s.scenario, point, points / point_hash(common[id(s)], point)) for s, point in wanted]
        done = {} if self.force else {i: kept for i, task in enumerate(tasks) if (kept := kept_point(task.folder))}
        self.reused += len(done)
        todo = [i for i in range(len(tasks)) if i not in done]
        for number, result in run_all(run_point, [tasks[i] for i in todo], self.jobs):
            done[todo[number]] = result
            if self.progress is not None:
                point = tasks[todo[number]].point
                self.progress(len(done), len(tasks), f"{point.spec.name} at {point.load:g}, seed {point.seed}")
        return [done[i] for i in range(len(tasks))]


def run_point(task: Task) -> dict[str, Any]:
    """Simulates, measures and writes one point; returns what its point.json holds."""
    setup = Setup.of(task.scenario)
    run = simulate_point(setup, task.point)
    return keep_point(setup, run, point_inputs(setup, run), task.folder)
