"""The picture of adapters: of which runs it is drawn, what it shows, what it says; and the table beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.image import imread

from batchsim.report.pictures.adapters_picture import HELD_BACK, adapters_text, draw_share, has_adapters
from batchsim.report.pictures.plots import write_pictures
from batchsim.report.pictures.style import figure, house_style
from tests.support.scenarios import run_in

TEXT = """\
model: llama-3.1-8b
cost: {kind: linear, base: 5ms, per_token: 20us}
kv: {tokens: 100000}
workload:
  arrivals: {kind: poisson, mean_rate: 20/s}
  lengths: {prompt: {kind: fixed, tokens: 50}, output: {kind: uniform, min: 2, max: 12}}
  output_cap: 16
  requests: 40
  loras: {count: 6, share_of_requests: 80%}
lora_cost: {step: 10%, per_adapter: 2%, load_gpu: 1ms, load_disk: 20ms}
policies:
  one: {kind: vllm, max_num_seqs: 8, max_num_batched_tokens: 512}
  six: {kind: vllm, max_num_seqs: 8, max_num_batched_tokens: 512, max_loras: 6}
load: {mean_rate: [20/s, 60/s]}
slo: ttft<9s @ 50%
seeds: 1
"""


def test_the_picture_has_a_line_a_policy_and_says_who_waits_most(tmp_path: Path) -> None:
    """Through the means of summary.csv; with a place for all none waits. `run` draws it, and writes the table."""
    results = run_in(tmp_path, TEXT)
    assert has_adapters(results)
    shares = results.summary[HELD_BACK].to_numpy()
    with house_style():
        ax = figure(4, 4).subplots()
        draw_share(ax, results, HELD_BACK)
    lines = [line for line in ax.lines if line.get_linestyle() != "None"]
    assert sorted(y for line in lines for y in line.get_ydata()) == sorted(100 * shares)  # type: ignore[union-attr]
    assert adapters_text(results).startswith("one has ") and adapters_text(results).endswith(
        "at 60 req/s offered; six 0"
    )
    assert results.path / "adapters.png" in write_pictures(results)
    assert imread(results.path / "adapters.png").std() > 0.01


def test_the_table_has_a_row_an_adapter_and_one_of_the_base_model(tmp_path: Path) -> None:
    """Whose requests are all of the point's; loads sum to the metrics of the point."""
    results = run_in(tmp_path, TEXT)
    table, points = results.adapters(), results.points
    assert table is not None
    for _, point in points.iterrows():
        own = table[(table["policy"] == point["policy"]) & (table["load"] == point["load"])]
        assert own["adapter"].tolist()[:-1] == sorted(own["adapter"].tolist()[:-1])
        assert own["adapter"].tolist()[-1] == "base model"
        assert own["requests"].sum() == point["cohort"] and own["finished"].sum() == point["finished"]
        assert own["host_loads"].sum() == point["adapter_host_loads"]
        assert np.isclose(own["load_s"].sum(), point["adapter_load_s"])
        assert (own["ttft_p50_s"] <= own["ttft_p99_s"]).all()


def test_without_adapters_there_is_neither(tmp_path: Path) -> None:
    """Nor where none is asked for."""
    results = run_in(tmp_path, TEXT.replace("share_of_requests: 80%", "share_of_requests: 0%"))
    assert not has_adapters(results) and results.adapters() is None
    assert results.path / "adapters.png" not in write_pictures(results)
