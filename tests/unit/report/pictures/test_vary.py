"""A key that is varied: the curves it makes, what they share, and how they are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsim.explain.counterfactual import counterfactual
from batchsim.report.pictures.curve_lines import draw_lanes
from batchsim.report.pictures.plots import write_pictures
from batchsim.report.pictures.style import figure, house_style
from batchsim.report.pictures.vary import draw_rate
from batchsim.report.reading import sweeps
from batchsim.report.text.summary_text import report
from batchsim.results.read import Results, curve_marks, num_blocks, scenario_of
from batchsim.scenario import load_scenario
from batchsim.study.curves.run import run_scenario

BASE = """\
model: llama-3.1-8b
cost: {kind: constant, step: 10ms}
kv: {tokens: 16000}
workload:
  arrivals: {kind: gamma, mean_rate: 20/s, cv: 1}
  lengths:
    prompt: {kind: fixed, tokens: 100}
    output: {kind: uniform, min: 2, max: 12}
  output_cap: 16
  requests: 60
policies:
  static: {batch_size: {best_of: [2, 4]}, max_wait: 100ms}
  continuous: {max_num_seqs: 8, max_num_batched_tokens: 512}
load: {mean_rate: [20/s, 40/s]}
slo: ttft<1s & tpot<50ms @ 99%
seeds: 2
"""


def ran(folder: Path, *overrides: str) -> Results:
    """A run of BASE with changes."""
    (folder / "s.yaml").write_text(BASE)
    return run_scenario(load_scenario(str(folder / "s.yaml"), overrides=overrides), out=folder)


@pytest.fixture(scope="module")
def slots(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """BASE with one slot and with eight."""
    return ran(tmp_path_factory.mktemp("slots"), "vary={policies.continuous.max_num_seqs: [1, 8]}")


def test_a_knob_of_one_policy_makes_a_curve_a_value_and_leaves_the_others_alone(slots: Results) -> None:
    """The policy whose knob it is has a row a value and load; the other one is run once, without a value."""
    results, summary = slots, slots.summary
    assert summary["policy"].unique().tolist() == [
        "static",
        "continuous, max_num_seqs=1",
        "continuous, max_num_seqs=8",
    ]
    assert set(summary["vary_key"]) == {"policies.continuous.max_num_seqs"}
    assert summary.groupby("policy", sort=False)["vary"].first().dropna().tolist() == [1, 8]
    assert results.manifest["points_run"] == 2 * 2 * 2 + 2 * 2 * 2  # two variants of static; two values of continuous
    assert results.manifest["vary"]["same_requests"]


def test_a_value_gives_what_the_scenario_with_that_value_gives(tmp_path: Path) -> None:
    """The points of a varied run are those of the plain scenarios, which reuse them."""
    varied = ran(tmp_path, "vary={kv.tokens: [1600, 16000]}")
    plain = ran(tmp_path, "kv.tokens=1600")
    assert plain.manifest["points_run"] == 0
    metrics = ["ttft_p99_s", "e2e_mean_s", "in_slo"]
    mine = varied.summary[varied.summary["policy"] == "continuous, kv.tokens=1600"]
    theirs = plain.summary[plain.summary["policy"] == "continuous"]
    assert mine[metrics].to_numpy().tolist() == theirs[metrics].to_numpy().tolist()
    assert (num_blocks(varied, "static, kv.tokens=1600"), num_blocks(varied, "static, kv.tokens=16000")) == (100, 1000)
    assert scenario_of(varied, "continuous, kv.tokens=1600")["kv"]["tokens"] == 1600
    assert varied.requests("continuous, kv.tokens=1600", 20.0, 1)["delivered_ns"].equals(
        plain.requests("continuous", 20.0, 1)["delivered_ns"]
    )


def test_a_deployment_that_is_varied_is_simulated_again(tmp_path: Path) -> None:
    """With its value: half the time of every step ends requests sooner."""
    short = ["workload.duration=10s", "workload.warmup=0s", "load={mean_rate: [2/s]}", "seeds=1"]
    results = run_scenario(load_scenario("deployment", overrides=short), out=tmp_path)
    policy = str(results.points["policy"].iloc[-1])
    assert scenario_of(results, policy)["cost"]["kv"] == "fp8" and "deployment" not in scenario_of(results, policy)
    found = counterfactual(results, policy, 2.0, 0, ["cost_factor=0.5"])
    assert found.rerun == "" and found.changed.records.num_steps > 0
    ends = [side.records.requests["delivered_ns"].sum() for side in (found.base, found.changed)]
    assert ends[1] < ends[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vary", "same"),
    [
        ("workload.lengths.prompt.tokens: [50, 100]", False),
        ("workload.arrivals.cv: [1, 3]", False),
        ("kv.block_size: [16, 32]", True),
        ("workload.warmup: [0s, 500ms]", True),
    ],
)
def test_it_is_said_whether_the_requests_change_with_the_value(tmp_path: Path, vary: str, same: bool) -> None:
    """Prompt lengths and burstiness change the requests; memory and the warm-up do not."""
    results = ran(tmp_path, f"vary={{{vary}}}", "seeds=1")
    text = report(results)
    assert results.manifest["vary"]["same_requests"] is same
    assert ("the same requests" in text, "each value its own requests" in text) == (same, not same)
    assert all(len(line) <= 100 for line in text.splitlines())


def test_the_values_stand_in_a_column_of_their_own_and_every_curve_has_its_highest_load(tmp_path: Path) -> None:
    """The table has a row a policy and value; the line below names the highest load of each."""
    text = report(ran(tmp_path, "vary={policies.continuous.max_num_seqs: [1, 8]}", "seeds=1"))
    rows = [line.split() for line in text.splitlines()]
    assert next(row for row in rows if row[0] == "value")[:2] == ["value", "ttft"]
    assert [row[1] for row in rows if row[0] == "continuous"] == ["1", "8"]
    assert "continuous, max_num_seqs=1 20" in text
    assert "continuous, max_num_seqs=8 40" in text


def test_auto_finds_loads_for_every_value(tmp_path: Path) -> None:
    """A curve a value, each around its own saturation."""
    slots = "vary={policies.continuous.max_num_seqs: [1, 8]}"
    results = ran(tmp_path, slots, "load={mean_rate: auto, points: 4}", "seeds=1")
    rates = results.manifest["saturation_rps"]
    assert rates["continuous, max_num_seqs=8"] > 4 * rates["continuous, max_num_seqs=1"]
    for policy, loads in results.summary.groupby("policy")["load"]:
        assert len(loads) == 4
        assert loads.min() < rates[policy] < loads.max()


def test_what_one_change_would_have_done_to_a_value(slots: Results) -> None:
    """The unchanged side is the point of that value, taken as it was recorded."""
    results = slots
    found = counterfactual(results, "continuous, max_num_seqs=1", 20.0, 0, ["policies.continuous.max_num_seqs=8"])
    assert (found.rerun, found.changes[0].before) == ("", 1)
    other = results.requests("continuous, max_num_seqs=8", 20.0, 0)
    assert found.changed.records.requests["delivered_ns"].tolist() == other["delivered_ns"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("load", ["[20/s, 40/s, 60/s]", "auto, points: 4"])
def test_the_pictures_have_a_line_a_policy_and_a_point_a_value(tmp_path: Path, load: str) -> None:
    """vary.png is written beside the others; its curves go through every value at which something is known."""
    results = ran(
        tmp_path,
        "vary={policies.continuous.max_num_seqs: [2, 4, 8]}",
        f"load={{mean_rate: {load}}}",
        "workload.requests=200",
    )
    assert (results.path / "vary.png") in write_pictures(results)
    assert (results.path / "vary.png").read_bytes().startswith(b"\x89PNG")
    with house_style():
        ax = figure(4, 3).subplots()
        draw_rate(ax, results, {sweep.policy: float(sweep.value or 5) for sweep in sweeps(results)})
    curves = [line.get_xydata().tolist() for line in ax.lines if line.get_linestyle() != "None"]
    assert curves == [[[2, 5], [8, 5]], [[2, 2], [4, 4], [8, 8]]]  # static is the same whatever the value


@pytest.mark.slow
def test_lanes_end_where_the_slo_is_crossed_and_are_shaded_where_the_queue_grows(tmp_path: Path) -> None:
    """The thick part of a policy's lane goes up to the crossing, the shade begins at the first growing load."""
    overrides = ("policies={continuous: {max_num_seqs: 8, max_num_batched_tokens: 512}}", "workload.requests=2000")
    results = ran(tmp_path, "load={mean_rate: auto}", "slo=e2e<200ms @ 95%", *overrides)
    its = curve_marks(results)["continuous"]
    with house_style():
        ax = figure(4, 3).subplots()
        draw_lanes(ax, results)
    thick = [line for line in ax.lines if line.get_linewidth() > 5]
    assert its.crossing.low is not None
    assert its.unstable_from is not None
    assert max(line.get_xdata()[1] for line in thick) == (its.crossing.load or its.crossing.low)
    (shade,) = (patch.get_paths()[0].get_extents() for patch in ax.collections)
    assert shade.x0 == its.unstable_from
