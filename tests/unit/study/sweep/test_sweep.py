"""Sweeps that last: a point that fails, a folder that another process writes, files that are cut short."""

from __future__ import annotations

import multiprocessing
import shutil
import sys
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pandas as pd
import pytest

from batchsim.base.errors import PointsFailed, ScenarioError
from batchsim.report.text.summary_text import report
from batchsim.results.failed import Failed, grouped
from batchsim.results.read import Results
from batchsim.scenario import Scenario, load_scenario
from batchsim.scenario.setup import Setup
from batchsim.study.curves.run import run_scenario
from batchsim.study.sweep.folder_lock import lock_folder
from batchsim.study.sweep.points import Sweep

SCENARIO = """\
model: llama-3.1-8b
cost: {kind: constant, step: 10ms}
kv: {tokens: 16000}
workload:
  arrivals: {kind: poisson, mean_rate: 20/s}
  lengths:
    prompt: {kind: fixed, tokens: 100}
    output: {kind: uniform, min: 2, max: 12}
  output_cap: 16
  requests: 60
policies:
  continuous: {max_num_seqs: 8, max_num_batched_tokens: 512}
  mine: {kind: "tests.support.failing_policies:KIND", limit: LIMIT}
load: {mean_rate: [10/s, 200/s]}
slo: ttft<1s & tpot<50ms @ 99%
seeds: 2
"""
FEW, MANY = 20, 1000  # waiting requests at which `mine` fails: at 200/s, never


def scenario(folder: Path, kind: str = "Forgets", limit: int = FEW) -> Scenario:
    path = folder / "s.yaml"
    path.write_text(SCENARIO.replace("KIND", kind).replace("LIMIT", str(limit)))
    return load_scenario(str(path), allow_code=True)


def failed_of(results: Results) -> set[tuple[str, float, int]]:
    return {(entry["policy"], entry["load"], entry["seed"]) for entry in results.manifest["failed"]}


@pytest.mark.parametrize(
    ("kind", "jobs", "why"),
    [
        ("Forgets", 1, "schedule"),
        ("Crashes", 1, "ZeroDivisionError: integer division or modulo by zero (failing_policies.py:"),
        ("Crashes", 2, "ZeroDivisionError: integer division or modulo by zero (failing_policies.py:"),
        ("Dies", 2, "its worker process was killed by SIGKILL, alone too"),
    ],
)
def test_a_failing_point_does_not_sink_the_rest(tmp_path: Path, kind: str, jobs: int, why: str) -> None:
    """Both seeds of the heavy load fail under one policy: all else has its numbers; table and summary say so."""
    results = run_scenario(scenario(tmp_path, kind), out=tmp_path, jobs=jobs)
    assert failed_of(results) == {("mine", 200.0, 0), ("mine", 200.0, 1)}
    assert all(why in entry["reason"] for entry in results.manifest["failed"])
    rows = {(row["policy"], row["load"]): row for row in results.summary.to_dict("records")}
    assert {key: row["failed"] for key, row in rows.items()} == {
        ("continuous", 10.0): 0, ("continuous", 200.0): 0, ("mine", 10.0): 0, ("mine", 200.0): 2,
    }  # fmt: skip
    assert {key for key, row in rows.items() if pd.isna(row["ttft_p99_s"])} == {("mine", 200.0)}
    text = report(results, 200.0)
    assert text.count("failed at load 200") == 1
    assert next(line for line in text.split("\n") if line.startswith("mine")).split().count("failed") == 1
    assert report(results, 10.0).count("failed at load 200") == 1


