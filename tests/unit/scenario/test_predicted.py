"""The live driver in virtual time leaves what a simulation leaves, whatever a scenario can say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.kernel.record import Records
from batchsim.scenario import Point, Scenario, load_scenario
from batchsim.scenario.load import shipped_scenarios
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from tests.support.predicted import predict

TRACES = os.environ.get("BATCHSIM_TRACES")

SHORT = {  # what makes a shipped scenario a matter of a second
    "azure-code": ["workload.requests=200"],
    "azure-conv": ["workload.requests=200"],
    "offline": ["workload.requests=60"],
    "claims": ["workload.requests=60"],
    "live-demo": [],
    "deployment": ["workload.duration=20s", "workload.warmup=1s"],
    "mooncake-prefix": ["workload.requests=30"],
    "long-context": ["workload.duration=90s", "workload.warmup=1s"],
    "speculative": ["workload.duration=3s", "workload.warmup=1s", "load={users: [1, 16]}"],
}

EVERYTHING = """\
model: llama-3.1-8b
cost: {kind: linear, base: 5ms, per_token: 20us, per_context_token: 30ns, per_swapped_block: 50us}
kv: {tokens: 4096, swap_space: 1GB}
max_waiting: 40
workload:
  arrivals: {kind: gamma, mean_rate: 20/s, cv: 3}
  lengths: {kind: trace}
  trace: {path: my.csv, columns: {arrival: ts, prompt: in, output: out}, time_unit: ms, jitter: 5ms}
  classes:
    chat: {share: 70%, priority: 0, deadline: 3s, slo: ttft<1s @ 90%, shared_prefix: {groups: 3, added_tokens: 40}}
    batch: {share: 30%, priority: 1, patience: {mean: 2s, kind: exponential},
            lengths: {prompt: {kind: uniform, min: 10, max: 900}, output: {kind: empirical, values: [5, 50]}}}
  output_cap: 256
  frontend: {request: 2ms, per_prompt_token: 1us, per_chunk: 1ms}
  requests: 60
  drain: 30s
policies:
  static: {batch_size: {best_of: [2, 4]}, max_wait: 100ms}
  shortest: {kind: preemptive, max_num_seqs: 8, max_num_batched_tokens: 512, waiting_order: sjf, by: auto,
             predictor: {kind: noisy, sigma: 0.5}}
  guess: {kind: preemptive, max_num_seqs: 8, max_num_batched_tokens: null, victim: most_remaining, by: swap,
          predictor: {kind: class_mean}}
  gated: {max_num_seqs: 8, max_num_batched_tokens: 512}
  vllm: {async_scheduling: false, max_num_seqs: 8, max_num_batched_tokens: 512}
  mine: {kind: "tests.support.own_policy:Own", max_num_seqs: 3, spread: [1, 2]}
slo: ttft<1s & tpot<50ms @ 90%
load: {mean_rate: [10/s, 40/s]}
seeds: 2
"""

REPLAY = """\
model: llama-3.1-8b
cost: {kind: constant, step: 10ms}
kv: {tokens: 16000}
workload:
  arrivals: {kind: trace}
  trace: {path: my.csv, columns: {arrival: ts, prompt: in, output: out}, time_unit: ms,
          rate_scale: {factor: 1, by: thin}}
  output_cap: exact
policies:
  vllm: {enable_prefix_caching: false, async_scheduling: false}
