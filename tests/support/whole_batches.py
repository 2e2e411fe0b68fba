"""Workloads in one line, and what the records of a run say, request by request."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

from batchsim.kernel.batch import Batch
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.leaps import leap
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import BLOCKED, OUTCOME_NAMES, Recorder, Records
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival, Request
from tests.support.engine import Constant

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
_REQUEST = re.compile(r"(\d+):(\d+)->(\d+)(?:/(\d+))?(?:p(-?\d+))?(?:c(\d+))?")


class Listed:
    """An open-loop workload from a list."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._arrivals = arrivals

    def arrivals(self) -> Iterator[Arrival]:
        return iter(self._arrivals)

    def responded(self, request: Request, now_ns: int) -> Arrival | None:
        return None


def requests(text: str) -> list[Arrival]:
    """`"5:100->3/8p1c70"`: at 5 ns 100 prompt and 3 output tokens, capped at 8, priority 1, cancelled at 70 ns."""
    arrivals = []
    for i, one in enumerate(text.split()):
        match = _REQUEST.fullmatch(one)
        assert match is not None, one
        at, prompt, output, cap, priority, cancel = (None if g is None else int(g) for g in match.groups())
        assert at is not None and prompt is not None and output is not None
        request = Request(i, at, prompt, cap or output, priority=priority or 0)
        arrivals.append(Arrival(request, output, cancel_ns=cancel))
    return arrivals


def leap_end_ns(policy: Any, config: Any, arrivals: str) -> int:
    """Where a leap without horizon ends that starts after the first decode step; all `arrivals` are at 0."""
    core = EngineCore(
        policy(config, PolicyContext(CountingKV(1000, BLOCK_SIZE), MAX_MODEL_LEN)),
        SimExecutor(Constant(), MAX_MODEL_LEN),
        Recorder(),
        max_model_len=MAX_MODEL_LEN,
    )
    for arrival in requests(arrivals):
        core.submit(arrival)
    now_ns = 0
    while True:
        batch = core.schedule(now_ns, True)
        assert isinstance(batch, Batch)
        now_ns = core.execute(batch, now_ns)
        if batch.num_decode:
            assert isinstance(core.executor, SimExecutor)
            return leap(core, core.executor, batch, now_ns, lambda: math.inf)
        core.complete(now_ns)


def times(records: Records, *columns: str) -> list[tuple[int, ...]]:
    """A tuple of `columns` for each request."""
    return [tuple(int(row[c]) for c in columns) for row in records.requests]


def steps(records: Records, *columns: str) -> list[tuple[int, ...]]:
    """A tuple of `columns` for each step."""
    return [tuple(int(row[c]) for c in columns) for row in records.steps]


def outcomes(records: Records) -> list[tuple[str, str]]:
    """(outcome, reason) for each request."""
    return [(OUTCOME_NAMES[int(row["outcome"])], records.texts[row["reason"]]) for row in records.requests]


def blocked(records: Records) -> list[tuple[int, int, str]]:
    """(time, request, reason) of every change at the head of the queue."""
    rows = records.states[records.states["state"] == BLOCKED]
    return [(int(row["time_ns"]), int(row["request_id"]), records.texts[row["reason"]]) for row in rows]


@st.composite
def workloads(draw: st.DrawFn, priorities: Sequence[int] = (0,)) -> list[Arrival]:
    """Up to a dozen small requests, some of which time out or are given up."""
    arrivals = []
    at = 0
    for i in range(draw(st.integers(1, 12))):
        at += draw(st.integers(0, 4)) * 7
        prompt, output = draw(st.integers(1, 20)), draw(st.integers(1, 12))
        cap = output + draw(st.integers(0, 4))
        give_up, deadline = (draw(st.none() | st.integers(0, 200)) for _ in range(2))
        request = Request(
            i,
            at,
            prompt,
            cap,
            priority=draw(st.sampled_from(priorities)),
            deadline_ns=None if deadline is None else at + deadline,
        )
        arrivals.append(Arrival(request, output, cancel_ns=None if give_up is None else at + give_up))
    return arrivals
