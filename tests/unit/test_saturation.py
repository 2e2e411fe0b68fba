"""The completion rate under overload, where it is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.capacity.saturation import overloaded, saturation_rps
from sim.point import Setup, simulate_point
from sim.scenario import Point, load_scenario

SCENARIO = """
model: llama-3.1-8b
cost: {kind: constant, step: 10ms}
kv: {tokens: 100000}
workload:
  arrivals: {kind: poisson, mean_rate: 1/s}
  lengths:
    prompt: {kind: fixed, tokens: 10}
    output: {kind: fixed, tokens: 5}
  output_cap: 5
  duration: 10s
policies:
  static: {batch_size: SIZE, max_wait: 2s, respond: batch_end}
load: {mean_rate: [1/s]}
slo: e2e<1s @ 99%
"""


@pytest.mark.parametrize("size", [1, 64, 240])
def test_whole_batches_are_counted_whole(tmp_path: Path, size: int) -> None:
    """A batch of five steps of 10 ms is answered at once: its size every 50 ms, however large it is."""
    (tmp_path / "s.yaml").write_text(SCENARIO.replace("SIZE", str(size)))
    scenario = load_scenario(str(tmp_path / "s.yaml"))
    setup = Setup.of(scenario)
    busy = Setup(scenario, overloaded(setup.resolved), setup.cost, setup.kv)
    records = simulate_point(busy, Point(scenario.specs[0], 1.0, 0)).records
    assert saturation_rps(records) == pytest.approx(size / 0.05)
