"""Runs of many requests in few rows: series by minute and histograms of latencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchsim.drive.fleet.fleet_records import EngineLife
from batchsim.kernel.record import FINISHED, MISSING, PRUNED
from batchsim.metrics.digest import PIECE_STEPS
from batchsim.metrics.histogram import Histogram
from batchsim.metrics.latencies import LATENCIES
from batchsim.metrics.measure import judged_requests, latencies_ns
from batchsim.metrics.point_inputs import PointInputs, between

MINUTE_NS = 60 * 10**9
Columns = dict[str, NDArray[Any]]


def request_minutes(inputs: PointInputs) -> Columns:
    """A row a minute, replica and class of traffic with any requests: how many were sent in it, how many of these are
    judged by an objective and meet it; how many were delivered in it, with how many output tokens."""
    requests = inputs.records.requests
    replicas = inputs.records.replicas
    of = np.zeros(len(requests), np.int32) if replicas is None else replicas.requests
    judged, passes = judged_requests(inputs, latencies_ns(inputs))
    sent = requests["sent_ns"]
    cohort = between(sent, inputs.window_ns) & (requests["outcome"] != PRUNED)
    done = requests["outcome"] == FINISHED
    minutes = np.concatenate((sent // MINUTE_NS, requests["delivered_ns"][done] // MINUTE_NS))
    owners = np.concatenate((of, of[done]))
    classes = np.concatenate((requests["request_class"], requests["request_class"][done]))
    none, count = np.zeros(int(done.sum()), np.int64), len(requests)
    counted = {
        "sent": np.concatenate((np.ones(count, np.int64), none)),
        "judged": np.concatenate((judged & cohort, none)),
        "within": np.concatenate((judged & passes & cohort, none)),
        "finished": np.concatenate((np.zeros(count, np.int64), none + 1)),
        "output_tokens": np.concatenate((np.zeros(count, np.int64), requests["output_tokens"][done])),
    }
    keys, at = np.unique(np.stack((minutes, owners, classes), axis=1), axis=0, return_inverse=True)
    columns: Columns = {"start_ns": keys[:, 0] * MINUTE_NS, "replica": keys[:, 1], "request_class": keys[:, 2]}
    for name, values in counted.items():
        columns[name] = np.zeros(len(keys), np.int64)
        np.add.at(columns[name], at.ravel(), values.astype(np.int64))
    return columns


def step_minutes(lives: Sequence[EngineLife], num_blocks: Sequence[int]) -> Columns:
    """A row a minute and replica in which steps began: how many, how long they took; by that time the mean numbers of
    requests that waited and ran, and the mean share of the replica's `num_blocks` KV blocks in use."""
    sums: dict[tuple[int, int], NDArray[np.float64]] = {}
    for life in lives:
        if life.replica == MISSING or not life.records.num_steps:
            continue
        for _, piece in life.records.pieces(PIECE_STEPS, 0):
            _add_steps(sums, piece.step_columns, life.replica, num_blocks[life.replica])
    keys = sorted(sums)
    count, busy_ns, waiting, running, utilisation = np.array([sums[key] for key in keys]).reshape(-1, 5).T
    length = np.maximum(busy_ns, 1)
    return {
        "start_ns": np.array([minute * MINUTE_NS for minute, _ in keys], np.int64),
        "replica": np.array([replica for _, replica in keys], np.int32),
        "num_steps": count.astype(np.int64),
        "busy_ns": busy_ns.astype(np.int64),
        "num_waiting": waiting / length,
        "num_running": running / length,
        "kv_utilisation": utilisation / length,
    }


def _add_steps(
    sums: dict[tuple[int, int], NDArray[np.float64]], steps: Mapping[str, NDArray[Any]], replica: int, num_blocks: int
) -> None:
    """Adds to `sums`, by minute and replica, the number of steps begun and their ns, and, times these ns, the waiting
    and running sequences and the share of blocks in use."""
    minutes = steps["start_ns"] // MINUTE_NS
    first, ns = int(minutes[0]), steps["duration_ns"]
    used = (1 - steps["free_blocks"] / num_blocks) * ns
    each = (np.ones(len(ns)), ns, steps["num_waiting"] * ns, steps["num_running"] * ns, used)
    totals = np.stack([np.bincount(minutes - first, weights) for weights in each], axis=1)
    for minute in np.flatnonzero(totals[:, 0]):
        key = first + int(minute), replica
        sums[key] = sums.get(key, np.zeros(len(each))) + totals[minute]


def histograms(inputs: PointInputs) -> Columns:
    """A row a class of traffic, latency and interval of it with any of the cohort's finished requests: how many, and
    their mean in ns. Codes: of classes the records', of latencies their places in LATENCIES."""
    requests = inputs.records.requests
    done = between(requests["sent_ns"], inputs.window_ns) & (requests["outcome"] == FINISHED)
    rows: list[tuple[NDArray[Any], ...]] = []
    latencies = latencies_ns(inputs)
    for number, name in enumerate(LATENCIES):
        if name not in latencies:  # gaps between tokens are of no single request
            continue
        values = latencies[name]
        for code in np.unique(requests["request_class"][done]):
            class_values = values[done & (requests["request_class"] == code)]
            known = class_values[~np.isnan(class_values)]
            histogram = Histogram()
            histogram.add(known, np.ones(len(known), np.int64))
            means, counts = histogram.means_and_counts()
            rows.append((np.full(len(means), code), np.full(len(means), number), means, counts))
    names = ("request_class", "latency", "mean_ns", "count")
    if not rows:
        return {name: np.empty(0) for name in names}
    return {name: np.concatenate([row[i] for row in rows]) for i, name in enumerate(names)}
