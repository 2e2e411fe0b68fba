"""Where each request's time went: every nanosecond of its life in exactly one part, so that the parts sum to its E2E.

A life runs from `sent_ns` to `delivered_ns`, or to `ended_ns` where nothing was delivered. Parts:

    frontend                on the way to the engine, a late load source's lag included; delivery of the last piece
    waiting_step            arrived while a step ran, until that step ended
    queued:REASON           in the queue; REASON is what held its head at the time, until that head left
    prefill, recompute      steps with a chunk of its own, for the first time or again after a preemption
    decode_alone            decode steps in which nobody had a prefill chunk
    decode_beside_prefill   decode steps that also ran prefill chunks
    sat_out:REASON          running, but left out of the step. `prefill_first`: the step ran prefills only;
                            `empty_step`: it only preempted or swapped
    preempted:REASON        lost its place and KV; `blocker` is the request that took them
    swapped:REASON          lost its place, KV kept in host memory
    host_gap                running, or about to and held by nothing, while no step ran
    response_held           last token made, response kept until its batch ended
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.record import (
    BLOCKED,
    DECODE,
    FINISHED,
    MISSING,
    PREEMPTED,
    PREFILL,
    RECOMPUTE,
    SAT_OUT,
    STATE_NAMES,
    SWAPPED,
    Records,
)

PARTS = (
    "frontend",
    "waiting_step",
    "queued",
    "prefill",
    "recompute",
    "decode_alone",
    "decode_beside_prefill",
    "sat_out",
    "preempted",
    "swapped",
    "host_gap",
    "response_held",
)
"""The parts without their reasons."""

UNSTATED = "unstated"
"""The reason where a policy gave none."""

Int = NDArray[np.int64]


class Intervals(NamedTuple):
    """Maximal spans in one state, by request and time; parallel arrays. `request` is a row of `records.requests`."""

    request: Int
    state: NDArray[np.int32]
    reason: NDArray[np.int32]
    blocker: Int
    start_ns: Int
    end_ns: Int
    is_last: NDArray[np.bool_]


class Piece(NamedTuple):
    """Time of one part: parallel arrays, a row a request that may have some of it. Zeros are left in."""

    part: str
    request: Int
    ns: Int
    blocker: Int


class Coverage:
    """How much of [0, t) the spans of one kind cover, for any t; O(log spans) each, exact in ns."""

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


def state_intervals(records: Records) -> Intervals:
    """The states each request went through, each until the next one or the request's end. Queue rows are left out."""
    requests = records.requests
    states = records.states[records.states["state"] != BLOCKED]
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
    end_ns[is_last] = np.where(_given_up(requests), requests["last_token_ns"], requests["ended_ns"])[row[is_last]]
    return Intervals(row, states["state"], states["reason"], states["blocker"], states["time_ns"], end_ns, is_last)


def pieces(records: Records, per_chunk_ns: int = 0) -> Iterator[Piece]:
    """The time of every request, part by part. `per_chunk_ns` is the front end's time to deliver one piece."""
    intervals = state_intervals(records)
    yield from _ends(records, per_chunk_ns)
    yield from _queue(records, intervals)
    yield from _running(records, intervals)
    for state in (SAT_OUT, PREEMPTED, SWAPPED):
        here = intervals.state == state
        for code in np.unique(intervals.reason[here]):
            at = here & (intervals.reason == code)
            length = intervals.end_ns[at] - intervals.start_ns[at]
            yield Piece(
                _named(STATE_NAMES[state], records.texts[code]), intervals.request[at], length, intervals.blocker[at]
            )


def attribute(records: Records, per_chunk_ns: int = 0) -> pd.DataFrame:
    """Columns request_id, part, ns, blocker (null without one): what each request's time went to, without zeros.

    Rows are by request, then in the order of PARTS; the `ns` of a finished request sum to its E2E exactly.
    """
    all_pieces = sorted(
        pieces(records, per_chunk_ns), key=lambda piece: (PARTS.index(piece.part.split(":")[0]), piece.part)
    )
    names = list(dict.fromkeys(piece.part for piece in all_pieces))
    code = np.concatenate([np.full(len(piece.ns), names.index(piece.part)) for piece in all_pieces])
    request = np.concatenate([piece.request for piece in all_pieces])
    blocker = np.concatenate([piece.blocker for piece in all_pieces])
    ns = np.concatenate([piece.ns for piece in all_pieces])
    some = ns != 0
    code, request, blocker, ns = code[some], request[some], blocker[some], ns[some]
    order = np.lexsort((blocker, code, request))
    code, request, blocker, ns = code[order], request[order], blocker[order], ns[order]
    first = np.ones(len(ns), dtype=bool)
    first[1:] = (code[1:] != code[:-1]) | (request[1:] != request[:-1]) | (blocker[1:] != blocker[:-1])
    if len(ns):
        ns = np.add.reduceat(ns, np.flatnonzero(first))
    blocker = blocker[first]
    return pd.DataFrame(
        {
            "request_id": records.requests["request_id"][request[first]],
            "part": pd.Categorical.from_codes(code[first], names),
            "ns": ns,
            "blocker": pd.arrays.IntegerArray(blocker, blocker == MISSING),
        }
    )


