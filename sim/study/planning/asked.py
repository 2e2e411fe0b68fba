"""What an objective asks of latencies, and the percentile of each that stands beside it."""

from __future__ import annotations

from dataclasses import dataclass

from batchsim.base.units import NS_PER_S
from batchsim.metrics.latencies import LATENCIES, TASK_E2E
from batchsim.metrics.measure import PERCENTILES
from batchsim.metrics.slo import parse_slo


@dataclass(frozen=True)
class AskedLatency:
    """A bound of an objective: `limit_s`, which `share` of the requests must keep, and the column of the probes, called
    `title`, that tells the percentile of as many."""

    column: str
    title: str
    limit_s: float
    share: float


def asked_latencies(objective: str, request_class: str = "") -> list[AskedLatency]:
    """The bounds of an objective of the per-request form, the least of each latency, in the order of LATENCIES.

    Where results have no percentile of its share it is the P99.
    """
    slo = parse_slo(objective)
    assert slo.share is not None, "plans take objectives of the per-request form"
    percent = next((p for p in PERCENTILES if abs(p - 100 * slo.share) < 1e-9), 99)
    of = f"[{request_class}]" if request_class else ""
    found = []
    titles = {metric: latency.title for metric, latency in LATENCIES.items()} | {TASK_E2E: "task E2E"}
    for metric, name in titles.items():
        limits = [bound.limit_ns / NS_PER_S for bound in slo.bounds if bound.metric == metric]
        if limits:
            column, title = f"{metric}_p{percent}_s{of}", f"{name} p{percent}"
            found.append(AskedLatency(column, title, min(limits), slo.share))
    return found
