"""Loads within the cost's error of saturation: both ends are simulated, an interval stands where a number stood."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import LineCollection

from batchsim.cost.cost_error import CostError, Unknown
from batchsim.cost.fitted import Fitted, StepTerms
from batchsim.report.cost_words import at_ends
from batchsim.report.page.plan_advice import recommendation
from batchsim.report.page.plan_charts import latency_charts
from batchsim.report.page.plan_text import plan_text
from batchsim.report.page.run_decision import decision
from batchsim.report.page.run_page import run_sections
from batchsim.report.pictures.plots import p99_vs_qps_figure
from batchsim.report.reading import sweeps
from batchsim.report.sheet import sentence_text
from batchsim.report.text.capacity_text import capacity_json, capacity_text
from batchsim.report.text.run_table import cell_of
from batchsim.report.text.summary_text import report
from batchsim.results.read import Results, curve_marks, load_results
from batchsim.scenario import Scenario, load_scenario
from batchsim.study.capacity.find import find_capacities
from batchsim.study.capacity.search import Effort
from batchsim.study.curves.run import run_scenario
from batchsim.study.planning.make import make_plan
from batchsim.study.planning.tables import tables_of
from batchsim.study.sweep.points import Sweep

SCENARIO = """\
model: llama-3.1-8b
cost: mine.json
kv: {tokens: 160000}
workload:
  arrivals: {kind: poisson, mean_rate: 1/s}
  lengths: {prompt: {kind: fixed, tokens: 20}, output: {kind: fixed, tokens: 10}}
  output_cap: exact
  duration: 12s
policies:
  continuous: {max_num_seqs: 8, max_num_batched_tokens: 512}
load: {mean_rate: [40/s, 50/s, 78/s, 90/s, 120/s]}
slo: ttft<150ms & tpot<50ms @ 90%
seeds: 2
"""
"""Eight slots of ten steps of 10 ms: 80 requests/s saturate it."""
OPEN = [78.0, 90.0]
"""The loads that an error of 15 % leaves open."""
LONG = "workload.duration=20s"  # where it does
SHORT = "workload.duration=5s"  # where it does not matter which of the loads are found open


def fit(folder: Path, tpot_error: float | None) -> None:
    """Writes `mine.json`: steps of 10 ms, with that error claimed."""
    its = {"kernel": None, "kernel_source": "", "terms": {"base": 1e7}, "frontend": {"request": 0.0}}
    whole = {"format": "batchsim fit 1", "words": "some runs", **its, "claims": {"tpot_mean_s": tpot_error}}
    (folder / "mine.json").write_text(json.dumps(whole))


def scenario(folder: Path, *overrides: str, tpot_error: float | None = 0.15) -> Scenario:
    fit(folder, tpot_error)
    (folder / "s.yaml").write_text(SCENARIO)
    return load_scenario(str(folder / "s.yaml"), overrides=overrides, allow_code=True)


def points(folder: Path) -> int:
    return len([*(folder / "s" / "points").iterdir()])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The scenario's run."""
    folder = tmp_path_factory.mktemp("run")
    return run_scenario(scenario(folder, LONG), out=folder)


def column(results: Results, name: str) -> dict[float, Any]:
    """A column of the summary by load."""
    return dict(zip(results.summary["load"], results.summary[name], strict=True))


def test_loads_beside_saturation_are_simulated_at_both_ends(run: Results) -> None:
    """Those within 15 % of it, and no others; in one seed each the first that are not; all of them are kept points."""
    assert [load for load, knee in column(run, "within_cost_error").items() if knee == 1] == OPEN
    assert column(run, "unstable_fast")[90.0] == 0 and column(run, "unstable_slow")[78.0] == 1
    assert [(one["load"], len(one["fast"]), len(one["slow"])) for one in run.manifest["cost_ends"]] == [
        (78.0, 2, 2),
        (90.0, 2, 2),
    ]
    assert points(run.path.parent.parent) == 5 * 2 + len(OPEN) * 2 * 2 + 2
    assert (run.manifest["points_run"], run.manifest["points_reused"]) == (10, 0)


def test_an_end_is_what_the_stretched_scenario_gives(run: Results, tmp_path: Path) -> None:
    """The columns of the long end are the numbers of the same scenario with `cost_factor`; TTFT is steep."""
    slow = run_scenario(scenario(tmp_path, LONG, "cost_factor=1.15", "load={mean_rate: [78/s]}"), out=tmp_path)
    for name in ("ttft_p99_s", "e2e_mean_s", "tpot_p99_s", "in_slo"):
        assert column(run, f"{name}_slow")[78.0] == pytest.approx(column(slow, name)[78.0])
    assert column(run, "ttft_mean_s_slow")[78.0] > 3 * column(run, "ttft_mean_s_fast")[78.0]


