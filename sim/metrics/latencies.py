"""The latencies of a request, each defined once: a row of LATENCIES is its name, its words and its function.

They are those of **delivery** to the client and count from when the client sent the request, which is the arrival at
the engine unless a front end stands before it. In ns here, in seconds in results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Ns = NDArray[np.float64]
Requests = NDArray[np.void] | Mapping[str, NDArray[Any]]
"""Columns of the requests table by name, of requests that finished: those of others mean nothing."""

LATENCY_COLUMNS = ("sent_ns", "arrival_ns", "scheduled_ns", "first_delivery_ns", "delivered_ns", "output_tokens")
"""The columns of the requests table that these latencies are made of."""


@dataclass(frozen=True)
class Latency:
    """`title` heads pictures, `doc` says from when to when. `of` gives ns of each request, NaN where it has none; None
    of a latency of which a request has many. `part`: the part of a request's life that it is made of. `of_tokens`:
    whether a request without a token, of a pooling model, has none of it."""

    title: str
    doc: str
    of: Callable[[Requests], Ns] | None
    part: Literal["whole", "queue", "to first token", "after first token"]
    of_tokens: bool = True

    @property
    def queues(self) -> bool:
        """Whether it holds the time in the queue, so that where the queue grows it grows with the run's length."""
        return self.part != "after first token"

    @property
    def streamed(self) -> bool:
        """Whether only an answer that is streamed has it: one sent whole has nothing after its first token."""
        return self.part == "after first token"


def _ttft(r: Requests) -> Ns:
    return np.where(r["output_tokens"] > 0, (r["first_delivery_ns"] - r["sent_ns"]) * 1.0, np.nan)


def _tpot(r: Requests) -> Ns:
    ttft, e2e = r["first_delivery_ns"] - r["sent_ns"], r["delivered_ns"] - r["sent_ns"]
    return np.where(r["output_tokens"] >= 2, (e2e - ttft) / np.maximum(r["output_tokens"] - 1, 1), np.nan)


def _e2e(r: Requests) -> Ns:
    return (r["delivered_ns"] - r["sent_ns"]) * 1.0


def _queue_time(r: Requests) -> Ns:
    return (r["scheduled_ns"] - r["arrival_ns"]) * 1.0


def _norm_latency(r: Requests) -> Ns:
    per_token = (r["delivered_ns"] - r["sent_ns"]) / np.maximum(r["output_tokens"], 1)
    return np.where(r["output_tokens"] > 0, per_token, np.nan)


LATENCIES = {
    "ttft": Latency("TTFT", "from sending to the first token at the client", _ttft, "to first token"),
    "tpot": Latency("TPOT", "(e2e − ttft) / (output − 1), per request", _tpot, "after first token"),
    "itl": Latency("ITL", "every gap between two tokens, pooled", None, "after first token"),
    "e2e": Latency("E2E", "from sending to the last token", _e2e, "whole", of_tokens=False),
    "queue_time": Latency(
        "queue time",
        "from the arrival at the engine to the start of the first step it took part in",
        _queue_time,
        "queue",
        of_tokens=False,
    ),
    "norm_latency": Latency("normalised latency", "e2e / output tokens", _norm_latency, "whole"),
}
"""The latencies by name. One token, or a response delivered whole, has no tpot and no itl; all have a norm_latency but
requests of pooling models, which get no token: see `OF_TOKENS`."""
OF_TOKENS = tuple(name for name, latency in LATENCIES.items() if latency.of_tokens)
"""The latencies that a request without a token does not have."""

TASK_E2E, TASK_TITLE, TASK_DOC = (
    "task_e2e",
    "E2E of tasks",
    "from sending a task's first request to the last token of its last one",
)
"""The latency of a task, which has several requests: no row of theirs has it (`batchsim.metrics.tasks`)."""

MAKESPAN = "makespan"
"""How long the work of a run takes, which objectives may bound: one number of it, and no latency of a request."""

STREAMED = tuple(name for name, latency in LATENCIES.items() if latency.streamed and latency.of is not None)
"""The latencies that a response delivered whole does not have, without those of which a request has many."""


def values_ns(requests: Requests) -> dict[str, Ns]:
    """By latency, the ns of every request; not of itl, which has many. A response sent whole still has a tpot."""
    return {name: latency.of(requests) for name, latency in LATENCIES.items() if latency.of is not None}


def judged_ns(latencies: Mapping[str, Ns], finished: NDArray[np.bool_], whole: NDArray[np.bool_]) -> dict[str, Ns]:
    """{latency: ns per request}, as objectives judge it: inf if unfinished, or for streaming metrics of a response sent
    whole. NaN: the latency does not apply."""
    missed = {name: ~finished | whole if name in STREAMED else ~finished for name in latencies}
    return {name: np.where(missed[name], np.inf, values) for name, values in latencies.items()}


def holds_queue(column: str) -> bool:
    """Whether a column of the summary is of a latency that holds time in the queue."""
    name = column.partition("[")[0].removesuffix("_s").rpartition("_")[0]
    return name == TASK_E2E or (name in LATENCIES and LATENCIES[name].queues)
