"""What steps of a real engine took, and the parts of their hull that tables of errors name.

The time of a step that a prediction must equal is its period: from its start to the next step's start, so that it holds
the scheduler, the records and all else that lies between two steps. Where the engine rested before the next step
(nothing to run, or a wait that the policy chose) it is the step's own duration.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from batchsim.cost.work import Columns

REGIONS = ("decode 1-8", "decode 9-64", "decode 65+", "prefill", "mixed")
"""Steps that only decode, by their rows, padding included; steps of chunks alone; steps of both."""


def regions(steps: Columns | NDArray[np.void]) -> NDArray[np.int64]:
    """The region of every step, as an index of REGIONS; `steps` as records or as columns."""
    rows = steps["num_decode_tokens"] + steps["pad_decode_rows"]
    decode = np.select([rows <= 8, rows <= 64], [0, 1], 2)
    with_chunks = np.where(rows > 0, 4, 3)
    return np.where(steps["num_chunks"] > 0, with_chunks, decode).astype(np.int64)


def periods_ns(steps: NDArray[np.void], rested: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
    """What each step took until the engine could start the next one. `rested`: steps that began after a rest."""
    periods = steps["duration_ns"].astype(np.float64)
    follows = np.ones(len(steps), bool)  # whether the next step began without a rest
    follows[-1:] = False
    before = np.asarray(rested, np.int64) - 1
    follows[before[before >= 0]] = False
    apart = np.diff(steps["start_ns"], append=0)
    return np.where(follows, apart, periods)
