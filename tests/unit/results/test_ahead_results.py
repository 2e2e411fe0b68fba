"""What is read of runs whose engine is ahead of results: steps' times are the GPU's, the host's part is beside."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from batchsim.cost.work import TIME_TERMS
from batchsim.explain.step_terms import device_rows, step_terms
from batchsim.metrics.host_lane import host_waits_ns
from batchsim.report.pictures.closeup import timeline
from batchsim.report.pictures.engine_lanes import lane_shares
from batchsim.report.text.attribution_text import overview, overview_text
from batchsim.results.fleet_inputs import cost_terms
from batchsim.results.keep import measured_point
from batchsim.results.point_files import write_point
from batchsim.results.read import Results
from batchsim.scenario import Scenario, load_scenario
from batchsim.scenario.point import Run, simulate_point
from batchsim.scenario.setup import Setup
from batchsim.study.curves.run import run_scenario

SCENARIO = """
model: llama-3.1-8b
cost: {kind: roofline, gpu: h100, host: {base: 12ms}}
workload:
  arrivals: {kind: poisson, mean_rate: 20/s}
  lengths:
    prompt: {kind: fixed, tokens: 100}
    output: {kind: uniform, min: 2, max: 12}
  output_cap: 16
  requests: 40
policies:
  vllm: {async_scheduling: true, max_num_seqs: 8, max_num_batched_tokens: 512}
slo: ttft<1s @ 99%
seeds: 1
"""


GROUPS = "{router: round_robin, groups: {a: {count: 1}, b: {count: 1, cost: {kind: roofline, gpu: h200, host: HOST}}}}"
GROUPS = GROUPS.replace("HOST", "{base: 12ms}")


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("ahead") / "some.yaml"
    file.write_text(SCENARIO, encoding="utf-8")
    return str(file)


@cache
def ran(path: str, *overrides: str) -> tuple[Setup, Run]:
    scenario: Scenario = load_scenario(path, overrides=overrides)
    setup = Setup.of(scenario)
    return setup, simulate_point(setup, scenario.points()[0])


def explained_ns(setup: Setup, run: Run) -> np.ndarray:
    terms = cost_terms(setup, run.records, run.point.spec.config)
    return sum((terms[name] for name in TIME_TERMS), np.zeros(len(run.records.steps)))


@pytest.mark.parametrize("mode", ["true", "false"])
@pytest.mark.parametrize("replicas", ["null", GROUPS], ids=["one", "groups"])
def test_terms_sum_to_the_steps_times_with_the_host_s_part_only_where_it_waits(
    path: str, mode: str, replicas: str
) -> None:
    """Ahead, the 12 ms of the host are in no step; else they are in each."""
    setup, run = ran(path, f"policies.vllm.async_scheduling={mode}", f"replicas={replicas}")
    assert np.abs(explained_ns(setup, run) - run.records.steps["duration_ns"]).max() <= len(TIME_TERMS)
    assert (run.records.steps["duration_ns"] > 12_000_000).all() == (mode == "false")


def test_a_step_of_a_pipeline_takes_what_it_computes_and_what_it_waits_between_stages(path: str) -> None:
    """Asynchronous or not: with several stages every engine is ahead."""
    setup, run = ran(path, "cost.pp=2", "policies.vllm.async_scheduling=false")
    rest = run.records.steps["duration_ns"] - explained_ns(setup, run)
    assert rest.min() >= -len(TIME_TERMS) and rest.max() > 10_000


@pytest.mark.parametrize("stages", [1, 2])
def test_kept_steps_say_what_their_time_was_made_of(path: str, tmp_path: Path, stages: int) -> None:
    """Read back with the host's part beside them; the wait of a pipeline is under `other`. With another cost nothing is
    claimed."""
    setup, run = ran(path, f"cost.pp={stages}")
    write_point(measured_point(setup, run, "kept"), tmp_path / "points" / "kept")
    points = pd.DataFrame([{"policy": "vllm", "load": 20.0, "seed": 0, "point": "kept"}])
    results = Results(tmp_path / "run", points, points, {}, setup.scenario.plain)
    records = results.records("vllm", 20.0, 0)
    assert records.lanes.tolist() == run.records.lanes.tolist()
    found = step_terms(results, records, "vllm")
    total = sum(found.values(), np.zeros(len(records.steps)))
    assert not found["host"].any() and np.abs(total - records.steps["duration_ns"]).max() <= len(TIME_TERMS)
    rows = device_rows(results, records, "vllm")
    assert list(rows) == (["device"] if stages == 1 else ["stage 1", "stage 2"])
    ends_ns = records.steps["start_ns"] + records.steps["duration_ns"]
    assert np.abs(list(rows.values())[-1][:, 1] - ends_ns).max() <= 4 * len(ends_ns) * (stages - 1)
    for gpu in ("a100", "h200"):  # slower and quicker
        other = replace(results, scenario=results.scenario | {"cost": results.scenario["cost"] | {"gpu": gpu}})
        assert step_terms(other, records, "vllm") == {}
        assert list(device_rows(other, records, "vllm")) == (["device"] if stages == 1 else [])


@pytest.mark.parametrize("replicas", ["null", GROUPS], ids=["one", "groups"])
def test_pictures_and_text_say_how_busy_host_and_device_were(path: str, tmp_path: Path, replicas: str) -> None:
    """A host of 12 ms a step, longer than the device's: the device waits for it before nearly every step. The picture's
    rows are the same time in intervals; without an engine ahead there is none, and no line."""
    for mode in ("true", "false"):
        overrides = [f"policies.vllm.async_scheduling={mode}", f"replicas={replicas}", "load={mean_rate: [20/s]}"]
        results = run_scenario(load_scenario(path, overrides=overrides), out=tmp_path)
        records = results.records("vllm", 20.0, 0)
        ends_ns = records.steps["start_ns"] + records.steps["duration_ns"]
        edges_ns = np.linspace(0, ends_ns.max(), 11)
        shares, found = lane_shares(results, "vllm", 20.0, 0, edges_ns), overview(results, "vllm", 20.0, 0)
        if mode == "true" and replicas == "null":
            timeline(results, tmp_path / "timeline.png", 20.0, 0)
        assert ("host at work" in overview_text(results, found)) == (mode == "true")
        if mode == "false":
            assert shares == {} and found["lanes"] is None
            continue
        assert list(shares) == ["host", "device"]
        lanes, (busy, waits) = found["lanes"], shares["device"]
        assert lanes["host"] > 0.6 and lanes["host_bound_steps"] > 0.9 * lanes["steps"] == 0.9 * len(records.steps)
        assert 0.3 < lanes["waits"] < 1 - lanes["device"]
        engines = 1 if replicas == "null" else 2
        ran_ns = (busy.mean() * edges_ns[-1] * engines, waits.mean() * edges_ns[-1] * engines)
        expected = (records.steps["duration_ns"].sum(), host_waits_ns(records).sum())
        assert ran_ns == pytest.approx(expected)
        assert (busy + waits <= 1 + 1e-9).all() and shares["host"][1].sum() == 0
