"""The installed `batchsim` as a process of its own: exit codes, Ctrl-C, and what a killed run leaves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_scenario import TINY, changed

BATCHSIM = Path(sys.executable).with_name("batchsim")
LIMIT_S = 60

# Each point takes some tenths of a second, all of them several seconds.
LONG = changed(changed(TINY, "requests: 40", "requests: 4000"), "seeds: 2", "seeds: 8")


def call(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BATCHSIM, *args], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.fixture
def long_run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of many points with two workers, in a process group of its own, some points of which are done."""
    (tmp_path / "s.yaml").write_text(LONG)
    command = [str(BATCHSIM), "run", "s.yaml", "--jobs", "2"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    _until(lambda: len(_whole(tmp_path)) >= 3 or process.poll() is not None)
    assert process.poll() is None, "the run ended before it could be stopped"
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def _whole(folder: Path) -> list[Path]:
    """The points that are there under their final names."""
    return [path.parent for path in folder.glob("results/s/points/[!.]*/point.json")]


def _alive(group: int) -> bool:
    """Whether any process of the group runs still; a zombie does not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            return True
    return False


def test_entry_point_answers(tmp_path: Path) -> None:
    """The script on the PATH runs: 0 with help on stdout, 2 with one line on stderr."""
    helped, wrong = call(tmp_path, "--help"), call(tmp_path, "run", "no.yaml")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert "batchsim run bursty" in " ".join(helped.stdout.split())
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)


def test_error_inside_a_worker_is_one_line(tmp_path: Path) -> None:
    """What only a worker process finds is one line on stderr too, and the table never reaches stdout."""
    (tmp_path / "s.yaml").write_text(changed(TINY, "tokens: 100", "tokens: 15999"))
    result = call(tmp_path, "run", "s.yaml", "--jobs", "2")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_ends_everything_with_130(long_run: subprocess.Popen[str], tmp_path: Path) -> None:
    """SIGINT to the whole group, as a terminal sends it: 130, one line, no traceback, no process and no part left."""
    os.killpg(long_run.pid, signal.SIGINT)
    stdout, stderr = long_run.communicate(timeout=LIMIT_S)
    assert long_run.returncode == 130, stderr
    assert stdout == ""
    assert stderr.count("\n") == 1 and stderr.startswith("interrupted.")
    _until(lambda: not _alive(long_run.pid))
    before = len(_whole(tmp_path))
    assert before < 32
    _goes_on(tmp_path, before)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_run_goes_on_where_it_was(long_run: subprocess.Popen[str], tmp_path: Path) -> None:
    """After kill -9 of the main process alone its workers end too; the same run again reuses every whole point."""
    long_run.kill()
    long_run.wait(timeout=LIMIT_S)
    _until(lambda: not _alive(long_run.pid))
    _goes_on(tmp_path, len(_whole(tmp_path)))


def _goes_on(folder: Path, whole: int) -> None:
    """Runs again: the whole points are reused, the others run, and nothing half-written is left."""
    again = call(folder, "run", "s.yaml", "--jobs", "2")
    assert again.returncode == 0, again.stderr
    (manifest,) = folder.glob("results/s/*/manifest.json")
    counted = json.loads(manifest.read_text())
    assert whole >= 3
    assert (counted["points_reused"], counted["points_run"]) == (whole, 32 - whole)
    assert not list(folder.glob("results/s/points/.*"))
    for point in folder.glob("results/s/points/*"):
        assert {path.name for path in point.iterdir()} == {
            "point.json", "requests.parquet", "steps.parquet", "states.parquet"
        }  # fmt: skip
