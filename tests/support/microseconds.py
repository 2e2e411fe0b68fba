"""Runs in microseconds, for systems whose knobs are: a step takes 10 us, arrivals are written in us."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from batchsim.kernel.batch import Batch
from batchsim.kernel.record import BLOCKED, Records
from batchsim.kernel.types import Arrival
from tests.support.stepping import run_every_way
from tests.support.whole_batches import outcomes, requests, steps, times, workloads

US = 1000


class TenMicroseconds:
    """Every step takes 10 us."""

    def step_ns(self, batch: Batch) -> int:
        return 10 * US


def in_us(arrivals: list[Arrival]) -> list[Arrival]:
    """The same with every time a thousand times as large."""
    return [
        replace(
            one,
            request=replace(
                one.request,
                arrival_ns=one.request.arrival_ns * US,
                deadline_ns=None if one.request.deadline_ns is None else one.request.deadline_ns * US,
            ),
            cancel_ns=None if one.cancel_ns is None else one.cancel_ns * US,
        )
        for one in arrivals
    ]


def records_of(policy: Any, config: Any, arrivals: str | list[Arrival], blocks: int = 1000) -> Records:
    """The records of a run that is equal, bit for bit, under every driver and KV manager."""
    given = requests(arrivals) if isinstance(arrivals, str) else arrivals
    return run_every_way(policy, config, in_us(given), cost=TenMicroseconds(), blocks=blocks).records


def starts_us(records: Records) -> list[int | None]:
    """When each request was first in a step; None for one that never was."""
    return [None if at < 0 else at // US for (at,) in times(records, "scheduled_ns")]


def ends_us(records: Records) -> list[int]:
    """When each request ended."""
    return [at // US for (at,) in times(records, "ended_ns")]


def blocked_us(records: Records) -> list[tuple[int, int, str]]:
    """(time, request, reason) of every change at the head of the queue."""
    rows = records.states[records.states["state"] == BLOCKED]
    return [(int(row["time_ns"]) // US, int(row["request_id"]), records.texts[row["reason"]]) for row in rows]


@st.composite
def busy(draw: st.DrawFn) -> list[Arrival]:
    """Small requests of priorities 0 to 3, some given up; a time within a step is as likely as a step's end."""
    return draw(workloads(priorities=(0, 1, 1, 2, 3)))


__all__ = ["blocked_us", "busy", "ends_us", "outcomes", "records_of", "starts_us", "steps", "times"]
