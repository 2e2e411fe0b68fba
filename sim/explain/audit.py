"""The audit log: which requests were delayed, in favour of which others, when and why. JSON lines by time.

Every event has

    time_ns, until_ns   when it began and ended, ns since the start of the run
    kind                what happened, see below
    reason              the policy's short name for why; "unstated" where it gave none
    delayed             ids of the requests that it cost time, or their place
    in_favour_of        ids of the requests that got what they did not; empty where the records name none

and the kinds are

    queue_held   the first in the queue could not come in. `delayed`: it alone; `waiting`: how many stood in the queue
                 for the first time as it began, itself included; `in_favour_of`: the ones in its way
    overtaken    arrived before others and came in after them. From its arrival at the engine until it came in, or
                 ended; `count` is how many overtook it, `in_favour_of` the first MAX_LISTED of them by their start
    preempted    lost its place and its KV, until it came back or ended; `in_favour_of`: the one that needed them, which
                 may be itself
    swapped      the same, its KV kept in host memory
    sat_out      runs, but was left out of steps: by the state rows, or (`prefill_first`, `empty_step`) because no
                 decode took part in a step; `in_favour_of` are then the prompts that it computed
    rejected, cancelled, unfinished   did not finish; `time_ns` is when that was known
    lost         was on a replica that failed, and went on at another

A decode that ran beside others' prefills was slowed, not left out: it is in the parts of `attribution`, not here.
"""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any

import numpy as np

from batchsim.base.files import Kind
from batchsim.drive.fleet.fleet_records import by_engine
from batchsim.kernel.record import (
    DECODE,
    FINISHED,
    HANDED_OVER,
    MISSING,
    OUTCOME_NAMES,
    PREEMPTED,
    PREFILL,
    PRUNED,
    RECOMPUTE,
    SAT_OUT,
    STATE_NAMES,
    SWAPPED,
    Records,
)
from batchsim.metrics.attribution import UNSTATED
from batchsim.metrics.lives import Int, Intervals, queue_holds, queueing, state_intervals, step_kinds

SCHEMA = "batchsim-audit"
VERSION = 1
KIND = Kind("audit log", rb'\{"schema": "batchsim-audit"')
MAX_LISTED = 100  # of the requests that overtook one: a log of all would grow with their square
KINDS = ("queue_held", "overtaken", "preempted", "swapped", "sat_out", "rejected", "cancelled", "unfinished", "lost")
LOST = "lost"
Event = dict[str, Any]


def audit_log(records: Records, **about: Any) -> Iterator[str]:
    """The lines of the log, without line ends. The first is a header: schema, version, and what `about` says."""
    yield json.dumps({"schema": SCHEMA, "version": VERSION, **about}, ensure_ascii=False)
    for event in audit_events(records):
        yield json.dumps(event, ensure_ascii=False)


def audit_events(records: Records) -> list[Event]:
    """All events by (time_ns, kind, delayed); of several replicas each with its `replica`, null for the router."""
    if records.replicas is None:
        return _events(records)
    events = []
    for replica, rows, engine in by_engine(records):
        gone = set(engine.requests["request_id"][rows < 0].tolist())
        for event in _events(engine):
            if event["kind"] == "unfinished" and event["delayed"][0] in gone:
                event["kind"] = LOST
            events.append(event | {"replica": None if replica == MISSING else replica})
    return sorted(events, key=_order)


def _order(event: Event) -> tuple[int, int, list[int]]:
    return event["time_ns"], KINDS.index(event["kind"]), event["delayed"]


def _events(records: Records) -> list[Event]:
    """The events of one engine, by (time_ns, kind, delayed)."""
    intervals = state_intervals(records)
    events = [*_held(records, intervals), *_overtaken(records, intervals), *_lost(records, intervals)]
    events += [*_left_out(records, intervals), *_not_finished(records)]
    return sorted(events, key=_order)


def _event(
    kind: str, start_ns: int, end_ns: int, reason: str, delayed: list[int], favoured: list[int], **more: int
) -> Event:
    return {
        "time_ns": int(start_ns),
        "until_ns": int(end_ns),
        "kind": kind,
        "reason": reason or UNSTATED,
        "delayed": delayed,
        "in_favour_of": favoured,
        **more,
    }


def _named(id_: int) -> list[int]:
    return [] if id_ == MISSING else [int(id_)]


