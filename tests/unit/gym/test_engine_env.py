"""Environments of a scenario's engine: Gymnasium's check, and that an agent meets there what it meets as a policy."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed: pip install 'batchsim[gym]'")

from gymnasium.utils.env_checker import check_env

import batchsim.gym  # noqa: F401
from batchsim.drive.simulate import simulate
from batchsim.gym.engine_env import EngineEnv
from batchsim.gym.request_objectives import Objectives
from batchsim.gym.rules import Constant, play
from batchsim.gym.steps import StepsEnv
from batchsim.gym.whole_batch import WholeBatchEnv
from batchsim.kernel.core import EngineCore
from batchsim.kernel.record import REQUEST_COLUMNS, Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.policies.families.batch_agent import BatchAgent, BatchAgentConfig
from batchsim.policies.families.step_agent import StepAgent, StepAgentConfig

SMALL = """\
model: llama-3.1-8b
cost: {kind: linear, base: 4ms, per_token: 40us, per_sequence: 100us}
kv: {tokens: 4000}
workload:
  arrivals: {kind: poisson, mean_rate: 20/s}
  lengths:
    prompt: {kind: uniform, min: 20, max: 120}
    output: {kind: uniform, min: 2, max: 30}
  output_cap: 40
  duration: 10s
policies:
  continuous: {max_num_seqs: 8, max_num_batched_tokens: 512}
load: {mean_rate: [10/s, 20/s, 40/s]}
slo: ttft<1s & tpot<50ms @ 99%
seeds: 2
"""
BATCHES = BatchAgentConfig(max_batch_size=6, max_wait=20_000_000)
STEPS = StepAgentConfig(
    max_num_seqs=32, max_num_batched_tokens=512, budgets=(16, 64, 512), caps=(4, 32), every=50_000_000
)


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return str(path)


def whole_batch(small: str, **knobs: Any) -> WholeBatchEnv:
    return WholeBatchEnv(small, config=BATCHES, objectives=Objectives(e2e_s=0.5), **knobs)


def steps(small: str, **knobs: Any) -> StepsEnv:
    return StepsEnv(small, config=STEPS, objectives=Objectives(ttft_s=0.2, tpot_s=0.02), **knobs)


KINDS = pytest.mark.parametrize("new", [whole_batch, steps])


@KINDS
def test_gymnasium_finds_no_fault_and_warns_of_none(new: Any, small: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        name = "WholeBatch" if new is whole_batch else "Steps"
        config, asked = (BATCHES if new is whole_batch else STEPS), Objectives(e2e_s=0.5)
        made = gymnasium.make(f"batchsim/{name}-v0", scenario=small, config=config, objectives=asked, horizon_s=2.0)
        check_env(made.unwrapped)


class OwnBatches(BatchAgent):
    """Serves three, or all that wait after 60 ms."""

    def decide(self, observed: tuple[float, ...]) -> int:
        return batch_rule(observed, {})


class OwnSteps(StepAgent):
    """A small budget while the latest step was long, few slots while many prompts are begun."""

    def decide(self, observed: tuple[float, ...]) -> tuple[int, int]:
        return step_rule(observed, {})


def batch_rule(observed: Any, info: dict[str, Any]) -> int:
    return 6 if observed[0] >= np.float32(np.log1p(3)) or observed[2] >= 0.055 else 0


def step_rule(observed: Any, info: dict[str, Any]) -> tuple[int, int]:
    return (0 if observed[9] > 0.008 else 2, 1 if observed[0] < 1.5 else 0)


@pytest.mark.parametrize(
    ("new", "policy", "rule"), [(whole_batch, OwnBatches, batch_rule), (steps, OwnSteps, step_rule)]
)
def test_an_agent_meets_in_the_environment_what_it_meets_as_a_policy(
    new: Any, policy: Any, rule: Any, small: str
) -> None:
    """The rows of all requests that ended before the horizon, from the simulation's driver and from the environment."""
    env = new(small, load=20.0, horizon_s=8.0)  # before the last arrival, behind which a simulation drains
    rows, over = [], False
    observed, info = env.reset(seed=7)
    while not over:
        env.answered(env._episode.scheduler, rule(observed, info))
        env._episode.go_on(decided=True)
        rows += env._episode.core.recorder.take()
        observed, over = env._observed(), env._episode.is_over
    setup, spec = env.setup, env.agent_spec
    workload = setup.workload(20.0, 7)
    kv = setup.new_kv(spec.config)
    scheduler: Any = policy(spec.config, type_context(kv, setup.max_model_len, env.cost))
    core = EngineCore(
        scheduler, SimExecutor(env.cost, setup.max_model_len), Recorder(), max_model_len=setup.max_model_len
    )
    simulate(core, workload)
    records = core.recorder.records()
    names = [name for name, _ in REQUEST_COLUMNS if name not in ("reason", "request_class", "tenant")]
    expected = {int(row["request_id"]): {n: int(row[n]) for n in names} for row in records.requests}
    seen = {row["request_id"]: {n: row[n] for n in names} for row in rows}
    assert len(seen) > 120
    assert seen == {number: expected[number] for number in seen}
    assert all(row["ended_ns"] >= env._episode.horizon_ns for number, row in expected.items() if number not in seen)


def type_context(kv: Any, max_model_len: int, cost: Any) -> Any:
    from batchsim.kernel.protocols import PolicyContext

    return PolicyContext(kv, max_model_len, None, cost)


