"""The optimum of a batch server, against closed forms, every rule of its kind, and an agent that learns it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="gymnasium is not installed: pip install 'batchsim[gym]'")

from batchsim.gym.batch_queue import BatchQueueEnv
from batchsim.gym.batch_server import BatchServer
from batchsim.gym.rules import ControlLimit, best_of, compare, play
from batchsim.gym.smdp import optimum
from batchsim.gym.tabular import TabularAgent

SERVER = BatchServer(rate=60.0, alpha_s=0.04, beta_s=0.002, max_batch=8, energy_j=1.0, energy_weight=0.004)


def test_batches_of_one_are_an_m_d_1_queue() -> None:
    """Pollaczek and Khinchine: at 60 % of 50 ms the mean response is s + rho s / (2 (1 - rho))."""
    server = BatchServer(rate=12.0, alpha_s=0.05, beta_s=0.0, max_batch=1)
    found = optimum(server, states=80, tolerance=1e-9)
    assert found.cost == pytest.approx(0.05 + 0.6 * 0.05 / (2 * 0.4), rel=1e-4)
    assert found.control_limit == 1 and found.sizes.tolist() == [0] + [1] * 79


def test_a_batch_of_any_size_at_the_cost_of_one_is_served_at_once_and_whole() -> None:
    """Without energy, and with a time that does not grow, waiting gains nothing: the limit is 1, all are taken."""
    found = optimum(BatchServer(rate=60.0, alpha_s=0.03, beta_s=0.0, max_batch=6), states=60)
    assert found.control_limit == 1
    assert found.sizes[:10].tolist() == [0, 1, 2, 3, 4, 5, 6, 6, 6, 6]


def test_energy_raises_the_control_limit() -> None:
    """The dearer a batch, the longer it is worth waiting for a fuller one."""
    limits = [optimum(replace(SERVER, energy_weight=w), states=80).control_limit for w in (0.0, 0.004, 0.02)]
    assert None not in limits
    assert limits == sorted(limits) and limits[0] < limits[2]


@pytest.mark.slow
def test_no_control_limit_beats_the_optimum_and_its_own_has_its_cost() -> None:
    """Each limit of 1 to 8 played for 100 simulated minutes: the best is the optimum's, within its interval."""
    found, env = optimum(SERVER, states=100), BatchQueueEnv(SERVER, horizon_s=600.0)
    costs = {}
    for limit in range(1, 9):
        rates = [-play(env, ControlLimit(limit, 8), seed).rate for seed in range(10)]
        costs[limit] = (float(np.mean(rates)), 2.26 * float(np.std(rates, ddof=1)) / 10**0.5)
    assert found.control_limit is not None
    mean, half = costs[found.control_limit]
    assert abs(mean - found.cost) < 2 * half
    assert all(mean > found.cost - 2 * half for mean, half in costs.values())


@pytest.mark.slow
def test_a_tabular_agent_comes_within_three_per_cent_and_beats_serving_at_once() -> None:
    """100,000 decisions to learn; judged on seeds that it never saw, beside the optimum and the greedy rule."""
    found, env = optimum(SERVER, states=100), BatchQueueEnv(SERVER, horizon_s=600.0)
    agent = TabularAgent(8)
    agent.learn(env, 100_000, seed=1)
    seeds = range(1000, 1010)
    rates = [-play(env, agent, seed).rate for seed in seeds]
    assert found.cost * 0.99 < np.mean(rates) < found.cost * 1.03
    ahead = compare(env, agent, ControlLimit(1, 8), seeds)
    assert ahead.mean is not None and ahead.half_width is not None and ahead.mean - ahead.half_width > 0


def test_whatever_never_idles_serves_as_much() -> None:
    """Rule: with rows that are all alike in a server whose time is per request, the order of work changes nothing."""
    server = BatchServer(rate=60.0, alpha_s=0.0, beta_s=0.01, max_batch=4)
    env = BatchQueueEnv(server, horizon_s=200.0)
    served = [play(env, lambda _, info, size=size: size, 1).counts["served"] for size in (1, 2, 4)]
    assert max(served) - min(served) <= 4
    assert abs(served[0] - 60.0 * 200) < 4 * (60.0 * 200) ** 0.5


def test_beyond_capacity_the_return_falls_with_the_horizon() -> None:
    """The queue grows without end: the cost of a second grows with it, under any rule."""
    server = BatchServer(rate=300.0, alpha_s=0.04, beta_s=0.002, max_batch=8)
    for limit in (1, 8):
        rates = [play(BatchQueueEnv(server, horizon_s=h), ControlLimit(limit, 8), 1).rate for h in (5.0, 10.0, 20.0)]
        assert rates[2] < 1.8 * rates[1] < 1.8 * 1.8 * rates[0] < 0


def test_a_rule_is_chosen_by_its_reward_and_compared_in_pairs() -> None:
    """Of three limits the one with the most reward a second; beside itself a rule gains nothing."""
    env = BatchQueueEnv(SERVER, horizon_s=30.0)
    limits = [ControlLimit(limit, 8) for limit in (1, 4, 8)]
    chosen = best_of(env, limits, [1, 2])
    sums = [sum(play(env, one, seed).rate for seed in (1, 2)) for one in limits]
    assert chosen is limits[int(np.argmax(sums))]
    same = compare(env, chosen, chosen, [3, 4])
    assert (same.mean, same.half_width, same.num_seeds) == (0.0, 0.0, 2)
