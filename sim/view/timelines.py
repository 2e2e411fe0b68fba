"""The steps of an engine as columns for charts, and between them the times at which it held no running request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchsim.base.units import NS_PER_S
from batchsim.kernel.record import MISSING, Records
from batchsim.metrics.lives import Int
from batchsim.view.downsampling import downsampled_rows

Columns = dict[str, NDArray[Any]]


def timeline_rows(parts: Sequence[Records], blocks: int, end_ns: int) -> Columns:
    """Rows from `start_ns` to `end_ns` in the order of time: an engine's steps, and its `idle` times, in which all
    columns but `waiting` are 0.

    `parts` are the engine's records of each time it was started, `blocks` its KV blocks, `end_ns` the end of the run.
    Between two steps of a running batch, where the host works, there is no row.
    """
    each: list[Columns] = []
    for k, part in enumerate(parts):
        later_ns = int(parts[k + 1].steps["start_ns"][0]) if k + 1 < len(parts) else end_ns
        each += [_steps(part.steps, blocks), _idle(part, 0 if k == 0 else None, later_ns)]
    rows = {name: np.concatenate([columns[name] for columns in each]) for name in each[0]}
    order = np.argsort(rows["start_ns"], kind="stable")
    return {name: values[order] for name, values in rows.items()}


def timeline_series(rows: Columns, window_ns: tuple[int, int], most: int) -> dict[str, Any]:
    """The rows that overlap a window, as lists in seconds, at most `most` of them.

    `of`: steps among them; `shown`: how many of them are listed; `exact`: whether that is all, else the rows with the
    extremes of each column (`downsampled_rows`) are. `until_s`: when the last row ends. `step_s` is 0 in idle time.
    """
    (low_ns, high_ns), start_ns, end_ns = window_ns, rows["start_ns"], rows["end_ns"]
    instants = (start_ns == end_ns) & (start_ns >= low_ns) & (start_ns <= high_ns)
    seen = np.flatnonzero(((start_ns < high_ns) & (end_ns > low_ns)) | instants)
    rows = {name: values[seen] for name, values in rows.items()}
    columns = {name: rows[name] for name in ("waiting", "running", "kv_share", "step_s", "tokens", "prefill_tokens")}
    kept = downsampled_rows(list(columns.values()), most)
    ran = ~rows["idle"]
    return {
        "exact": len(kept) == len(seen),
        "of": int(ran.sum()),
        "shown": int(ran[kept].sum()),
        "start_s": (rows["start_ns"][kept] / NS_PER_S).tolist(),
        "until_s": float(rows["end_ns"][-1] / NS_PER_S) if len(seen) else None,
        **{name: values[kept].tolist() for name, values in columns.items()},
    }


def _steps(steps: NDArray[Any], blocks: int) -> Columns:
    return {
        "start_ns": steps["start_ns"],
        "end_ns": steps["start_ns"] + steps["duration_ns"],
        "idle": np.zeros(len(steps), bool),
        "waiting": steps["num_waiting"],
        "running": steps["num_running"],
        "kv_share": 1 - steps["free_blocks"] / max(blocks, 1),
        "step_s": steps["duration_ns"] / NS_PER_S,
        "tokens": steps["num_prefill_tokens"] + steps["num_decode_tokens"],
        "prefill_tokens": steps["num_prefill_tokens"],
    }


def _idle(part: Records, begin_ns: int | None, end_ns: int) -> Columns:
    """The times between steps in which no request was running, from `begin_ns` (None: the first step) to `end_ns`; one
    in which requests come to wait is a row for each length of the queue."""
    requests, steps = part.requests, part.steps
    ended_ns, scheduled_ns = requests["ended_ns"], requests["scheduled_ns"]
    ran = scheduled_ns != MISSING
    came_ns, gone_ns = np.sort(scheduled_ns[ran]), np.sort(ended_ns[ran])
    until_ns = np.append(steps["start_ns"], end_ns)  # each gap ends with the next step
    step_ends_ns = np.maximum.accumulate(steps["start_ns"] + steps["duration_ns"])
    from_ns = np.append(until_ns[0] if begin_ns is None else begin_ns, step_ends_ns)
    last = _up_to(gone_ns, until_ns - 1)
    empty = _up_to(came_ns, until_ns - 1) == last
    if len(gone_ns):  # a request ends when its last step has been handled, which may be later than the step
        from_ns = np.maximum(from_ns, np.where(last > 0, gone_ns[np.maximum(last - 1, 0)], 0))
    gaps = np.flatnonzero(empty & (from_ns < until_ns))
    from_ns, until_ns = from_ns[gaps], until_ns[gaps]
    arrived_ns, left_ns = np.sort(requests["arrival_ns"]), np.sort(np.where(ran, scheduled_ns, ended_ns))
    within = np.searchsorted(from_ns, arrived_ns, "right") - 1
    waits = (within >= 0) & (arrived_ns < until_ns[np.maximum(within, 0)]) if len(gaps) else np.zeros(0, bool)
    start_ns = np.unique(np.concatenate([from_ns, arrived_ns[waits] if len(gaps) else from_ns]))
    of_gap = np.searchsorted(from_ns, start_ns, "right") - 1
    ends_ns = np.minimum(np.append(start_ns[1:], end_ns), until_ns[of_gap]) if len(gaps) else start_ns
    nothing = np.zeros(len(start_ns))
    waiting = _up_to(arrived_ns, start_ns) - _up_to(left_ns, start_ns)
    columns = ("running", "kv_share", "step_s", "tokens", "prefill_tokens")
    idle = {"start_ns": start_ns, "end_ns": ends_ns, "idle": np.ones(len(start_ns), bool), "waiting": waiting}
    return idle | dict.fromkeys(columns, nothing)


def _up_to(times_ns: Int, at_ns: Int) -> Int:
    """How many of the sorted `times_ns` are no later than each of `at_ns`."""
    return np.searchsorted(times_ns, at_ns, "right")
