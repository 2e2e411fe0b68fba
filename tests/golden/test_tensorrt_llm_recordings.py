"""The TensorRT-LLM policy against schedules recorded from its batch manager: whole runs, and one rule a file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from batchsim.check.conform import conform
from tests.golden.planted import not_found

FOLDER = Path(os.environ.get("BATCHSIM_GOLDEN", "")) / "tensorrt_llm"
NO_FOLDER = "BATCHSIM_GOLDEN names no folder with tensorrt_llm recordings"
RUNS, RULES = (
    sorted(folder.glob("*.json")) if "BATCHSIM_GOLDEN" in os.environ else [] for folder in (FOLDER, FOLDER / "minimal")
)


def test_every_recording_is_there() -> None:
    """None of the recordings is passed over; four runs have a twin that lists its batches by arrival."""
    if not FOLDER.is_dir():
        pytest.skip(NO_FOLDER)
    assert (len(RUNS), len(RULES)) == (14, 7)
    assert [path.stem[:2] for path in RUNS if path.stem.endswith("_by_arrival")] == ["09", "11", "13", "17"]


@pytest.mark.parametrize("path", RUNS + RULES or [None], ids=lambda path: path.stem if path else "none")
def test_every_step_equals_the_recorded_one(path: Path | None) -> None:
    """Batches in their order, prefix hits, pauses, finishes, blocks and queue lengths are equal in every step."""
    if path is None:
        pytest.skip(NO_FOLDER)
    verdict = conform(path, "tensorrt_llm")
    assert verdict.difference == ""
    assert verdict.num_steps == len(json.loads(path.read_text(encoding="utf-8"))["steps"])
    assert verdict.order == ("arrival" if path.stem.endswith("_by_arrival") else "exact")


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow) for path in RUNS] + RULES or [None],
    ids=lambda path: path.stem if path else "none",
)
def test_every_planted_error_is_found_at_its_step(path: Path | None, tmp_path: Path) -> None:
    """One wrong number, row, order, step or total anywhere is a difference, named with its step and field."""
    if path is None:
        pytest.skip(NO_FOLDER)
    assert not_found(path, tmp_path) == []