def test_the_table_has_an_interval_and_the_verdict_is_open(run: Results) -> None:
    """`∞` where the queue grows at the long end; what is not near has numbers; how to tell is said once."""
    text = report(run, 78.0)
    row = next(line for line in text.splitlines() if line.startswith("continuous"))
    assert "ms…∞" in row and "unstable" not in row
    text = " ".join(text.split())
    assert "continuous 50 (at 78 cannot be told" in text
    assert "78, 90 req/s within the cost's error" in text and "the queue grows from 120 req/s on" in text
    assert text.count("batchsim calibrate --bench FILES") == 1 and "±15 %: claimed by the fit to some" in text
    far = next(line for line in report(run, 50.0).splitlines() if line.startswith("continuous"))
    assert "…" not in far
    assert "unstable" in next(line for line in report(run, 120.0).splitlines() if line.startswith("continuous"))


def test_columns_that_are_asked_for_have_the_interval(run: Results) -> None:
    """Of latencies and shares, each in its own unit; whether the SLO is met is open; other metrics, and those of
    loads away from saturation, are numbers."""
    (sweep,) = sweeps(run)
    names = ("ttft_p99_s", "e2e_mean_s", "in_slo", "slo_margin", "slo_met", "preemptions")
    near, far = ([cell_of(sweep, list(sweep.loads).index(load), name) for name in names] for load in (78.0, 50.0))
    assert near[:2] == [at_ends(sweep, 2, name) for name in names[:2]] and all("ms…∞" in text for text in near[:2])
    assert all("…" in text and text.endswith(" %") for text in near[2:4]) and near[4:] == ["–", "0"]
    assert not any("…" in text for text in far) and far[4] == "yes"
    without = replace(sweep, rows=sweep.rows.drop(columns="ttft_p99_s_fast"))
    assert cell_of(without, 2, "ttft_p99_s") == "–"


def test_page_picture_and_json_have_the_interval(run: Results) -> None:
    """The Decision says that it cannot be told; a bar is drawn for each load that is open; JSON has both ends."""
    said = " ".join(sentence_text(sentence) for part in decision(run) for sentence in part)
    assert "up to 50 req/s" in said and "cannot be told without calibration" in said and "crossing near" not in said
    notes = [chart.note for s in run_sections(run, 78.0) if s.title == "Latency against load" for chart in s.charts]
    assert ["no number, and no mark" in note for note in notes] == [True, False, True]  # of tokens alone, all are known
    assert any("…" in cell.text for s in run_sections(run, 78.0) for v in s.views for row in v.rows for cell in row)
    ax = p99_vs_qps_figure(run).axes[0]
    bars = [line for each in ax.collections if isinstance(each, LineCollection) for line in each.get_segments()]
    assert [bar[0][0] for bar in bars] == OPEN
    assert all(math.isnan(value) for value in sweeps(run)[0].stable("ttft_p99_s")[2:])
    rows = {row["load"]: row for row in run.as_json()["policies"]["continuous"]["loads"]}
    assert rows[78.0]["ttft_p99_s_fast"] < rows[78.0]["ttft_p99_s_slow"] and rows[50.0]["ttft_p99_s_fast"] is None


def test_a_queue_grows_from_where_it_does_whatever_the_error(run: Results) -> None:
    """At 90 it grows as simulated, and not with the shortest steps: table, marks, picture and page say 120."""
    (sweep,) = sweeps(run)
    assert dict(zip(sweep.loads.tolist(), sweep.unstable.tolist(), strict=True))[90.0]
    assert sweep.unstable_from == curve_marks(run)["continuous"].unstable_from == 120.0
    crosses = [line for line in p99_vs_qps_figure(run).axes[0].lines if line.get_marker() == "x"]
    assert [np.asarray(line.get_xdata()).tolist() for line in crosses] == [[120.0]]
    charts = [chart for section in run_sections(run, 78.0) for chart in section.charts]
    marked = [
        [x for x, grows in zip(s.x, s.crosses, strict=True) if grows] for c in charts for s in c.series if s.crosses
    ]
    assert marked and all(each == [120.0] for each in marked)


