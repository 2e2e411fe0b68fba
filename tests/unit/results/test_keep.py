"""What is kept of points: the same figures, fewer rows, and a line that says so where rows are asked for."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from batchsim.base.errors import ScenarioError
from batchsim.metrics.histogram import RELATIVE_WIDTH, Histogram
from batchsim.report.pictures.fleet_picture import fleet_picture
from batchsim.report.pictures.plots import lacking
from batchsim.report.traffic_over_time import traffic_over_time
from batchsim.results.keep import measured_point
from batchsim.results.point_files import read_table
from batchsim.results.read import POINTS, REPLICAS, Results
from batchsim.scenario import load_scenario
from batchsim.scenario.parse import changed
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from tests.unit.scenario.test_replicas import LIKE, MIXED, SCALER, SCENARIO, ran

SCALED = f"replicas: {{count: 1, router: random, autoscaler: {{{SCALER}, above: 1, below: 0.2, min: 1, max: 3}}}}\n"
FAILING = (
    "replicas: {count: 2, router: least_tokens, failures: [{replica: 1, at: 8s, down_for: 3s}], lost: retry}\n"
    "max_waiting: 30\n"
)
VLLM = "policies={vllm: {max_num_seqs: 8}}"
CLASSES = "workload.classes={short: {share: 70%, slo: ttft<300ms @ 90%}, long: {share: 30%}}"


def values(results: Results) -> dict[str, Any]:
    """The metrics of the first point."""
    return results.points.iloc[0].drop(["point"]).to_dict()


@pytest.mark.parametrize("keep", ["requests", "minutes"])
@pytest.mark.parametrize(
    ("replicas", "more"),
    [(LIKE, [VLLM]), (MIXED, []), (SCALED, [CLASSES]), (FAILING, ["workload.drain=0s"])],
    ids=["ahead of results", "mixed", "scaled", "failing"],
)
def test_figures_are_those_of_all_rows(tmp_path: Path, replicas: str, more: list[str], keep: str) -> None:
    """To rounding, and percentiles of gaps between tokens to the width of their intervals; of each replica too."""
    every = ran(tmp_path, replicas, "seeds=1", *more)
    fewer = ran(tmp_path, replicas, "seeds=1", f"keep={keep}", *more)
    mine, theirs = values(fewer), values(every)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        gap = name.startswith("itl") and "mean" not in name
        within = RELATIVE_WIDTH if gap else 1e-9
        same = (
            mine[name] == value
            if isinstance(value, str)
            else mine[name] == pytest.approx(value, rel=within, nan_ok=True)
        )
        assert same, (name, mine[name], value)
    tables = [pd.read_csv(each.path / REPLICAS).drop(columns="point") for each in (fewer, every)]
    pd.testing.assert_frame_equal(*tables, rtol=1e-9)
    assert fewer.manifest["outcomes"] == every.manifest["outcomes"] and lacking(fewer) and not lacking(every)


@pytest.mark.parametrize("policy", [VLLM, "policies={vllm: {max_num_seqs: 8, async_scheduling: false}}"])
def test_steps_are_taken_piece_by_piece(tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose steps are packed in many chunks and digested in pieces comes to what it comes to in one."""
    path = tmp_path / "pieces.yaml"
    path.write_text(SCENARIO + LIKE, encoding="utf-8")
    setup = Setup.of(changed(load_scenario(str(path)), ["seeds=1", "keep=minutes", policy]))
    point = setup.scenario.points()[0]
    whole = measured_point(setup, simulate_point(setup, point), "a")
    monkeypatch.setattr("batchsim.kernel.journal.PACK_BYTES", 3000)
    monkeypatch.setattr("batchsim.metrics.digest.PIECE_STEPS", 50)
    monkeypatch.setattr("batchsim.metrics.by_minute.PIECE_STEPS", 50)
    run = simulate_point(setup, point)
    assert len(list(run.lives[0].records.pieces(50, 7))) > 3
    pieces = measured_point(setup, run, "a")
    for name, value in whole.result["values"].items():
        mine = pieces.result["values"][name]
        assert mine == value if value is None else mine == pytest.approx(value, rel=1e-12), name
    for name, table in whole.tables.items():
        mine, theirs = (pq.read_table(BytesIO(each)).to_pandas() for each in (pieces.tables[name], table))
        pd.testing.assert_frame_equal(mine, theirs, rtol=1e-12)


