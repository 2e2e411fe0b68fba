"""What the records imply of requests' lives in time: states as spans, the queue and what held it, kinds of steps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchsim.kernel.record import (
    BLOCKED,
    FINISHED,
    HELD_BACK,
    LOAD_WAITED,
    LOADED,
    LOADING,
    MISSING,
    STATE_NAMES,
    Records,
)
from batchsim.metrics.host_lane import ends_before_ns
from batchsim.metrics.rank_waits import FOR_GPU, PADDING, WAITING, gpu_waits, outside, rank_waits

Int = NDArray[np.int64]
_OF_LIVES = [state for state in STATE_NAMES if state != BLOCKED]  # the others are remarks on a life or on the queue


class Intervals(NamedTuple):
    """Maximal spans in one state, by request and time; parallel arrays. `request` is a row of `records.requests`.

    `reason` indexes `records.texts`. `blocker` is a request's id, or MISSING. `is_last`: the request's last span.
    """

    request: Int
    state: NDArray[np.int32]
    reason: NDArray[np.int32]
    blocker: Int
    start_ns: Int
    end_ns: Int
    is_last: NDArray[np.bool_]


class Holds(NamedTuple):
    """What held the queue, in time: parallel arrays of disjoint spans. `head`, the first in it, and `blocker`: ids."""

    start_ns: Int
    end_ns: Int
    reason: NDArray[np.int32]
    head: Int
    blocker: Int


class Queueing(NamedTuple):
    """A row a request: its arrival, from when and until when it stood in the queue. `soon`: the very next step took it.

    A request enters the queue when the step that ran at its arrival ends.
    """

    arrival_ns: Int
    entered_ns: Int
    until_ns: Int
    soon: NDArray[np.bool_]


class Coverage:
    """How many ns of [0, t) the given spans cover, for any t; O(log spans) a question, exact."""

    def __init__(self, start_ns: Int, length_ns: Int) -> None:
        self._start_ns = np.ascontiguousarray(start_ns)
        self._length_ns = length_ns
        self._before_ns = np.concatenate(([0], np.cumsum(length_ns)))

    def until(self, time_ns: Int) -> Int:
        if not len(self._start_ns):
            return np.zeros_like(time_ns)
        at = np.searchsorted(self._start_ns, time_ns, "right") - 1
        inside = np.clip(time_ns - self._start_ns[at], 0, self._length_ns[at])
        return np.where(at < 0, 0, self._before_ns[at] + inside)

    def between(self, start_ns: Int, end_ns: Int) -> Int:
        return self.until(end_ns) - self.until(start_ns)


def step_spans(records: Records) -> tuple[Int, Int]:
    """When some step ran, as a span for each: (start, length) in ns. Where steps overlap, in a pipeline, a step has the
    time from the end of the one before it on."""
    steps = records.step_columns
    start_ns = np.maximum(steps["start_ns"], ends_before_ns(records))
    return start_ns, np.maximum(steps["start_ns"] + steps["duration_ns"] - start_ns, 0)


def state_intervals(records: Records) -> Intervals:
    """The states each request went through, each until the next one or the request's end. Queue rows are left out.

    One that goes on beyond the request's first token, as of a request preempted with that in flight, is two.
    """
    requests = records.requests
    states = records.states[np.isin(records.states["state"], _OF_LIVES)]
    row = np.searchsorted(requests["request_id"], states["request_id"])
    known = row < len(requests)
    if not known.all() or (requests["request_id"][row] != states["request_id"]).any():
        raise ValueError("states name a request without a row of its own: close the core before reading its records")
    order = np.argsort(row, kind="stable")  # rows of one request stay in the order in which things happened
    states, row = states[order], row[order]
    is_last = np.ones(len(row), dtype=bool)
    is_last[:-1] = row[1:] != row[:-1]
    end_ns = np.empty(len(row), dtype=np.int64)
    end_ns[:-1] = states["time_ns"][1:]
    end_ns[is_last] = np.where(given_up(requests), requests["last_token_ns"], requests["ended_ns"])[row[is_last]]
    start_ns = states["time_ns"]
    first_ns = requests["first_token_ns"][row]
    across = (start_ns < first_ns) & (first_ns < end_ns)
    if across.any():
        twice = np.repeat(np.arange(len(row)), 1 + across)
        second = np.append(False, twice[1:] == twice[:-1])
        first = np.append(second[1:], False)
        start_ns = np.where(second, first_ns[twice], start_ns[twice])
        end_ns = np.where(first, first_ns[twice], end_ns[twice])
        is_last, row, states = is_last[twice] & ~first, row[twice], states[twice]
    return Intervals(row, states["state"], states["reason"], states["blocker"], start_ns, end_ns, is_last)


def given_up(requests: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which requests got their last token but never their answer: it was held back until they had ended otherwise."""
    return (requests["outcome"] != FINISHED) & (requests["last_token_ns"] != MISSING)