def explain_request(attributed: pd.DataFrame, request_id: int) -> pd.DataFrame:
    """Why one request took as long as it did: its rows of `attribute`, largest first, and each one's share."""
    mine = attributed.loc[attributed["request_id"] == request_id]
    if mine.empty:
        raise KeyError(f"request {request_id} has no time on record")
    mine = mine.iloc[np.argsort(-mine["ns"].to_numpy(), kind="stable")].reset_index(drop=True)
    return mine.assign(share=mine["ns"] / mine["ns"].sum())


def _named(part: str, reason: str) -> str:
    return f"{part}:{reason or UNSTATED}"


def _piece(part: str, request: Int, ns: Int) -> Piece:
    return Piece(part, request, ns, np.full(len(ns), MISSING))


def _ends(records: Records, per_chunk_ns: int) -> Iterator[Piece]:
    """Before the arrival at the engine and after the last token."""
    requests = records.requests
    everyone = np.arange(len(requests))
    # The end of a run may come before requests that are still on their way have arrived.
    handed_ns = requests["arrival_ns"] + requests["lag_ns"]
    yield _piece("frontend", everyone, _span(requests["sent_ns"], np.minimum(handed_ns, requests["ended_ns"])))
    finished = np.flatnonzero(requests["outcome"] == FINISHED)
    done = requests[finished]
    yield _piece("response_held", finished, done["delivered_ns"] - per_chunk_ns - done["ended_ns"])
    lost = np.flatnonzero(_given_up(requests))
    yield _piece("response_held", lost, requests["ended_ns"][lost] - requests["last_token_ns"][lost])
    yield _piece("frontend", finished, np.full(len(finished), per_chunk_ns))


def _given_up(requests: NDArray[np.void]) -> NDArray[np.bool_]:
    """Those that got their last token, but whose held answer nobody waited for."""
    return (requests["outcome"] != FINISHED) & (requests["last_token_ns"] != MISSING)


def _span(start_ns: Int, end_ns: Int) -> Int:
    return np.maximum(end_ns - start_ns, 0)


def _queue(records: Records, intervals: Intervals) -> Iterator[Piece]:
    """From the arrival to the first state: the rest of the step that ran, then what held the head of the queue.

    What nothing held is the host's where the very next step took it in; else its policy gave no reason.
    """
    requests, steps = records.requests, records.steps
    everyone = np.arange(len(requests))
    arrival = requests["arrival_ns"] + requests["lag_ns"]
    until = requests["ended_ns"].copy()
    is_first = np.ones(len(intervals.request), dtype=bool)
    is_first[1:] = intervals.is_last[:-1]
    until[intervals.request[is_first]] = intervals.start_ns[is_first]
    entered, next_start = arrival.copy(), np.full(len(requests), MISSING)
    if len(steps):
        # A step that starts at the very instant of the arrival is one the request was there for.
        at = np.searchsorted(steps["start_ns"], arrival, "left") - 1
        step_end = np.where(at < 0, 0, steps["start_ns"][at] + steps["duration_ns"][at])
        entered = np.maximum(arrival, np.minimum(step_end, until))
        next_start[at + 1 < len(steps)] = steps["start_ns"][(at + 1)[at + 1 < len(steps)]]
    yield _piece("waiting_step", everyone, entered - arrival)
    blocked = records.states[records.states["state"] == BLOCKED]
    left = _span(entered, until)
    if len(blocked):
        length = _held_until(records, intervals, blocked, int(until.max())) - blocked["time_ns"]
        for code in np.unique(blocked["reason"]):
            at = blocked["reason"] == code
            ns = Coverage(blocked["time_ns"][at], length[at]).between(entered, np.maximum(entered, until))
            left = left - ns
            yield _piece(_named("queued", records.texts[code]), everyone, ns)
    soon = until <= next_start
    yield _piece("host_gap", everyone, np.where(soon, left, 0))
    yield _piece(_named("queued", ""), everyone, np.where(soon, 0, left))


def _held_until(records: Records, intervals: Intervals, blocked: NDArray[np.void], end_ns: int) -> Int:
    """When each reason ceased to hold the queue: at the next reason, or when the head it named left, if sooner."""
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
    found = np.empty(len(blocked), dtype=np.int64)
    found[order[of_reason] - len(intervals.request)] = left_ns[of_reason]
    return np.minimum(next_ns, found)


def _running(records: Records, intervals: Intervals) -> Iterator[Piece]:
    """Own prefill and recompute, decode by what ran beside it, and what no step covers."""
    steps = records.steps
    decodes, chunks = steps["num_decode"] > 0, steps["num_chunks"] > 0
    kinds = {
        "decode_alone": decodes & ~chunks,
        "decode_beside_prefill": decodes & chunks,
        "sat_out:prefill_first": ~decodes & chunks,
        "sat_out:empty_step": ~decodes & ~chunks,
    }
    covers = {part: Coverage(steps["start_ns"][kind], steps["duration_ns"][kind]) for part, kind in kinds.items()}
    any_step = Coverage(steps["start_ns"], steps["duration_ns"])
    for state, name in ((PREFILL, "prefill"), (RECOMPUTE, "recompute")):
        at = intervals.state == state
        start, end, request = intervals.start_ns[at], intervals.end_ns[at], intervals.request[at]
        ns = any_step.between(start, end)
        yield _piece(name, request, ns)
        yield _piece("host_gap", request, end - start - ns)
    at = intervals.state == DECODE
    start, end, request = intervals.start_ns[at], intervals.end_ns[at], intervals.request[at]
    left = end - start
    for part, cover in covers.items():
        ns = cover.between(start, end)
        left = left - ns
        yield _piece(part, request, ns)
    yield _piece("host_gap", request, left)
