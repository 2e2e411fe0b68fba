"""Which shares of requests an SLO asks for, and where in a run's results they stand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchsim.metrics.slo import parse_slo
from batchsim.report.reading import column
from batchsim.results.read import Results


@dataclass(frozen=True)
class SloShare:
    """A share of requests within an objective: column `metric` of the summary, the `objective` as text, and the share
    that it asks for, `target`, from 0 to 1. `request_class` is empty where it is of all requests."""

    metric: str
    objective: str
    target: float
    request_class: str = ""


def slo_shares(results: Results) -> list[SloShare]:
    """The shares that a run's SLO asks for: that of all requests, or where classes have objectives of their own that of
    each class. None of an objective that bounds percentiles or means, or of which the run has no value."""
    manifest = results.manifest
    if manifest["objective"] == manifest["slo"]:
        asked = [("in_slo", manifest["slo"], "")]
    else:
        classes = results.scenario["workload"].get("classes", {})
        asked = [(f"in_slo[{name}]", its.get("slo") or manifest["slo"], name) for name, its in classes.items()]
    found = []
    for metric, text, name in asked:
        share = parse_slo(text).share
        known = metric in results.summary and not np.isnan(column(results.summary, metric)).all()
        if share is not None and known:
            found.append(SloShare(metric, text, share, name))
    return found
