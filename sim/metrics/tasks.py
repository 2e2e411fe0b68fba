"""How tasks of several requests went: a task is done when its last request is, and never where one of them failed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchsim.kernel.record import FINISHED, PRUNED, Records
from batchsim.metrics.point_inputs import PointInputs


class TaskLives(NamedTuple):
    """The tasks of which a request is on record, by number: parallel arrays.

    `first` is the row of `records.requests` that was sent first, of equals the lowest id. `e2e_ns` is inf of a task
    that is not done: one of its requests was not sent, or did not finish, unless others made it needless.
    """

    first: NDArray[np.int64]
    e2e_ns: NDArray[np.float64]


def task_lives(inputs: PointInputs) -> TaskLives:
    """The tasks of a run whose requests are parts of tasks."""
    assert inputs.task_of is not None, "asked of a run with tasks"
    prunable = np.zeros(len(inputs.task_of), bool) if inputs.prunable is None else inputs.prunable
    return lives_of(inputs.records, inputs.task_of, prunable)


def lives_of(records: Records, task_of: NDArray[np.int64], prunable: NDArray[np.bool_]) -> TaskLives:
    """The tasks of recorded requests. By request id: the number of its task, -1 of one that is of none, and whether it
    may be pruned."""
    rows = np.flatnonzero(task_of[records.requests["request_id"]] >= 0)
    requests = records.requests[rows]
    task = task_of[requests["request_id"]]
    size = np.bincount(task_of[task_of >= 0])
    needed = np.bincount(task_of[~prunable & (task_of >= 0)], minlength=len(size))
    order = np.lexsort((requests["request_id"], requests["sent_ns"], task))
    numbers, begin = np.unique(task[order], return_index=True)
    first = order[begin]
    is_finished = requests["outcome"] == FINISHED
    finished = np.bincount(task[is_finished & ~prunable[requests["request_id"]]], minlength=len(size))
    failed = np.bincount(task[~is_finished & (requests["outcome"] != PRUNED)], minlength=len(size))
    last_ns = np.zeros(len(size), np.int64)
    np.maximum.at(last_ns, task, requests["delivered_ns"])
    e2e_ns = (last_ns[numbers] - requests["sent_ns"][first]).astype(np.float64)
    done = (finished[numbers] == needed[numbers]) & (failed[numbers] == 0)
    return TaskLives(rows[first], np.where(done, e2e_ns, np.inf))