def queueing(records: Records, intervals: Intervals) -> Queueing:
    """When each request stood in the queue, a row for every request."""
    requests, steps = records.requests, records.step_columns
    arrival = requests["arrival_ns"] + requests["lag_ns"]
    until = requests["ended_ns"].copy()
    is_first = np.ones(len(intervals.request), dtype=bool)
    is_first[1:] = intervals.is_last[:-1]
    until[intervals.request[is_first]] = intervals.start_ns[is_first]
    entered, next_start = arrival.copy(), np.full(len(requests), MISSING)
    if records.num_steps:
        # A step that starts at the very instant of the arrival is one the request was there for.
        at = np.searchsorted(steps["start_ns"], arrival, "left") - 1
        step_end = np.where(at < 0, 0, steps["start_ns"][at] + steps["duration_ns"][at])
        entered = np.maximum(arrival, np.minimum(step_end, until))
        after = _next_own(records)[at + 1]
        followed = after < records.num_steps
        next_start[followed] = steps["start_ns"][after[followed]]
    return Queueing(arrival, entered, np.maximum(entered, until), until <= next_start)


def _next_own(records: Records) -> Int:
    """For each step, and behind the last one, the number of the first from it on that is no dummy of a rank."""
    numbers = np.arange(records.num_steps + 1)
    if rank_waits(records) is None:
        return numbers
    steps = records.step_columns
    dummy = (steps["num_decode"] == 0) & (steps["num_chunks"] == 0)
    numbers[:-1][dummy] = records.num_steps
    return np.minimum.accumulate(numbers[::-1])[::-1]


class HeldBack(NamedTuple):
    """When requests in the queue were passed over for a reason of their own, which indexes `records.texts`: parallel
    arrays, by request, a row of `records.requests`, and time."""

    request: Int
    reason: NDArray[np.int32]
    start_ns: Int
    end_ns: Int


def held_back(records: Records, queue: Queueing) -> HeldBack:
    """The spans in which requests were passed over, within their time in the `queue` before they first ran."""
    rows = records.states[records.states["state"] == HELD_BACK]
    request = np.searchsorted(records.requests["request_id"], rows["request_id"])
    order = np.argsort(request, kind="stable")
    rows, request = rows[order], request[order]
    end_ns = queue.until_ns[request]
    goes_on = np.append(request[1:] == request[:-1], False) if len(request) else np.zeros(0, bool)
    end_ns[goes_on] = np.minimum(end_ns[goes_on], rows["time_ns"][1:][goes_on[:-1]])
    start_ns = np.maximum(rows["time_ns"], queue.entered_ns[request])
    held = (rows["reason"] != 0) & (start_ns < end_ns)
    return HeldBack(request[held], rows["reason"][held], start_ns[held], end_ns[held])


def step_loads_ns(records: Records) -> Int:
    """How long each step, from its start on, waited for the weights of LoRA adapters, in ns; empty where none did."""
    rows = records.states[(records.states["state"] == LOADING) | (records.states["state"] == LOADED)]
    rows = rows[np.argsort(rows["request_id"], kind="stable")]
    loading = np.flatnonzero(rows["state"] == LOADING)
    if not len(loading):
        return np.empty(0, np.int64)
    ends_ns = np.append(rows["time_ns"], rows["time_ns"][-1])[loading + 1]
    lengths_ns = np.maximum(ends_ns - rows["time_ns"][loading], 0)
    starts_ns, spans_ns = step_spans(records)
    loads_ns = np.zeros(len(starts_ns), np.int64)
    np.add.at(loads_ns, np.searchsorted(starts_ns, rows["time_ns"][loading], "right") - 1, lengths_ns)
    return np.minimum(loads_ns, spans_ns)


