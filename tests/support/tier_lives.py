"""What records of engines with KV in the memory of their host say of requests: tokens moved, and parts of lives."""

from __future__ import annotations

from typing import Any

from batchsim.kernel.record import FINISHED, REJECTED, Records
from batchsim.kernel.types import Arrival
from batchsim.metrics.attribution import attribute


def moved(records: Records, what: int) -> dict[int, int]:
    """By request the tokens that were loaded or stored of it."""
    moved: dict[int, int] = {}
    for row in records.states[records.states["state"] == what]:
        moved[int(row["request_id"])] = moved.get(int(row["request_id"]), 0) + int(row["blocker"])
    return moved


def parts_of(records: Records, number: int) -> dict[str, int]:
    """The ns of each part of a request's life."""
    parts = attribute(records)
    mine = parts[parts["request_id"] == number]
    ns: dict[str, int] = {}
    for part, each in zip(mine["part"].tolist(), mine["ns"].tolist(), strict=True):
        ns[part] = ns.get(part, 0) + each
    return ns


def all_end_with_their_tokens(requests: Any, arrivals: list[Arrival]) -> None:
    """AssertionError unless each of `arrivals` has a row of the table `requests`, in order: finished with all its
    tokens, or given up or rejected."""
    assert requests["request_id"].tolist() == [arrival.request.id for arrival in arrivals]
    for row, arrival in zip(requests, arrivals, strict=True):
        if row["outcome"] == FINISHED:
            assert row["output_tokens"] == arrival.output_tokens
        else:
            assert row["outcome"] == REJECTED or arrival.cancel_ns is not None
