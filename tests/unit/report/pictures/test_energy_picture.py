"""The picture of energy: what it shows, of which runs it is drawn, and what it says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from batchsim.report.pictures.energy_picture import (
    JOULES,
    LATENCY,
    POWER,
    concerns_energy,
    draw_energy,
    draw_power,
    energy_text,
)
from batchsim.report.pictures.plots import write_pictures
from batchsim.report.pictures.style import figure, house_style
from batchsim.report.text.run_table import asked_columns
from batchsim.report.text.summary_text import report
from tests.support.scenarios import run_in

TEXT = """\
model: llama-3.1-8b
cost: {kind: roofline, gpu: h100}
kv: {tokens: 100000}
workload:
  arrivals: {kind: poisson, mean_rate: 2/s}
  lengths: {prompt: {kind: fixed, tokens: 100}, output: {kind: uniform, min: 2, max: 12}}
  output_cap: 16
  requests: 20
policies:
  continuous: {max_num_seqs: 8, max_num_batched_tokens: 512}
  energy_aware: {control_limit: 4}
load: {mean_rate: [2/s, 4/s]}
slo: ttft<9s @ 50%
seeds: 1
"""


def test_the_picture_has_power_against_load_and_energy_against_latency(tmp_path: Path) -> None:
    """A line a policy through the means of summary.csv; its title names least and most energy at the lowest load."""
    results = run_in(tmp_path, TEXT)
    rows = [results.summary[results.summary["policy"] == name] for name in ("continuous", "energy_aware")]
    with house_style():
        power, energy = figure(8, 4).subplots(1, 2)
        draw_power(power, results)
        draw_energy(energy, results)
    for ax, x, y in ((power, "load", POWER), (energy, LATENCY, JOULES)):
        lines = [line for line in ax.lines if line.get_linestyle() != "None"]
        assert [np.asarray(line.get_xdata()).tolist() for line in lines] == [row[x].tolist() for row in rows]
        assert [np.asarray(line.get_ydata()).tolist() for line in lines] == [row[y].tolist() for row in rows]
    low, high = (float(row[JOULES].tolist()[0]) for row in reversed(rows))
    assert low < high
    assert energy_text(results) == (
        f"energy_aware takes {low:.3g} J an output token at 2 req/s offered, idle included; continuous {high:.3g} J"
    )


@pytest.mark.slow
def test_it_is_among_the_pictures_of_a_run(tmp_path: Path) -> None:
    results = run_in(tmp_path, TEXT)
    assert results.path / "energy.png" in write_pictures(results)
    assert imread(results.path / "energy.png").std() > 0.01


@pytest.mark.parametrize(
    ("before", "after", "drawn"),
    [
        ("", "", True),
        ("  energy_aware: {control_limit: 4}\n", "", False),
        ("gpu: h100", "gpu: b300_sxm", False),
    ],
    ids=["controller", "no controller", "no law"],
)
def test_it_is_drawn_where_a_controller_minds_a_power_that_is_known(
    tmp_path: Path, before: str, after: str, drawn: bool
) -> None:
    assert concerns_energy(run_in(tmp_path, TEXT.replace(before, after))) is drawn


def test_it_is_drawn_where_a_cap_is_stated(tmp_path: Path) -> None:
    """Without a controller, of a roofline with a cap."""
    text = TEXT.replace("  energy_aware: {control_limit: 4}\n", "").replace("gpu: h100", "gpu: h100, power_cap: 600W")
    assert concerns_energy(run_in(tmp_path, text))


def test_a_table_with_energy_says_that_it_is_an_estimate(tmp_path: Path) -> None:
    """The law and its error stand below the table where columns of energy are asked for, and only there."""
    results = run_in(tmp_path, TEXT)
    said = "power of h100, an estimate: 447 W in a step"
    assert said in report(results, columns=asked_columns("mean_power_w,J/token", []))
    assert said not in report(results, columns=asked_columns("ttft_p50", []))