def test_only_the_failed_points_are_tried_again(tmp_path: Path) -> None:
    """The next run simulates what failed and nothing else; with `run` the failure is an error that says which."""
    made = scenario(tmp_path)
    setup = Setup.of(made)
    sweep = Sweep(tmp_path / "s")
    wanted = [(setup, point) for point in made.points()]
    found = sweep.attempt(wanted)
    assert [isinstance(each, Failed) for each in found] == [p.load == 200 and p.spec.label == "mine" for _, p in wanted]
    said: list[str] = []
    again = Sweep(tmp_path / "s", progress=lambda done, total, last: said.append(last))
    with pytest.raises(PointsFailed, match=r"2 of 8 points failed, the others are kept: mine: 2 points failed at load"):
        again.run(wanted)
    assert again.reused == 6
    assert said == ["6 there already", "mine at 200, seed 0", "mine at 200, seed 1"]


@pytest.mark.parametrize("replicas", ["null", "{count: 2, router: round_robin}"])
def test_a_long_point_says_about_every_minute_how_far_it_is(tmp_path: Path, replicas: str) -> None:
    """Where it runs in this process; 1,000 requests at 4 a second are some four minutes."""
    said: list[tuple[int, int, str]] = []
    path = tmp_path / "s.yaml"
    path.write_text(
        SCENARIO.replace("requests: 60", "requests: 1000").split("  mine:")[0] + "load: {mean_rate: [4/s]}\n"
    )
    made = load_scenario(str(path), overrides=[f"replicas={replicas}", "slo=ttft<1s @ 99%", "seeds=1"])
    run_scenario(made, out=tmp_path, progress=lambda *each: said.append(each))
    minutes = [f"continuous at 4, seed 0, 0:0{n}:00 simulated" for n in (1, 2, 3)]
    assert [text for *_, text in said[:4]] == ["starting", *minutes]
    assert {done for done, *_ in said[:-1]} == {0} and said[-1] == (1, 1, "continuous at 4, seed 0")


@pytest.mark.parametrize("jobs", [0, -1, "2", 2**63])
def test_a_number_of_processes_is_one_that_a_machine_has(tmp_path: Path, jobs: Any) -> None:
    """Another is refused in one line, before anything is written."""
    with pytest.raises(ScenarioError, match=f"jobs {jobs!r} is not a number of processes. Write one from 1 to 1024."):
        run_scenario(scenario(tmp_path), out=tmp_path, jobs=jobs)
    assert not (tmp_path / "s").exists()


def test_a_run_without_any_point_is_an_error(tmp_path: Path) -> None:
    """Nothing can be tabulated of points that all failed: the reasons are the error, and no folder pretends."""
    made = load_scenario(
        scenario(tmp_path).source,
        overrides=['policies={mine: {kind: "tests.support.failing_policies:Forgets", limit: 0}}'],
        allow_code=True,
    )
    with pytest.raises(PointsFailed, match=r"4 of 4 points failed: mine: 4 points failed at load 10, 200: "):
        run_scenario(made, out=tmp_path)
    assert not list(tmp_path.glob("s/*/manifest.json"))


