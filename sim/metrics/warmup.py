"""How much of a run's beginning its steady state does not look like: MSER-5.

Source: K. P. White, An effective truncation heuristic for bias reduction in simulation output, Simulation 69 (1997);
K. P. White, M. J. Cobb and S. C. Spratt, A comparison of five steady-state truncation heuristics for simulation,
Winter Simulation Conference 2000.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BATCH = 5
MIN_BATCHES = 20  # of a series that says anything


def mser5(series: NDArray[np.float64]) -> int | None:
    """How many observations to leave out at the start, a multiple of 5; None of too short a series.

    The series is cut into means of 5. Left out are as many of them, at most half, as make the squared standard error of
    the mean of the rest smallest, taken as if they were independent: beginnings that lie apart widen it.
    """
    num_batches = len(series) // BATCH
    if num_batches < MIN_BATCHES:
        return None
    means = series[: num_batches * BATCH].reshape(num_batches, BATCH).mean(axis=1)
    means = means - means.mean()  # so that the sums of squares below lose no digits
    left = np.arange(num_batches, 0, -1)
    sums, squares = (np.cumsum(values[::-1])[::-1] for values in (means, means**2))
    errors = (squares - sums**2 / left) / left**2
    return BATCH * int(np.argmin(errors[: num_batches // 2 + 1]))
