"""The records of several engines as one, and as each engine left them.

As one they are Records with `replicas`: requests by id, steps by start, states in the order of time; where that is
equal, by replica. A request that lived on several engines, since one failed or handed it over, has one row, that of
the last; its stays on the others are kept apart, since the states and steps of those engines speak of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchsim.kernel.lane_rows import LANE_DTYPE
from batchsim.kernel.record import (
    HANDED_OVER,
    MISSING,
    REPLICA_FAILED,
    STATE_DTYPE,
    STAY_DTYPE,
    STEP_DTYPE,
    UNFINISHED,
    Recorder,
    Records,
    Replicas,
)

_TEXTS = {"requests": ("request_class", "tenant", "reason"), "states": ("reason",), "steps": ()}
_ORDER = {"requests": "request_id", "steps": "start_ns", "states": "time_ns"}
_NAMES = {"start_ns": "arrival_ns", "end_ns": "ended_ns", "why": "reason"}
_OF_REQUEST = {name: _NAMES.get(name, name) for name in STAY_DTYPE.names or () if name != "replica"}
"""The column of requests that each column of stays comes from."""


@dataclass(frozen=True)
class EngineLife:
    """What one engine recorded from its start to its end."""

    replica: int
    records: Records


def without_steps(life: EngineLife) -> EngineLife:
    """The life with the rows of its requests alone."""
    none = (np.empty(0, dtype) for dtype in (STEP_DTYPE, STATE_DTYPE, LANE_DTYPE))
    steps, states, lanes = none
    return EngineLife(life.replica, replace(life.records, step_rows=steps, states=states, lanes=lanes))


def work_of_steps(recorder: Recorder, first: int, until_ns: int) -> tuple[int, int, int]:
    """How many steps, of those from number `first` on, have ended by `until_ns`; their output tokens; their ns."""
    rows = recorder.steps_from(first)
    ended = rows[rows["start_ns"] + rows["duration_ns"] <= until_ns]
    tokens = sum(int(ended[name].sum()) for name in ("num_decode", "num_accepted_tokens", "num_sampled_chunks"))
    return len(ended), tokens, int(ended["duration_ns"].sum())


def merged(lives: list[EngineLife]) -> Records:
    """The records of all engines as one; `lives` are in order of their replicas, MISSING being the router."""
    codes: dict[str, int] = {"": 0}
    details: dict[str, str] = {}
    for life in lives:
        for text in life.records.texts:
            codes.setdefault(text, len(codes))
        for reason, detail in life.records.details.items():
            details.setdefault(reason, detail)
    tables: dict[str, NDArray[np.void]] = {}
    owners: dict[str, NDArray[np.int32]] = {}
    numbers = np.array([life.replica for life in lives], np.int32)
    for name in _ORDER:
        each = [_recoded(getattr(life.records, name), life.records.texts, codes, name) for life in lives]
        tables[name] = np.concatenate(each)
        owners[name] = np.repeat(numbers, [len(rows) for rows in each])
    last = _is_last(tables["requests"])
    stays = np.empty(len(last) - int(last.sum()), STAY_DTYPE)
    stays["replica"] = owners["requests"][~last]
    for name, column in _OF_REQUEST.items():
        stays[name] = tables["requests"][column][~last]
    tables["requests"], owners["requests"] = tables["requests"][last], owners["requests"][last]
    tables["lanes"] = _lanes(lives)
    for name, key in _ORDER.items():
        order = np.argsort(tables[name][key], kind="stable")
        if name == "steps" and len(tables["lanes"]):
            tables["lanes"] = tables["lanes"][order]
        tables[name], owners[name] = tables[name][order], owners[name][order]
    return Records(
        tables["requests"],
        tables["steps"],
        tables["states"],
        tuple(codes),
        details,
        Replicas(**owners, stays=stays),
        tables["lanes"],
    )


def _lanes(lives: list[EngineLife]) -> NDArray[np.void]:
    """A row for each step of all engines, in their order, if any is ahead: a step of one that is not was called and
    launched at its start and processed at its end."""
    if not any(len(life.records.lanes) for life in lives):
        return np.empty(0, LANE_DTYPE)
    each: list[NDArray[np.void]] = []
    for steps, lanes in ((life.records.steps, life.records.lanes) for life in lives):
        if len(lanes) < len(steps):
            lanes = np.zeros(len(steps), LANE_DTYPE)
            lanes["called_ns"] = lanes["launched_ns"] = steps["start_ns"]
            lanes["processed_ns"] = steps["start_ns"] + steps["duration_ns"]
        each.append(lanes)
    return np.concatenate(each)


def _is_last(rows: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which of the requests' rows at all engines is the last one of its request."""
    order = np.lexsort((rows["ended_ns"], rows["arrival_ns"], rows["request_id"]))
    ids = rows["request_id"][order]
    last = np.ones(len(rows), bool)
    last[order[:-1]] = ids[1:] != ids[:-1]
    return last


def _recoded(rows: NDArray[np.void], texts: tuple[str, ...], codes: dict[str, int], table: str) -> NDArray[np.void]:
    """`rows` of `table` with the codes of their own `texts` replaced by the codes in `codes`."""
    if not _TEXTS[table] or tuple(codes)[: len(texts)] == texts:
        return rows
    new, coded = np.array([codes[text] for text in texts], np.int32), rows.copy()
    for column in _TEXTS[table]:
        coded[column] = new[rows[column].astype(np.int32)]
    return coded


class OfEngine(NamedTuple):
    """The records of one engine, and for each of its requests the row in the records of all: -1 where the request was
    lost with a replica and began anew.

    A request that came from an engine that handed it over has `sent_ns` when it left that one.
    """

    replica: int
    rows: NDArray[np.int64]
    records: Records


