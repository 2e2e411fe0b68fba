"""How tasks of several requests went: a task is done when its last request is, and never where one of them failed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchsim.kernel.record import FINISHED
from batchsim.metrics.point_inputs import PointInputs


class TaskLives(NamedTuple):
    """The tasks of which a request is on record, by number: parallel arrays.

    `first` is the row of `records.requests` that was sent first, of equals the lowest id. `e2e_ns` is inf of a task
    that is not done: one of its requests was not sent, or did not finish.
    """

    first: NDArray[np.int64]
    e2e_ns: NDArray[np.float64]


def task_lives(inputs: PointInputs) -> TaskLives:
    """The tasks of a run whose requests are parts of tasks."""
    assert inputs.task_of is not None, "asked of a run with tasks"
    requests = inputs.records.requests
    task = inputs.task_of[requests["request_id"]]
    size = np.bincount(inputs.task_of)
    order = np.lexsort((requests["request_id"], requests["sent_ns"], task))
    numbers, begin = np.unique(task[order], return_index=True)
    first = order[begin]
    finished = np.bincount(task[requests["outcome"] == FINISHED], minlength=len(size))
    last_ns = np.zeros(len(size), np.int64)
    np.maximum.at(last_ns, task, requests["delivered_ns"])
    e2e_ns = (last_ns[numbers] - requests["sent_ns"][first]).astype(np.float64)
    return TaskLives(first, np.where(finished[numbers] == size[numbers], e2e_ns, np.inf))