def _held(records: Records, intervals: Intervals) -> Iterator[Event]:
    queue, holds = queueing(records, intervals), queue_holds(records, intervals)
    arrived, gone = np.sort(queue.arrival_ns), np.sort(queue.until_ns)
    waiting: Int = np.searchsorted(arrived, holds.start_ns, "right") - np.searchsorted(gone, holds.start_ns, "right")
    for k in np.flatnonzero(holds.end_ns > holds.start_ns):
        reason, head = records.texts[holds.reason[k]], int(holds.head[k])
        favoured, span = _named(holds.blocker[k]), (holds.start_ns[k], holds.end_ns[k])
        yield _event("queue_held", *span, reason, [head], favoured, waiting=int(waiting[k]))


def _overtaken(records: Records, intervals: Intervals) -> Iterator[Event]:
    """An event for each request that later arrivals overtook, found from the last arrival back."""
    queue, ids = queueing(records, intervals), records.requests["request_id"]
    came_in = np.isin(np.arange(len(ids)), intervals.request)  # here: `scheduled_ns` may be of an engine before
    started: list[tuple[int, int]] = []  # (start, id) of the later arrivals
    for i in sorted(range(len(ids)), key=lambda i: (queue.arrival_ns[i], ids[i]), reverse=True):
        until_ns = int(queue.until_ns[i])
        count = bisect_left(started, (until_ns, -1))
        if count:
            favoured = [id_ for _, id_ in started[:MAX_LISTED]][:count]
            yield _event("overtaken", queue.arrival_ns[i], until_ns, "", [int(ids[i])], favoured, count=count)
        if came_in[i]:
            insort(started, (until_ns, int(ids[i])))


def _lost(records: Records, intervals: Intervals) -> Iterator[Event]:
    """Events of spans in which a request was preempted, swapped out, or left out of steps by name."""
    ids = records.requests["request_id"]
    for k in np.flatnonzero(np.isin(intervals.state, (PREEMPTED, SWAPPED, SAT_OUT))):
        yield _event(
            STATE_NAMES[int(intervals.state[k])],
            intervals.start_ns[k],
            intervals.end_ns[k],
            records.texts[intervals.reason[k]],
            [int(ids[intervals.request[k]])],
            _named(intervals.blocker[k]),
        )


def _left_out(records: Records, intervals: Intervals) -> Iterator[Event]:
    """Events of steps without any decode while some request could: one for consecutive steps with the same requests."""
    steps, kinds = records.steps, step_kinds(records)
    decodes, prompts = _Inside(records, intervals, (DECODE,)), _Inside(records, intervals, (PREFILL, RECOMPUTE))
    last: Event | None = None
    at = -1
    for k in np.flatnonzero(steps["num_decode"] == 0):
        start_ns = int(steps["start_ns"][k])
        end_ns, delayed = start_ns + int(steps["duration_ns"][k]), decodes.at(start_ns)
        if not delayed:
            continue
        reason = "prefill_first" if kinds["sat_out:prefill_first"][k] else "empty_step"
        event = _event("sat_out", start_ns, end_ns, reason, delayed, prompts.at(start_ns))
        if last is not None and k == at + 1 and all(last[n] == event[n] for n in ("reason", "delayed", "in_favour_of")):
            last["until_ns"] = end_ns
        else:
            if last is not None:
                yield last
            last = event
        at = k
    if last is not None:
        yield last


class _Inside:
    """The requests in one of `states` at a time; the times asked for must not fall."""

    def __init__(self, records: Records, intervals: Intervals, states: tuple[int, ...]) -> None:
        places = np.flatnonzero(np.isin(intervals.state, states))
        places = places[np.argsort(intervals.start_ns[places], kind="stable")]
        ids = records.requests["request_id"][intervals.request[places]]
        starts, ends = intervals.start_ns[places].tolist(), intervals.end_ns[places].tolist()
        self._coming = list(zip(starts, ends, ids.tolist(), strict=True))[::-1]
        self._inside: list[tuple[int, int]] = []

    def at(self, time_ns: int) -> list[int]:
        """The ids of the requests that are in one of the states at `time_ns`, in rising order."""
        while self._coming and self._coming[-1][0] <= time_ns:
            _, end_ns, id_ = self._coming.pop()
            self._inside.append((end_ns, id_))
        self._inside = [item for item in self._inside if item[0] > time_ns]
        return sorted(id_ for _, id_ in self._inside)


def _not_finished(records: Records) -> Iterator[Event]:
    for row in records.requests[~np.isin(records.requests["outcome"], (FINISHED, HANDED_OVER, PRUNED))]:
        outcome, ended_ns = OUTCOME_NAMES[int(row["outcome"])], row["ended_ns"]
        yield _event(outcome, ended_ns, ended_ns, records.texts[row["reason"]], [int(row["request_id"])], [])
