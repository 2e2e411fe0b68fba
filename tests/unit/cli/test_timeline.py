"""`batchsim timeline`: which point it takes, what it writes, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from batchsim.base.errors import ScenarioError
from batchsim.base.files import file_hash
from batchsim.cli.common import OneLineGroup
from batchsim.cli.timeline import timeline
from batchsim.explain.step_terms import step_terms
from batchsim.results.read import load_results
from batchsim.scenario import load_scenario
from batchsim.study.curves.run import run_scenario
from tests.support.tiny_scenario import TINY, changed

app = typer.Typer(cls=OneLineGroup)
app.callback()(lambda: None)
app.command()(timeline)


def trace(*args: object) -> Any:
    """The result of `batchsim timeline ...`."""
    return CliRunner().invoke(app, ["timeline", *map(str, args)])


def test_a_point_is_written_as_a_trace(ran: Path, tmp_path: Path) -> None:
    """All 40 requests of the point, each a slice; stdout says what was written."""
    out = tmp_path / "trace.json"
    result = trace(ran, "--policy", "static", "--load", 20, "--seed", 1, "-o", out)
    assert result.exit_code == 0
    read = json.loads(out.read_text())
    names = {event["name"] for event in read["traceEvents"]}
    assert {f"request {i}" for i in range(40)} <= names
    assert (read["otherData"]["policy"], read["otherData"]["load"], read["otherData"]["seed"]) == ("static", 20.0, 1)
    slices = sum(event["ph"] == "B" for event in read["traceEvents"])
    assert result.stdout.startswith(f"{out}  ") and f"{slices:,} slices" in result.stdout


def test_a_window_holds_less(ran: Path, tmp_path: Path) -> None:
    """Nothing lies outside of it, and what crosses its edges is cut there."""
    out = tmp_path / "trace.json"
    assert trace(ran, "--policy", "static", "--from", "500ms", "--to", "1s", "-o", out).exit_code == 0
    slices = [event for event in json.loads(out.read_text())["traceEvents"] if event["ph"] in "BE"]
    assert slices
    assert all(5e5 <= event["ts"] <= 1e6 for event in slices)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "has 2 policies, a trace is of one. Write --policy and one of static, continuous."),
        (("--policy", "vllm"), "has no policy vllm. Write --policy and one of static, continuous."),
        (("--policy", "static", "--load", 99), "load 99 was not tested. Tested are 10, 20."),
        (("--policy", "static", "--seed", 7), "no point static"),
        (("--policy", "static", "--from", "9"), "has no known unit of a time"),
        (("--policy", "static", "--from", "2h"), "the run goes from 0 to"),
        (("--policy", "static", "--from", "2s", "--to", "1s"), "--from 2s --to 1s: the run goes from 0 to"),
        (("--policy", "static", "-o", __file__), "is there, and no trace"),
        (("--policy", "static", "-o", "/nowhere/trace.json"), "/nowhere/trace.json: cannot be written"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(ran: Path, args: tuple[object, ...], message: str) -> None:
    """Exit code 2, and a line that says what to write instead."""
    result = trace(ran, *args)
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_a_window_before_the_first_request_is_a_trace_without_slices(ran: Path, tmp_path: Path) -> None:
    """Nothing to see is no error: the counts are 0."""
    result = trace(ran, "--policy", "static", "--to", "1ns", "-o", tmp_path / "trace.json")
    assert result.exit_code == 0 and " 0 slices and 0 counter values" in result.stdout


def test_steps_say_what_their_time_was_made_of(ran: Path, tmp_path: Path) -> None:
    """A constant cost of 10 ms knows one term; with another cost than the run's nothing is claimed."""
    results = load_results(ran)
    records = results.records("static", 20.0, 0)
    terms = step_terms(results, records, "static")
    assert {name: set(ns.tolist()) for name, ns in terms.items() if ns.any()} == {"other": {1e7}}
    out = tmp_path / "trace.json"
    assert trace(ran, "--policy", "static", "--load", 20, "-o", out).exit_code == 0
    steps = [e for e in json.loads(out.read_text())["traceEvents"] if e["ph"] == "B" and e["pid"] == 1]
    assert steps and all(step["args"]["other_us"] == 10_000 for step in steps)
    other = results.scenario | {"cost": results.scenario["cost"] | {"step": "11ms"}}
    assert step_terms(replace(results, scenario=other), records, "static") == {}


def test_steps_of_a_cost_that_an_option_changed_say_what_their_time_was_made_of(tmp_path: Path) -> None:
    """The run's own scenario counts, not the file that it began from; of a varied key each policy's own value."""
    path = tmp_path / "tiny.yaml"
    path.write_text(changed(TINY, "requests: 40", "requests: 4"))
    options = ["load=null", "seeds=1", "cost.step=11ms"]
    results = run_scenario(load_scenario(str(path), overrides=options), out=tmp_path / "out")
    load = float(results.points["load"].iloc[0])
    terms = step_terms(results, results.records("static", load, 0), "static")
    assert {name: set(ns.tolist()) for name, ns in terms.items() if ns.any()} == {"other": {1.1e7}}
    varied = load_scenario(str(path), overrides=[*options, "vary={cost.step: [12ms, 13ms]}"])
    results = run_scenario(varied, out=tmp_path / "out")
    for label, ns in zip(results.points["policy"], (1.2e7, 1.3e7) * 2, strict=True):
        found = step_terms(results, results.records(str(label), load, 0), str(label))
        assert set(found["other"].tolist()) == {ns}, label


def test_a_replica_that_an_option_added_is_a_trace(tmp_path: Path) -> None:
    """The run's own replicas count, which its scenario file does not have; steps say what they were made of."""
    path = tmp_path / "tiny.yaml"
    path.write_text(changed(TINY, "requests: 40", "requests: 4"))
    options = ("replicas={groups: {a: {count: 1}, b: {count: 1}}, router: round_robin}", "load=null", "seeds=1")
    scenario = load_scenario(str(path), overrides=options)
    results = run_scenario(scenario, out=tmp_path / "out")
    out = tmp_path / "trace.json"
    result = trace(results.path, "--policy", "static", "--replica", 1, "-o", out)
    assert result.exit_code == 0, result.output
    steps = [e for e in json.loads(out.read_text())["traceEvents"] if e["ph"] == "B" and e["pid"] == 1]
    assert steps and all(step["args"]["other_us"] == 10_000 for step in steps)


def test_steps_of_a_live_run_say_what_was_measured(ran: Path, tmp_path: Path) -> None:
    """The kernels' and the host's time of each step, from the raw run; without that file nothing."""
    results = load_results(ran)
    records = results.records("static", 20.0, 0)
    count = len(records.steps)
    raw = tmp_path / "raw" / "1.npz"
    raw.parent.mkdir()
    np.savez(raw, kernel_ns=np.arange(count), host_ns=np.full(count, 7))
    live = {"raw": "raw/1.npz", "raw_sha256": file_hash(raw)}
    kept = replace(results, path=tmp_path / "run", manifest=results.manifest | {"live": live})
    found = step_terms(kept, records, "static")
    assert found["kernel"].tolist() == list(range(count)) and set(found["host"]) == {7.0}
    np.savez(raw, kernel_ns=np.arange(count), host_ns=np.full(count, 8))
    with pytest.raises(ScenarioError, match="not as it was written"):
        step_terms(kept, records, "static")
    raw.unlink()
    assert step_terms(kept, records, "static") == {}
