"""`batchsim train`: what it prints and writes, and how it fails."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from batchsim.cli import app
from batchsim.training.kpis import KPIS
from batchsim.training.packers.registry import PACKERS

PACKED = "{padded: {kind: transformers.padded}, best fit: {kind: trl.bfd}}"
FEW = ["--set", "training.lengths.examples=600", "--set", f"training.packers={PACKED}"]
FEW += ["--set", "training.global_batch=null"]  # which neither of the two packs


def test_a_comparison_is_printed_and_kept(tmp_path: Path) -> None:
    """A line a packer with what the finding is, and files with every figure and every step."""
    result = CliRunner().invoke(app, ["train", "packing", *FEW, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    folder = tmp_path / "packing" / "train"
    assert {file.name for file in folder.iterdir()} == {
        "packers.csv",
        "steps.csv",
        "training.json",
        "training.txt",
        "training.png",
    }
    rows = list(csv.DictReader((folder / "packers.csv").open(encoding="utf-8")))
    assert list(rows[0]) == ["packer", "kind", *(kpi.name for kpi in KPIS)]
    assert [row["packer"] for row in rows] == [line.split("  ")[0] for line in result.output.split("\n")[4:6]]
    steps = list(csv.DictReader((folder / "steps.csv").open(encoding="utf-8")))
    assert len(steps) == sum(int(float(row["steps"])) for row in rows)
    assert "Full rows are not even ones" in result.output
    assert (folder / "training.txt").read_text(encoding="utf-8").strip() in result.output
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")


def test_json_has_the_figures_and_how_they_were_made(tmp_path: Path) -> None:
    """The same rows, with seed, versions and machine."""
    result = CliRunner().invoke(app, ["train", "packing", *FEW, "--out", str(tmp_path), "--json"])
    value = json.loads(result.output)
    assert [row["kind"] for row in value["packers"]][:1] == ["transformers.padded"]
    assert {"seed", "machine", "code", "commit", "path"} <= value.keys()


def test_the_packers_are_listed() -> None:
    """Every packer by kind, with the framework it follows."""
    result = CliRunner().invoke(app, ["train", "--packers"])
    assert result.exit_code == 0 and all(kind in result.output for kind in PACKERS)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["train"], "no scenario is named. Give one, like batchsim train packing, or --packers for a list."),
        (["train", "bursty"], "bursty: no such training scenario. Shipped are packing"),
        (["train", "packing", "--set", "capacity"], "--set capacity: not of the form key.key=value"),
        (
            ["train", "packing", "--set", "training.packers.x={kind: trl.bfdd}"],
            "kind is trl.bfdd. Did you mean trl.bfd",
        ),
        (["run", "SCENARIO"], "s.yaml:1: a training block is for batchsim train. Run it by that."),
        (["conform", "--policy", "vllm", "FILE"], "is what a packer made, of no policy and with one order."),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(given: list[str], expected: str, tmp_path: Path) -> None:
    """On stderr, with what to do."""
    path = tmp_path / "packed.json"
    path.write_text('{"packer": "trl.bfd", "lengths": [3]}', encoding="utf-8")
    (tmp_path / "s.yaml").write_text("training: {}\n", encoding="utf-8")
    files = {"FILE": str(path), "SCENARIO": str(tmp_path / "s.yaml")}
    result = CliRunner().invoke(app, [files.get(word, word) for word in given])
    assert result.exit_code == 2 and expected in result.stderr and result.stderr.count("\n") == 1
