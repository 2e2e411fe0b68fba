"""Arrivals of one's own: Poisson batches of `size` requests at once, as a nightly job sends them.

    workload: {arrivals: {kind: "own_arrivals:BatchArrivals", mean_rate: 8/s, size: 4}, ...}

with this folder on PYTHONPATH and --allow-code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from batchsim.base.ranges import PositiveInt
from batchsim.workload.processes import OwnArrivals


@dataclass(frozen=True)
class BatchArrivals(OwnArrivals):
    size: PositiveInt

    def times_s(self, random: np.random.Generator) -> Iterator[float]:
        now_s = 0.0
        while True:
            now_s += random.exponential(self.size / self.mean_rate)
            yield from [now_s] * self.size