@KINDS
def test_seeds_repeat_an_episode_bit_for_bit_and_a_copy_goes_on_as_the_original(new: Any, small: str) -> None:
    first, again, other = new(small), new(small), new(small)
    starts = [env.reset(seed=seed)[0].tobytes() for env, seed in ((first, 1), (again, 1), (other, 2))]
    assert starts[0] == starts[1] != starts[2]
    first.action_space.seed(3)
    for _ in range(20):
        action = first.action_space.sample()
        ours, twins = first.step(action), again.step(action)
        assert ours[0].tobytes() == twins[0].tobytes() and ours[1:] == twins[1:]
        assert first.observation_space.contains(ours[0])
    copy = pickle.loads(pickle.dumps(first))
    for _ in range(20):
        action = first.action_space.sample()
        ours, twins = first.step(action), copy.step(action)
        assert ours[0].tobytes() == twins[0].tobytes() and ours[1:] == twins[1:]


def test_the_reward_counts_each_request_once(small: str) -> None:
    """What is in its SLO and what is not are all that ended, and at the horizon those that are late already."""
    env = steps(small, load=40.0, second_cost=0.5)
    played = play(env, Constant((2, 1)), 5)
    counts = played.counts
    assert played.reward == pytest.approx(counts["in_slo"] - counts["missed"] - 0.5 * played.seconds)
    arrived = len(env.setup.workload(40.0, 5).sent_ns)
    assert 0.9 * arrived < counts["in_slo"] + counts["missed"] <= arrived
    assert counts["in_slo"] > 0


def test_an_engine_that_may_run_none_of_what_waits_misses_all(small: str) -> None:
    """An agent that always waits: no request ends, and at the horizon all that are older than 0.5 s are late."""
    env = whole_batch(small, horizon_s=5.0)
    played = play(env, Constant(0), 2)
    waited = sum(env.setup.workload(env.load, 2).sent_ns < 4.5e9)
    assert (played.counts["finished"], played.counts["missed"]) == (0, waited)


def test_the_load_is_an_option_and_the_first_of_the_scenario_by_default(small: str) -> None:
    env = whole_batch(small)
    assert env.load == 10.0
    low = play(env, Constant(6), 1).counts["finished"]
    high = play(env, Constant(6), 1, {"load": 40.0}).counts["finished"]
    assert 60 < low < 140 < 300 < high < 500


def test_work_conserving_actions_change_no_throughput(small: str) -> None:
    """Far below capacity all that arrive are served, whatever budgets an agent takes."""
    env = steps(small, load=10.0)
    finished = [play(env, Constant(action), 3).counts["finished"] for action in ((0, 1), (1, 0), (2, 1))]
    assert max(finished) - min(finished) <= 2


CLOSED = SMALL.replace("{kind: poisson, mean_rate: 20/s}", "{kind: closed_loop, users: 4, think_time: 1s}").replace(
    "load: {mean_rate: [10/s, 20/s, 40/s]}", "load: {users: [4]}"
)
REPLICAS = SMALL + "replicas: {count: 2, router: round_robin}\n"


@pytest.mark.parametrize(
    ("text", "knobs", "options", "words"),
    [
        (SMALL, {"discount_per_s": 0.0}, {}, "discount_per_s 0 must be above 0 and at most 1"),
        (SMALL, {"second_cost": -1.0}, {}, "second_cost -1 at least 0"),
        (SMALL, {"horizon_s": 0.0}, {}, "horizon_s 0.0 above 0"),
        (SMALL, {"horizon_s": 11.0}, {}, "arrivals end after 10 s, before horizon_s 11. Lengthen workload.duration"),
        (SMALL, {}, {"load": 0.0}, "only load is one, and it must be above 0"),
        (SMALL, {}, {"rate": 5.0}, "only load is one"),
        (CLOSED, {}, {}, "requests that depend on answers are no episode yet. Give it open-loop arrivals"),
        (REPLICAS, {}, {}, "an environment has one engine, and the scenario has replicas. Remove them"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(
    text: str, knobs: dict[str, Any], options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=words) as error:
        whole_batch(str(path), **knobs).reset(options=options)
    assert "\n" not in str(error.value)


def test_a_scenario_that_is_no_text_is_refused() -> None:
    """A number, say, by what it is, and not by what cannot be done with it."""
    with pytest.raises(ValueError, match="scenario 3 is no path or name of a scenario"):
        whole_batch(cast(str, 3))


def test_a_step_before_an_episode_and_objectives_of_nothing_are_refused(small: str) -> None:
    with pytest.raises(ValueError, match=r"no episode has begun. Call reset\(\) first."):
        whole_batch(small).step(1)
    with pytest.raises(ValueError, match="none of ttft_s, tpot_s and e2e_s is asked"):
        Objectives()
    with pytest.raises(ValueError, match="times must be above 0 and miss at least 0"):
        Objectives(e2e_s=-1.0)


@pytest.mark.parametrize(
    ("make", "action", "words"),
    [
        (whole_batch, 7, r"action 7 is not in Discrete\(7\)"),
        (whole_batch, 2.5, r"action 2.5 is not in Discrete\(7\)"),
        (steps, (3, 0), r"action \(3, 0\) is not in MultiDiscrete\(\[3 2\]\)"),
        (steps, (0, 0, 0), r"action \(0, 0, 0\) is not in MultiDiscrete"),
        (steps, (0.5, 0.5), r"action \(0.5, 0.5\) is not in MultiDiscrete"),
    ],
)
def test_an_action_outside_the_space_is_refused(
    small: str, make: Callable[[str], EngineEnv], action: Any, words: str
) -> None:
    env = make(small)
    env.reset(seed=1)
    with pytest.raises(ValueError, match=words):
        env.step(action)
