"""Attainment in stretches of one window: where a single recording is replayed, its stretches stand in for seeds."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd

from batchsim.metrics.latencies import LATENCY_COLUMNS, Ns, judged_ns, values_ns
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
    request_class = table["request_class"].astype(str).to_numpy()
    members = {name: request_class == name if name else np.ones(len(table), dtype=bool) for name in slos}
    judged = _judged_ns(table, streams)
    passed = np.logical_or.reduce([members[name] & slo.passes(judged) for name, slo in slos.items()])
    edges = np.linspace(window_ns[0], int(sent.max()) + 1, batches + 1)
    attainments = []
    for low, high in pairwise(edges):
        in_batch = (sent >= low) & (sent < high)
        by_class: dict[str, float | None] = {}
        margins = []
        for name, slo in slos.items():
            of_class = in_batch & members[name]
            share = float(passed[of_class].mean()) if of_class.any() else None
            by_class[name] = share
            if share is not None:
                assert slo.share is not None, "plans take objectives of the per-request form"
                margins.append(share - slo.share)
        if margins:
            attainments.append((float(passed[in_batch].mean()), min(margins), by_class, int(in_batch.sum())))
    return attainments


def _judged_ns(requests: pd.DataFrame, streams: bool) -> dict[str, Ns]:
    """`judged_ns` of a kept table of requests."""
    columns = {name: requests[name].to_numpy(dtype=np.float64, na_value=np.nan) for name in LATENCY_COLUMNS}
    finished = (requests["outcome"] == "finished").to_numpy(dtype=bool)
    return judged_ns(values_ns(columns), finished, (columns["output_tokens"] >= 2) & (not streams))
