"""Output that cannot be written: one line, exit code 2, found before the work. A reader who has gone is no error."""

from __future__ import annotations

import builtins
import gzip
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from batchsim.base.errors import ScenarioError
from batchsim.base.files import json_kind
from batchsim.cli import app
from batchsim.cli.common import check_output
from tests.support.tiny_scenario import TINY, batchsim, listing

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
    "audit": (["explain", "RAN"], "--audit"),
    "slo": (["explain", "RAN", "--slo"], "-o"),
    "timeline": (["timeline", "RAN", "--policy", "static"], "-o"),
    "profile": (["calibrate", "show", "llama-3.1-8b-h200-vllm-0.24.0"], "-o"),
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


@pytest.mark.parametrize("command", ["init", "inspect"])
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
    opening = open

    def no_reading(path: object, mode: str = "r", *more: object) -> object:
        if path == there and mode == "rb":
            raise PermissionError(13, "Permission denied", str(path))
        return opening(path, mode, *more)  # type: ignore[call-overload]

    monkeypatch.setattr(builtins, "open", no_reading)
    with pytest.raises(ScenarioError, match=r"t\.json: is there and cannot be read \(Permission denied\), so whether"):
        check_output(there, json_kind("mine"))


# ---- what is there

NOT_OURS = {
    "text": b"my own work\n",
    "picture": b"\x89PNG\r\n\x1a\n" + bytes(400),
    "json": b'{"format": "mine", "heading": ""}',
    "packed": gzip.compress(b'{"mine": 1}'),
}
FILES = {name: written for name, written in WRITES.items() if name not in ("run", "capacity", "plan")}


@pytest.mark.parametrize("data", NOT_OURS.values(), ids=NOT_OURS)
@pytest.mark.parametrize(("args", "option"), FILES.values(), ids=FILES)
def test_no_command_writes_over_what_it_did_not_make(
    folder: Path, ran: Path, args: list[str], option: str, data: bytes
) -> None:
    """One line names the file and the way out, and the file is as it was."""
    (folder / "mine.png").write_bytes(data)
    result = batchsim(*[str(ran) if arg == "RAN" else arg for arg in args], option, "mine.png")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert result.stderr.startswith("mine.png: is there") and "another" in result.stderr
    assert (folder / "mine.png").read_bytes() == data


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name == "profile" else [])
        for name in FILES
        if not name.startswith("init")
    ],
)
def test_what_a_command_made_is_made_anew(folder: Path, ran: Path, name: str) -> None:
    """The same call twice, with the same bytes; an empty file has nothing to lose."""
    args, option = FILES[name]
    args = [str(ran) if arg == "RAN" else arg for arg in args]
    (folder / "mine.png").touch()
    made = []
    for _ in range(2):
        result = batchsim(*args, option, "mine.png")
        assert result.exit_code == 0, result.output
        made.append((folder / "mine.png").read_bytes())
    assert made[0] == made[1]


@pytest.mark.parametrize(
    "args",
    [
        ["trace", "inspect", "my.csv", "--columns", "prompt=in,output=out", "--out", "my.csv"],
        ["trace", "fit", "my.csv", "--columns", "arrival=ts,prompt=in,output=out", "--picture", "my.csv"],
        ["init", "--trace", "my.csv", "--columns", "prompt=in,output=out", "-o", "my.csv", "--force"],
        ["init", "--trace", "my.csv", "--columns", "prompt=in,output=out", "-o", "link.yaml", "--force"],
        ["init", "--from-trtllm", "trtllm-serve meta-llama/Llama-3.1-8B --config o.yaml", "-o", "o.yaml", "--force"],
        ["init", "-o", "batchsim.schema.json"],
        ["trace", "fit", "my.csv", "-o", "load.png"],
    ],
    ids=" ".join,
)
def test_no_command_writes_over_what_it_reads(folder: Path, args: list[str]) -> None:
    """Not with --force either, nor through a link; and no two files of a call are the same."""
    (folder / "o.yaml").write_text("max_batch_size: 8\n")
    (folder / "link.yaml").symlink_to("my.csv")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    result = batchsim(*args)
    assert result.exit_code == 2 and "another" in result.stderr.splitlines()[-1], result.output
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("name", ["report.html", "report.md", "report.json"])
def test_a_plan_writes_over_no_file_of_another(folder: Path, name: str) -> None:
    """Found before the work, in a folder that holds no report of a plan."""
    (folder / "docs").mkdir()
    (folder / "docs" / name).write_text("my own work\n")
    result = batchsim("plan", "plan", "-o", "docs")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert f"docs/{name}: is there, and no " in result.stderr and "Give another folder with -o." in result.stderr
    assert listing(folder / "docs") == {name}


@pytest.mark.parametrize("name", ["...yaml", "..yaml", ".yaml", "a\nb.yaml"])
def test_results_stay_below_out(folder: Path, name: str) -> None:
    """A scenario whose name is none of a folder of its own is refused: `..` would be the folder above."""
    (folder / name).write_text(TINY)
    (folder / "out").mkdir()
    before = listing(folder)
    result = batchsim("run", name, "--out", "out", "--no-pictures")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert "Give the file another name." in result.stderr and listing(folder) == before


def test_a_name_that_is_no_text_is_one_line(folder: Path) -> None:
    """Bytes that are no UTF-8, as an argument has them."""
    for args in (["run", "s\udcff.yaml"], ["trace", "inspect", "my.csv", "--out", "\udcff.png"]):
        result = batchsim(*args)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
        assert "is not UTF-8 text. Rename the file." in result.stderr


def test_a_name_that_is_no_text_is_printed_as_escapes(capfd: pytest.CaptureFixture[str]) -> None:
    """As found in a folder: the bytes of a name need be no UTF-8."""
    assert called(["policies"]) == 0
    typer.echo("\udcff/s.yaml")
    assert capfd.readouterr().out.splitlines()[-1] == "\\udcff/s.yaml"
