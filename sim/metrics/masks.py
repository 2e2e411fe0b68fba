"""How long sampling waited for the masks of answers that grammars constrain, and whose time that is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from batchsim.kernel.record import MASKED, Records
from batchsim.metrics.encoding import Yielded, taken_of_steps
from batchsim.metrics.lives import Int, Intervals, remarked_ns, step_spans

MASK_WAIT = "mask_wait"
"""The part of a request's life in steps whose forward was over, while the host still filled masks."""


def step_mask_ns(records: Records) -> Int:
    """How long sampling of each recorded step waits for masks, behind its forward, in ns; empty where none does."""
    return remarked_ns(records, MASKED)


def mask_times(
    records: Records, intervals: Intervals, is_after_first: Callable[[Records, Int, Int], NDArray[np.bool_]]
) -> Iterator[Yielded]:
    """What the waits for masks take off other parts of requests' lives, and add to MASK_WAIT."""
    wait_ns = step_mask_ns(records)
    if not len(wait_ns):
        return
    starts, lengths = step_spans(records)
    wait_ns = np.minimum(wait_ns, lengths)
    yield from taken_of_steps(records, intervals, is_after_first, starts + lengths - wait_ns, wait_ns, MASK_WAIT)
