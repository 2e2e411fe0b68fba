"""The picture of an autoscaled group, and what it says of costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from batchsim.base.units import NS_PER_S
from batchsim.drive.fleet.fleet_plan import HELD, UP, ReplicaSpan
from batchsim.report.pictures import closeup
from batchsim.report.pictures.fleet_picture import cost_text, counted, draw_kept, fleet_picture
from batchsim.report.reading import sweeps
from batchsim.report.text.run_lines import replica_lines
from batchsim.report.traffic_over_time import kept_shares
from tests.unit.scenario.test_replicas import SCALER, ran

HOUR = 3600 * NS_PER_S
SPANS = (
    ReplicaSpan(0, "up", 0, 10 * HOUR),
    ReplicaSpan(1, "starting", 2 * HOUR, 3 * HOUR),
    ReplicaSpan(1, "up", 3 * HOUR, 6 * HOUR),
    ReplicaSpan(1, "draining", 6 * HOUR, 7 * HOUR),
)


def test_replicas_are_counted_by_state_as_averages() -> None:
    """Over five hours, then five: 10 + 2 replica hours up of 10, and 3 + 2 held by the second one."""
    edges = np.array([0.0, 5.0, 10.0]) * HOUR
    assert counted(SPANS, (UP,), edges).tolist() == [1.4, 1.2]
    assert counted(SPANS, HELD, edges).tolist() == [1.6, 1.4]


def test_costs_are_held_against_as_many_as_at_most_all_the_time() -> None:
    """15 hours of 20, at 2 an hour 30 against 40."""
    assert cost_text(SPANS, None) == "15 replica hours, 25 % less than 2 all the time"
    assert cost_text(SPANS, "2.00/h") == "30 for 15 replica hours, 25 % less than 2 all the time (40)"


def test_the_picture_of_an_autoscaled_run_is_drawn(tmp_path: Path) -> None:
    """With the SLO's share by time, and the cost in the text; timeline.png has a row of replicas."""
    scaler = "{" + SCALER + ", above: 1, below: 0.2, min: 1, max: 3}"
    replicas = f"replicas: {{count: 1, router: random, price: 2.00/h, autoscaler: {scaler}}}\n"
    results = ran(tmp_path, replicas, "seeds=1")
    spans = results.spans("continuous", 1.0, 0)
    assert {span.replica for span in spans} == {0, 1, 2}
    fleet_picture(results, tmp_path / "fleet.png", 1.0, 0)
    assert imread(tmp_path / "fleet.png").std() > 0.01
    closeup.timeline(results, tmp_path / "timeline.png", 1.0, 0)
    assert imread(tmp_path / "timeline.png").std() > 0.01
    text = replica_lines(results, [(sweeps(results)[0], 0)])[-1]
    point = results.points.iloc[0]
    assert f"{2 * point['num_replicas_mean']:.4g} an hour" in text and "less than 6 for 3 all the time" in text


def test_the_share_within_the_slo_is_of_those_sent_in_each_interval(tmp_path: Path) -> None:
    """Weighted by their numbers, shares of the intervals are the share of the run."""
    results = ran(tmp_path, "replicas: {count: 1}\n", "seeds=1")
    records = results.records("continuous", 1.0, 0)
    ax = Figure().subplots()
    edges = np.linspace(0, 30 * NS_PER_S, 11)
    draw_kept(ax, kept_shares(records, results.scenario, edges), results.scenario, edges, "black")
    (stairs,) = ax.patches
    shares = stairs.get_data().values  # pyright: ignore[reportAttributeAccessIssue]
    sent = records.requests["sent_ns"]
    counts = np.histogram(sent[sent >= 2 * NS_PER_S], edges)[0]
    assert np.nansum(shares * counts) / counts.sum() == pytest.approx(results.points["in_slo"][0], abs=0.02)
    assert np.nanmin(shares) < np.nanmax(shares)
