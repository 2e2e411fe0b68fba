"""What an SLO asks for on the axes of a run: shares of requests, bounds on latencies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchsim.base.units import NS_PER_S
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
        asked = [(f"in_slo[{name}]", traffic.get("slo") or manifest["slo"], name) for name, traffic in classes.items()]
    shares = []
    for metric, text, name in asked:
        share = parse_slo(text).share
        known = metric in results.summary and not np.isnan(column(results.summary, metric)).all()
        if share is not None and known:
            shares.append(SloShare(metric, text, share, name))
    return shares


def slo_bounds(results: Results, name: str, percentile: str | None = None) -> list[float]:
    """The SLO's bounds in seconds on the latency `name`: on the `percentile` (`p50`, `p99`), no mean. A bound that a
    share of the requests must keep is one on the P99 where that is more than half of them, else on the P50.

    Without `percentile`: the bounds that either the P50 or the P99 panel shows.
    """
    if results.manifest["objective"] != results.manifest["slo"]:
        return []  # each request class has bounds of its own: no line holds for all
    slo = parse_slo(results.manifest["slo"])
    of_each = None if slo.share is None else 0.99 if slo.share > 0.5 else 0.5
    shown = (0.5, 0.99) if percentile is None else (float(percentile.removeprefix("p")) / 100,)
    bounds = [bound for bound in slo.bounds if bound.metric == name and not bound.mean]
    return [bound.limit_ns / NS_PER_S for bound in bounds if (bound.share or of_each) in shown]
