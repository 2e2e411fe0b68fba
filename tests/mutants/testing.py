"""Runs collected tests once for each mutant, each time in a process of its own."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol
from mutmut.mutation.trampoline import set_mutant_under_test

from tests.mutants.making import ROOT, Mutant
from tests.mutants.table import test_file, tests_of

COPIED = ("sim", "tests", "scenarios", "calibrate", "docs")
MEMORY = 6 << 30  # bytes that a process may take
GUESS_S = 0.02  # CPU time of a test that has not run yet, to order it by
PATIENCE_S = 20.0  # CPU time after which one that has not run without a mutant is asked whether it hangs


@dataclass(frozen=True)
class Trial:
    """A mutant and the tests that are asked whether they notice it; `suspect` is the one that did, to be run without
    the mutant, and `hung` whether it did by taking long."""

    mutant: Mutant
    items: list[pytest.Item]
    suspect: pytest.Item | None = None
    hung: bool = False


@dataclass
class Tester:
    """A pytest plugin that, instead of running what was collected once, runs it for each mutant."""

    mutants: list[Mutant]
    jobs: int
    notify: Callable[[Mutant, bool], None]  # whether it was killed
    seconds: dict[str, float] = field(default_factory=dict[str, float])  # of CPU, by test, last time it passed
    alone: dict[str, float] = field(default_factory=dict[str, float])  # the same without a mutant

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        """Random cases are the same in every run, and a failing one is not made smaller."""
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", settings.default, derandomize=True, database=None, phases=phases)
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        wanted = {name for mutant in self.mutants for name in tests_of(mutant.path)}
        items[:] = [item for item in items if _group(item) in wanted]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("the tests cannot be collected")
        groups: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in session.items:
            groups[_group(item)].append(item)
        gc.collect()
        gc.freeze()  # what is forked stays shared
        trials: list[Trial] = []
        for mutant in self.mutants:
            items = [item for name in tests_of(mutant.path) for item in groups[name]]
            if not items:
                raise SystemExit(f"{mutant.path}: none of its tests was collected")
            trials.append(Trial(mutant, items))
        _forked(trials, self.jobs, self._try, self._ended)
        return True

    def _try(self, trial: Trial) -> None:
        """Runs the tests of a trial, the quick ones first, and writes which was begun and how long each took."""
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        items = [trial.suspect] if trial.suspect is not None else sorted(trial.items, key=self._guess_s)
        if trial.suspect is None:
            set_mutant_under_test(trial.mutant.name)
        with _log(trial).open("w", buffering=1, encoding="utf-8") as log:
            for item, following in zip(items, [*items[1:], None], strict=True):
                log.write(f"{item.nodeid}\n")
                if trial.suspect is None:
                    signal.setitimer(signal.ITIMER_PROF, self._limit_s(item))  # its signal ends this process
                start = time.process_time()
                _run(item, following)
                log.write(f"{time.process_time() - start}\n")

    def _guess_s(self, item: pytest.Item) -> float:
        return self.seconds.get(item.nodeid, GUESS_S)

    def _limit_s(self, item: pytest.Item) -> float:
        known = self.alone.get(item.nodeid)
        return PATIENCE_S if known is None else 1 + 10 * known

    def _ended(self, trial: Trial, status: int) -> list[Trial]:
        """Tells the outcome of a trial; the trials that must come before that. A test has noticed a mutant only if it
        passes without, in less time."""
        lines = _log(trial).read_text(encoding="utf-8").splitlines()
        taken = dict(zip(lines[::2], map(float, lines[1::2]), strict=False))
        self.seconds |= taken
        if trial.suspect is not None:
            if status:
                raise SystemExit(f"{trial.suspect.nodeid} fails without any mutant. Put it right first.")
            self.alone |= taken
            if trial.hung and self._limit_s(trial.suspect) > PATIENCE_S:
                return [Trial(trial.mutant, trial.items)]  # it was given too little time
        elif status:
            noticed = lines[-1]
            if noticed not in self.alone:
                suspect = next(item for item in trial.items if item.nodeid == noticed)
                return [Trial(trial.mutant, trial.items, suspect, os.WIFSIGNALED(status))]
        self.notify(trial.mutant, bool(status) or trial.suspect is not None)
        return []


def _log(trial: Trial) -> Path:
    return Path(f"{trial.mutant.name}.log")


def _group(item: pytest.Item) -> str:
    """What `tests_of` calls the file of a test."""
    name = str(item.path.relative_to(Path("tests").resolve()).with_suffix(""))
    if name != "conformance/test_conformance":
        return name
    kind = getattr(getattr(item, "callspec", None), "params", {}).get("kind")
    return name if kind is None else f"conformance:{kind}"


def _run(item: pytest.Item, following: pytest.Item | None) -> None:
    """Runs one test, and keeps the fixtures that the one after it has too; ends this process with 1 if it fails."""
    if any(report.failed for report in runtestprotocol(item, log=False, nextitem=following)):
        os._exit(1)


def _forked(
    work: list[Trial], jobs: int, do: Callable[[Trial], None], ended: Callable[[Trial, int], list[Trial]]
) -> None:
    """`do(trial)` for each in a process of its own, `jobs` at a time; `ended(trial, exit status)` as they end, which
    gives more to do."""
    running: dict[int, Trial] = {}
    todo = work[::-1]
    while todo or running:
        while todo and len(running) < jobs:
            one = todo.pop()
            pid = os.fork()
            if pid == 0:
                _child(do, one)
            running[pid] = one
        pid, status = os.wait()
        if pid in running:
            todo += ended(running.pop(pid), status)


def _child(do: Callable[[Trial], None], one: Trial) -> None:
    code = 1
    try:
        silent = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(silent, number)
        do(one)
        code = 0
    finally:
        os._exit(code)


def test(sources: dict[str, str], tester: Tester, folder: Path) -> None:
    """Runs `tester` in `folder`, on a copy of the project with mutated `sources`."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "batchsim").symlink_to("sim")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    for path, code in sources.items():
        (folder / path).write_text(code, encoding="utf-8")
    os.chdir(folder)
    ours = (ROOT, ROOT / "tests")
    sys.path[:] = [str(folder), *(entry for entry in sys.path if Path(ROOT, entry).resolve() not in ours)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "batchsim")]:
        del sys.modules[name]  # those of the copy are imported instead
    names = {test_file(name) for mutant in tester.mutants for name in tests_of(mutant.path)}
    arguments = ["-s", "-qq", "--disable-warnings", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    code = pytest.main([*arguments, *sorted(names)], plugins=[tester])
    os.chdir(ROOT)
    if code:
        sys.exit(f"pytest ended with {code!r}")
