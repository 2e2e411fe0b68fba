"""The installed `batchsim` as a process of its own: exit codes, Ctrl-C, and what a killed run leaves."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

from batchsim.__main__ import main
from batchsim.study.sweep.pool import start_early
from tests.support.tiny_scenario import TINY, changed

BATCHSIM = Path(sys.executable).with_name("batchsim")
LIMIT_S = 60

# Each point takes some tenths of a second, all of them several seconds.
LONG = changed(changed(TINY, "requests: 40", "requests: 2000"), "seeds: 2", "seeds: 12")
POINTS = 48  # of LONG


def call(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BATCHSIM, *args], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)


def start(folder: Path) -> subprocess.Popen[str]:
    """A run with two workers in a process group of its own."""
    command = [str(BATCHSIM), "run", "s.yaml", "--jobs", "2"]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.fixture
def long_run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of many points with two workers, in a process group of its own, some points of which are done."""
    (tmp_path / "s.yaml").write_text(LONG)
    process = start(tmp_path)
    _until(lambda: len(_whole(tmp_path)) >= 3 or process.poll() is not None)
    assert process.poll() is None, "the run ended before it could be stopped"
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _check_heading_alone(stdout: str) -> None:
    """AssertionError if anything stands behind the heading's last lines, the KV memory and how long the run takes."""
    kv, points = stdout.splitlines()[-2:]
    assert kv.startswith("KV 16,000 tokens") and " points to simulate: some " in points, "the heading alone"


def _answers(stdout: str) -> list[str]:
    """The lines of a run without how long it may take, which other numbers of processes change."""
    return [line for line in stdout.splitlines() if " points to simulate: some " not in line]


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


