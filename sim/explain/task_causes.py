"""Why tasks of several requests missed their objective: one cause for each miss.

The rule. A task's time is that of its critical path: from its last answer back to when that request was sent, from
there to the answer that came last before, and so on to its first request. A life's parts are as in `attribution`; what
lies between an answer and the request that follows on it is `between_requests`: tools, or the user. The cause is the
largest part; but the path's own work, and what lies between requests, is blamed only where all of it together is too
long, since else the task would have kept its bound had its requests only worked. A task that is not done is named after
its first request that did not finish, by the rule of `causes`; where none failed, the run ended before the task did.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchsim.base.reading import adapter
from batchsim.explain.causes import OWN_WORK, Objectives, misses_frame, part_sides, unfinished_cause
from batchsim.kernel.record import FINISHED, PRUNED, Records
from batchsim.metrics.latencies import TASK_E2E
from batchsim.metrics.lives import Int
from batchsim.metrics.slo import Bound
from batchsim.metrics.tasks import TaskLives, lives_of
from batchsim.workload.task_config import Tasks

BETWEEN = "between_requests"
Missed = tuple[str, str, int, int | None, int | None]
"""metric, cause, cause_ns, value_ns and limit_ns of a row of `slo_misses`."""


@dataclass(frozen=True)
class TaskObjectives:
    """The objectives of a scenario's tasks, whose requests are numbered task by task, `tasks.num_requests` each."""

    stated: Objectives
    tasks: Tasks

    @classmethod
    def of(cls, scenario: Mapping[str, Any]) -> TaskObjectives | None:
        """The objectives that a scenario's plain values state; None where none bounds tasks, and for tasks of a log,
        whose requests its results do not name."""
        objectives, tasks = Objectives.stated(scenario), scenario["workload"].get("tasks")
        of_tasks = any(slo.of_tasks for slo in (objectives.slo, *objectives.class_slos.values()))
        return cls(objectives, adapter(Tasks).validate_json(json.dumps(tasks))) if of_tasks and tasks else None

    def lives(self, records: Records) -> TaskLives:
        """The judged tasks of a run, which began after the warm-up."""
        size = self.tasks.num_requests
        count = -(-(int(records.requests["request_id"].max(initial=-1)) + 1) // size)
        prunable = [stage.success is not None for stage in self.tasks.stages for _ in range(stage.num_requests)]
        lives = lives_of(records, np.arange(count * size) // size, np.tile(np.array(prunable, bool), count))
        judged = records.requests["sent_ns"][lives.first] >= self.stated.warmup_ns
        return TaskLives(lives.first[judged], lives.e2e_ns[judged])

    def bound(self, request_class: str) -> Bound | None:
        """The tightest bound on the E2E of a task of this class; None where nothing bounds it."""
        bounds = self.stated.class_slos.get(request_class, self.stated.slo).bounds
        of_tasks = [bound for bound in bounds if bound.metric == TASK_E2E]
        return min(of_tasks, key=lambda bound: bound.limit_ns, default=None)


def task_misses(records: Records, objectives: TaskObjectives) -> tuple[pd.DataFrame, dict[str, int]]:
    """A row a miss with the columns of `slo_misses`, by the id of the task's first request; and how many tasks were
    judged, by class."""
    requests, lives, size = records.requests, objectives.lives(records), objectives.tasks.num_requests
    names, before, after = part_sides(records, objectives.stated.per_chunk_ns)
    parts = before + after
    order = np.argsort(requests["request_id"])
    ids = requests["request_id"][order]
    rows: list[tuple[Any, ...]] = []
    judged: dict[str, int] = {}
    for first, e2e_ns in zip(lives.first.tolist(), lives.e2e_ns.tolist(), strict=True):
        request_class = records.texts[requests["request_class"][first]]
        bound = objectives.bound(request_class)
        if bound is None:
            continue
        judged[request_class] = judged.get(request_class, 0) + 1
        if not bound.passes(np.array([e2e_ns]))[0]:
            begin = int(requests["request_id"][first]) // size * size
            of_task = order[slice(*np.searchsorted(ids, (begin, begin + size)))]
            missed = _late(requests, names, parts, of_task, bound) if np.isfinite(e2e_ns) else None
            missed = missed or _undone(records, names, parts, of_task)
            rows.append((int(requests["request_id"][first]), request_class, *missed))
    return misses_frame(rows), judged


def path_ns(requests: NDArray[np.void], parts: Int, task: Int) -> Int:
    """The ns of the critical path of a task that is done, by part, and last those between requests; they sum to its
    E2E. `task` has its rows in `requests`; `parts` the ns of every request's parts."""
    ended = task[requests["outcome"][task] == FINISHED]
    at = ended[requests["delivered_ns"][ended].argmax()]
    begin, between, total = int(requests["sent_ns"][task].min()), 0, parts[at].copy()
    while (sent := int(requests["sent_ns"][at])) > begin:
        earlier = ended[requests["delivered_ns"][ended] <= sent]
        if not len(earlier):
            between += sent - begin
            break
        at = earlier[requests["delivered_ns"][earlier].argmax()]
        between += sent - int(requests["delivered_ns"][at])
        total += parts[at]
    return np.append(total, between)


def _late(requests: NDArray[np.void], names: Sequence[str], parts: Int, task: Int, bound: Bound) -> Missed:
    """The miss of a task that is done."""
    time_ns = path_ns(requests, parts, task)
    own = np.array([name in OWN_WORK for name in names] + [True])
    work_keeps_it = bound.passes(np.array([time_ns[own].sum()], dtype=np.float64))[0]
    i = int(np.where(own & work_keeps_it, -1, time_ns).argmax())
    return TASK_E2E, [*names, BETWEEN][i], int(time_ns[i]), int(time_ns.sum()), bound.limit_ns


def _undone(records: Records, names: Sequence[str], parts: Int, task: Int) -> Missed:
    """The miss of a task that is not done, by the first of its requests that failed."""
    requests = records.requests
    failed = task[~np.isin(requests["outcome"][task], (FINISHED, PRUNED))]
    if not len(failed):
        return "unfinished", BETWEEN, 0, None, None
    at = int(failed[requests["ended_ns"][failed].argmin()])
    return *unfinished_cause(records, at, names, parts[at]), None, None
