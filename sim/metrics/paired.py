"""Differences between two policies that served the same requests: seed by seed, so that the luck of the draw cancels.

The interval of a difference is most often far narrower than those of the two values suggest, because a seed that is
hard for one policy is hard for the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sim.metrics.measure import half_width


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
    """`values` minus `others`, both by seed, over the seeds that both have."""
    seeds = sorted(set(values) & set(others))
    if not seeds:
        return Difference(None, None, 0, "no seed in common")
    found = [
        value - other for seed in seeds if (value := values[seed]) is not None and (other := others[seed]) is not None
    ]
    if len(found) < len(seeds):
        return Difference(None, None, len(seeds), "not defined for one of them")
    if len(found) == 1:
        return Difference(found[0], None, 1, "one seed has no interval")
    return Difference(float(np.mean(found)), half_width(found), len(found))
