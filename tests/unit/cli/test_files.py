"""Files that are no files, and files of results that somebody changed: exit code 2, one line, and nothing written."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.results.read import load_results
from tests.support.resealed import reseal
from tests.support.tiny_scenario import REPLAY, TINY, batchsim, changed

MODEL, COST = ("model: llama-3.1-8b", "model: x.json"), ("cost: {kind: constant, step: 10ms}", "cost: x.json")
READS = {
    "scenario": (["run", "x.json"], None),
    "recording": (["conform", "x.json"], None),
    "profile": (["calibrate", "show", "x.json"], None),
    "profile_of_a_scenario": (["run", "s.yaml"], changed(TINY, *COST)),
    "model": (["run", "s.yaml"], changed(TINY, *MODEL)),
    "model_of_init": (["init", "-o", "y.yaml", "--model", "x.json"], None),
    "trace": (["trace", "inspect", "x.json"], None),
    "trace_of_a_scenario": (["run", "s.yaml"], changed(REPLAY, "my.csv", "x.json")),
    "trace_of_init": (["init", "-o", "y.yaml", "--trace", "x.json"], None),
    "manifest": (["explain", "."], None),
}


@pytest.mark.parametrize(("args", "text"), READS.values(), ids=READS)
@pytest.mark.parametrize("kind", ["FIFO", "character device"])
def test_what_is_no_file_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], text: str | None, kind: str
) -> None:
    """A FIFO that nobody writes and a device without end, in the place of any file that a user names."""
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(TINY if text is None else text)
    name = "manifest.json" if args[0] == "explain" else "x.json"
    if kind == "FIFO":
        os.mkfifo(name)
    else:
        Path(name).symlink_to("/dev/zero")
    before = sorted(os.listdir())
    result = batchsim(*args)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert name in result.stderr and f"is a {kind}, not a regular file" in result.stderr
    assert sorted(os.listdir()) == before


# ---- results that somebody changed

READING: list[list[object]] = [
    ["explain"],
    ["explain", "--slo", "-o", "slo.png"],
    ["explain", "--request", "3", "--json"],
    ["explain", "--audit", "log.jsonl"],
    ["explain", "--counterfactual", "kv.tokens=+20%", "--policy", "continuous"],
    ["timeline", "--policy", "static", "-o", "t.json"],
]


def result_of(folder: Path, args: list[object], out: Path) -> Any:
    """A reading command on results; what it writes goes to `out`."""
    placed = [out / arg if str(arg).endswith((".png", ".json", ".jsonl")) else arg for arg in args[1:]]
    return batchsim(args[0], folder, *placed)


def refused(folder: Path, args: list[object], out: Path) -> str:
    """The one line that a reading command answers with, having written nothing."""
    result = result_of(folder, args, out)
    assert result.exit_code == 2, f"{args}: {result.output} {result.exception!r}"
    assert (result.stdout, result.stderr.count("\n")) == ("", 1), f"{args}: {result.output}"
    assert len(result.stderr) < 600 and str(folder.parent) in result.stderr, f"{args}: {result.stderr}"
    assert not list(out.iterdir())
    return result.stderr


def unread(folder: Path) -> str:
    """What reading a run, or a table of one of its points, is refused with."""
    with pytest.raises(ScenarioError) as error:
        load_results(folder).records("static", 10.0, 0)
    said = str(error.value)
    assert "\n" not in said and len(said) < 500 and said.endswith("Run the scenario again.")
    return said


@pytest.fixture
def copied(ran: Path, tmp_path: Path) -> Path:
    """The results of the tiny scenario, which may be changed: the folder of the run."""
    shutil.copytree(ran, tmp_path / "s")
    (tmp_path / "out").mkdir()
    return next((tmp_path / "s").glob("*/manifest.json")).parent


def drop(*path: str) -> Callable[[Any], Any]:
    def change(value: Any) -> Any:
        at = value
        for key in path[:-1]:
            at = at[key]
        del at[path[-1]]
        return value

    return change


def put(new: Any, *path: str) -> Callable[[Any], Any]:
    def change(value: Any) -> Any:
        at = value
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = new
        return value

    return change


MANIFESTS: dict[str, Callable[[Any], Any]] = {
    "null_scenario": put(None, "scenario"),
    "scenario_a_word": put("chat", "scenario"),
    "null_workload_of_the_scenario": put(None, "scenario", "workload"),
    "null_packages": put(None, "packages"),
    "packages_a_list": put([1], "packages"),
    "package_without_a_version": put(None, "packages", "numpy"),
    "code_a_number": put(5, "code"),
    "no_workload": drop("workload"),
    "no_outcomes": drop("outcomes"),
    "another_policys_outcomes": put([], "outcomes", "static"),
    "another_objective": put("ttft<9s @ 1%", "slo"),
    "blocks_a_word": put("many", "num_blocks"),
    "no_checksums": drop("files"),
    "checksums_a_list": put([], "files"),
    "no_checksum_of_its_own": drop("sha256"),
    "a_list": lambda value: [value],
    "null": lambda value: None,
}


@pytest.mark.parametrize("change", MANIFESTS.values(), ids=MANIFESTS)
def test_a_changed_manifest_is_refused(copied: Path, change: Callable[[Any], Any]) -> None:
    """Whatever key of it was changed, dropped or made null."""
    path = copied / "manifest.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    assert "manifest.json" in unread(copied)


def test_another_version_is_told_and_never_at_length(copied: Path, tmp_path: Path) -> None:
    """How a run was made is no part of what it is, and may be of any length."""
    path = copied / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"packages": {"numpy": "1" * 5000}}))
    result = result_of(copied, ["explain"], tmp_path / "out")
    assert (result.exit_code, result.stderr.count("\n")) == (0, 1) and len(result.stderr) < 400


BYTES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "binary": lambda data: random.Random(0).randbytes(4000),
    "header_alone": lambda data: data.splitlines(keepends=True)[0][:-1],
    "deep": lambda data: b"[" * 100_000,
    "long_number": lambda data: b'{"a": ' + b"9" * 5000 + b"}",
    "one_byte": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
}
RUN = ["manifest.json", "summary.csv", "points.csv"]
POINT = ["point.json", "requests.parquet", "steps.parquet", "states.parquet"]


@pytest.mark.parametrize("damage", BYTES.values(), ids=BYTES)
@pytest.mark.parametrize("name", [*RUN, *POINT])
def test_a_damaged_file_is_refused(copied: Path, name: str, damage: Callable[[bytes], bytes]) -> None:
    """Empty, cut, binary, a header alone, too deep, or one bit: of a run or of its points."""
    for path in [copied / name] if name in RUN else (copied.parent / "points").glob(f"*/{name}"):
        path.write_bytes(damage(path.read_bytes()))
    assert name.removesuffix(".parquet") in unread(copied)


@pytest.mark.parametrize("column", ["policy", "load", "seed", "point", "ttft_mean_s", "unstable"])
def test_a_table_without_a_column_is_refused(copied: Path, column: str) -> None:
    """Nobody falls over it later."""
    rows = [line.split(",") for line in (copied / "points.csv").read_text().splitlines()]
    at = rows[0].index(column)
    (copied / "points.csv").write_text("".join(",".join(row[:at] + row[at + 1 :]) + "\n" for row in rows))
    assert "points.csv: cannot be read: it is not as it was written" in unread(copied)


@pytest.mark.parametrize("args", READING, ids=lambda args: " ".join(map(str, args[:2])))
@pytest.mark.parametrize("whole", [False, True], ids=["table", "folder"])
def test_tables_of_another_point_are_refused(copied: Path, args: list[object], whole: bool, tmp_path: Path) -> None:
    """One table, or all that a point has, copied over those of another: every command that reads points says so."""
    points = load_results(copied).points
    points = points[(points["seed"] == 0)]
    for policy in ("static", "continuous"):
        low, high = (copied.parent / "points" / name for name in points.loc[points["policy"] == policy, "point"])
        for table in ["requests.parquet"] if not whole else POINT:
            one, other = (low / table).read_bytes(), (high / table).read_bytes()
            (low / table).write_bytes(other)
            (high / table).write_bytes(one)
    said = refused(copied, args, tmp_path / "out")
    assert ("is of another point" if whole else "it is not as it was written") in said


def test_a_point_whose_tables_were_changed_is_simulated_again(copied: Path) -> None:
    """`run` does not take another point's folder for its own: the summary is that of the first run."""
    before = (copied / "summary.csv").read_bytes()
    low, high = sorted((copied.parent / "points").iterdir())[:2]
    shutil.rmtree(low)
    shutil.copytree(high, low)
    home = copied.parent.parent
    (home / "s.yaml").write_text(TINY)
    assert batchsim("run", home / "s.yaml", "--out", home, "--jobs", 1, "--no-pictures").exit_code == 0
    assert (copied / "summary.csv").read_bytes() == before
    assert load_results(copied).manifest["points_reused"] == 7