def remarked_ns(records: Records, remark: int) -> Int:
    """The ns that the rows of `remark` say of each recorded step, at its start; empty without such rows."""
    rows = records.states[records.states["state"] == remark]
    if not len(rows):
        return np.empty(0, np.int64)
    ns = np.zeros(records.num_steps, np.int64)
    at = np.searchsorted(records.step_columns["start_ns"], rows["time_ns"], "right") - 1
    np.add.at(ns, at, rows["blocker"])
    return ns


KV_LOAD = "kv_load"
"""The part of a request's life in which its step waits for KV that is loaded beside it."""


class Lead(NamedTuple):
    """A time at or near the start of each step, of which it is a part: (start, length) in ns, a row a step."""

    part: str
    start_ns: Int
    length_ns: Int


def step_leads(records: Records) -> list[Lead]:
    """What steps do first and what is no work of their sequences, in this order: the GPU runs other models' steps,
    adapters are loaded, a rank waits for others and computes padding. Waits for KV lie among the layers of a step, and
    count as before them."""
    leads: list[Lead] = []
    if (of_gpu := gpu_waits(records)) is not None:
        leads.append(Lead(FOR_GPU, *of_gpu))
    if len(loads_ns := step_loads_ns(records)):
        leads.append(Lead("adapter_load", step_spans(records)[0], loads_ns))
    if (waits := rank_waits(records)) is not None:
        leads.append(Lead(WAITING, waits.start_ns, waits.wait_ns))
        leads.append(Lead(PADDING, waits.start_ns + waits.wait_ns, waits.padding_ns))
    if len(waits_ns := remarked_ns(records, LOAD_WAITED)):
        starts_ns, spans_ns = step_spans(records)
        leads.append(Lead(KV_LOAD, starts_ns, np.minimum(waits_ns, spans_ns)))
    return leads


def queue_waits(records: Records, holds: Holds) -> tuple[Coverage, Coverage] | None:
    """When a rank waited for others, in all and while nothing held its queue; None of an engine that is no rank."""
    waits = rank_waits(records)
    if waits is None:
        return None
    starts, lengths = waits.start_ns, waits.wait_ns
    return Coverage(starts, lengths), Coverage(*outside(starts, lengths, holds.start_ns, holds.end_ns))


def queue_holds(records: Records, intervals: Intervals) -> Holds:
    """What held the queue when. A reason holds until the next one, or until the head that it named left, if sooner."""
    blocked = records.states[records.states["state"] == BLOCKED]
    end_ns = int(records.requests["ended_ns"].max()) if len(blocked) else 0
    return Holds(
        blocked["time_ns"],
        _held_until(records, intervals, blocked, end_ns) if len(blocked) else blocked["time_ns"],
        blocked["reason"],
        blocked["request_id"],
        blocked["blocker"],
    )


def _held_until(records: Records, intervals: Intervals, blocked: NDArray[np.void], end_ns: int) -> Int:
    """When each reason of `blocked`, which is not empty, ceased to hold the queue; no later than `end_ns`."""
    next_ns = np.append(blocked["time_ns"][1:], max(end_ns, int(blocked["time_ns"][-1])))
    head = np.searchsorted(records.requests["request_id"], blocked["request_id"])
    rows, times = np.append(intervals.request, head), np.append(intervals.start_ns, blocked["time_ns"])
    is_reason = np.arange(len(rows)) >= len(intervals.request)
    order = np.lexsort((is_reason, times, rows))  # a state of the same instant is the one it was put back by
    rows, times = np.append(rows[order], -1), times[order]
    states = np.where(is_reason[order], len(order), np.arange(len(order)))
    state = np.minimum.accumulate(states[::-1])[::-1]  # the place of the next state at or after each place
    goes_on = rows[state] == rows[:-1]
    left_ns = np.where(goes_on, np.append(times, 0)[state], records.requests["ended_ns"][rows[:-1]])
    of_reason = is_reason[order]
    ceased_ns = np.empty(len(blocked), dtype=np.int64)
    ceased_ns[order[of_reason] - len(intervals.request)] = left_ns[of_reason]
    return np.minimum(next_ns, ceased_ns)


def step_kinds(records: Records) -> dict[str, NDArray[np.bool_]]:
    """By part of `attribution`, a mask of the steps that count for it in the life of a request able to decode."""
    decodes, chunks = records.step_columns["num_decode"] > 0, records.step_columns["num_chunks"] > 0
    return {
        "decode_alone": decodes & ~chunks,
        "decode_beside_prefill": decodes & chunks,
        "sat_out:prefill_first": ~decodes & chunks,
        "sat_out:empty_step": ~decodes & ~chunks,
    }
