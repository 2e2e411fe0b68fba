"""Rows whose times lie a year or more from all others: a 0, a clock that was not set, a time in another unit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchsim.base.units import YEAR_NS, format_duration
from batchsim.workload.traces.trace_rows import Ints


@dataclass(frozen=True)
class Outliers:
    """`count` rows outside the largest stretch without a gap of a year. `keep` is that stretch, of rows in time order.

    `first` is the place in time order of the outside row that stands first in the file; `away_ns` is how long before
    (below 0) or after the stretch that row lies.
    """

    keep: slice
    count: int
    first: int
    away_ns: int

    def __str__(self) -> str:
        """What is odd about the row `first`; to be read after its place in the file."""
        side = "before" if self.away_ns < 0 else "after"
        others = f"; {self.count - 1:,} more lie a year or more from most" if self.count > 1 else ""
        return f"its time lies {format_duration(abs(self.away_ns))} {side} those of most rows{others}"


def time_outliers(arrival_ns: Ints, numbers: Ints) -> Outliers | None:
    """The rows of a sorted trace that lie apart, None where there are none; `numbers` are their places in the file.

    Times may be as far from each other as 64 bits allow.
    """
    gaps = np.diff(arrival_ns.astype(np.uint64))  # differences beyond 292 years overflow signed ones
    cuts = np.flatnonzero(gaps >= YEAR_NS) + 1
    if not len(cuts):
        return None
    starts, ends = np.concatenate(([0], cuts)), np.concatenate((cuts, [len(arrival_ns)]))
    largest = int(np.argmax(ends - starts))
    keep = slice(int(starts[largest]), int(ends[largest]))
    outside = np.concatenate((np.arange(keep.start), np.arange(keep.stop, len(arrival_ns))))
    first = int(outside[np.argmin(numbers[outside])])
    nearest = keep.start if first < keep.start else keep.stop - 1
    return Outliers(keep, len(outside), first, int(arrival_ns[first]) - int(arrival_ns[nearest]))
