"""Made-up results in the shape of `batchsim.load_results`, by formula: enough to draw and print, true of no engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from batchsim.results.read import Results

LATENCIES = ("ttft", "tpot", "itl", "e2e", "queue_time", "norm_latency")
LOADS = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 20.0)
# Label, kind, and the rate at which the policy saturates.
FOUR = {
    "static": ("static (bs 16)", "static", 3.4),
    "dynamic": ("dynamic", "dynamic", 6.5),
    "continuous": ("continuous", "continuous", 17.0),
    "preemptive": ("preemptive", "preemptive", 23.0),
}
SEVEN = {
    **FOUR,
    "vllm": ("vllm 0.11 defaults", "vllm", 21.0),
    "small": ("continuous, 64 slots", "continuous", 11.0),
    "sglang": ("sglang", "sglang", 19.0),
}
OUTPUT_TOKENS = 200
NUM_BLOCKS = 55_800


@dataclass(frozen=True)
class SampleResults(Results):
    """Results that no folder holds; the tables of a run are made up too."""

    capacity: dict[str, float] = field(default_factory=dict)

    def requests(self, policy: str, load: float, seed: int) -> pd.DataFrame:
        return _one_run(self.capacity[policy], load, seed)[0]

    def steps(self, policy: str, load: float, seed: int) -> pd.DataFrame:
        return _one_run(self.capacity[policy], load, seed)[1]

    def lanes(self, policy: str, load: float, seed: int) -> None:
        """None: no engine is ahead of results."""


def sample_results(
    policies: dict[str, tuple[str, str, float]] | None = None,
    loads: tuple[float, ...] = LOADS,
    *,
    seeds: int = 3,
    noise: float = 0.08,
    slo: str = "ttft<1s & tpot<50ms @ 99%",
    load_name: str = "mean_rate",
    knobs: dict[str, Any] | None = None,
) -> SampleResults:
    """A run of `policies` at `loads`, each with `knobs`; `noise` is the interval's half-width as a share of the value,
    before growth."""
    policies = FOUR if policies is None else policies
    rows = [
        _row(policy, kind, label, load, load / capacity, noise, load_name, seeds)
        for policy, (label, kind, capacity) in policies.items()
        for load in loads
    ]
    summary = pd.DataFrame(rows)
    values = [name for name in summary.columns if f"{name}_ci" in summary.columns]
    keys = ["policy", "kind", "label", "load_name", "load"]
    points = pd.concat([summary[[*keys, *values]].assign(seed=seed) for seed in range(seeds)])
    cost = "cost: roofline, not measured here (kernel part ±12 %)"
    return SampleResults(
        Path("results/bursty/3f9a"),
        summary,
        points.reset_index(drop=True),
        scenario={
            "workload": {"warmup": "10s"},
            "cost": {"kind": "roofline", "gpu": "h200"},
            "policies": {policy: {"kind": kind} | (knobs or {}) for policy, (_, kind, _) in policies.items()},
        },
        manifest={
            "scenario_name": "bursty",
            "measured_at": "engine",
            "heading": f"bursty · llama-3.1-8b bf16 on h200 · {cost} · measured at: engine",
            "kv": "KV 892,800 tokens (55,800 blocks of 16: 141 GB × 0.90 − 15.0 weights − 4.2 reserve)",
            "num_blocks": NUM_BLOCKS,
            "workload": [
                {"load": load, "seed": 0, "text": "on/off arrivals, CV 2.4, IDC(1 s) 6.1", "notes": []}
                for load in summary["load"].unique().tolist()
            ],
            "identical_seeds": False,
            "slo": slo,
            "objective": slo,
            "outcomes": {label: [] for label in summary["label"].unique()},
            "details": {},
            "points_run": len(points),
            "points_reused": 0,
        },
        capacity={policy: capacity for policy, (_, _, capacity) in policies.items()},
    )


def _row(
    policy: str, kind: str, label: str, load: float, rho: float, noise: float, load_name: str, seeds: int
) -> dict[str, Any]:
    whole = kind == "static"
    unstable = rho >= 1
    wait = 0.04 / max(1 - rho, 0.02) if kind != "static" else 3.0 / load + 2 / max(1 - rho, 0.02)
    pace = 0.008 + 0.018 * min(rho, 1.2)
    e2e = wait + OUTPUT_TOKENS * pace
    p50 = {"ttft": e2e if whole else wait, "tpot": pace, "itl": pace, "e2e": e2e, "queue_time": wait * 0.6}
    p50["norm_latency"] = e2e / OUTPUT_TOKENS
    row: dict[str, Any] = {
        "policy": policy, "kind": kind, "label": label, "load_name": load_name, "load": load, "num_seeds": seeds,
        "failed": 0, "unstable": unstable,
        "bound_by": "padding, slots" if whole else "load" if rho < 0.8 else "KV blocks",
        "few": "ttft_p99_s norm_latency_p99_s tpot_p99_s" if load <= 1 else "",
    }  # fmt: skip
    growth = 1 + 3 * rho**4
    tails = {"mean": 1.2, "p50": 1.0, "p90": 2.0, "p95": 3.0, "p99": 6.0}
    for name in LATENCIES:
        for statistic, factor in tails.items():
            factor = 1 + (factor - 1) * (0.15 if name in ("tpot", "itl") else 1)
            value = np.nan if whole and name in ("tpot", "itl") else p50[name] * factor
            _put(row, f"{name}_{statistic}_s", value, noise * growth * (2 if statistic == "p99" else 1), seeds)
    done = min(load, load / rho)
    ttft_ok = not whole and not unstable and p50["ttft"] * tails["p99"] < 1 and pace < 0.045
    others = {
        "offered_rps": load, "submitted": load * 600, "finished": done * 600, "rejected": 0.0, "cancelled": 0.0,
        "unfinished": 0.0, "uncompleted_share": 0.0, "too_short": 0.0, "throughput_rps": done,
        "output_tokens_per_s": done * OUTPUT_TOKENS, "output_tokens_per_s_per_gpu": done * OUTPUT_TOKENS,
        "user_tokens_per_s_p50": np.nan if whole else 1 / pace,
        "in_slo": 0.994 if ttft_ok else 0.03,
        "slo_met": float(ttft_ok),
        "slo_margin": 0.01 if ttft_ok else -0.01,
        "pad_share": 0.41 if whole else 0.0,
    }  # fmt: skip
    for name, value in others.items():
        _put(row, name, value, 0.02, seeds)
    return row


def _put(row: dict[str, Any], name: str, value: float, noise: float, seeds: int) -> None:
    row[name] = value
    row[f"{name}_ci"] = value * noise if seeds > 1 else np.nan


def _one_run(capacity: float, load: float, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Requests and steps of one run: bursty arrivals, first come first served, 0.2 s a step."""
    rng = np.random.default_rng([seed, 7])
    arrival = np.cumsum(rng.gamma(0.3, 1 / (0.3 * load), size=int(120 * load)))
    work = rng.exponential(1 / capacity, size=len(arrival))
    ended = np.empty_like(arrival)
    free_at = 0.0
    for i, (at, need) in enumerate(zip(arrival, work, strict=True)):
        ended[i] = free_at = max(at, free_at) + need
    ended += 1.5
    first = np.maximum(ended - 1.4 - work, arrival + 0.02)
    requests = pd.DataFrame(
        {
            "replica": 0,
            "request_id": np.arange(len(arrival)),
            "arrival_ns": (arrival * 1e9).astype(np.int64),
            "sent_ns": (arrival * 1e9).astype(np.int64),
            "output_tokens": OUTPUT_TOKENS,
            "first_delivery_ns": (first * 1e9).astype(np.int64),
            "delivered_ns": (ended * 1e9).astype(np.int64),
            "ended_ns": (ended * 1e9).astype(np.int64),
            "outcome": "finished",
        }
    )
    start = np.arange(arrival[0], ended[-1], 0.2)
    inside = np.searchsorted(arrival, start) - np.searchsorted(np.sort(ended), start)
    running = np.minimum(inside, 24)
    steps = pd.DataFrame(
        {
            "replica": 0,
            "start_ns": (start * 1e9).astype(np.int64),
            "duration_ns": 200_000_000,
            "num_running": running,
            "num_waiting": inside - running,
            "free_blocks": NUM_BLOCKS - running * 1800,
        }
    )
    return requests, steps[steps["num_running"] > 0].reset_index(drop=True)
