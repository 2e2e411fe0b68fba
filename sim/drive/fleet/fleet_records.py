"""The records of several engines as one, and as each engine left them.

As one they are Records with `replicas`: requests by id, steps by start, states in the order of time; where that is
equal, by replica. A request that was lost with its replica and sent to another has one row, that of the last replica;
its rows on the failed ones are kept apart, since the states and steps of the failed engines speak of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchsim.kernel.record import Records, Replicas

_TEXTS = {"requests": ("request_class", "tenant", "reason"), "states": ("reason",), "steps": ()}
_ORDER = {"requests": "request_id", "steps": "start_ns", "states": "time_ns"}


@dataclass(frozen=True)
class EngineLife:
    """What one engine recorded from its start to its end. `lost` are the ids of requests that went on elsewhere."""

    replica: int
    records: Records
    lost: frozenset[int] = frozenset()


def merged(lives: list[EngineLife]) -> Records:
    """The records of all engines as one; `lives` are in order of their replicas, MISSING being the router."""
    codes: dict[str, int] = {"": 0}
    details: dict[str, str] = {}
    for life in lives:
        for text in life.records.texts:
            codes.setdefault(text, len(codes))
        for reason, detail in life.records.details.items():
            details.setdefault(reason, detail)
    kept: dict[str, list[NDArray[np.void]]] = {name: [] for name in _ORDER}
    replicas: dict[str, list[NDArray[np.int32]]] = {name: [] for name in _ORDER}
    lost: list[NDArray[np.void]] = []
    of_lost: list[NDArray[np.int32]] = []
    for life in lives:
        tables = {name: _recoded(getattr(life.records, name), life.records.texts, codes, name) for name in _ORDER}
        gone = np.isin(tables["requests"]["request_id"], list(life.lost))
        lost.append(tables["requests"][gone])
        of_lost.append(np.full(int(gone.sum()), life.replica, np.int32))
        tables["requests"] = tables["requests"][~gone]
        for name, rows in tables.items():
            kept[name].append(rows)
            replicas[name].append(np.full(len(rows), life.replica, np.int32))
    whole, owners = {}, {}
    for name, key in _ORDER.items():
        rows = np.concatenate(kept[name])
        order = np.argsort(rows[key], kind="stable")
        whole[name], owners[name] = rows[order], np.concatenate(replicas[name])[order]
    return Records(
        **whole,
        texts=tuple(codes),
        details=details,
        replicas=Replicas(**owners, lost=np.concatenate(lost), of_lost=np.concatenate(of_lost)),
    )


def _recoded(rows: NDArray[np.void], texts: tuple[str, ...], codes: dict[str, int], table: str) -> NDArray[np.void]:
    """`rows` of `table` with the codes of their own `texts` replaced by those that `codes` gives the texts."""
    if not _TEXTS[table] or tuple(codes)[: len(texts)] == texts:
        return rows
    new, found = np.array([codes[text] for text in texts], np.int32), rows.copy()
    for column in _TEXTS[table]:
        found[column] = new[rows[column].astype(np.int32)]
    return found


class OfEngine(NamedTuple):
    """The records of one engine, and for each of its requests the row in the records of all: -1 where the request was
    lost with the replica and went on elsewhere."""

    replica: int
    rows: NDArray[np.int64]
    records: Records


def by_engine(records: Records) -> Iterator[OfEngine]:
    """The records of each engine from its start to its end or failure; under replica MISSING those of requests that
    only the router saw. Without a router: `records` as one engine's.
    """
    replicas = records.replicas
    if replicas is None:
        yield OfEngine(0, np.arange(len(records.requests)), records)
        return
    owners = (replicas.requests, replicas.steps, replicas.states, replicas.of_lost)
    for replica in np.unique(np.concatenate(owners)):
        lost = replicas.lost[replicas.of_lost == replica]
        # A failure that lost nothing divides nothing that could be mistaken.
        cuts = np.unique(lost["ended_ns"])
        rows = np.flatnonzero(replicas.requests == replica)
        steps, states = records.steps[replicas.steps == replica], records.states[replicas.states == replica]
        requests = records.requests[rows]
        for k in range(len(cuts) + 1):
            mine = np.searchsorted(cuts, requests["ended_ns"]) == k
            gone = lost[np.searchsorted(cuts, lost["ended_ns"]) == k]
            all_rows = np.concatenate((requests[mine], gone))
            places = np.concatenate((rows[mine], np.full(len(gone), -1, np.int64)))
            order = np.argsort(all_rows["request_id"], kind="stable")
            engine = replace(
                records,
                requests=all_rows[order],
                steps=steps[np.searchsorted(cuts, steps["start_ns"]) == k],
                states=states[np.searchsorted(cuts, states["time_ns"]) == k],
                replicas=None,
            )
            yield OfEngine(int(replica), places[order], engine)
