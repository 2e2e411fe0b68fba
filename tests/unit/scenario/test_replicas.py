"""A scenario with replicas: what it leaves, and what each replica's share of it is."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from batchsim.base.errors import ScenarioError
from batchsim.explain.causes import Objectives, slo_misses
from batchsim.kernel.record import FINISHED, UNFINISHED
from batchsim.metrics.attribution import attribute
from batchsim.report.text.summary_text import warnings
from batchsim.results.fleet_inputs import step_watts
from batchsim.results.read import REPLICAS, Results
from batchsim.scenario import load_scenario
from batchsim.scenario.setup import Setup
from batchsim.study.curves.run import run_scenario
from tests.unit.cost.test_profile import PROFILE

SCENARIO = """
model: llama-3.1-8b
cost: {kind: linear, base: 20ms, per_token: 10us, per_sequence: 500us}
kv: {tokens: 20000}
workload:
  arrivals: {kind: poisson, mean_rate: 8/s}
  lengths:
    prompt: {kind: uniform, min: 10, max: 900}
    output: {kind: uniform, min: 2, max: 90}
  output_cap: 100
  duration: 20s
  warmup: 2s
policies:
  continuous: {max_num_seqs: 8, max_num_batched_tokens: 2048}
slo: ttft<1s & tpot<50ms @ 90%
seeds: 2
"""
LIKE = "replicas: {count: 3, router: round_robin}\n"
MIXED = """
replicas:
  router: least_tokens
  groups:
    quick: {count: 1}
    slow: {count: 2, cost: {kind: linear, base: 60ms, per_token: 20us, per_sequence: 1ms}, kv: {tokens: 5000}}
