"""The notebooks run from top to bottom, use public names only, and are kept without outputs, but for the long one."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import batchsim

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
LONG = "sayings"  # takes minutes, and so is kept with what it printed
every_notebook = pytest.mark.parametrize("name", sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")))
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


def code_cells(name: str) -> list[Any]:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def run(name: str, folder: Path, **parameters: str) -> list[Any]:
    """The outputs of a notebook run in `folder`; `parameters` replace lines of its cell of parameters."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    cell = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    lines = cell.source.splitlines()
    for key, value in parameters.items():
        (at,) = [i for i, line in enumerate(lines) if line.startswith(f"{key} = ")]
        lines[at] = f"{key} = {value!r}"
    cell.source = "\n".join(lines)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def shown(outputs: list[Any], kind: str) -> list[str]:
    return [output.data[kind] for output in outputs if kind in output.get("data", {})]


@every_notebook
def test_a_notebook_is_kept_without_outputs(name: str) -> None:
    """Neither outputs nor execution counts are stored, but in the long one, where every cell was run in order."""
    cells = code_cells(name)
    assert cells
    if name == LONG:
        assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    else:
        assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)


@every_notebook
def test_a_notebook_uses_public_names_only(name: str) -> None:
    """Of the package it imports `batchsim` and nothing within, and takes from it what `batchsim.__all__` names."""
    nodes = [node for cell in code_cells(name) for node in ast.walk(ast.parse(cell.source))]
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    assert [module for module in modules if module.partition(".")[0] in {"batchsim", "tests"}] == ["batchsim"]
    assert not [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda)]
    used = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "batchsim"
    }
    assert used
    assert used <= set(batchsim.__all__)


def test_every_public_name_is_there() -> None:
    """Each name can be fetched, from wherever it is, and is listed."""
    assert dir(batchsim) == sorted(batchsim.__all__)
    assert all(callable(getattr(batchsim, name)) for name in batchsim.__all__)


@pytest.mark.slow
def test_p99_vs_qps_draws_the_picture_of_a_results_folder(tmp_path: Path) -> None:
    """With the folder of a scenario that was just run, the picture and the table come out; where the queue grows the
    table has no latency with time in it."""
    (tmp_path / "small.yaml").write_text(SMALL.replace("4/s]", "400/s]"))
    ran = batchsim.run_scenario(batchsim.load_scenario(str(tmp_path / "small.yaml")), out=tmp_path / "results")
    outputs = run("p99_vs_qps", tmp_path, results_folder=str(tmp_path / "results" / "small"))
    assert len(shown(outputs, "image/png")) == 1
    rows = re.findall(r"<tr>\s*<th>\d+</th>(.*?)</tr>", shown(outputs, "text/html")[0], re.DOTALL)
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in rows]  # label, load, unstable, TTFT and its interval, ...
    grows = [bool(each) for each in ran.summary["unstable"]]
    assert True in grows and False in grows and [row[3] == row[4] == row[7] == "NaN" for row in cells] == grows


@pytest.mark.slow
def test_policy_anatomy_shows_a_minute_under_every_policy(tmp_path: Path) -> None:
    """The table, three pictures and a life of one request under each of the four policies come out."""
    outputs = run("policy_anatomy", tmp_path, out=str(tmp_path / "results"))
    table = shown(outputs, "text/html")[0]
    assert len(shown(outputs, "image/png")) == 3
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    for policy in ("static", "dynamic", "continuous", "preemptive"):
        assert policy in table
        assert printed.count(f"{policy} at 6 req/s offered, seed 0: request 150") == 1


@pytest.mark.slow
def test_capacity_planning_finds_what_one_replica_carries_and_tries_several(tmp_path: Path) -> None:
    """The search's table with its interval, two pictures, and of 3 and 4 replicas only the 4 hold the target; which
    surely do is what the intervals say."""
    outputs = run("capacity_planning", tmp_path, out=str(tmp_path / "results"))
    printed, decided = (output.text for output in outputs if output.get("name") == "stdout")
    assert decided == "surely holds: continuous, replicas.count=4\nopen: continuous, replicas.count=3\n"
    assert re.search(r"^continuous +\d+\.\d+ \[\d+\.\d+, \d+\.\d+\]", printed, re.MULTILINE)
    assert "not decided" not in printed
    assert len(shown(outputs, "image/png")) == 2
    rows = batchsim.load_results(tmp_path / "results" / "bursty").summary
    assert dict(zip(rows["vary"], rows["slo_margin"] >= 0, strict=True)) == {3: False, 4: True}


def test_every_condition_of_a_saying_is_one_that_can_be_run() -> None:
    """Its keys are accepted, its policies and load are among those that run, and the kept outputs tell of it."""
    names: dict[str, Any] = {}
    cells = code_cells(LONG)
    for cell in cells[:3]:
        exec(cell.source, names)
    printed = "".join(output.text for cell in cells for output in cell.outputs)
    assert {name for name, *_ in names["tests"]} == set(names["sayings"])
    for name, condition, changes, load, policy, others, _ in names["tests"]:
        scenario = batchsim.load_scenario("claims", overrides=changes)
        assert {policy, *others} <= set(scenario.file.policies)
        assert load in scenario.loads
        assert condition in printed and names["sayings"][name][0] in printed


@pytest.mark.slow
def test_sayings_gives_a_verdict_under_every_condition(tmp_path: Path) -> None:
    """With few requests: a table for each saying, and one for the requests that wait at most a token."""
    outputs = run(LONG, tmp_path, out=str(tmp_path / "results"), jobs=1, requests=10, duration="1min")
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    assert len(re.findall(r"holds under \d of \d conditions", printed)) == 6
    verdicts = re.findall(r" (?:yes|no|seeds differ|undefined)(?: |$)", printed, re.MULTILINE)
    assert len(verdicts) >= 33
    waits = printed.partition("longest wait in s")[2]
    assert len([line for line in waits.splitlines() if re.search(r"\d$", line)]) == 6
