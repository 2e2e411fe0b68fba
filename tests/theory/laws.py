"""Mean times of the queues that the simulator must reproduce, in closed form or exactly for steps of finite length.

Textbook queues serve in continuous time; here an arrival waits for the running step to end. Where that shifts the mean,
the exact law of the stepped queue is computed beside the textbook one, and tends to it as steps become short.
Source of the textbook results: L. Kleinrock, Queueing Systems, volumes 1 (M/G/1, M/M/c) and 2 (processor sharing).
"""

from __future__ import annotations

from math import factorial

import numpy as np
from numpy.typing import NDArray
from scipy import sparse, special
from scipy.sparse.linalg import spsolve


def pollaczek_khinchine_wait(rate: float, services: NDArray[np.float64]) -> float:
    """Mean wait of M/G/1 with equally likely `services`."""
    return rate * float((services**2).mean()) / (2 * (1 - rate * float(services.mean())))


def mmc_time_in_system(rate: float, service: float, servers: int) -> float:
    """Mean time in an M/M/c by Erlang's C formula."""
    load = rate * service
    full = load**servers / factorial(servers) / (1 - load / servers)
    waits = full / (sum(load**k / factorial(k) for k in range(servers)) + full)
    return service + waits * service / (servers - load)


def stepped_mmc_time_in_system(rate: float, step: float, mean_steps: float, servers: int, states: int = 400) -> float:
    """Mean time in system where up to `servers` advance together in steps and end with probability 1/mean_steps.

    The number in system at the starts of steps is a Markov chain: binomial ends, Poisson arrivals, and from an empty
    system the next arrival starts a step at once. Little's law turns the time average into the mean time.
    """
    arrivals = _poisson(np.arange(states), rate * step)
    matrix = np.zeros((states, states))
    for n in range(1, states):
        ends = _binomial(min(n, servers), 1 / mean_steps)
        for k, probability in enumerate(ends):
            matrix[n, n - k :] += probability * arrivals[: states - n + k]
    empties = matrix[:, 0].copy()
    matrix[:, 1] += empties
    start = _stationary(matrix[1:, 1:])
    numbers = np.arange(1, states)
    in_system = float(start @ (numbers * step + rate * step**2 / 2))
    cycle = step + float(start @ empties[1:]) / rate
    return in_system / cycle / rate


def _poisson(counts: NDArray[np.int64], mean: float) -> NDArray[np.float64]:
    """The chance of each of `counts` by Poisson's law."""
    return np.exp(counts * np.log(mean) - mean - special.gammaln(counts + 1))


def _binomial(trials: int, chance: float) -> NDArray[np.float64]:
    """The chance of 0, 1, ... `trials` successes."""
    counts = np.arange(trials + 1)
    return special.comb(trials, counts) * chance**counts * (1 - chance) ** (trials - counts)