@pytest.mark.slow
def test_error_inside_a_worker_is_one_line(tmp_path: Path) -> None:
    """What only a worker process finds is one line on stderr too, and the table never reaches stdout."""
    (tmp_path / "s.yaml").write_text(changed(TINY, "tokens: 100", "tokens: 15999"))
    result = call(tmp_path, "run", "s.yaml", "--jobs", "2")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    _check_heading_alone(result.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_ends_everything_with_130(long_run: subprocess.Popen[str], tmp_path: Path) -> None:
    """SIGINT to the whole group, as a terminal sends it: 130, one line, no traceback, no process and no part left."""
    os.killpg(long_run.pid, signal.SIGINT)
    stdout, stderr = long_run.communicate(timeout=LIMIT_S)
    assert long_run.returncode == 130, stderr
    _check_heading_alone(stdout)
    _until(lambda: not _alive(long_run.pid))
    before = len(_whole(tmp_path))
    assert before < POINTS
    said = re.search(
        r"^interrupted\. (\d+) of 48 points asked for are kept; the same command goes on.*\n\Z", stderr, re.M
    )
    assert said is not None and int(said[1]) in (before, before - 1), stderr  # the last one just written
    _goes_on(tmp_path, before)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_run_goes_on_where_it_was(long_run: subprocess.Popen[str], tmp_path: Path) -> None:
    """After kill -9 of the main process alone its workers end too; the same run again reuses every whole point."""
    long_run.kill()
    long_run.wait(timeout=LIMIT_S)
    _until(lambda: not _alive(long_run.pid))
    _goes_on(tmp_path, len(_whole(tmp_path)))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_three_times_the_run_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    """kill -9 in mid-sweep, three times: no whole point is written twice, and all files are those of a quiet run."""
    for name in ("killed", "quiet"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "s.yaml").write_text(LONG)
    killed = tmp_path / "killed"
    written: dict[str, int] = {}
    for kill in range(3):
        process = start(killed)
        _until(lambda: len(_whole(killed)) >= 7 * (kill + 1) or process.poll() is not None)  # noqa: B023
        assert process.poll() is None, "the run ended before it could be killed"
        process.kill()
        process.communicate()
        _until(lambda: not _alive(process.pid))  # noqa: B023
        now = {point.name: (point / "point.json").stat().st_mtime_ns for point in _whole(killed)}
        assert written.items() <= now.items()
        assert len(now) < POINTS
        written = now
    last, quiet = call(killed, "run", "s.yaml", "--jobs", "2"), call(tmp_path / "quiet", "run", "s.yaml", "--jobs", "1")
    assert (last.returncode, quiet.returncode) == (0, 0)
    assert _answers(last.stdout) == _answers(quiet.stdout)
    now = {point.name: (point / "point.json").stat().st_mtime_ns for point in _whole(killed)}
    assert written.items() <= now.items() and len(now) == POINTS
    assert files_of(killed) == files_of(tmp_path / "quiet")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_second_run_of_a_scenario_says_who_is_at_it(long_run: subprocess.Popen[str], tmp_path: Path) -> None:
    """It ends at once with one line; reading goes on; and the first run is not disturbed."""
    second = call(tmp_path, "run", "s.yaml", "--jobs", "1", "--set", "seeds=1")
    assert (second.returncode, second.stdout, second.stderr.count("\n")) == (2, "", 1)
    assert f"is being written by process {long_run.pid} on " in second.stderr
    elsewhere = call(tmp_path, "run", "s.yaml", "--jobs", "1", "--set", "workload.requests=40", "--out", "other")
    assert elsewhere.returncode == 0, elsewhere.stderr
    _, stderr = long_run.communicate(timeout=LIMIT_S)
    assert long_run.returncode == 0
    assert [line for line in stderr.splitlines() if not line.startswith("after 0:")] == []
    assert call(tmp_path, "explain", "results/s").returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs, or else limits the size of files")
@pytest.mark.parametrize(("way", "jobs"), [("tmpfs", "2"), ("ulimit", "1")])
def test_a_full_disk_leaves_whole_points_and_the_run_goes_on(tmp_path: Path, way: str, jobs: str) -> None:
    """In the middle of a run the disk is full: one line, nothing half-written; with room it ends as if never full."""
    full, quiet = tmp_path / "full", tmp_path / "quiet"
    for folder in (full, quiet):
        folder.mkdir()
        (folder / "s.yaml").write_text(changed(TINY, "requests: 40", "requests: 400"))
    assert call(quiet, "run", "s.yaml", "--jobs", "1").returncode == 0
    sizes = [path.stat().st_size for path in quiet.glob("results/s/points/*/*")]
    results = full / "results"
    results.mkdir()
    with contextlib.ExitStack() as stack:
        limit = ""
        if way == "tmpfs":
            size = sum(sizes) // 2
            if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", results], check=False).returncode:
                pytest.skip("only root may mount a tmpfs")
            stack.callback(subprocess.run, ["umount", "--lazy", results], check=True)
        else:
            limit = f"ulimit -f {max(sizes) // 1024 - 1}; "
        first = subprocess.run(
            ["bash", "-c", f"{limit}exec {BATCHSIM} run s.yaml --jobs {jobs}"],
            cwd=full,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        kept = _whole(full)
        assert (first.returncode, first.stderr.count("\n")) == (2, 1), first.stderr
        _check_heading_alone(first.stdout)
        why = "the disk is full" if way == "tmpfs" else "a file reached the largest size allowed (ulimit -f)"
        assert f"{why}; " in first.stderr and f" {len(kept)} whole points are kept." in first.stderr
        assert 0 < len(kept) < 8
        assert not [path for path in results.rglob(".*") if path.name != ".lock"]
        if way == "tmpfs":
            subprocess.run(["mount", "-o", "remount,size=100m", results], check=True)
        last = call(full, "run", "s.yaml", "--jobs", jobs)
        assert last.returncode == 0, last.stderr
        (manifest,) = results.glob("s/*/manifest.json")
        assert json.loads(manifest.read_text())["points_reused"] == len(kept)
        assert files_of(full) == files_of(quiet)


def files_of(folder: Path) -> dict[str, bytes]:
    """What runs left, apart from when and how it was made."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if path.name not in ("manifest.json", ".lock")}


def _goes_on(folder: Path, whole: int) -> None:
    """Runs again: the whole points are reused, the others run, and nothing half-written is left."""
    again = call(folder, "run", "s.yaml", "--jobs", "2")
    assert again.returncode == 0, again.stderr
    assert again.stderr == f"{whole} points were there already; --force simulates them again\n"
    (manifest,) = folder.glob("results/s/*/manifest.json")
    counted = json.loads(manifest.read_text())
    assert whole >= 3
    assert (counted["points_reused"], counted["points_run"]) == (whole, POINTS - whole)
    assert not list(folder.glob("results/s/points/.*"))
    for point in folder.glob("results/s/points/*"):
        assert {path.name for path in point.iterdir()} == {
            "point.json", "requests.parquet", "steps.parquet", "states.parquet"
        }  # fmt: skip


def test_ctrl_c_while_it_is_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Imports take most of the first second, and no command has begun."""

    class Interrupted:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "batchsim.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "batchsim.cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted.\n")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_is_left_to_the_first_process() -> None:
    """The server of workers, which imports for a second, never hears of it; this process does."""
    start_early("batchsim.study.sweep.points")
    status = Path(f"/proc/{forkserver._forkserver._forkserver_pid}/status").read_text()  # type: ignore[attr-defined]
    blocked = int(next(line for line in status.splitlines() if line.startswith("SigBlk")).split()[1], 16)
    assert blocked >> (signal.SIGINT - 1) & 1
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
