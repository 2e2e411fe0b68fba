"""A scenario with replicas: what it leaves, and what each replica's share of it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sim.attribution import attribute
from sim.record import FINISHED
from sim.results import REPLICAS, Results
from sim.run import run_scenario
from sim.scenario import load_scenario

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