def by_engine(records: Records) -> Iterator[OfEngine]:
    """The records of each engine from its start to its end or failure; under replica MISSING the requests that only the
    router saw. Without a router: `records` as one engine's.

    ValueError where a request came back to an engine that had handed it over: its states there cannot be separated.
    """
    replicas = records.replicas
    if replicas is None:
        yield OfEngine(0, np.arange(len(records.requests)), records)
        return
    requests, places = _at_every_engine(records)
    of_requests = np.concatenate((replicas.requests, replicas.stays["replica"]))
    failed = records.stays(REPLICA_FAILED)
    for replica in np.unique(np.concatenate((of_requests, replicas.steps, replicas.states))):
        # A failure that lost nothing divides nothing that could be mistaken.
        cuts = np.unique(failed["end_ns"][failed["replica"] == replica])
        served = np.flatnonzero(of_requests == replica)
        ran = replicas.steps == replica
        steps, lanes, states = records.steps[ran], records.lanes_of(ran), records.states[replicas.states == replica]
        for k in range(len(cuts) + 1):
            rows = served[np.searchsorted(cuts, requests["ended_ns"][served]) == k]
            rows = rows[np.argsort(requests["request_id"][rows], kind="stable")]
            ids = requests["request_id"][rows]
            if (twice := ids[1:][ids[1:] == ids[:-1]]).size:
                raise ValueError(f"request {twice[0]} lived twice on replica {replica}, which did not fail in between")
            of_life = np.searchsorted(cuts, steps["start_ns"]) == k
            engine = replace(
                records,
                requests=requests[rows],
                step_rows=steps[of_life],
                lanes=lanes[of_life] if len(lanes) else lanes,
                states=states[np.searchsorted(cuts, states["time_ns"]) == k],
                replicas=None,
            )
            yield OfEngine(int(replica), places[rows], engine)


def stay_rows(records: Records) -> NDArray[np.void]:
    """The stays of the records of several engines as rows of requests, each as its engine left it."""
    requests, stays = records.requests, _stays(records)
    of, goes_on = _parts(records)
    rows = requests[of]
    for name, column in _OF_REQUEST.items():
        rows[column] = stays[name]
    rows["outcome"] = np.where(_failed(records), UNFINISHED, HANDED_OVER)
    rows["first_delivery_ns"] = rows["delivered_ns"] = MISSING
    began_ns = requests["arrival_ns"].copy()  # where the life that was the last began
    np.minimum.at(began_ns, of[goes_on], stays["start_ns"][goes_on])
    at_router_ns = (began_ns - requests["router_ns"] - requests["failover_ns"])[of]
    lost = np.flatnonzero(~goes_on)
    lost = lost[np.lexsort((stays["start_ns"][lost], of[lost]))]
    is_first = np.ones(len(lost), bool)
    is_first[1:] = of[lost[1:]] != of[lost[:-1]]
    first = np.flatnonzero(is_first)[np.cumsum(is_first) - 1]
    for name, of_stay in (("num_retries", _failed(records)), ("failover_ns", stays["end_ns"] - stays["start_ns"])):
        before = np.cumsum(of_stay[lost]) - of_stay[lost]
        rows[name][lost] = before - before[first]
    rows["router_ns"][lost] = stays["start_ns"][lost] - at_router_ns[lost] - rows["failover_ns"][lost]
    return rows


def lost_stays(records: Records) -> NDArray[np.void]:
    """The stays that are no part of their request's last life: it began anew after them. None for one engine."""
    return np.empty(0, STAY_DTYPE) if records.replicas is None else records.replicas.stays[~_parts(records)[1]]


def _stays(records: Records) -> NDArray[np.void]:
    assert records.replicas is not None, "only several engines leave stays"
    return records.replicas.stays


def _failed(records: Records) -> NDArray[np.bool_]:
    """Which stays ended with their replica; the others were handed over."""
    codes = [code for code, text in enumerate(records.texts) if text == REPLICA_FAILED]
    return np.isin(_stays(records)["why"], codes)


def _parts(records: Records) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """For each stay the row in `requests` of its request, and whether the request went on from it to the end: it was
    handed over, and no replica failed that it was on since."""
    requests, stays, failed = records.requests, _stays(records), _failed(records)
    of = np.searchsorted(requests["request_id"], stays["request_id"])
    anew_ns = np.full(len(requests), MISSING)  # when it last began anew
    np.maximum.at(anew_ns, of[failed], stays["end_ns"][failed])
    return of, ~failed & (stays["start_ns"] >= anew_ns[of])


def _at_every_engine(records: Records) -> tuple[NDArray[np.void], NDArray[np.int64]]:
    """All rows of `requests`, then all stays as such rows; and of which row in `requests` each is a part, or -1."""
    requests, stays = records.requests, _stays(records)
    everyone = np.arange(len(requests))
    if not len(stays):
        return requests, everyone
    of, goes_on = _parts(records)
    rows, of = np.concatenate((requests, stay_rows(records))), np.concatenate((everyone, of))
    parts = np.flatnonzero(np.concatenate((np.ones(len(requests), bool), goes_on)))
    parts = parts[np.lexsort((rows["ended_ns"][parts], rows["arrival_ns"][parts], of[parts]))]
    follows = of[parts[1:]] == of[parts[:-1]]
    later = parts[1:][follows]
    rows["sent_ns"][later] = rows["ended_ns"][parts[:-1][follows]]
    rows["router_ns"][later] = rows["failover_ns"][later] = 0
    places = np.full(len(rows), -1)
    places[parts] = of[parts]
    return rows, places