def test_a_run_that_is_made_again_simulates_nothing(tmp_path: Path) -> None:
    """Both ends are points like others: found again, and the results are the same file for file."""
    asked = (SHORT, "load={mean_rate: [78/s]}")
    first = run_scenario(scenario(tmp_path, *asked), out=tmp_path)
    assert first.manifest["cost_ends"]
    summary, made = (first.path / "summary.csv").read_bytes(), points(tmp_path)
    again = run_scenario(scenario(tmp_path, *asked), out=tmp_path)
    assert (again.path, points(tmp_path)) == (first.path, made)
    assert (again.path / "summary.csv").read_bytes() == summary
    assert (again.manifest["points_run"], again.manifest["points_reused"]) == (0, 2)
    assert load_results(tmp_path / "s").summary.equals(again.summary)


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["load={mean_rate: [10/s]}"], 0.1),
        (["workload.arrivals={kind: closed_loop, users: 8, think_time: 0s}", "load={users: [8, 16]}"], 0.1),
        (["workload.arrivals={kind: all_at_once}", "workload.requests=50", "workload.duration=null", "load=null"], 0.1),
        ([SHORT], None),
    ],
    ids=["with_time_to_spare", "closed_loop", "all_at_once", "unknown_error"],
)
def test_what_has_no_such_load_is_simulated_once(tmp_path: Path, overrides: list[str], error: float | None) -> None:
    """An engine that rests for longer than the error, loads that cannot be beyond saturation, an error nobody knows."""
    results = run_scenario(scenario(tmp_path, *overrides, tpot_error=error), out=tmp_path)
    assert points(tmp_path) == len(results.points)
    assert "within_cost_error" not in results.summary and results.manifest["cost_ends"] == []


def test_an_unknown_error_makes_no_interval_but_is_said(tmp_path: Path) -> None:
    """Where a queue grows at a tested load; a curve on which none does says nothing."""
    text = report(run_scenario(scenario(tmp_path, tpot_error=None), out=tmp_path)).replace("\n  ", " ")
    assert "saturation lies between 78 and 90 req/s" in text and "unknown: the fit claims none" in text
    assert "Latencies near it may be anything" in text and "cannot be told without calibration" in text
    calm = run_scenario(scenario(tmp_path, SHORT, "load={mean_rate: [20/s, 40/s]}", tpot_error=None), out=tmp_path)
    assert "unknown" not in report(calm)


def test_an_end_may_decide_the_objective_alone(tmp_path: Path) -> None:
    """TPOT of 10 ms against a bound of 10.5 ms, far from saturation: latencies are numbers, and the verdict is open."""
    asked = [SHORT, "slo=tpot<10500us @ 90%", "load={mean_rate: [20/s, 40/s]}"]
    results = run_scenario(scenario(tmp_path, *asked), out=tmp_path)
    assert set(column(results, "within_cost_error").values()) == {0}
    text = report(results).replace("\n  ", " ")
    assert "continuous at none for sure (at 20, 40 cannot be told without calibration)" in text
    assert "whether the SLO is met at 20, 40 req/s the cost's error decides" in text
    assert "…" not in next(line for line in text.splitlines() if line.startswith("continuous"))


def test_one_load_has_a_verdict_of_its_own(tmp_path: Path) -> None:
    """Beside saturation neither yes nor no."""
    results = run_scenario(scenario(tmp_path, SHORT, "load=null", "workload.arrivals.mean_rate=78/s"), out=tmp_path)
    assert "continuous cannot be told without calibration" in report(results).replace("\n  ", " ")


@pytest.mark.parametrize(
    ("error", "fast", "slow", "steep"),
    [(0.1, 1.0, 1.2, False), (0.1, 1.0, 2.4, False), (0.1, 1.0, 2.5, True), (0.0, 1.0, 1.0, False)],
)
def test_a_latency_is_steep_where_it_differs_by_twice_what_steps_do(
    error: float, fast: float, slow: float, steep: bool
) -> None:
    """Of steps 10 % shorter and longer: by 2.44."""
    assert CostError(-error, error, "").is_steep(fast, slow) is steep
    assert not CostError(-error, error, "").is_steep(None, slow)


def test_an_error_that_leaves_steps_no_time_is_no_bound() -> None:
    """Nothing can be simulated at its short end."""
    found = Fitted(None, StepTerms(base=1.0), "x", 1.2).error
    assert isinstance(found, Unknown) and "±1.2e+02 % is no bound" in found.source


@pytest.mark.slow
def test_a_capacity_has_the_interval_of_the_cost_beside_it(tmp_path: Path) -> None:
    """In the table and the JSON; which it is, is said to need calibration."""
    study = find_capacities(
        scenario(tmp_path, "seeds=1"), Sweep(tmp_path / "s"), effort=Effort(most=4, fewest=4, max_probes=8)
    )
    text, (row,) = capacity_text(study), capacity_json(study)["capacities"]
    low, high = row["cost_error_share"]
    assert -0.2 < high < -0.08 < 0.08 < low < 0.25
    cell = next(line for line in text.splitlines() if line.startswith("continuous"))
    assert "…" in cell and "cost's error" in text.splitlines()[2]
    assert "cannot be told without" in text.replace("\n  ", " ")


