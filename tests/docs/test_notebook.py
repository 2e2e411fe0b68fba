"""The notebook runs on the results of a small scenario, and is kept without outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import sim

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "p99_vs_qps.ipynb"
SMALL = """
model: llama-3.1-8b
cost: h200
workload:
  arrivals: {kind: poisson, mean_rate: 2/s}
  lengths: {prompt: {kind: fixed, tokens: 200}, output: {kind: fixed, tokens: 20}}
  output_cap: 32
  duration: 20s
policies:
  static: {batch_size: 4, max_wait: 1s}
  continuous: {max_num_seqs: 16, max_num_batched_tokens: 2048}
load: {mean_rate: [1/s, 4/s]}
slo: ttft<1s & tpot<50ms @ 99%
seeds: 2
"""


def test_notebook_is_kept_without_outputs():
    """Neither outputs nor execution counts are stored."""
    cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert cells
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)


@pytest.mark.slow
def test_notebook_draws_the_picture_of_a_results_folder(tmp_path: Path):
    """With the folder of a scenario that was just run, the picture and the table come out."""
    (tmp_path / "small.yaml").write_text(SMALL)
    sim.run_scenario(sim.load_scenario(str(tmp_path / "small.yaml")), out=tmp_path / "results")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    parameters = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    parameters.source = f"results_folder = {str(tmp_path / 'results' / 'small')!r}"
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output.data for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert "image/png" in shown[0]
    assert "continuous" in shown[1]["text/html"]
