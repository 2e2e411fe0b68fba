"""The best that any rule can do at a `BatchServer`: its semi-Markov decision process, solved by relative value
iteration.

Decisions fall when a batch ends and, while the server is idle, at arrivals: to wait for the next arrival, or to serve
some requests that wait, first come first served. The queue is cut at `states`, above which an arrival is lost: choose
it so far out that it is never seen. Source: Puterman, Markov Decision Processes, 11.4 (the transformation to steps of
equal length, and relative value iteration).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, lgamma, log

import numpy as np
from numpy.typing import NDArray

from batchsim.gym.batch_server import BatchServer

_SWEEPS = 200_000


@dataclass(frozen=True)
class Optimum:
    """The least cost a second, and a rule that has it: `sizes[n]` requests run at once where n wait; 0 waits."""

    cost: float
    sizes: NDArray[np.int64]

    @property
    def control_limit(self) -> int | None:
        """The queue from which on the rule serves, as many as it may; None if it is no such rule."""
        serves = self.sizes > 0
        limit = int(np.argmax(serves))
        return limit if serves[limit:].all() else None


def optimum(server: BatchServer, states: int = 200, tolerance: float = 1e-7) -> Optimum:
    """The optimum of `server` with queues below `states`, its cost exact to `tolerance` of itself.

    ValueError if the server cannot keep up, or if `states` are fewer than two batches.
    """
    if server.rate >= server.capacity:
        raise ValueError(
            f"rate {server.rate:g}/s is not below the capacity of {server.capacity:g}/s, so that no rule has a mean"
            " cost. Lower it."
        )
    if states < 2 * server.max_batch + 2:
        raise ValueError(f"states {states} must be at least two batches of {server.max_batch}, and 2.")
    steps = [_Serving(server, size, states) for size in range(1, server.max_batch + 1)]
    wait_s, queue = 1 / server.rate, np.arange(states)
    least_s = 0.99 * min(wait_s, *(one.seconds for one in steps))
    values, wait_cost = np.zeros(states), server.delay_weight * queue / server.rate
    for _ in range(_SWEEPS):
        each = np.full((server.max_batch + 1, states), np.inf)
        gone = np.append(values[1:], values[-1]) - values
        each[0] = wait_cost + gone * (least_s / wait_s)
        for size, one in enumerate(steps, start=1):
            part = least_s / one.seconds
            each[size, size:] = one.cost_rate[size:] + part * (one.move @ values - values)[size:]
        change = each.min(axis=0)
        new = values + change
        values = new - new[0]
        low, high = change.min(), change.max()
        if high - low <= tolerance * abs(high):
            return Optimum(float(high + low) / 2, each.argmin(axis=0))
    raise ValueError(f"no convergence to {tolerance:g} in {_SWEEPS} sweeps. Raise tolerance, or lower states.")


class _Serving:
    """A batch of `size`: its seconds, the cost of a second by the queue at its start, and where the queue goes."""

    def __init__(self, server: BatchServer, size: int, states: int) -> None:
        self.seconds = server.service_s(size)
        queue, mean = np.arange(states), server.rate * self.seconds
        request_s = queue * self.seconds + mean * self.seconds / 2
        self.cost_rate = np.array([server.cost(x, server.energy(size)) for x in request_s]) / self.seconds
        arrivals = np.array([exp(k * log(mean) - mean - lgamma(k + 1)) for k in range(states)])
        self.move = np.zeros((states, states))
        for n in range(size, states):
            rest = n - size
            self.move[n, rest:] = arrivals[: states - rest]
            self.move[n, -1] += 1 - self.move[n].sum()