@pytest.mark.parametrize(("limit_us", "untold"), [(9_500, True), (5_000, False)])
def test_a_capacity_met_at_no_rate_may_be_the_cost_s_error(tmp_path: Path, limit_us: int, untold: bool) -> None:
    """Steps of 10 ms against a bound of 9.5 ms: with steps 10 % shorter it is met."""
    asked = scenario(tmp_path, SHORT, f"slo=tpot<{limit_us}us @ 90%", "seeds=1")
    study = find_capacities(asked, Sweep(tmp_path / "s"), effort=Effort(most=4, fewest=4))
    assert study.policies[0].found.never and (study.policies[0].untold is not None) is untold
    assert ("the cost's error decides" in capacity_text(study).replace("\n  ", " ")) is untold


PLAN = """
plan:
  target: {rate: 72/s}
  window: 8s
  currency: $
  router: least_tokens
  gpus: {one: {cost: {kind: profile, profile: mine.json}, price: 2.00/h, kv_tokens: 160000}}
  max_replicas: %d
"""


def planned(folder: Path, limit: int, slo: str) -> tuple[Any, str]:
    fit(folder, 0.15)
    text = SCENARIO.replace("load: {mean_rate: [40/s, 50/s, 78/s, 90/s, 120/s]}\n", "")
    (folder / "s.yaml").write_text(text + PLAN % limit)
    made = make_plan(load_scenario(str(folder / "s.yaml"), overrides=[f"slo={slo}", "seeds=3"]), Sweep(folder / "s"))
    tables = tables_of(made)
    return tables, plan_text(tables, "$").replace("\n  ", " ")


def test_a_plan_says_where_the_cost_decides_how_many_hold(tmp_path: Path) -> None:
    """72 requests/s of 80: with steps 15 % longer one replica is too few; the sentence and a line say so."""
    tables, text = planned(tmp_path, 4, "ttft<300ms @ 90%")
    (row,) = tables["configurations"]
    assert (row["replicas"], row["replicas_if_fast"], row["replicas_if_slow"]) == (1, 1, 2)
    assert "! one × 1, continuous: the cost's error decides: 1 with the shortest steps that it allows, 2" in text
    said = " ".join(sentence_text(sentence) for sentence in recommendation(tables, "$"))
    assert "would take 1 to 2 replicas, and which cannot be told without calibration" in said
    same = {"replicas": 1, "traffic": 1, "dispersion": 1, "prompts": 1}
    probes = {row["cost_factor"]: row for row in tables["probes"] if same.items() <= row.items()}
    assert [probes[factor]["ttft_p99_s"] is None for factor in (0.85, 1.0, 1.15)] == [False, True, False]
    assert probes[1.0]["tpot_p99_s"] == pytest.approx(0.01)
    ttft = latency_charts(tables)[0]
    (one,) = (series for series in ttft.series if series.label == "1 replica")
    assert one.x and probes[1.0]["offered_rps"] not in one.x and "no mark" in ttft.note


def test_a_plan_in_which_nothing_holds_tries_the_short_end(tmp_path: Path) -> None:
    """TPOT of 10 ms against 9.5 ms: no number of replicas helps, steps 15 % shorter do."""
    tables, text = planned(tmp_path, 2, "tpot<9500us @ 90%")
    assert tables["configurations"][0]["replicas_if_fast"] == 1
    assert "would hold it: whether any does cannot be told without calibration" in text


def test_an_end_that_cannot_be_simulated_is_said(tmp_path: Path) -> None:
    """A policy that breaks under the queue of longer steps: the run without them is right, and says what it lacks."""
    policies = 'policies={mine: {kind: "tests.support.failing_policies:Crashes", limit: 80}}'
    results = run_scenario(scenario(tmp_path, policies, "load={mean_rate: [78/s]}"), out=tmp_path)
    assert results.manifest["failed"] == [] and "within_cost_error" not in results.summary
    text = " ".join(report(results).split())
    assert "! mine: 78 req/s could not be simulated at the ends of the cost's error: ZeroDivisionError" in text


@pytest.mark.slow
def test_a_run_that_finds_its_loads_says_where_the_slo_is_open(tmp_path: Path) -> None:
    """Its table has a crossing between tested loads: a line says at which of them the cost's error decides."""
    results = run_scenario(scenario(tmp_path, "load={mean_rate: auto, points: 6}", "seeds=1"), out=tmp_path)
    untold = sweeps(results)[0].loads[sweeps(results)[0].untold]
    text = " ".join(report(results).split())
    assert len(untold) and f"whether the SLO is met at {', '.join(f'{load:g}' for load in untold)} req/s" in text