def test_results_with_other_contents_and_their_checksums_are_another_runs(copied: Path, tmp_path: Path) -> None:
    """The checksums are what is checked: with new ones the same change is read."""
    path = copied / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"heading": "mine"}))
    refused(copied, ["explain"], tmp_path / "out")
    reseal(copied.parent)
    assert result_of(copied, ["explain"], tmp_path / "out").exit_code == 0


TABLES: dict[str, Callable[[str], str]] = {
    "nothing": lambda text: "",
    "a_header_alone": lambda text: text.splitlines()[0] + "\n",
    "words_for_numbers": lambda text: text.splitlines()[0] + "\n" + "x," * text.splitlines()[0].count(",") + "x\n",
    "no_policy": lambda text: text.replace("policy,", "politics,", 1),
    "zero_bytes": lambda text: "\0\xff\n" * 9,
}


@pytest.mark.parametrize("name", ["summary.csv", "points.csv"])
@pytest.mark.parametrize("change", TABLES.values(), ids=TABLES)
def test_a_table_that_is_none_is_refused_with_its_checksums_too(
    copied: Path, name: str, change: Callable[[str], str]
) -> None:
    """As another version might have written it: no table of numbers, no rows, or not of policies."""
    (copied / name).write_text(change((copied / name).read_text()), encoding="utf-8")
    reseal(copied.parent)
    assert f"{name}: cannot be read: " in unread(copied)


def test_an_audit_that_fails_leaves_the_log_that_was_there(copied: Path, tmp_path: Path) -> None:
    """The second of two policies cannot be read: the file of an earlier audit stays whole."""
    log = tmp_path / "log.jsonl"
    assert batchsim("explain", copied, "--audit", log).exit_code == 0
    before = log.read_bytes()
    points = load_results(copied).points
    for name in points.loc[points["policy"] == "continuous", "point"]:
        (copied.parent / "points" / name / "steps.parquet").write_bytes(b"")
    assert batchsim("explain", copied, "--audit", log).exit_code == 2
    assert log.read_bytes() == before and sorted(path.name for path in tmp_path.glob("*log*")) == ["log.jsonl"]