def test_alike_failures_are_one_line() -> None:
    """Reasons that differ in numbers alone are told once; another policy's or another reason apart."""
    failed = [
        Failed("a", "a", 8.0, 0, "x", "512 sequences asked"),
        Failed("a", "a", 4.0, 0, "x", "513 sequences asked"),
        Failed("a", "a", 8.0, 1, "x", "stalled"),
        Failed("b", "b", 8.0, 0, "x", "512 sequences asked"),
    ]
    assert grouped(failed) == [
        ("a: 2 points failed at load 4, 8:", "512 sequences asked"),
        ("a: 1 point failed at load 8:", "stalled"),
        ("b: 1 point failed at load 8:", "512 sequences asked"),
    ]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 8 points, to be copied."""
    folder = tmp_path_factory.mktemp("whole")
    run_scenario(scenario(folder, limit=MANY), out=folder)
    return folder


@pytest.mark.parametrize("table", ["requests.parquet", "steps.parquet", "point.json"])
@pytest.mark.parametrize("damage", ["cut", "zeros", "gone"])
def test_a_damaged_point_is_made_again(whole_run: Path, tmp_path: Path, table: str, damage: str) -> None:
    """A file cut short, of zeros (as a power cut leaves it) or gone: the point is no point, and its bytes come back."""
    shutil.copytree(whole_run, tmp_path, dirs_exist_ok=True)
    made, points = scenario(tmp_path, limit=MANY), tmp_path / "s" / "points"
    before = contents(points)
    victim = sorted(points.glob("[!.]*"))[1] / table
    whole = victim.read_bytes()
    if damage == "gone":
        victim.unlink()
    else:
        victim.write_bytes(whole[:-7] if damage == "cut" else bytes(len(whole)))
    again = run_scenario(made, out=tmp_path)
    assert (again.manifest["points_reused"], again.manifest["points_run"]) == (7, 1)
    assert contents(points) == before


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_trace_that_changed_is_read_again(tmp_path: Path, jobs: int) -> None:
    """One process runs a scenario twice with another trace under the same name: the second run is of the second."""
    made = scenario(tmp_path, limit=MANY)
    text = made.text.replace("{kind: poisson, mean_rate: 20/s}", "{kind: trace}").replace("  requests: 60\n", "")
    start = text.index("  lengths:"), text.index("  output_cap")
    trace = "  trace: {path: my.csv, columns: {arrival: ts, prompt: in, output: out}, time_unit: ms}\n"
    text = text[: start[0]] + trace + text[start[1] :].replace("load: {mean_rate: [10/s, 200/s]}\n", "")
    (tmp_path / "t.yaml").write_text(text)
    lasts = []
    for gap_ms in (40, 80):
        (tmp_path / "my.csv").write_text("\n".join(["ts,in,out", *(f"{gap_ms * i},50,5" for i in range(60))]))
        results = run_scenario(load_scenario(str(tmp_path / "t.yaml"), allow_code=True), out=tmp_path, jobs=jobs)
        lasts.append(results.requests("continuous", 1.0, 0)["arrival_ns"].max())
    assert lasts == [59 * 40_000_000, 59 * 80_000_000]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_two_writers_exclude_each_other(tmp_path: Path) -> None:
    """While another process holds the folder a run stops at once and says who does; when that is killed, it runs."""
    made = scenario(tmp_path, limit=MANY)
    (tmp_path / "s").mkdir()
    code = "import sys, pathlib, batchsim.study.sweep.folder_lock as own\n"
    code += "lock = own.lock_folder(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    other = Popen([sys.executable, "-c", code, tmp_path / "s"], stdin=PIPE, stdout=PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(ScenarioError, match=rf"s: is being written by process {other.pid} on \S+, since 2.*--out"):
            run_scenario(made, out=tmp_path)
        assert not list((tmp_path / "s").glob("points/*"))
    finally:
        other.kill()
        other.communicate()
    assert run_scenario(made, out=tmp_path).manifest["points_run"] == 8


def test_the_folder_is_free_when_the_sweep_is_gone(tmp_path: Path) -> None:
    """One process may have several sweeps of a folder; the lock ends with the last of them."""
    first, second = lock_folder(tmp_path), lock_folder(tmp_path)
    assert first is second
    del first, second
    other = multiprocessing.get_context("spawn").Process(target=lock_folder, args=(tmp_path,))
    other.start()
    other.join()
    assert other.exitcode == 0


def test_requests_of_points_that_were_there_are_described_once(tmp_path: Path) -> None:
    """Those of `continuous` are read, those of `mine` simulated: the manifest has one entry a load and seed."""
    whole = scenario(tmp_path, limit=MANY)
    path = str(tmp_path / "s.yaml")
    run_scenario(
        load_scenario(path, overrides=["policies={continuous: {max_num_seqs: 8, max_num_batched_tokens: 512}}"]),
        out=tmp_path,
    )
    results = run_scenario(whole, out=tmp_path)
    assert results.manifest["points_reused"] == 4
    assert len(results.manifest["workload"]) == 4
