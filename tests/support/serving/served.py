"""A scenario of milliseconds behind an endpoint."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from batchsim.scenario import load_scenario
from batchsim.scenario.setup import Setup
from batchsim.serve.answers import SPILL_BYTES
from batchsim.serve.metrics import Metrics, Names
from batchsim.serve.realtime import RealtimeSimulation

SCENARIO = """\
model: llama-3.1-8b
cost: {{kind: constant, step: 10ms}}
kv: {{tokens: {tokens}}}
max_model_len: 4096
workload:
  arrivals: {{kind: poisson, mean_rate: 20/s}}
  lengths:
    prompt: {{kind: fixed, tokens: 100}}
    output: {{kind: uniform, min: 2, max: 12}}
  output_cap: 16
  requests: 40
  {workload}
policies:
  {policy}
{more}
slo: ttft<1s & tpot<50ms @ 99%
seeds: 1
"""


def scenario_of(policy: str, more: str = "", workload: str = "", tokens: int = 16000) -> str:
    """The YAML of a scenario whose steps take 10 ms each, with KV memory for so many `tokens`."""
    return SCENARIO.format(policy=policy, more=more, workload=workload, tokens=tokens)


def setup_of(policy: str, more: str = "", workload: str = "", tokens: int = 16000) -> Setup:
    """The setup of a scenario whose steps take 10 ms each, under one policy."""
    return setup_from(scenario_of(policy, more, workload, tokens))


def setup_from(text: str) -> Setup:
    """The setup of a scenario given by its YAML."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "served.yaml"
        path.write_text(text)
        return Setup.of(load_scenario(str(path)))


def simulation_of(setup: Setup, names: Names = "vllm", spill_bytes: int = SPILL_BYTES) -> RealtimeSimulation:
    """The engines of the one policy of `setup`, whose model is called m."""
    metrics = Metrics(names, "m", setup.max_model_len)
    return RealtimeSimulation(setup, setup.scenario.specs[0], metrics, spill_bytes=spill_bytes)
