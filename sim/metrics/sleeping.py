"""What models that take turns on a GPU cost their requests: how often one woke up, and how long requests waited."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from batchsim.base.units import NS_PER_S
from batchsim.drive.fleet.fleet_plan import OFFLOADING, STARTING
from batchsim.kernel.record import Replicas
from batchsim.metrics.point_inputs import FleetInputs

_Row = tuple[str, Literal["loads", "share", "s"], Literal["lower", "higher", ""], str]
SLEEP_METRICS: tuple[_Row, ...] = (
    ("wakes", "loads", "lower", "models that began to wake up within the span"),
    ("weights_moving_share", "share", "lower", "of the span, the time in which weights left the GPU or came to it"),
    ("asleep_wait_mean_s", "s", "lower", "how long requests of the cohort waited for their model to be awake, mean"),
    ("asleep_wait_share", "share", "lower", "share of the cohort's requests that waited for their model to be awake"),
)
"""Rows of the table of metrics: name, unit, what is better, words."""


def sleep_kpis(
    fleet: FleetInputs,
    requests: NDArray[np.void],
    replicas: Replicas,
    cohort: NDArray[np.bool_],
    span_ns: tuple[int, int],
) -> dict[str, float | None]:
    """The metrics of models that sleep, by name. A request waits at the router while its model sleeps, and at its
    engine while that wakes up."""
    waking = [span for span in fleet.spans if span.state == STARTING]
    moving_ns = int(fleet.replica_ns(span_ns, (STARTING, OFFLOADING)).sum())
    waited_ns = requests["router_ns"].astype(np.int64)
    for span in waking:
        arrival_ns = requests["arrival_ns"]
        there = (replicas.requests == span.replica) & (span.start_ns <= arrival_ns) & (arrival_ns < span.end_ns)
        waited_ns[there] += np.minimum(span.end_ns, requests["ended_ns"][there]) - arrival_ns[there]
    of_cohort = waited_ns[cohort]
    return {
        "wakes": float(sum(span_ns[0] <= span.start_ns < span_ns[1] for span in waking)),
        "weights_moving_share": moving_ns / (span_ns[1] - span_ns[0]) if span_ns[1] > span_ns[0] else None,
        "asleep_wait_mean_s": float(of_cohort.mean()) / NS_PER_S if len(of_cohort) else None,
        "asleep_wait_share": float((of_cohort > 0).mean()) if len(of_cohort) else None,
    }
