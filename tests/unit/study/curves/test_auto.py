"""Loads that a run finds by itself: where they lie, what they cost, and that policies without common loads are told."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from batchsim.results.read import Results, curve_marks
from batchsim.scenario import load_scenario
from batchsim.study.curves.run import run_scenario

# One slot and service times of exponential tokens of 20 ms: an M/M/1 queue of ten requests a second, nearly.
MM1 = """\
model: llama-3.1-8b
cost: {kind: constant, step: 20ms}
kv: {tokens: 16000}
workload:
  arrivals: {kind: poisson, mean_rate: 1/s}
  lengths:
    prompt: {kind: fixed, tokens: 1}
    output: {kind: gamma, mean: 20, cv: 1, max: 900}
  output_cap: exact
  duration: 1500s
policies:
  continuous: {max_num_seqs: 1, max_num_batched_tokens: 512}
load: {mean_rate: auto}
slo: e2e<4s @ 90%
seeds: 2
"""
SERVICE_RPS = 1 / (20.5 * 0.020)  # tokens are rounded up to one at least, which adds half of one where none was drawn

TWO = """\
model: llama-3.1-8b
cost: {kind: constant, step: 10ms}
kv: {tokens: 16000}
workload:
  arrivals: {kind: poisson, mean_rate: 20/s}
  lengths:
    prompt: {kind: fixed, tokens: 100}
    output: {kind: uniform, min: 2, max: 12}
  output_cap: 16
  requests: 200
policies:
  small: {kind: continuous, max_num_seqs: 2, max_num_batched_tokens: 512}
  large: {kind: continuous, max_num_seqs: 16, max_num_batched_tokens: 512}
load: {mean_rate: auto, points: 6}
slo: ttft<1s & tpot<50ms @ 99%
seeds: 1
"""


def ran(text: str, folder: Path, *overrides: str, jobs: int = 1) -> Results:
    """A run of the scenario in `text`."""
    (folder / "s.yaml").write_text(text)
    return run_scenario(load_scenario(str(folder / "s.yaml"), overrides=overrides), out=folder, jobs=jobs)


@pytest.mark.slow
def test_the_knee_and_the_crossing_of_an_mm1_queue_are_found(tmp_path: Path) -> None:
    """Saturation is the service rate, the knee lies around half of it, and the SLO is crossed where theory says."""
    results = ran(MM1, tmp_path)
    loads = results.summary["load"].tolist()
    found = curve_marks(results)["continuous"]
    assert results.manifest["saturation_rps"]["continuous"] == pytest.approx(SERVICE_RPS, rel=0.08)
    assert len(loads) == 10
    assert all(load == float(f"{load:.3g}") for load in loads)
    assert found.knee is not None
    assert found.knee.low is not None
    assert found.knee.high is not None
    assert found.knee.low < SERVICE_RPS / 2 < found.knee.high
    assert found.crossing.load == pytest.approx(SERVICE_RPS - math.log(10) / 4, rel=0.08)
    assert found.unstable_from is not None
    assert found.unstable_from > 0.95 * SERVICE_RPS
    around = [load for load in loads if 0.4 * SERVICE_RPS < load < 0.95 * SERVICE_RPS]
    assert len(around) >= 6, "most points lie around knee and crossing"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    """A run of TWO, and its folder."""
    folder = tmp_path_factory.mktemp("two")
    return folder, ran(TWO, folder, "seeds=2")


def test_a_second_run_simulates_nothing(two: tuple[Path, Results]) -> None:
    """All points are reused, and the overloaded runs too."""
    folder, first = two
    kept = {path: path.stat().st_mtime_ns for path in (folder / "s" / "saturation").iterdir()}
    again = ran(TWO, folder, "seeds=2")
    assert (again.manifest["points_run"], again.manifest["points_reused"]) == (0, first.manifest["points_run"])
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


@pytest.mark.slow
def test_jobs_do_not_change_which_loads_are_run(tmp_path: Path) -> None:
    """Two processes choose and find what one does."""
    (tmp_path / "two").mkdir()
    assert ran(TWO, tmp_path / "two", jobs=2).summary.equals(ran(TWO, tmp_path).summary)


def test_each_policy_gets_its_points_and_no_more(two: tuple[Path, Results]) -> None:
    """Six points were asked for; the two policies differ eightfold, and so do their loads."""
    results = two[1]
    by_policy = results.summary.groupby("policy")["load"]
    assert by_policy.count().to_dict() == {"small": 6, "large": 6}
    rates = results.manifest["saturation_rps"]
    assert rates["large"] > 4 * rates["small"]
    for policy, loads in by_policy:
        assert loads.min() <= 0.25 * rates[policy]
        assert loads.max() >= rates[policy]


def test_a_policy_like_another_gets_the_same_loads(tmp_path: Path) -> None:
    """Saturations that differ by little give one set of coarse loads, at which both can be compared."""
    twin = "  twin: {kind: continuous, max_num_seqs: 16, max_num_batched_tokens: 500}\nload: {mean"
    results = ran(TWO.replace("load: {mean", twin), tmp_path)
    mine, theirs = (set(results.summary.loc[results.summary["policy"] == p, "load"]) for p in ("large", "twin"))
    assert mine == theirs


def test_points_not_run_have_no_differences_and_say_so_when_asked(two: tuple[Path, Results]) -> None:
    """The JSON holds each policy's own loads; a policy is compared only where it was run."""
    results = two[1]
    only = max(results.summary["load"])
    plain = results.as_json()
    assert [row["policy"] for row in plain["differences"] if row["load"] == only] == []
    assert {len(policy["loads"]) for policy in plain["policies"].values()} == {6}
    assert plain["policies"]["small"]["saturation_rps"] < plain["policies"]["large"]["curve"]["knee"]["load"]
    with pytest.raises(Exception, match=r"no point small at load .* loads "):
        results.requests("small", only, 0)


@pytest.mark.slow
def test_users_of_a_closed_loop_are_whole_and_lie_around_its_saturation(tmp_path: Path) -> None:
    """Two slots of 70 ms and a think time of 1 s saturate at about 30 users."""
    arrivals = "arrivals: {kind: closed_loop, users: 4, think_time: 1s}"
    text = TWO.replace("arrivals: {kind: poisson, mean_rate: 20/s}", arrivals).replace("requests: 200", "duration: 20s")
    results = ran(text.replace("mean_rate: auto", "users: auto"), tmp_path)
    loads = results.summary.loc[results.summary["policy"] == "small", "load"].tolist()
    assert all(load == int(load) for load in loads)
    assert loads[0] == 1
    assert 20 < results.manifest["saturation_rps"]["small"] * 1.07 < 40
    assert any(20 <= load <= 40 for load in loads)
