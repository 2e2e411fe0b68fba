"""Attainment in stretches of one window: where a single recording is replayed, its stretches stand in for seeds."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np

from batchsim.metrics.latencies import LATENCY_COLUMNS, STREAMED, values_ns
from batchsim.metrics.slo import Slo
from batchsim.results.point_files import read_table

BATCHES = 10
"""Stretches of equal length. Of a 20-minute window each lasts two minutes: longer than nearly every request."""


def batch_attainments(
    folder: Path, slos: Mapping[str, Slo], window_ns: tuple[int, int], streams: bool, batches: int
) -> list[tuple[float, float, dict[str, float | None], int]]:
    """For each stretch: the share within the SLO, the least margin over the classes, the share of each class, requests.

    The stretches cut the sendings of the window into equal lengths of time. `slos` has the objective of every class, or
    of "" where there are none. A class absent from a stretch has no share in it.
    """
    table = read_table(folder, "requests")
    sent = table["sent_ns"].to_numpy()
    start = window_ns[0]
    end = int(sent.max())
    inside = sent >= start
    passed = _passed(table, slos, streams)
    request_class = table["request_class"].astype(str).to_numpy()
    edges = np.linspace(start, end + 1, batches + 1)
    found = []
    for low, high in pairwise(edges):
        mine = inside & (sent >= low) & (sent < high)
        by_class: dict[str, float | None] = {}
        margins = []
        for name, slo in slos.items():
            of_class = mine if name == "" else mine & (request_class == name)
            share = float(passed[of_class].mean()) if of_class.any() else None
            by_class[name] = share
            if share is not None:
                assert slo.share is not None, "plans take objectives of the per-request form"
                margins.append(share - slo.share)
        if margins:
            found.append((float(passed[mine].mean()), min(margins), by_class, int(mine.sum())))
    return found


def _passed(table: object, slos: Mapping[str, Slo], streams: bool) -> np.ndarray:
    """Which requests meet their objective, by the definitions of `batchsim.metrics.latencies`."""
    column = {name: np.asarray(table[name].astype("float64").fillna(np.nan)) for name in LATENCY_COLUMNS}  # type: ignore[index]
    finished = np.asarray(table["outcome"].astype(str) == "finished")  # type: ignore[index]
    judged = values_ns(column)
    if not streams:
        for name in STREAMED:
            judged[name][column["output_tokens"] >= 2] = np.inf
    judged = {name: np.where(finished, values, np.inf) for name, values in judged.items()}
    request_class = np.asarray(table["request_class"].astype(str))  # type: ignore[index]
    passed = np.zeros(len(finished), dtype=bool)
    for name, slo in slos.items():
        mine = np.ones(len(finished), dtype=bool) if name == "" else request_class == name
        passed |= mine & slo.passes(judged)
    return passed
