"""The capacity search against a queue whose capacity is known."""

from __future__ import annotations

import pytest

from batchsim.scenario import load_scenario
from batchsim.study.capacity.find import find_capacities
from batchsim.study.capacity.search import Effort
from batchsim.study.sweep.points import Sweep

STEP_MS = 10
SCENARIO = f"""
model: llama-3.1-8b
cost: {{kind: constant, step: {STEP_MS}ms}}
kv: {{tokens: 1600}}
workload:
  arrivals: {{kind: poisson, mean_rate: 50/s}}
  lengths: {{prompt: {{kind: fixed, tokens: 8}}, output: {{kind: fixed, tokens: 1}}}}
  output_cap: 1
  requests: 5000
policies: {{continuous: {{max_num_seqs: 1, max_num_batched_tokens: 8}}}}
slo: mean(queue_time)<20ms
"""


@pytest.mark.slow
@pytest.mark.parametrize("wait_ms", [5, 20])
def test_the_capacity_of_an_md1_queue_is_that_of_pollaczek_and_khinchine(tmp_path, wait_ms):
    """One server, one step of constant time a request, mean wait rho S / (2 (1 - rho)) below a limit: the rate is found
    within 3 %, inside an interval that narrow."""
    (tmp_path / "md1.yaml").write_text(SCENARIO)
    scenario = load_scenario(str(tmp_path / "md1.yaml"), overrides=[f"slo=mean(queue_time)<{wait_ms}ms"])
    sweep = Sweep(tmp_path / "out")
    study = find_capacities(scenario, sweep, effort=Effort(precision=0.015), extras=False)
    (policy,) = study.policies
    truth = 2 * wait_ms / (2 * wait_ms + STEP_MS) / (STEP_MS / 1000)  # rho = 2 W / (2 W + S)
    assert policy.found.load == pytest.approx(truth, rel=0.03)
    assert policy.found.low < policy.found.load < policy.found.high
    assert (policy.found.high - policy.found.low) / 2 <= 0.016 * truth