def _stationary(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """The stationary distribution of a chain cut off at its last state."""
    matrix = matrix / matrix.sum(axis=1, keepdims=True)
    system = matrix.T - np.eye(len(matrix))
    system[-1] = 1.0  # in place of an equation that follows from the others: it sums to 1
    return np.linalg.solve(system, np.eye(len(matrix))[-1])


def stepped_sharing_time_in_system(
    rate: float, quantum: float, lengths: NDArray[np.float64], generations: int = 4000
) -> float:
    """Mean time in system where a step takes `quantum` for each of the jobs in it; `lengths[k]` is P(k steps needed).

    Own derivation. Everybody present gets one quantum a step, and during each quantum Poisson(rate * quantum) jobs
    arrive that are present from the next step on. A busy period is thus a branching process: a job of L steps has
    offspring in L generations, so the first two moments of the number present in each step obey renewal equations.
    """
    a = rate * quantum
    steps = np.arange(len(lengths))
    load = a * float(lengths @ steps)
    at_least = np.append(lengths[::-1].cumsum()[::-1][1:], 0.0)  # [j] = P(L > j) = P(L >= j + 1)
    alive = np.zeros(generations)
    alive[: len(at_least)] = at_least[:generations]
    mean = np.zeros(generations)
    for k in range(generations):  # mean[k]: present in step k of a busy period
        window = min(k, len(at_least))
        mean[k] = alive[k] + a * float(at_least[:window] @ mean[k - window : k][::-1])
    total = np.append(0.0, mean.cumsum())
    squares = 0.0
    for length in np.flatnonzero(lengths):
        k = np.arange(generations)
        expected = (k < length) + a * (total[k] - total[k - np.minimum(k, length)])
        squares += lengths[length] * float(expected @ expected)
    second_moment = squares / (1 - load)
    return quantum * (1 + a / 2) * (1 - load) * second_moment


def batch_time_in_system(rate: float, per_item: float, fixed: float, states: int = 400) -> float:
    """Mean time in system where a free server takes all who wait, n of them for `per_item * n + fixed`."""
    sizes = np.arange(1, states)
    durations = per_item * sizes + fixed
    counts, mean = np.arange(states)[None, :], rate * durations[:, None]
    arrivals = _poisson(counts, mean)
    matrix = arrivals[:, 1:].copy()
    matrix[:, 0] += arrivals[:, 0]
    start = _stationary(matrix)
    in_system = float(start @ (sizes * durations + rate * durations**2 / 2))
    cycle = float(start @ durations) + float(start @ arrivals[:, 0]) / rate
    return in_system / cycle / rate


def inoue_bound(rate: float, per_item: float, fixed: float) -> float:
    """Upper bound of `batch_time_in_system`: the better of two, for mean batches of at least 1 and of the busy limit.

    Source: Y. Inoue, Queueing analysis of GPU-based inference servers with dynamic batching: a closed-form
    characterization, Performance Evaluation 147 (2021), arXiv 1912.06322.
    """
    load = rate * per_item
    small = (per_item + fixed) / (2 * (1 - load)) * (1 + 2 * rate * fixed + (1 - rate * fixed) / (1 + load))
    large = 1.5 * fixed / (1 - load) + per_item / 2 * (load + 2) / (1 - load**2)
    return min(small, large)


def round_robin_time_in_system(rate: float, service: float, servers: int) -> float:
    """Mean time in system where every server gets each `servers`-th of Poisson arrivals: E_c/M/1.

    Source: Kleinrock, volume 1, the system G/M/1: an arrival finds the server busy with the root of
    x = A(mu (1 - x)) as its probability, A being the Laplace transform of the time between arrivals.
    """
    busy = 0.5
    for _ in range(10_000):
        busy = (rate / (rate + (1 - busy) / service)) ** servers
    return service / (1 - busy)


def shortest_of_two_time_in_system(rate: float, service: float, longest: int = 50) -> float:
    """Mean time in system of two exponential servers where arrivals join the shorter queue, the first of equals.

    The stationary law of the numbers at both, cut off at `longest`, and Little's law.
    """
    size = longest + 1
    one, other = (number.ravel() for number in np.meshgrid(np.arange(size), np.arange(size), indexing="ij"))
    here = np.arange(size * size)
    moves = [
        (rate, (one <= other) & (one < longest), size),
        (rate, (one > other) & (other < longest), 1),
        (1 / service, one > 0, -size),
        (1 / service, other > 0, -1),
    ]
    flow = sparse.csr_matrix((size * size, size * size))
    for speed, can, step in moves:
        flow += sparse.csr_matrix((np.full(can.sum(), speed), (here[can], here[can] + step)), shape=flow.shape)
    balance = (flow - sparse.diags(np.asarray(flow.sum(axis=1)).ravel())).T.tolil()
    balance[0, :] = 1.0  # the chances sum to 1 instead of one of the balance equations
    chance = spsolve(balance.tocsc(), np.eye(1, size * size).ravel())
    return float(chance @ (one + other)) / rate