load: {rate_scale: [0.5, 1]}
slo: e2e<10s @ 90%
seeds: 2
"""


def same(one: Records, other: Records) -> None:
    for table in ("requests", "steps", "states"):
        assert getattr(one, table).tobytes() == getattr(other, table).tobytes(), f"{table} differ"
    assert (one.texts, one.details) == (other.texts, other.details)


def check_predicted(scenario: Scenario) -> None:
    """Every policy at the lowest and highest load: simulated, and by the live driver in virtual time."""
    setup = Setup.of(scenario)
    for load, seed in {(scenario.loads[0], 0), (scenario.loads[-1], scenario.file.seeds - 1)}:
        for spec in scenario.specs:
            run = simulate_point(setup, Point(spec, load, seed))
            predicted = predict(setup, spec, load, seed, setup.cost_under(spec.config))
            same(run.records, predicted.records)
            assert (run.end_ns, run.window_ns, run.streams) == (
                predicted.end_ns,
                predicted.window_ns,
                predicted.streams,
            )
            assert predicted.policy == spec.name and predicted.num_offered == run.workload.num_offered


SIMULATED = {"day", "disaggregated", "experts", "replicas", "rollout", "shared-gpu", "tiers"}
"""Scenarios of several engines, of a trainer and of a tier of KV, which are only simulated."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*shipped_scenarios()} - SIMULATED))
def test_shipped_scenarios_run_live_as_in_simulation(name: str) -> None:
    """live in virtual time leaves the records of simulate, bit for bit, for every policy."""
    if ("azure" in name or "mooncake" in name) and TRACES is None:
        pytest.skip("BATCHSIM_TRACES names no folder of traces")
    overrides = SHORT.get(name, ["workload.duration=12s", "workload.warmup=1s"])
    folders = [Path(TRACES)] if TRACES else []
    check_predicted(load_scenario(name, overrides=overrides, trace_folders=folders))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small trace."""
    rows = [f"{40 * i + i % 7},{20 + 37 * i % 400},{1 + 13 * i % 90}" for i in range(60)]
    (tmp_path / "my.csv").write_text("\n".join(["ts,in,out", *rows]) + "\n")
    return tmp_path


@pytest.mark.parametrize("text", [EVERYTHING, REPLAY], ids=["everything", "replay"])
def test_what_a_scenario_can_say_runs_live_as_in_simulation(text: str, folder: Path) -> None:
    """Classes, a trace with jitter, predictors, best_of, swap, a front end and a user's own policy, bit for bit."""
    (folder / "s.yaml").write_text(text)
    check_predicted(load_scenario(str(folder / "s.yaml"), allow_code=True))


def test_a_closed_loop_runs_live_as_in_simulation(folder: Path) -> None:
    """Users who think and ask again send the same requests."""
    arrivals = "{kind: closed_loop, users: 6, think_time: 50ms, think_kind: exponential}"
    text = REPLAY.replace(
        "arrivals: {kind: trace}", f"arrivals: {arrivals}\n  lengths: {{kind: trace}}\n  requests: 30"
    )
    text = text.replace(",\n          rate_scale: {factor: 1, by: thin}", "").replace(
        "{rate_scale: [0.5, 1]}", "{users: [2, 6]}"
    )
    (folder / "s.yaml").write_text(text)
    check_predicted(load_scenario(str(folder / "s.yaml")))


@pytest.mark.parametrize(
    ("arrivals", "sessions"),
    [
        ("{kind: closed_loop, users: 5, think_time: 50ms}", "{turns: {kind: uniform, min: 1, max: 9}}"),
        ("{kind: poisson, mean_rate: 20/s}", "{turns: {kind: uniform, min: 1, max: 9}, think_time: 50ms}"),
    ],
)
def test_sessions_run_live_as_in_simulation(arrivals: str, sessions: str, folder: Path) -> None:
    """Growing prompts with shared beginnings are the same, and so are the hits of a prefix cache."""
    text = (
        REPLAY[: REPLAY.index("workload:")]
        + f"""\
workload:
  arrivals: {arrivals}
  sessions: {sessions}
  shared_prefix: {{groups: 2, added_tokens: 64, zipf: 1}}
  lengths: {{prompt: {{kind: uniform, min: 1, max: 90}}, output: {{kind: uniform, min: 1, max: 30}}}}
  output_cap: 64
  duration: 3s
policies:
  vllm: {{async_scheduling: false}}
slo: e2e<10s @ 90%
seeds: 2
"""
    )
    (folder / "s.yaml").write_text(text.replace("tokens: 16000", "tokens: 4000"))
    scenario = load_scenario(str(folder / "s.yaml"))
    check_predicted(scenario)
    records = simulate_point(Setup.of(scenario), Point(scenario.specs[0], 1.0, 0)).records
    assert records.requests["cached_tokens"].max() > 64


def test_a_policy_is_named_with_its_variant_where_there_are_several(folder: Path) -> None:
    """A label that has two variants names neither; the line says what there is."""
    (folder / "s.yaml").write_text(EVERYTHING)
    scenario = load_scenario(str(folder / "s.yaml"), allow_code=True)
    with pytest.raises(ScenarioError, match=r"has 2 variants of static. Write one of static \(bs 2\)"):
        scenario.find("static")
    with pytest.raises(ScenarioError, match=r"s: has no policy none\. Write one of static \(bs 2\)"):
        scenario.find("none")
    assert scenario.find("static (bs 4)").config.batch_size == 4
