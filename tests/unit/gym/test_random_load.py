"""The wrapper that draws the load of every episode."""

from __future__ import annotations

import pytest

pytest.importorskip("gymnasium", reason="gymnasium is not installed: pip install 'batchsim[gym]'")

from batchsim.gym.batch_queue import BatchQueueEnv
from batchsim.gym.random_load import RandomLoad


def loads_of(env: RandomLoad, seed: int, episodes: int) -> list[float]:
    inner = env.unwrapped
    assert isinstance(inner, BatchQueueEnv)
    env.reset(seed=seed)
    found = [inner.rate]
    for _ in range(episodes - 1):
        env.reset()
        found.append(inner.rate)
    return found


def test_every_load_is_drawn_and_a_seed_repeats_them() -> None:
    env = RandomLoad(BatchQueueEnv(horizon_s=1.0), [20.0, 40.0, 60.0], option="rate")
    first = loads_of(env, 1, 30)
    assert set(first) == {20.0, 40.0, 60.0}
    assert first == loads_of(env, 1, 30) != loads_of(env, 2, 30)


def test_a_load_that_is_asked_for_wins() -> None:
    env = RandomLoad(BatchQueueEnv(horizon_s=1.0), [20.0], option="rate")
    env.reset(seed=1, options={"rate": 33.0})
    assert env.unwrapped.rate == 33.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("loads", [[], [5.0, 0.0]])
def test_no_loads_and_loads_of_nothing_are_refused(loads: list[float]) -> None:
    with pytest.raises(ValueError, match="there must be some, all above 0"):
        RandomLoad(BatchQueueEnv(), loads)
