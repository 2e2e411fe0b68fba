"""The wait for a single server with Poisson arrivals: its law, and the wait of every request of a replication.

Source of M/M/1: L. Kleinrock, Queueing Systems, volume 1. Source of the law of M/D/1: A. K. Erlang (1909), as in
V. B. Iversen and L. Staalhagen, Waiting time distribution in M/D/1 queueing systems, Electronics Letters 35 (1999).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import cached_property
from math import log

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from batchsim.kernel.batch import Batch
from tests.theory.laws import pollaczek_khinchine_wait
from tests.theory.stations import Station, slots

SERVICE_TOKENS = 10_000  # the mean prompt: fine enough for an exponential law
NS_PER_TOKEN = 1_000
SERVICE_NS = SERVICE_TOKENS * NS_PER_TOKEN
DIGITS = 100  # the terms of the series alternate and are up to e^(load · wait) times their sum
NS_PER_S = 1e9


class PerPromptToken:
    """A step takes NS_PER_TOKEN for every prompt token in it."""

    def step_ns(self, batch: Batch) -> int:
        return NS_PER_TOKEN * batch.num_prefill_tokens


def _equal(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    return np.full(count, SERVICE_TOKENS)


def _exponential(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    return np.ceil(rng.exponential(SERVICE_TOKENS, count)).astype(np.int64)


@dataclass(frozen=True)
class SingleServer:
    """M/M/1, or M/D/1 where `equal`, with services of SERVICE_NS on average."""

    load: float
    equal: bool

    def __str__(self) -> str:
        return f"M/{'D' if self.equal else 'M'}/1 at {self.load:g}"

    @cached_property
    def station(self) -> Station:
        """One slot, prompts for services, one output token."""
        draw = _equal if self.equal else _exponential
        rate_per_ns = self.load / SERVICE_NS
        return Station(slots(1), PerPromptToken(), rate_per_ns, lambda rng, count: np.ones(count, np.int64), draw)

    def truth_s(self) -> dict[str, float]:
        """Mean and 99th percentile of the wait."""
        mean = self.load / (1 - self.load)
        p99 = max(log(100 * self.load) / (1 - self.load), 0.0)
        if self.equal:
            mean = pollaczek_khinchine_wait(self.load, np.ones(1))
            p99 = quantile(lambda wait: md1_wait_cdf(self.load, wait), 0.99, 2 * p99)
        scale = SERVICE_NS / NS_PER_S
        return {"queue_time_mean_s": mean * scale, "queue_time_p99_s": p99 * scale}

    def waits_ns(self, seed: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """When the requests of a replication arrive, and how long each waits: Lindley's recursion, exact."""
        arrivals_ns, prompts, _ = self.station.requests(seed, count)
        steps_ns = prompts[:-1] * NS_PER_TOKEN - np.diff(arrivals_ns)
        free = np.concatenate(([0], np.cumsum(steps_ns)))
        return arrivals_ns, free - np.minimum.accumulate(free)


def md1_wait_cdf(load: float, wait: float) -> float:
    """P(wait <= `wait` services) in M/D/1, by Erlang's series in DIGITS decimal digits."""
    with localcontext() as context:
        context.prec = DIGITS
        rate, at, total, factorial = Decimal(load), Decimal(wait), Decimal(0), Decimal(1)
        for k in range(int(wait) + 1):
            factorial *= max(k, 1)
            power = rate * (k - at)
            total += (power**k if k else 1) / factorial * (-power).exp()
        return float((1 - rate) * total)


def quantile(cdf: Callable[[float], float], share: float, above: float) -> float:
    """Where `cdf` reaches `share`; it must do so below `above`."""
    return float(brentq(lambda at: cdf(at) - share, 0.0, above, xtol=1e-10))
