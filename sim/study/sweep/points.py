"""Simulates points and keeps them under `results/<scenario>/points`: what is there already is read, not redone.

Workers simulate and hand the bytes back; only this process writes, and holds the folder's lock while it may.
"""

from __future__ import annotations

import errno
import pickle
import shutil
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from numbers import Integral
from pathlib import Path
from typing import Any

from batchsim.base.errors import BatchsimError, CalibrationError, NobodyToMeasure, ScenarioError, TraceError
from batchsim.base.files import writing
from batchsim.base.ranges import MAX_JOBS
from batchsim.base.units import NS_PER_S, clock_text
from batchsim.results.failed import Failed, points_failed
from batchsim.results.keep import measured_point
from batchsim.results.point_files import PackedPoint, read_point, remove_unfinished, write_point
from batchsim.results.provenance import identity, point_hash, short_hash
from batchsim.results.read import POINTS
from batchsim.scenario import Point
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from batchsim.study.sweep.folder_lock import FolderLock, lock_folder
from batchsim.study.sweep.pool import Killed, run_all
from batchsim.study.sweep.ray_pool import run_on_ray
from batchsim.study.sweep.size import Limits, check_size

Progress = Callable[[int, int, str], None]
"""Called with points done, points in all, and what was done last, or how far the only point at work is."""

_OF_THE_SCENARIO = (ScenarioError, TraceError, CalibrationError)
"""Errors of the scenario, which every point would have: they end the sweep at once."""

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file reached the largest size allowed (ulimit -f)",
}


@dataclass(frozen=True)
class Task:
    """What a worker needs for one point: the setup, pickled once for all its points; and the name of its folder.

    `inputs` is the hash of the setup's inputs, files included.
    """

    setup: bytes
    inputs: str
    point: Point
    name: str


class Sweep:
    """Runs points of one scenario, or of variants of it; their results lie in `home`.

    They run on `jobs` processes of this machine, or on the CPUs of the Ray cluster at the address `ray`. `force`
    simulates anew what is there. `limits` is what `check_size` goes by. `reused` counts the points that were not
    simulated. From `hold` or the first run on, no other process can write to `home` until this object is gone.

    >>> batchsim.Sweep(Path("results/tiny"), jobs=2).reused
    0
    """

    def __init__(
        self,
        home: Path,
        *,
        jobs: int = 1,
        ray: str | None = None,
        force: bool = False,
        progress: Progress | None = None,
        limits: Limits | None = None,
    ) -> None:
        if not isinstance(jobs, Integral) or not 1 <= jobs <= MAX_JOBS:
            raise ScenarioError(f"jobs {jobs!r} is not a number of processes. Write one from 1 to {MAX_JOBS}.")
        self.home = home
        self.jobs = jobs
        self.ray = ray
        self.force = force
        self.progress = progress
        self.limits = limits or Limits()
        self.reused = 0
        self._lock: FolderLock | None = None

    def run(self, wanted: Sequence[tuple[Setup, Point]]) -> list[dict[str, Any]]:
        """What point.json holds, for every point in the order asked.

        PointsFailed if some failed, when all others are done and kept; for the rest as `attempt`.
        """
        outcomes = self.attempt(wanted)
        if failed := [result for result in outcomes if isinstance(result, Failed)]:
            raise points_failed(failed, len(outcomes))
        return [result for result in outcomes if not isinstance(result, Failed)]

    def attempt(
        self, wanted: Sequence[tuple[Setup, Point]], *, may_be_empty: bool = False
    ) -> list[dict[str, Any] | Failed]:
        """What point.json holds, for every point in the order asked; Failed in the place of one that failed.

        ScenarioError at once if the scenario itself is wrong, another process writes to `home`, or `home` cannot be
        written; what was done by then is kept. A point without a request to measure is a wrong scenario too, unless
        it `may_be_empty`: then it is Failed like others.
        """
        with keeping(self.home):
            return self._attempt(wanted, may_be_empty)

    def hold(self) -> None:
        """Keeps other processes from writing to `home` from now on, as a run would. ScenarioError if one does."""
        if self._lock is None:
            with keeping(self.home):
                self.home.mkdir(parents=True, exist_ok=True)
                self._lock = lock_folder(self.home)

    def check_size(self, points: int, largest: Iterable[tuple[Setup, float]], where: str) -> None:
        """ScenarioError, before anything runs, if the number of `points`, or the memory of the `largest` by setup and
        load, is too large."""
        check_size(points, largest, jobs=self.jobs if self.ray is None else 1, limits=self.limits, where=where)

    def _attempt(self, wanted: Sequence[tuple[Setup, Point]], may_be_empty: bool) -> list[dict[str, Any] | Failed]:
        self.hold()
        points = self.home / POINTS
        points.mkdir(exist_ok=True)
        remove_unfinished(points)
        tasks = _tasks(wanted, carry=self.ray is not None)
        done: dict[int, dict[str, Any] | Failed] = {}
        if not self.force:
            done |= {i: kept for i, task in enumerate(tasks) if (kept := read_point(points / task.name))}
        self.reused += len(done)
        todo = [i for i in range(len(tasks)) if i not in done]
        if self.progress is not None:
            self.progress(len(done), len(tasks), f"{len(done):,} there already" if done else "starting")

        def tell(task: Task, now_ns: int) -> None:
            assert self.progress is not None
            self.progress(len(done), len(tasks), f"{_named(task.point)}, {clock_text(now_ns)} simulated")

        for number, result in self._execute([tasks[i] for i in todo], None if self.progress is None else tell):
            i = todo[number]
            if isinstance(result, Failed) and result.is_empty and not may_be_empty:
                raise NobodyToMeasure(result.reason)
            done[i] = self._keep(points, tasks[i], result)
            if self.progress is not None:
                self.progress(len(done), len(tasks), _named(tasks[i].point))
        return [done[i] for i in range(len(tasks))]

    def _execute(
        self, tasks: Sequence[Task], tell: Callable[[Task, int], None] | None
    ) -> Iterator[tuple[int, PackedPoint | Failed | Killed]]:
        if not tasks or self.ray is None:
            return run_all(run_point, tasks, self.jobs, here=partial(run_point, tell=tell))
        return run_on_ray(run_point, tasks, self.ray)

    def _keep(self, points: Path, task: Task, result: PackedPoint | Failed | Killed) -> dict[str, Any] | Failed:
        if isinstance(result, Killed):
            return Failed.of(task.point, task.name, f"its worker process {result.how}: perhaps memory is short")
        if isinstance(result, PackedPoint):
            write_point(result, points / task.name)
            return result.result
        return result


