"""When the device of an engine that is ahead of results had steps to run, and when it stood still for its host."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchsim.kernel.record import Records

Int = NDArray[np.int64]


def ends_before_ns(records: Records) -> Int:
    """For each step, when all steps before it on its engine had ended; 0 for the first. In a pipeline that may be after
    its start. Zeros where no engine is ahead: there no two steps meet."""
    found = np.zeros(len(records.steps), np.int64)
    for mine in _engines(records):
        ends = records.step_columns["start_ns"][mine] + records.step_columns["duration_ns"][mine]
        found[mine[1:]] = np.maximum.accumulate(ends)[:-1]
    return found


def _engines(records: Records) -> list[NDArray[np.intp]]:
    """The steps of each engine, by number; none where no engine is ahead."""
    if not len(records.lanes):
        return []
    if records.replicas is None:
        return [np.arange(len(records.steps))]
    of = records.replicas.steps
    return [np.flatnonzero(of == replica) for replica in np.unique(of)]
