"""Output that cannot be written: one line, exit code 2, found before the work. A reader who has gone is no error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_scenario import TINY, batchsim, listing

from batchsim.base.errors import ScenarioError
from batchsim.cli import app
from batchsim.cli.common import check_replaceable

SPOKEN: list[list[str]] = [["--help"], ["run", "--help"], ["policies"], ["catalog", "--json"], ["schema"]]


def called(args: list[str]) -> object:
    """The exit code of a call in this process, with the stdout that there is."""
    with pytest.raises(SystemExit) as ended:
        app(args)
    return ended.value.code


@pytest.mark.parametrize("args", SPOKEN, ids=" ".join)
def test_a_full_stdout_is_one_line(args: list[str], monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """What is to be printed goes nowhere, and that is said; nothing is tried again as Python ends."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert called(args) == 2
        full.flush()
    assert capfd.readouterr().err == (
        "stdout: cannot be written: No space left on device. Send it elsewhere, or make room.\n"
    )


@pytest.mark.parametrize("args", SPOKEN, ids=" ".join)
def test_a_closed_stdout_is_one_line(args: list[str], monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """As `>&-` leaves it: nothing that is printed could be seen, so nothing is begun."""
    monkeypatch.setattr(sys, "stdout", None)
    assert called(args) == 2
    assert capfd.readouterr().err == ("stdout: is closed. Send it somewhere, /dev/null if nothing is to be seen.\n")


@pytest.mark.parametrize("args", [["run", "bursty"], ["policies"], ["init"]], ids=" ".join)
def test_a_folder_that_is_gone_is_one_line(args: list[str], tmp_path: Path, monkeypatch, capfd) -> None:
    """One that was removed after a shell went into it."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert called(args) == 2
    told = capfd.readouterr()
    assert told.out == "" and told.err.startswith("the current folder: ") and told.err.count("\n") == 1


def test_a_full_stderr_costs_the_line_and_not_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither takes a word, the code still says it."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", open("/dev/full", "w", buffering=1))  # noqa: SIM115
        assert called(["policies"]) == 2


def test_a_reader_who_has_gone_ends_it_quietly(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """As `| head -1` does."""
    reads, writes = os.pipe()
    os.close(reads)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writes, "w"))
    assert called(["policies"]) == 1
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_process_ends_without_a_second_complaint(ran: Path) -> None:
    """Not at the end of Python either: one line of `explain > /dev/full`, and none of `explain | head -1`."""
    explain = f"{Path(sys.executable).with_name('batchsim')} explain {ran}"
    ended = subprocess.run(["bash", "-c", f"{explain} > /dev/full"], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1) and "No space left" in ended.stderr
    piped = subprocess.run(["bash", "-c", f"{explain} | head -1"], capture_output=True, text=True, timeout=60)
    assert (piped.stderr, piped.stdout.count("\n")) == ("", 1)


# ---- files

WRITES: dict[str, tuple[list[str], str]] = {
    "init": (["init"], "-o"),
    "init_of_a_trace": (["init", "--trace", "my.csv", "--columns", "prompt=in,output=out"], "-o"),
    "inspect": (["trace", "inspect", "my.csv", "--columns", "prompt=in,output=out"], "--out"),
    "resolve": (["resolve", "s.yaml"], "-o"),
    "audit": (["explain", "RAN"], "--audit"),
    "slo": (["explain", "RAN", "--slo"], "-o"),
    "timeline": (["timeline", "RAN", "--policy", "static"], "-o"),
    "profile": (["calibrate", "show", "h200-llama-3.1-8b-aiconfigurator"], "-o"),
    "run": (["run", "s.yaml"], "--out"),
    "capacity": (["capacity", "s.yaml"], "--out"),
    "plan": (["plan", "plan"], "-o"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands run: with a scenario, a trace, and a file where a folder would have to be."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("s.yaml", TINY), ("my.csv", "ts,in,out\n0,5,5\n"), ("file", "")):
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A file system that nobody may write, not even root."""
    place = tmp_path / "ro"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", place], check=False).returncode:
        pytest.skip("only root may mount a tmpfs")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def unwritten(folder: Path, ran: Path, args: list[str], option: str, place: str) -> None:
    """Asserts that the command refuses to write at `place`, before it has done anything."""
    before = listing(folder)
    args = [str(ran) if arg == "RAN" else arg for arg in args]
    result = batchsim(*args, option, place)
    assert result.exit_code == 2, f"{result.output} {result.exception!r}"
    assert (result.stdout, result.stderr.count("\n")) == ("", 1), result.output
    assert ": cannot be written: " in result.stderr and place in result.stderr
    assert listing(folder) == before


@pytest.mark.parametrize(("args", "option"), WRITES.values(), ids=WRITES)
def test_a_file_in_place_of_a_folder_is_found_before_the_work(
    folder: Path, ran: Path, args: list[str], option: str
) -> None:
    """No command simulates first and fails then."""
    unwritten(folder, ran, args, option, "file/x.png")


@pytest.mark.parametrize("command", ["init", "inspect", "audit", "timeline", "run", "plan"])
def test_a_read_only_file_system_is_found_before_the_work(
    folder: Path, ran: Path, read_only: Path, command: str
) -> None:
    """Where the permissions would do."""
    unwritten(folder, ran, *WRITES[command], f"{read_only.name}/x.png")


@pytest.mark.parametrize("command", ["init", "resolve", "inspect"])
def test_a_full_disk_is_one_line(folder: Path, command: str) -> None:
    """What only writing finds: of a device that takes nothing."""
    args, option = WRITES[command]
    result = batchsim(*args, option, "/dev/full", *(["--force"] if command == "init" else []))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert "/dev/full: cannot be written: No space left on device." in result.stderr


def test_a_file_that_cannot_be_read_is_not_said_to_be_one_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether another's work would be written over cannot be told then."""
    there = tmp_path / "t.json"
    there.touch()
    opening = os.open

    def no_reading(path: object, flags: int, *more: int) -> int:
        if path == there and not flags & os.O_WRONLY:
            raise PermissionError(13, "Permission denied", str(path))
        return opening(path, flags, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", no_reading)
    with pytest.raises(ScenarioError, match=r"t\.json: is there, and cannot be read: Permission denied\."):
        check_replaceable(there, (b"{",), "trace")
