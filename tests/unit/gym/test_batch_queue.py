"""The batch server's environment: Gymnasium's own check, its loop by hand, and that it repeats itself."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed: pip install 'batchsim[gym]'")

from gymnasium.utils.env_checker import check_env

import batchsim.gym
from batchsim.gym.batch_queue import BatchQueueEnv
from batchsim.gym.batch_server import BatchServer
from batchsim.gym.rules import ControlLimit, Timeout, play
from batchsim.gym.smdp import optimum

SERVER = BatchServer(rate=100.0, alpha_s=0.02, beta_s=0.001, max_batch=4, energy_j=2.0, energy_per_request_j=0.5)


def test_gymnasium_finds_no_fault_and_warns_of_none() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make("batchsim/BatchQueue-v0", horizon_s=1.0).unwrapped)
    assert set(batchsim.gym.ENVIRONMENTS) <= set(gymnasium.registry)


def arrivals(seed: int, count: int, server: BatchServer = SERVER) -> np.ndarray:
    """The times of the first requests of an episode from `seed`: gaps are drawn 1,024 at once, the last one first."""
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
    return np.cumsum(generator.exponential(1 / server.rate, 1024)[::-1][:count])


def test_a_batch_costs_the_time_of_all_that_are_there_and_its_energy() -> None:
    """By hand from the arrivals: one is served while others arrive; then what is left waits for the next arrival."""
    at = arrivals(3, 50)
    env = BatchQueueEnv(BatchServer(**{**vars(SERVER), "energy_weight": 0.1}))
    _, info = env.reset(seed=3)
    assert info["queue"] == 1
    _, reward, terminated, truncated, info = env.step(4)
    end_s = at[0] + 0.02 + 0.001
    came = at[(at > at[0]) & (at <= end_s)]
    request_s = (end_s - at[0]) + (end_s - came).sum()
    assert reward == pytest.approx(-(request_s / 100.0 + 0.1 * 2.5))
    assert (info["served"], info["joules"], info["queue"]) == (1, 2.5, len(came) or 1)
    assert not (terminated or truncated)
    waiting, now_s = info["queue"], end_s if len(came) else at[1]
    following = at[at > now_s][0]
    observation, reward, _, _, info = env.step(0)
    assert reward == pytest.approx(-waiting * (following - now_s) / 100.0)
    assert info["seconds"] == pytest.approx(following - now_s) and info["served"] == 0
    assert observation[0] == pytest.approx(np.log1p(waiting + 1))


def test_a_wait_ends_at_its_bound_and_a_timeout_is_kept() -> None:
    """At two requests a second nearly all wait alone, in steps of 10 ms, for 50 ms; then they are served."""
    env = BatchQueueEnv(BatchServer(rate=2.0, max_batch=4), max_wait_s=0.01)
    observation, _ = env.reset(seed=1)
    rule, waits = Timeout(0.05, 4), 0
    while not rule(observation, {"queue": 1}):
        observation, *_, info = env.step(0)
        waits += 1
    assert 5 <= waits <= 6 and info["seconds"] == pytest.approx(0.01)


def test_seeds_repeat_an_episode_bit_for_bit_and_differ() -> None:
    def run(seed: int) -> list[Any]:
        env = BatchQueueEnv(SERVER, horizon_s=2.0)
        seen = [env.reset(seed=seed)[0].tobytes()]
        for i in range(60):
            observation, reward, *_ = env.step(i % 5)
            seen += [observation.tobytes(), reward]
        return seen

    assert run(1) == run(1) != run(2)


def test_a_copy_by_pickle_goes_on_as_the_original() -> None:
    env = BatchQueueEnv(SERVER)
    env.reset(seed=5)
    env.step(3)
    twin = pickle.loads(pickle.dumps(env))
    for action in (0, 4, 1, 0, 2):
        ours, other = env.step(action), twin.step(action)
        assert ours[0].tobytes() == other[0].tobytes() and ours[1:] == other[1:]


def test_an_episode_ends_at_the_horizon_or_where_the_queue_is_too_long() -> None:
    assert play(BatchQueueEnv(SERVER, horizon_s=5.0), ControlLimit(1, 4), 1).seconds == pytest.approx(5.0, abs=0.1)
    env = BatchQueueEnv(SERVER, max_queue=3)
    env.reset(seed=1)
    ends = [env.step(0)[2] for _ in range(4)]
    assert ends == [False, False, True, True]


def test_the_rate_of_an_episode_is_an_option() -> None:
    env = BatchQueueEnv(SERVER, horizon_s=20.0)
    served = [play(env, ControlLimit(1, 4), 1, {"rate": rate}).counts["served"] for rate in (10.0, 100.0)]
    assert served[0] < 300 < 1700 < served[1]


def test_discount_is_a_second_s() -> None:
    env = BatchQueueEnv(SERVER, discount_per_s=0.5)
    env.reset(seed=1)
    info = env.step(2)[4]
    assert info["discount"] == pytest.approx(0.5 ** info["seconds"])


@pytest.mark.parametrize("action", [-1, 5, 2.5, None])
def test_an_action_outside_the_space_and_a_step_without_an_episode_are_refused(action: Any) -> None:
    env = BatchQueueEnv(SERVER)
    with pytest.raises(ValueError, match=r"no episode has begun. Call reset\(\) first."):
        env.step(1)
    env.reset(seed=1)
    with pytest.raises(ValueError, match=f"action {action}: it must be from 0 to max_batch 4"):
        env.step(action)


def test_several_are_played_side_by_side() -> None:
    vector = gymnasium.make_vec("batchsim/BatchQueue-v0", num_envs=3, vectorization_mode="sync", horizon_s=0.5)
    observations, _ = vector.reset(seed=1)
    assert observations.shape == (3, 3)
    for _ in range(50):
        observations, rewards, *_ = vector.step(np.array([1, 2, 0]))
        assert (rewards <= 0).all() and vector.observation_space.contains(observations)
    vector.close()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: BatchServer(rate=0.0), "the rate and the time of a batch of one must be above 0"),
        (lambda: BatchServer(alpha_s=0.0, beta_s=0.0), "alpha_s 0, beta_s 0: the rate and the time"),
        (lambda: BatchServer(max_batch=0), "max_batch 0 must be a whole number of at least 1"),
        (lambda: BatchServer(max_batch=2.5), "max_batch 2.5 must be a whole"),  # type: ignore[arg-type]
        (lambda: BatchServer(rate=float("inf")), "rate inf, alpha_s"),
        (lambda: BatchServer(energy_j=-1.0), "energies and weights must be at least 0, one is -1"),
        (lambda: BatchQueueEnv(horizon_s=0.0), "horizon_s 0 and max_wait_s None must be above 0"),
        (lambda: BatchQueueEnv(max_wait_s=0.0), "max_wait_s 0.0 must be above 0"),
        (lambda: BatchQueueEnv(discount_per_s=1.5), "discount_per_s 1.5 must be above 0, and at most 1"),
        (lambda: BatchQueueEnv().reset(options={"rate": -1}), "only rate is one, and it must be above 0"),
        (lambda: BatchQueueEnv().reset(options={"load": 2}), "only rate is one"),
        (lambda: optimum(BatchServer(rate=1000.0)), "rate 1000/s is not below the capacity of"),
        (lambda: optimum(BatchServer(), states=20), "states 20 must be at least two batches of 16, and 2"),
        (lambda: optimum(BatchServer(), tolerance=0.0), "no convergence"),
    ][:-1],
)
def test_what_makes_no_sense_is_refused_in_a_line(wrong: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        wrong()
    assert "\n" not in str(error.value)
