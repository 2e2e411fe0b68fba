"""What an SLO asks for on the axes of a run: shares of requests, bounds on latencies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchsim.base.units import NS_PER_S
from batchsim.metrics.latencies import LATENCIES, TASK_E2E, TASK_TITLE
from batchsim.metrics.slo import parse_slo
from batchsim.report.reading import column
from batchsim.results.read import Results


@dataclass(frozen=True)
class SloShare:
    """A share of requests, or tasks, within an objective: column `metric` of the summary, the `objective` as text, and
    the share that it asks for, `target`, from 0 to 1. `request_class` is empty where it is of all requests."""

    metric: str
    objective: str
    target: float
    request_class: str = ""

    @property
    def counted(self) -> str:
        """What it is a share of: requests, or tasks."""
        return "tasks" if parse_slo(self.objective).of_tasks else "requests"


def slo_shares(results: Results) -> list[SloShare]:
    """The shares that a run's SLO asks for: that of all requests, or where classes have objectives of their own that of
    each class. None of an objective that bounds percentiles or means, or of which the run has no value."""
    manifest = results.manifest
    if manifest["objective"] == manifest["slo"]:
        asked = [("in_slo", manifest["slo"], "")]
    else:
        classes = results.scenario["workload"].get("classes", {})
        asked = [(f"in_slo[{name}]", _objective(results, name), name) for name in classes]
    shares = []
    for metric, text, name in asked:
        share = parse_slo(text).share
        known = metric in results.summary and not np.isnan(column(results.summary, metric)).all()
        if share is not None and known:
            shares.append(SloShare(metric, text, share, name))
    return shares


@dataclass(frozen=True)
class LatencyPanel:
    """A latency that is drawn against load: of all requests, or of those of `request_class` alone."""

    latency: str
    request_class: str = ""

    @property
    def title(self) -> str:
        """What stands above the panel."""
        name = TASK_TITLE if self.latency == TASK_E2E else LATENCIES[self.latency].title
        return f"{name}, {self.request_class}" if self.request_class else name

    def metric(self, percentile: str) -> str:
        """The column of the summary: `ttft_p99_s[chat]`."""
        of = f"[{self.request_class}]" if self.request_class else ""
        return f"{self.latency}_{percentile}_s{of}"


def latency_panels(results: Results) -> list[LatencyPanel]:
    """The latencies that a run's curves are of: TTFT, TPOT, normalised latency and, where there are tasks, their E2E.
    Where request classes have objectives of their own, TTFT and TPOT of each class instead, and its E2E where an
    objective bounds that."""
    if results.manifest["objective"] == results.manifest["slo"]:
        names = ["ttft", "tpot", "norm_latency"] + [TASK_E2E] * (f"{TASK_E2E}_p99_s" in results.summary)
        return [LatencyPanel(name) for name in names]
    panels = []
    for of in results.scenario["workload"].get("classes", {}):
        bounded = {bound.metric for bound in parse_slo(_objective(results, of)).bounds}
        panels += [LatencyPanel(name, of) for name in ("ttft", "tpot", *({"e2e"} & bounded))]
    return panels


def _objective(results: Results, request_class: str) -> str:
    classes = results.scenario["workload"].get("classes", {})
    return (classes.get(request_class) or {}).get("slo") or results.manifest["slo"]


def slo_bounds(results: Results, panel: LatencyPanel, percentile: str | None = None) -> list[float]:
    """The SLO's bounds in seconds on a latency: on the `percentile` (`p50`, `p99`), no mean. A bound that a share of
    the requests must keep is one on the P99 where that is more than half of them, else on the P50.

    Without `percentile`: the bounds that either the P50 or the P99 panel shows. None for all requests where each class
    has bounds of its own.
    """
    if not panel.request_class and results.manifest["objective"] != results.manifest["slo"]:
        return []
    slo = parse_slo(_objective(results, panel.request_class))
    of_each = None if slo.share is None else 0.99 if slo.share > 0.5 else 0.5
    shown = (0.5, 0.99) if percentile is None else (float(percentile.removeprefix("p")) / 100,)
    bounds = [bound for bound in slo.bounds if bound.metric == panel.latency and not bound.mean]
    return [bound.limit_ns / NS_PER_S for bound in bounds if (bound.share or of_each) in shown]
