"""The two lanes of an engine that is ahead of results: when its host was at work, and when its device stood still for
that."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchsim.kernel.record import MISSING, Records

Int = NDArray[np.int64]
Spans = NDArray[np.int64]


def ends_before_ns(records: Records) -> Int:
    """For each step, when all steps before it on its engine had ended; 0 for the first. In a pipeline that may be after
    its start. Zeros where no engine is ahead: there no two steps meet."""
    ends_ns = np.zeros(records.num_steps, np.int64)
    for rows in _engines(records):
        ends = records.step_columns["start_ns"][rows] + records.step_columns["duration_ns"][rows]
        ends_ns[rows[1:]] = np.maximum.accumulate(ends)[:-1]
    return ends_ns


def host_waits_ns(records: Records) -> Int:
    """GPU idle ns before each step that is due to host work (scheduling, or processing of the previous results). Zeros
    where no engine is ahead.

    Time in which the host was idle, too, is not counted: the engine was empty or asleep.
    """
    waits_ns = np.zeros(records.num_steps, np.int64)
    before_ns = ends_before_ns(records)
    for rows in _engines(records):
        lanes = records.lanes[rows]
        called_ns, processed_ns = lanes["called_ns"], lanes["processed_ns"].copy()
        processed_ns[processed_ns == MISSING] = np.iinfo(np.int64).max  # the last ones; results come in order
        at = np.minimum(np.searchsorted(processed_ns, called_ns), len(rows) - 1)
        straight = processed_ns[at] == called_ns  # from the results of a step to the call
        since_ns = np.where(straight, before_ns[rows], np.maximum(before_ns[rows], lanes["called_ns"]))
        waits_ns[rows] = np.maximum(records.step_columns["start_ns"][rows] - since_ns, 0)
    return waits_ns


def device_spans_ns(records: Records) -> Spans:
    """When one engine's device ran each step, a row a step of (start, end), without when one before it ran too."""
    starts_ns, ends_ns = records.steps["start_ns"], records.steps["start_ns"] + records.steps["duration_ns"]
    starts_ns = np.maximum(starts_ns, ends_before_ns(records))
    return np.stack([starts_ns, np.maximum(ends_ns, starts_ns)], axis=1)


def host_spans_ns(records: Records) -> tuple[Spans, Spans]:
    """What the host of one engine that is ahead did for each step, a row a step of (start, end): from the call of the
    scheduler to the launch; from when it took up the results until they were processed. No length where it did neither.

    Where results are processed between a call and its launch, the call ends there.
    """
    lanes, ends_ns = records.lanes, records.steps["start_ns"] + records.steps["duration_ns"]
    called, launched, processed = (lanes[name] for name in ("called_ns", "launched_ns", "processed_ns"))
    took = launched > called
    over_ns = np.append(0, launched[took])[np.searchsorted(launched[took], processed, "right")]
    called_ns = np.append(0, called)[np.searchsorted(called, processed)]
    begun = np.maximum.reduce([ends_ns, over_ns, called_ns, np.append(0, processed)[: len(ends_ns)]])
    never = processed == MISSING
    done = np.where(never, np.iinfo(np.int64).max, processed)
    begun = np.where(never, done, begun)
    until = np.append(begun, launched[-1:])[np.searchsorted(begun, called)]
    return np.stack([called, np.minimum(launched, until)], axis=1), np.stack([begun, done], axis=1)


def stage_spans_ns(records: Records, stages_ns: NDArray[np.int64]) -> list[Spans]:
    """For each stage of a pipeline when each step was in it, by `stages_ns`, a row a step and a column a stage.

    A step goes through a stage as soon as it left the one before and the step before it has left this one.
    """
    by_stage: list[Spans] = []
    ready_ns = records.steps["start_ns"].tolist()
    for lengths_ns in stages_ns.T.tolist():
        free_ns, rows = 0, []
        for at_ns, length_ns in zip(ready_ns, lengths_ns, strict=True):
            start_ns = max(at_ns, free_ns)
            free_ns = start_ns + length_ns
            rows.append((start_ns, free_ns))
        ready_ns = [end_ns for _, end_ns in rows]
        by_stage.append(np.array(rows, np.int64).reshape(-1, 2))
    return by_stage


def _engines(records: Records) -> list[NDArray[np.intp]]:
    """The steps of each engine, by number; none where no engine is ahead."""
    if not len(records.lanes):
        return []
    if records.replicas is None:
        return [np.arange(records.num_steps)]
    of = records.replicas.steps
    return [np.flatnonzero(of == replica) for replica in np.unique(of)]
