"""What came over time, and how much of it kept the SLO: from the rows of requests, or from what was kept by minute."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from batchsim.base.errors import ScenarioError
from batchsim.drive.fleet.fleet_plan import ReplicaSpan
from batchsim.explain.causes import Objectives, kept_slo
from batchsim.kernel.record import Records
from batchsim.metrics.by_minute import MINUTE_NS
from batchsim.report.reading import Floats, column
from batchsim.results.read import Results, scenario_of

BINS = 96
"""Intervals of the time shown: quarters of an hour of a day."""


class Traffic(NamedTuple):
    """How many requests were sent in each interval between `edges_ns`, and the share of the judged ones that kept the
    SLO, NaN where none was; None where it bounds no single request."""

    edges_ns: Floats
    sent: Floats
    shares: Floats | None


def traffic_over_time(results: Results, policy: str, load: float, seed: int) -> Traffic:
    """The traffic of a point of replicas, in BINS intervals; of one kept by minute in fewer, of whole minutes."""
    end_ns = max(span.end_ns for span in results.spans(policy, load, seed))
    scenario = scenario_of(results, policy)
    if results.keeps(policy) != "minutes":
        edges_ns = np.linspace(0, end_ns, BINS + 1)
        records = results.records(policy, load, seed, requests_only=True)
        sent = np.histogram(records.requests["sent_ns"], edges_ns)[0].astype(float)
        return Traffic(edges_ns, sent, kept_shares(records, scenario, edges_ns))
    minutes = -(-end_ns // (BINS * MINUTE_NS))
    edges_ns = np.arange(0, end_ns + minutes * MINUTE_NS, minutes * MINUTE_NS).astype(float)
    rows = results.minutes(policy, load, seed)
    sent, judged, within = (
        np.histogram(column(rows, "start_ns"), edges_ns, weights=column(rows, name))[0]
        for name in ("sent", "judged", "within")
    )
    return Traffic(edges_ns, sent, _shares(within, judged) if judged.any() else None)


def kept_shares(records: Records, scenario: Mapping[str, Any], edges_ns: Floats) -> Floats | None:
    """The share of the judged requests sent in each interval that kept the SLO, NaN where none was; None where the SLO
    bounds no single request."""
    try:
        objectives = Objectives.of(scenario)
    except ScenarioError:
        return None
    sent_ns, judged = records.requests["sent_ns"], objectives.cohort(records)
    of = np.histogram(sent_ns[judged], edges_ns)[0]
    good = np.histogram(sent_ns[judged & kept_slo(records, objectives)], edges_ns)[0]
    return _shares(good, of)


def _shares(good: Floats, of: Floats) -> Floats:
    return np.where(of > 0, good / np.maximum(of, 1), np.nan)


def counted(spans: Sequence[ReplicaSpan], states: Collection[str], edges_ns: Floats) -> Floats:
    """How many replicas were in one of `states`, as an average over each interval of `edges_ns`."""
    total = np.zeros(len(edges_ns) - 1)
    for span in spans:
        if span.state in states:
            total += np.diff(np.clip(edges_ns, span.start_ns, span.end_ns))
    return total / np.diff(edges_ns)