"""


def ran(folder: Path, replicas: str, *overrides: str) -> Results:
    path = folder / "some.yaml"
    path.write_text(SCENARIO + replicas, encoding="utf-8")
    return run_scenario(load_scenario(str(path), overrides=overrides), out=folder / "results")


@pytest.mark.parametrize("replicas", [LIKE, MIXED], ids=["alike", "mixed"])
def test_shares_of_the_replicas_sum_to_the_whole(tmp_path: Path, replicas: str) -> None:
    """replicas.csv, the replica columns of the tables and the metrics of the group tell of the same requests."""
    results = ran(tmp_path, replicas)
    rows = pd.read_csv(results.path / REPLICAS)
    for seed in (0, 1):
        shares, point = rows[rows["seed"] == seed], results.points[results.points["seed"] == seed].iloc[0]
        requests = results.requests("continuous", 1.0, seed)
        assert shares["replica"].tolist() == [0, 1, 2]
        assert shares["requests"].sum() == point["cohort"] and shares["num_steps"].sum() == point["num_steps"]
        sent = requests[requests["sent_ns"].between(2e9, 20e9)]
        assert shares["requests"].tolist() == sent["replica"].value_counts().sort_index().tolist()
        assert shares["held_s"].sum() == point["replica_seconds"] == 3 * 18
        assert point["engine_busy_share"] == pytest.approx(shares["engine_busy_share"].mean())
        assert (point["num_replicas_mean"], point["num_replicas_max"], point["retries"]) == (3, 3, 0)
        assert shares["kv_utilisation_peak"].max() == point["kv_utilisation_peak"]


@pytest.mark.parametrize("watts", [900, None])
def test_steps_take_the_power_of_their_own_replica(tmp_path: Path, watts: int | None) -> None:
    """Of two kinds of replicas, 500 W and `watts` when they decode, a fifth more else; None makes all of it unknown."""
    for name, power in (("a", 500), ("b", watts)):
        energy = {
            "decode": {"step": {"n": 1}, "joules": 0.01 * (power or 0)},
            "prefill": {"step": {"n": 2}, "joules": 0.012 * (power or 0)},
        }
        samples = ({"n": 1, "ns": 10_000_000}, {"n": 2, "ns": 10_000_000})
        profile = replace(PROFILE, energy=energy, samples=samples)
        if not power:  # of a GPU that no law is of
            profile = replace(profile, energy=None, gpu=None)
        (tmp_path / f"{name}.json").write_text(profile.to_json(), encoding="utf-8")
    costs = [f"cost: {{kind: profile, profile: {tmp_path / name}.json}}, kv: {{tokens: 5000}}" for name in "ab"]
    groups = f"{{a: {{count: 1, {costs[0]}}}, b: {{count: 2, {costs[1]}}}}}"
    replicas = f"replicas: {{router: round_robin, groups: {groups}}}\n"
    results = ran(tmp_path, replicas, "policies.continuous.max_num_batched_tokens=512")
    records = results.records("continuous", 1.0, 0)
    found = step_watts(Setup.of(load_scenario(str(tmp_path / "some.yaml"))), records, {})
    assert results.points["power_w"].isna().all() == (watts is None) == (found is None)
    if found is not None and records.replicas is not None:
        prompts = records.step_columns["num_prefill_tokens"] > 0
        expected = np.where(records.replicas.steps == 0, 500, 900) * np.where(prompts, 1.2, 1.0)
        assert found.tolist() == pytest.approx(expected.tolist()) and 0 < prompts.sum() < len(prompts)


def test_group_metrics_are_those_of_all_its_requests(tmp_path: Path) -> None:
    """Throughput counts every replica's requests, and a request's parts still sum to its life."""
    results = ran(tmp_path, MIXED)
    records = results.records("continuous", 1.0, 0)
    requests = records.requests
    done = requests[(requests["outcome"] == FINISHED) & (requests["delivered_ns"] <= 20 * 10**9)]
    done = done[done["delivered_ns"] >= 2 * 10**9]
    assert results.points["throughput_rps"][0] == pytest.approx(len(done) / 18)
    lives = attribute(records).groupby("request_id")["ns"].sum()
    assert (lives.to_numpy() == requests["delivered_ns"] - requests["sent_ns"]).all()
    assert set(np.unique(results.steps("continuous", 1.0, 0)["replica"])) == {0, 1, 2}


def test_three_replicas_serve_what_one_does_not(tmp_path: Path) -> None:
    """The point of it: a queue that grows at one engine does not at three."""
    alone, three = ran(tmp_path, ""), ran(tmp_path, LIKE)
    assert three.summary["ttft_p99_s"][0] < alone.summary["ttft_p99_s"][0] / 2
    assert three.summary["in_slo"][0] > alone.summary["in_slo"][0]


SCALER = "kind: queue_per_replica, every: 1s, cold_start: 1s, scale_down_delay: 1s"
WRONG = {
    "none": ("{count: 0, router: random}", "count is 0. It must be from 1 to 10000"),
    "no_router": ("{count: 2}", "router is missing, and 2 replicas need one"),
    "unknown_router": ("{count: 2, router: least_token}", "Did you mean least_tokens?"),
    "both": ("{count: 2, router: random, groups: {a: {count: 1}}}", "give either count"),
    "neither": ("{router: random}", "give either count"),
    "no_groups": ("{router: random, groups: {}}", "groups is empty"),
    "nameless_group": ('{router: random, groups: {"": {count: 1}}}', "a group has an empty name"),
    "unbounded": ("{count: 2, router: {kind: prefix_affinity, prefix_tokens: 8, load_factor: 1.0}}", "must be above 1"),
    "stranger_fails": (
        "{count: 2, router: random, lost: retry, failures: [{replica: 2, at: 1s, down_for: 1s}]}",
        "replica 2 is to fail, and there are 2, numbered from 0",
    ),
    "fails_while_down": (
        "{count: 1, lost: fail, failures: [{replica: 0, at: 1s, down_for: 5s}, {replica: 0, at: 3s, down_for: 1s}]}",
        "replica 0 is to fail at 3 s, and is down until 6 s",
    ),
    "lost_unsaid": ("{count: 1, failures: [{replica: 0, at: 1s, down_for: 1s}]}", "lost says what becomes"),
    "lost_for_nothing": ("{count: 1, lost: retry}", "lost says what becomes"),
    "min_above_max": (f"{{count: 1, autoscaler: {{{SCALER}, above: 2, below: 1, min: 3, max: 2}}}}", "min 3 and max 2"),
    "below_above": (
        f"{{count: 1, autoscaler: {{{SCALER}, above: 1, below: 2, min: 1, max: 1}}}}",
        "below 2 and above 1",
    ),
    "start_outside": (
        f"{{count: 9, router: random, autoscaler: {{{SCALER}, above: 2, below: 1, min: 1, max: 3}}}}",
        "count 9, the replicas at the start, must be from the autoscaler's min 1 to its max 3",
    ),
    "scaled_groups": (
        f"{{groups: {{a: {{count: 1}}}}, autoscaler: {{{SCALER}, above: 2, below: 1, min: 1, max: 1}}}}",
        "Write count instead of groups",
    ),
    "looks_too_often": (
        "{count: 1, autoscaler: {kind: kv_utilisation, every: 1ns, cold_start: 1s, scale_down_delay: 1s, above: 90%,"
        " below: 10%, min: 1, max: 1}}",
        "every is 1 ns. It must be at least 1 ms",
    ),
    "scaled_by_time": (
        "{count: 1, autoscaler: {kind: busy_share, every: 15s, cold_start: 1s, scale_down_delay: 1s, above: 90%,"
        " below: 10%, min: 1, max: 1}}",
        "busy as soon as one request runs, so that this is full at any load. Write kv_utilisation",
    ),
    "gate_for_nobody": ("{count: 1, admission: {}}", "admission holds nobody. Write max_outstanding: 64"),
    "shed_stranger": (
        "{count: 1, admission: {max_outstanding: 8, shed: {batch: 4}}}",
        "shed names batch, and there is no such class. The workload has none.",
    ),
    "price_of_several_kinds": (
        "{groups: {a: {count: 1}}, router: random, price: 3.50/h}",
        "price is that of replicas that are alike. Write count instead of groups",
    ),
    "hpa_of_nothing": (
        "{count: 1, autoscaler: {kind: hpa, min: 1, max: 2, cold_start: 1s, metrics: {}}}",
        "metrics is empty. Give a target for one of waiting, running, kv_utilisation, tokens_per_s, busy_share",
    ),
    "hpa_without_policies": (
        "{count: 1, autoscaler: {kind: hpa, min: 1, max: 2, cold_start: 1s, metrics: {waiting: 4},"
        " scale_up: {stabilization_window: 0s, policies: []}}}",
        "policies is empty. Write one, like [{type: pods, value: 4, period: 15s}]",
    ),
    "no_memory": ("{groups: {a: {count: 1, kv: {tokens: 4, block_size: 16}}}}", "must hold at least one block"),
    "unknown_cost": ("{groups: {a: {count: 1, cost: h20}}}", "Did you mean h200?"),
}


@pytest.mark.parametrize(("replicas", "said"), WRONG.values(), ids=WRONG)
def test_wrong_replicas_are_one_clear_line(tmp_path: Path, replicas: str, said: str) -> None:
    """What is wrong, with the numbers, and where it stands."""
    path = tmp_path / "some.yaml"
    path.write_text(SCENARIO + f"replicas: {replicas}\n", encoding="utf-8")
    with pytest.raises(ScenarioError, match=re.escape(said)) as raised:
        load_scenario(str(path))
    assert str(raised.value).startswith(f"{path}:17") and "\n" not in str(raised.value)


def test_a_failure_after_the_end_is_refused(tmp_path: Path) -> None:
    """It would silently not happen."""
    with pytest.raises(ScenarioError, match="replica 0 is to fail at 40 s, and continuous at load 1, seed 0 ends at"):
        ran(tmp_path, "replicas: {count: 1, lost: retry, failures: [{replica: 0, at: 40s, down_for: 1s}]}\n")


def test_what_cannot_be_real_refuses_replicas(tmp_path: Path) -> None:
    """live and validate run one engine."""
    path = tmp_path / "some.yaml"
    path.write_text(SCENARIO + LIKE, encoding="utf-8")
    with pytest.raises(ScenarioError, match="replicas can only be simulated"):
        Setup.of(load_scenario(str(path))).check_can_be_real()


def test_what_a_failure_took_is_a_miss_of_the_failure(tmp_path: Path) -> None:
    """However long the request had decoded by then."""
    failing = "{count: 2, router: random, lost: fail, failures: [{replica: 1, at: 10s, down_for: 5s}]}"
    results = ran(tmp_path, "replicas: " + failing + "\n")
    records = results.records("continuous", 1.0, 0)
    misses = slo_misses(records, Objectives.of(results.scenario))
    lost = misses[misses["metric"] == "unfinished"]
    assert len(lost) == (records.requests["outcome"] == UNFINISHED).sum() > 0
    assert set(lost["cause"]) == {"unfinished:replica_failed"}


def test_group_metrics_hold_with_failures_and_a_scaler(tmp_path: Path) -> None:
    """Every offered request is counted once; what was lost is counted beside; what is held costs."""
    failing = "{count: 2, router: random, lost: retry, failures: [{replica: 1, at: 10s, down_for: 5s}]}"
    results = ran(tmp_path, "replicas: " + failing + "\n")
    point = results.points.iloc[0]
    records, table = results.records("continuous", 1.0, 0), results.replicas()
    assert table is not None and records.replicas is not None
    assert point["submitted"] == len(records.requests) and point["uncompleted_share"] == 0
    assert point["retries"] == len(records.stays("replica_failed")) == table[table["seed"] == 0]["lost"].sum() > 0
    assert point["replica_seconds"] == 2 * 18 and table["up_s"].tolist() == [18, 13, 18, 13]
    scaler = "{kind: hpa, min: 1, max: 3, cold_start: 1s, every: 2s, metrics: {METRIC}}"
    hpa = "{count: 1, router: random, autoscaler: " + scaler + "}"
    for metric, warns in (("waiting: 1", False), ("busy_share: 60%", True)):
        results = ran(tmp_path, f"replicas: {hpa.replace('METRIC', metric)}\n")
        assert results.points["num_replicas_max"][0] > 1
        assert any("busy_share is full" in line for line in warnings(results, None)) == warns
    scaled = "{count: 1, router: random, autoscaler: {" + SCALER + ", above: 1, below: 0.2, min: 1, max: 3}}"
    results = ran(tmp_path, "replicas: " + scaled + "\n")
    point, table = results.points.iloc[0], results.replicas()
    assert point["num_replicas_max"] == 3 and 1 < point["num_replicas_mean"] < 3
    assert table is not None and table["starting_s"].iloc[0] == 0 and (table["starting_s"] % 1 == 0).all()
    assert (table["starting_s"] + table["up_s"] == table["held_s"]).all() and table["starting_s"].sum() >= 2