def _tasks(wanted: Sequence[tuple[Setup, Point]], *, carry: bool) -> list[Task]:
    """A task a point. With `carry` it brings the trace along; without, its worker reads the file."""
    common = {id(setup): identity(setup) for setup, _ in wanted}
    inputs = {key: short_hash(known) for key, known in common.items()}
    packed: dict[tuple[int, int | None], bytes] = {}
    tasks = []
    for setup, point in wanted:
        rows_of = setup.trace_seed(point.seed) if carry else None
        key = id(setup), rows_of
        if key not in packed:
            packed[key] = pickle.dumps(setup.carrying(rows_of))
        tasks.append(Task(packed[key], inputs[id(setup)], point, point_hash(common[id(setup)], point)))
    return tasks


def _named(point: Point) -> str:
    return f"{point.spec.name} at {point.load:g}, seed {point.seed}"


def run_point(task: Task, tell: Callable[[Task, int], None] | None = None) -> PackedPoint | Failed:
    """One point, simulated and measured by a worker; Failed if it failed. Raises what is wrong with the scenario.

    `tell` is called about once a simulated minute, with the time in ns that the simulation has reached.
    """
    setup, point, name = _unpickled(task.setup, task.inputs), task.point, task.name
    due_ns = 60 * NS_PER_S

    def pulse(now_ns: int) -> None:
        nonlocal due_ns
        if tell is not None and now_ns >= due_ns:
            due_ns = now_ns + 60 * NS_PER_S
            tell(task, now_ns)

    try:
        return measured_point(setup, simulate_point(setup, point, None if tell is None else pulse), name)
    except NobodyToMeasure as error:
        return Failed.of(point, name, str(error), is_empty=True)
    except _OF_THE_SCENARIO:
        raise
    except BatchsimError as error:
        return Failed.of(point, name, str(error))
    except (Exception, SystemExit) as error:  # an own policy, memory, or a bug of ours: the other points stay right
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"
        return Failed.of(point, name, reason, traceback.format_exc())


@lru_cache(maxsize=4)
def _unpickled(setup: bytes, inputs: str) -> Setup:
    """A task's setup: one object a worker for all its points, to read a trace once; another when `inputs` changed."""
    return pickle.loads(setup)


@contextmanager
def keeping(home: Path) -> Iterator[None]:
    """Turns an error of the file system into one line that says whether the disk is full and what is kept."""
    with writing(home.parent, "Give another folder with --out."):
        try:
            yield
        except OSError as error:
            full = _FULL.get(error.errno or 0)
            if full is None:
                raise
            kept = sum(1 for _ in (home / POINTS).glob("[!.]*/"))
            raise ScenarioError(
                f"{home}: {full}; {shutil.disk_usage(home).free / 1e6:,.1f} MB are free."
                f" {kept:,} whole points are kept. Make room and run the same command again: it goes on from there;"
                " or give another folder with --out."
            ) from None
