"""Intervals of 95 %: of a mean over seeds, of a share without misses, and of differences between two policies.

Two policies that served the same requests are compared seed by seed, so that the luck of the draw cancels: the interval
of a difference is most often far narrower than those of the two values suggest, because a seed that is hard for one
policy is hard for the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

CONFIDENCE = 0.95


def half_width(values: Sequence[float]) -> float:
    """Half the width of the 95 % t-interval of the mean of two or more independent `values`, in their unit."""
    return float(t_quantile(len(values)) * np.std(values, ddof=1) / np.sqrt(len(values)))


def unseen(num_requests: float) -> float:
    """The share of requests that may miss, at 95 %, when none of `num_requests` did. Clopper and Pearson 1934."""
    return 1 - ((1 - CONFIDENCE) / 2) ** (1 / num_requests)


@cache
def t_quantile(count: int) -> float:
    """Half the width of the 95 % interval of a mean of `count` values, in standard errors."""
    # Inside, and not from scipy.stats: that would be half a second and 70 MB for workers who measure one point.
    from scipy.special import stdtrit

    return float(stdtrit(count - 1, (1 + CONFIDENCE) / 2))


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % t-interval, None without at least two observations; all None without any."""

    mean: float | None
    low: float | None
    high: float | None

    @classmethod
    def of(
        cls, values: Sequence[float], weights: Sequence[float] | None = None, num_requests: float | None = None
    ) -> Interval:
        """The interval of the mean of `values`; weighted, its spread is that of a ratio of means, to first order.

        Where values are shares of `num_requests` requests in all, the lower end is never above what as many without a
        miss show: values that are all alike have no spread, and prove no more than that.
        """
        if not values:
            return cls(None, None, None)
        share = np.ones(len(values)) if weights is None else np.array(weights) / np.mean(weights)
        mean = float(np.average(values, weights=share))
        if len(values) < 2:
            return cls(mean, None, None)
        half = half_width(((np.array(values) - mean) * share).tolist())
        below = half if num_requests is None else max(half, unseen(num_requests))
        return cls(mean, mean - below, mean + half)


@dataclass(frozen=True)
class Difference:
    """The mean over seeds of one value minus another's, and half the width of its 95 % t-interval.

    `mean` is None where a seed has no value of one of them, `half_width` also with one seed; `why` says it in words.
    """

    mean: float | None
    half_width: float | None
    num_seeds: int
    why: str = ""

    @property
    def is_none(self) -> bool:
        """Whether the interval contains 0: the seeds show no difference. False where there is no interval."""
        return self.mean is not None and self.half_width is not None and abs(self.mean) <= self.half_width


def paired(values: Mapping[int, float | None], others: Mapping[int, float | None]) -> Difference:
    """The mean of `values` minus `others`, both by seed, over the seeds that both have."""
    seeds = sorted(set(values) & set(others))
    if not seeds:
        return Difference(None, None, 0, "no seed in common")
    differences = [
        value - other for seed in seeds if (value := values[seed]) is not None and (other := others[seed]) is not None
    ]
    if len(differences) < len(seeds):
        return Difference(None, None, len(seeds), "not defined for one of them")
    if len(differences) == 1:
        return Difference(differences[0], None, 1, "one seed has no interval")
    return Difference(float(np.mean(differences)), half_width(differences), len(differences))
