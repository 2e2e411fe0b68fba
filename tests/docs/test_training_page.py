"""The page on training names every figure with its words, every packer and every key."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from batchsim.training.config import TrainingConfig
from batchsim.training.kpis import KPIS
from batchsim.training.packers.registry import PACKERS

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")


def test_the_figures_are_those_of_the_table() -> None:
    """A row each, in the order of packers.csv and in the same words."""
    rows = [line for line in PAGE.splitlines() if line.startswith("| `") and line.count("|") == 3]
    assert [f"| `{kpi.name}` | {kpi.words} |" for kpi in KPIS] == rows[-len(KPIS) :]


def test_every_packer_and_every_key_is_named() -> None:
    """Packers as the command lists them, keys in the table of a scenario."""
    assert [kind for kind in PACKERS if f"  {kind} " not in PAGE] == []
    assert [key.name for key in fields(TrainingConfig) if f"`{key.name}`" not in PAGE] == []
