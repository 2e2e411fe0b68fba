"""One measured point and the factor on step times that meets it."""

from functools import partial

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.cost.scaled import Scaled
from batchsim.scenario import load_scenario
from batchsim.scenario.anchor import mean_tpot_ns, solved
from batchsim.scenario.deployment_config import Anchor
from batchsim.scenario.setup import Setup

MS = 1_000_000
SCENARIO = """
model: llama-3.1-8b
cost: COST
kv: {tokens: 400000}
workload:
  arrivals: {kind: poisson, mean_rate: 2/s}
  lengths: {prompt: {kind: fixed, tokens: 500}, output: {kind: uniform, min: 40, max: 80}}
  output_cap: 100
  duration: 60s
  max_concurrency: 50
policies:
  vllm: {max_num_seqs: 64, max_num_batched_tokens: 2048, async_scheduling: false, enable_prefix_caching: false}
slo: ttft<1s @ 99%
"""
LINEAR = "{kind: linear, base: 5ms, per_token: 10us, per_sequence: 20us}"


def setup_of(folder, cost=LINEAR, **changes):
    text = SCENARIO.replace("COST", cost)
    for old, new in changes.items():
        text = text.replace(old, new)
    (folder / "s.yaml").write_text(text)
    return Setup.of(load_scenario(str(folder / "s.yaml")))


def engines_of(setup, users):
    """Makes engines of the first policy that so many users keep busy."""
    return partial(setup.engine_of_users, setup.scenario.specs[0], users)


def factor_of(setup, concurrency, tpot_ns):
    """The factor on all steps of `setup` that meets the point under its first policy."""
    return solved(engines_of(setup, concurrency), Anchor(concurrency, round(tpot_ns)), lambda x: Scaled(setup.cost, x))


def test_the_factor_is_that_of_a_cost_stretched_by_it(tmp_path):
    """What a cost of 1.7 times the step times shows at 16 users is found again as 1.7."""
    setup = setup_of(tmp_path)
    slow = setup_of(tmp_path, "{kind: linear, base: 8500us, per_token: 17us, per_sequence: 34us}")
    measured = mean_tpot_ns(*engines_of(slow, 16)(slow.cost))
    assert measured is not None and measured > 10 * MS
    assert factor_of(setup, 16, measured) == pytest.approx(1.7, rel=2e-3)
    assert factor_of(setup, 16, measured) == factor_of(setup, 16, measured)


def test_a_point_that_the_costs_meet_has_the_factor_1(tmp_path):
    """Exactly: nothing is stretched."""
    setup = setup_of(tmp_path, "{kind: constant, step: 7ms}")
    assert factor_of(setup, 1, 7 * MS) == 1


@pytest.mark.parametrize(("tpot_ms", "times"), [(0.07, "0.01"), (70, "10")])
def test_a_point_out_of_reach_is_one_line(tmp_path, tpot_ms, times):
    """Ten or a hundred times off: the unit or the deployment is wrong, and the line says by how much."""
    setup = setup_of(tmp_path, "{kind: constant, step: 7ms}")
    with pytest.raises(ScenarioError, match=rf"concurrency 4 is {times} times what is simulated.*0\.2 to 5") as caught:
        factor_of(setup, 4, tpot_ms * MS)
    assert "\n" not in str(caught.value)


def test_a_point_that_step_times_leap_over_is_one_line(tmp_path):
    """With steps of 7 ms or 21 ms and none between, 14 ms is met by neither."""
    setup = setup_of(tmp_path, "{kind: constant, step: 7ms}")
    with pytest.raises(ScenarioError, match=r"no factor on step times meets it; near 1\.5 TPOT jumps\. Anchor elsewh"):
        solved(engines_of(setup, 1), Anchor(1, 14 * MS), lambda x: Scaled(setup.cost, 3.0 if x >= 1.5 else 1.0))


def test_a_factor_that_changes_some_steps_alone_is_found(tmp_path):
    """TPOT is no longer proportional to it: the point is met to a thousandth all the same."""
    setup = setup_of(tmp_path, "{kind: constant, step: 7ms}")

    def at(x):
        return Scaled(setup.cost, x**3 / 2 + 0.5)

    x = solved(engines_of(setup, 4), Anchor(4, 9 * MS), at)
    assert x**3 / 2 + 0.5 == pytest.approx(9 / 7, rel=1e-3)


def test_answers_of_one_token_anchor_nothing(tmp_path):
    """They have no time between tokens."""
    setup = setup_of(tmp_path, **{"{kind: uniform, min: 40, max: 80}": "{kind: fixed, tokens: 1}"})
    with pytest.raises(ScenarioError, match="no request finished with two tokens"):
        factor_of(setup, 4, MS)


@pytest.mark.parametrize("concurrency", [0, 16_385, 1_000_001])
def test_a_point_has_as_many_requests_as_an_engine_may_run(concurrency):
    """More would be simulated without end, and queue at any engine."""
    with pytest.raises(ValueError, match=f"concurrency is {concurrency}. It must be from 1 to 16384."):
        Anchor(concurrency, 7 * MS)