def test_minutes_and_histograms_are_of_the_requests(tmp_path: Path) -> None:
    """Summed they are the requests of the run; the share within the SLO in time is that of the rows."""
    every = ran(tmp_path, SCALED, "seeds=1", CLASSES, "workload.duration=130s", "workload.warmup=61s")
    fewer = ran(tmp_path, SCALED, "seeds=1", CLASSES, "workload.duration=130s", "workload.warmup=61s", "keep=minutes")
    policy = str(every.points["policy"].iloc[0])
    minutes, requests = fewer.minutes(policy, 1.0, 0), every.requests(policy, 1.0, 0)
    assert minutes["sent"].sum() == len(requests)
    late = requests["sent_ns"] >= 61e9
    assert minutes["judged"].sum() == late.sum()
    assert minutes["within"].sum() / late.sum() == pytest.approx(every.points["in_slo"].iloc[0])
    done = requests[requests["outcome"] == "finished"]
    by_class = done.groupby("request_class", observed=True)["output_tokens"].sum().to_dict()
    assert minutes.groupby("request_class", observed=True)["output_tokens"].sum().to_dict() == by_class
    folder = fewer.path.parent / POINTS / str(fewer.points["point"].iloc[0])
    table = read_table(folder, "histograms")
    counts = table[(table["latency"] == "ttft") & (table["request_class"] == "long")]
    of = done[late & (done["request_class"] == "long")]
    ttft = (of["first_delivery_ns"] - of["sent_ns"]).to_numpy(dtype=float)
    assert counts["count"].sum() == len(of)
    assert (counts["mean_ns"] * counts["count"]).sum() == pytest.approx(ttft.sum())
    engines, steps = read_table(folder, "engine_minutes"), every.steps(policy, 1.0, 0)
    assert engines["num_steps"].sum() == len(steps) and engines["busy_ns"].sum() == steps["duration_ns"].sum()
    weights = engines["busy_ns"] / engines["busy_ns"].sum()
    mean = (steps["num_running"] * steps["duration_ns"]).sum() / steps["duration_ns"].sum()
    assert (engines["num_running"] * weights).sum() == pytest.approx(mean)
    edges_ns, sent, shares = traffic_over_time(fewer, policy, 1.0, 0)
    assert np.diff(edges_ns).tolist() == [60e9] * len(sent) and sent.sum() == len(requests)
    assert shares is not None and np.isnan(shares[0]) and 0 < shares[1] <= 1
    fleet_picture(fewer, tmp_path / "fleet.png", 1.0, 0)


def test_what_was_not_kept_is_said_with_what_to_set(tmp_path: Path) -> None:
    results = ran(tmp_path, LIKE, "seeds=1", "keep=requests")
    assert len(results.requests("continuous", 1.0, 0)) == len(
        results.records("continuous", 1.0, 0, requests_only=True).requests
    )
    with pytest.raises(ScenarioError, match=r"its steps were not kept, .* keep: requests. .* --set keep=all\.$"):
        results.records("continuous", 1.0, 0)
    results = ran(tmp_path, LIKE, "seeds=1", "keep=minutes")
    with pytest.raises(ScenarioError, match=r"its requests were not kept, .* keep: minutes. .* --set keep=requests\.$"):
        results.requests("continuous", 1.0, 0)


def test_an_engine_alone_keeps_its_requests(tmp_path: Path) -> None:
    results = ran(tmp_path, "", "seeds=1", "keep=requests")
    assert len(results.requests("continuous", 1.0, 0)) == values(results)["submitted"]
    with pytest.raises(ScenarioError, match="keep=all"):
        results.steps("continuous", 1.0, 0)
    assert str(values(ran(tmp_path, "", "seeds=1", "keep=minutes"))) == str(values(results))


def test_gaps_by_class_need_all_rows(tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_text(SCENARIO + LIKE, encoding="utf-8")
    of_class = "workload.classes={short: {share: 70%, slo: p99(itl)<300ms}, long: {share: 30%}}"
    scenario = load_scenario(str(path), overrides=["keep=minutes", of_class])
    setup = Setup.of(scenario)
    with pytest.raises(ScenarioError, match=r"keep minutes: the slo of a class bounds itl.* Write keep: all, or bound"):
        measured_point(setup, simulate_point(setup, scenario.points()[0]), "")
    with pytest.raises(ScenarioError, match="names keep, which cannot be varied"):
        load_scenario(str(path), overrides=["vary={keep: [all, minutes]}"])


def test_a_histogram_keeps_the_mean_and_every_percentile_within_its_width() -> None:
    values = np.random.default_rng(1).lognormal(17, 2, 20_000)
    histogram = Histogram()
    histogram.add(values[:9000], np.ones(9000, np.int64))
    histogram.add(values[9000:], np.full(11_000, 3))
    means, counts = histogram.means_and_counts()
    expanded = np.sort(np.concatenate((values[:9000], np.repeat(values[9000:], 3))))
    assert counts.sum() == len(expanded) and len(means) < 8000
    assert (means * counts).sum() == pytest.approx(expanded.sum())
    binned = np.repeat(means, counts)
    assert np.abs(binned / expanded - 1).max() < RELATIVE_WIDTH
    assert Histogram().means_and_counts()[0].size == 0
