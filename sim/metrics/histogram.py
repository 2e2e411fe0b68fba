"""Many values in few numbers: how many lie in each of intervals that are narrow for the size of their values."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

RELATIVE_WIDTH = 0.0025
"""Of each interval, of its lower end."""


class Histogram:
    """Counts values in ns, those below 1 as 1, in intervals that grow by RELATIVE_WIDTH.

    Each interval stands at the mean of its values: the mean of all is exact, and a percentile within that width.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._sums: dict[int, float] = {}

    def add(self, values: NDArray[np.float64], counts: NDArray[np.int64]) -> None:
        """Counts each of `values` as often as `counts` says."""
        places = np.floor(np.log(np.maximum(values, 1.0)) / np.log1p(RELATIVE_WIDTH)).astype(np.int64)
        if not len(places):
            return
        total = np.bincount(places, counts)
        sums = np.bincount(places, counts * values)
        for place in np.flatnonzero(total).tolist():
            self._counts[place] += int(total[place])
            self._sums[place] = self._sums.get(place, 0.0) + float(sums[place])

    def means_and_counts(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """The mean of each interval in which there is any, and how many there are."""
        places = sorted(self._counts)
        counts = np.array([self._counts[place] for place in places], np.int64)
        return np.array([self._sums[place] for place in places], np.float64) / np.maximum(counts, 1), counts
