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


def host_waits_ns(records: Records) -> Int:
    """For each step, how long no step ran before it because the host was still at work: on the call that scheduled it,
    or on results right before that. Zeros where no engine is ahead.

    Time in which the host had nothing to do either is not counted: nobody was there, or the engine slept.
    """
    found = np.zeros(len(records.steps), np.int64)
    before_ns = ends_before_ns(records)
    for mine in _engines(records):
        lanes = records.lanes[mine]
        straight = np.isin(lanes["called_ns"], lanes["processed_ns"])  # from the results of a step to the call
        since_ns = np.where(straight, before_ns[mine], np.maximum(before_ns[mine], lanes["called_ns"]))
        found[mine] = np.maximum(records.step_columns["start_ns"][mine] - since_ns, 0)
    return found


def _engines(records: Records) -> list[NDArray[np.intp]]:
    """The steps of each engine, by number; none where no engine is ahead."""
    if not len(records.lanes):
        return []
    if records.replicas is None:
        return [np.arange(len(records.steps))]
    of = records.replicas.steps
    return [np.flatnonzero(of == replica) for replica in np.unique(of)]
