"""What each LoRA adapter's requests met with: a row of metrics an adapter."""

from __future__ import annotations

from typing import Any

import numpy as np

from batchsim.base.units import NS_PER_S
from batchsim.kernel.record import FINISHED, PRUNED
from batchsim.metrics.measure import latencies_ns, percentile
from batchsim.metrics.point_inputs import PointInputs, between

BASE = "base model"
"""Stands for the adapter of requests that ask for none."""
COLUMNS = ("adapter", "requests", "finished", "ttft_p50_s", "ttft_p99_s", "tpot_p99_s", "e2e_p50_s", "e2e_p99_s")
COLUMNS += ("held_back_mean_s", "hits", "host_loads", "disk_loads", "load_s")


def adapter_table(inputs: PointInputs) -> list[dict[str, Any]]:
    """A row of COLUMNS for each adapter that was asked for, and one for the base model where some asked for that; []
    without adapters.

    Requests are those of the cohort, loads those of the whole run; latencies are of finished requests, in seconds.
    """
    use, requests = inputs.adapters, inputs.records.requests
    if use is None or not use.names:
        return []
    cohort = between(requests["sent_ns"], inputs.window_ns) & (requests["outcome"] != PRUNED)
    done, latencies = cohort & (requests["outcome"] == FINISHED), latencies_ns(inputs)
    rows: list[dict[str, Any]] = []
    for k, name in [*enumerate(use.names), (-1, BASE)]:
        own = use.of == k
        if k < 0 and not (own & cohort).any():
            continue
        row: dict[str, Any] = {
            "adapter": name,
            "requests": int((own & cohort).sum()),
            "finished": int((own & done).sum()),
        }
        for column in COLUMNS[3:8]:
            latency, percent = column.removesuffix("_s").split("_p")
            observed = latencies[latency][own & done]
            observed = observed[~np.isnan(observed)]
            row[column] = percentile(observed, float(percent))[0] / NS_PER_S if len(observed) else None
        held_ns = use.held_ns[own & cohort]
        row["held_back_mean_s"] = float(held_ns.mean()) / NS_PER_S if len(held_ns) else None
        row |= {name: 0 if k < 0 else int(getattr(use, name)[k]) for name in ("hits", "host_loads", "disk_loads")}
        row["load_s"] = 0.0 if k < 0 else int(use.load_ns[k]) / NS_PER_S
        rows.append(row)
    return rows
