"""Decisions a second of CPU in the environments of `batchsim.gym`: `python -m tests.bench_gym`, and in `make bench`.

Each environment is played by a rule that costs next to nothing, three times; the medians are printed. `whole-batch`
decodes 200 tokens a batch between two decisions, in leaps; `steps` holds each decision for 200 ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batchsim.gym.batch_queue import BatchQueueEnv
from batchsim.gym.batch_server import BatchServer
from batchsim.gym.request_objectives import Objectives
from batchsim.gym.rules import Constant, ControlLimit, Rule, play
from batchsim.gym.steps import StepsEnv
from batchsim.gym.whole_batch import WholeBatchEnv
from batchsim.policies.families.batch_agent import BatchAgentConfig
from batchsim.policies.families.step_agent import StepAgentConfig

REPEATS = 3
SCENARIO = """\
model: llama-3.1-8b
cost: {kind: linear, base: 6ms, per_token: 25us, per_sequence: 30us}
kv: {tokens: 400000}
workload:
  arrivals: {kind: poisson, mean_rate: 8/s}
  lengths: {prompt: {kind: fixed, tokens: 500}, output: {kind: fixed, tokens: 200}}
  output_cap: exact
  duration: 5min
policies:
  continuous: {max_num_seqs: 256, max_num_batched_tokens: 8192}
slo: ttft<1s & tpot<50ms @ 99%
seeds: 1
"""


def rows(path: str) -> dict[str, tuple[Callable[[], Any], Rule]]:
    """By name an environment on the scenario at `path`, where it has one, and the rule that plays it."""
    batches = BatchAgentConfig(max_batch_size=16, max_wait=1_000_000)
    steps = StepAgentConfig(max_num_seqs=256, max_num_batched_tokens=8192, every=200_000_000)
    server = BatchServer(rate=60.0, alpha_s=0.04, beta_s=0.002, max_batch=8)
    return {
        "batch-queue": (lambda: BatchQueueEnv(server, horizon_s=1500.0), ControlLimit(4, 8)),
        "whole-batch": (
            lambda: WholeBatchEnv(path, config=batches, objectives=Objectives(e2e_s=9.0)),
            ControlLimit(1, 16),
        ),
        "steps": (
            lambda: StepsEnv(path, config=steps, objectives=Objectives(ttft_s=1.0)),
            Constant((3, 4)),
        ),
    }


def measure() -> dict[str, dict[str, float]]:
    """By environment decisions, steps of the engine and simulated seconds a second of CPU: medians."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.yaml"
        path.write_text(SCENARIO)
        for name, (new, rule) in rows(str(path)).items():
            env, repeats = new(), []
            for seed in range(REPEATS):
                begun_s = time.process_time()
                played = play(env, rule, seed)
                took_s = time.process_time() - begun_s
                each = {"decisions": played.decisions, "simulated_s": played.seconds}
                each["steps"] = played.counts["steps"]
                repeats.append({key: value / took_s for key, value in each.items()})
            found[name] = {key: statistics.median(one[key] for one in repeats) for key in repeats[0]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args()
    found = measure()
    if asked.json:
        print(json.dumps(found))
        return
    for name, row in found.items():
        print(
            f"gym {name}: {row['decisions']:,.0f} decisions, {row['steps']:,.0f} steps of the engine and"
            f" {row['simulated_s']:,.0f} simulated seconds a second of CPU"
        )


if __name__ == "__main__":
    main()
