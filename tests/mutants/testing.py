"""Runs collected tests once for each mutant, each time in a process of its own."""

from __future__ import annotations

import gc
import json
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
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from mutmut.mutation.trampoline import set_mutant_under_test

from tests.mutants.making import ROOT, Mutant
from tests.mutants.table import test_file, tests_of

COPIED = ("sim", "tests", "scenarios", "calibrate", "docs")
MEMORY = 6 << 30  # bytes that a process may take


@dataclass
class Tester:
    """A pytest plugin that, instead of running what was collected once, runs it for each mutant."""

    mutants: list[Mutant]
    jobs: int
    notify: Callable[[Mutant, bool], None]  # whether it was killed
    seconds: dict[str, float] = field(default_factory=dict[str, float])  # of CPU, by test, without a mutant

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
        self._time(list(groups.items()))
        work: list[tuple[Mutant, list[pytest.Item]]] = []
        for mutant in self.mutants:
            items = [item for name in sorted(tests_of(mutant.path)) for item in groups[name]]
            if not items:
                raise SystemExit(f"{mutant.path}: none of its tests was collected")
            work.append((mutant, sorted(items, key=lambda item: self.seconds[item.nodeid])))
        _forked(work, self.jobs, self._test, lambda one, status: self.notify(one[0], status != 0))
        return True

    def _time(self, groups: list[tuple[str, list[pytest.Item]]]) -> None:
        """Runs every test without a mutant; nothing is worth knowing if one fails."""

        def time_them(one: tuple[str, list[pytest.Item]]) -> None:
            taken: dict[str, float] = {}
            for item in one[1]:
                start = time.process_time()
                _run(item)
                taken[item.nodeid] = time.process_time() - start
            Path(one[0].replace("/", "-")).write_text(json.dumps(taken), encoding="utf-8")

        def ended(one: tuple[str, list[pytest.Item]], status: int) -> None:
            if status:
                raise SystemExit(f"tests/{one[0]} fails without any mutant. Put it right first.")
            self.seconds |= json.loads(Path(one[0].replace("/", "-")).read_text(encoding="utf-8"))

        _forked(groups, self.jobs, time_them, ended)

    def _test(self, one: tuple[Mutant, list[pytest.Item]]) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        set_mutant_under_test(one[0].name)
        for item in one[1]:
            signal.setitimer(signal.ITIMER_PROF, 1 + 10 * self.seconds[item.nodeid])  # its signal ends a process
            _run(item)


def _group(item: pytest.Item) -> str:
    """What `tests_of` calls the file of a test."""
    name = str(item.path.relative_to(Path("tests").resolve()).with_suffix(""))
    if name != "conformance/test_conformance":
        return name
    return f"conformance:{item.callspec.params['kind']}"  # type: ignore[attr-defined]


def _run(item: pytest.Item) -> None:
    """Runs one test; ends this process with 1 if it fails."""
    if any(report.failed for report in runtestprotocol(item, log=False, nextitem=None)):
        os._exit(1)


def _forked(work: list[Any], jobs: int, do: Callable[[Any], None], ended: Callable[[Any, int], None]) -> None:
    """`do(one)` for each in a process of its own, `jobs` at a time; `ended(one, exit status)` as they end."""
    running: dict[int, Any] = {}
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
            ended(running.pop(pid), status)


def _child(do: Callable[[Any], None], one: Any) -> None:
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
