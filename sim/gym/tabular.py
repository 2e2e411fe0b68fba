"""A tabular agent for `BatchQueueEnv`: to wait, or to serve a whole batch, by the number that wait.

Average-cost Q-learning of a semi-Markov process: the value of a choice is its cost less the mean cost of its seconds.
Source: Das, Gosavi, Mahadevan and Marchalleck, Solving semi-Markov decision problems using average reward reinforcement
learning (Management Science, 1999), with the rates that follow here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchsim.gym.batch_queue import BatchQueueEnv

_DRAWN = 4096


class TabularAgent:
    """Values of waiting and of serving at each queue up to `states`; longer queues count as that.

    Where a whole batch waits it is served: no longer queue makes a better one.
    """

    def __init__(self, max_batch: int, states: int = 64) -> None:
        self.max_batch, self.states = max_batch, states
        self.values = [[0.0, 0.0] for _ in range(states + 1)]
        self.cost = 0.0  # the mean cost of a second

    def __call__(self, observation: NDArray[np.float32], info: dict[str, Any]) -> int:
        """The action of less value: 0, or a whole batch."""
        wait, serve = self.values[min(info["queue"], self.states)]
        return self.max_batch if serve <= wait or info["queue"] >= self.max_batch else 0

    def learn(self, env: BatchQueueEnv, decisions: int, seed: int) -> None:
        """Learns from a number of `decisions` in `env`, from the start of as many episodes as these take.

        The share of choices by chance falls from a half to 2 %, the learning rate of a choice as one over its visits to
        the power of 0.7, and the mean cost is that of the seconds in which no choice was by chance.
        """
        chance = np.random.default_rng([seed, 1])
        visits = [[0, 0] for _ in range(self.states + 1)]
        lost, seconds = 0.0, 1e-9
        _, info = env.reset(seed=seed)
        draws = list[float]()
        for done in range(decisions):
            if len(draws) < 2:
                draws = chance.random(_DRAWN).tolist()
            state = min(info["queue"], self.states)
            wait, serve = self.values[state]
            full = state >= self.max_batch
            choice = 1 if serve <= wait or full else 0
            explores = not full and draws.pop() < max(0.02, 0.5 * (1 - 2 * done / decisions))
            if explores:
                choice = int(draws.pop() < 0.5)
            _, reward, _, truncated, info = env.step(self.max_batch * choice)
            row, count = self.values[state], visits[state]
            count[choice] += 1
            following = min(info["queue"], self.states)
            ahead = self.values[following][1] if following >= self.max_batch else min(self.values[following])
            target = -reward - self.cost * info["seconds"] + ahead
            row[choice] += count[choice] ** -0.7 * (target - row[choice])
            if not explores:
                lost, seconds = lost - reward, seconds + info["seconds"]
                self.cost += (lost / seconds - self.cost) * min(1.0, 50.0 / (done + 50))
            if truncated:
                _, info = env.reset()
