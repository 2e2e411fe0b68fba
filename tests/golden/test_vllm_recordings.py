"""The vLLM policy against schedules recorded from the real vLLM 0.33.0 scheduler."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from batchsim.check.conform import conform
from tests.golden.planted import not_found

FOLDER = Path(os.environ.get("BATCHSIM_GOLDEN", "")) / "vllm-v1"
NO_FOLDER = "BATCHSIM_GOLDEN names no folder with vllm-v1 recordings"
RECORDINGS = sorted(FOLDER.glob("*.json")) if "BATCHSIM_GOLDEN" in os.environ else []
NUM_RECORDINGS = 18


def test_every_recording_is_there() -> None:
    """None of the recordings is passed over."""
    if not FOLDER.is_dir():
        pytest.skip(NO_FOLDER)
    assert len(RECORDINGS) == NUM_RECORDINGS


@pytest.mark.parametrize("path", RECORDINGS or [None], ids=lambda path: path.stem if path else "none")
def test_every_step_equals_the_recorded_one(path: Path | None) -> None:
    """Scheduled tokens, prefix hits, preemptions, finishes, blocks and queue lengths are equal in every step."""
    if path is None:
        pytest.skip(NO_FOLDER)
    verdict = conform(path, "vllm")
    assert verdict.difference == ""
    assert verdict.num_steps == len(json.loads(path.read_text(encoding="utf-8"))["steps"])


@pytest.mark.slow
@pytest.mark.parametrize("path", RECORDINGS or [None], ids=lambda path: path.stem if path else "none")
def test_every_planted_error_is_found_at_its_step(path: Path | None, tmp_path: Path) -> None:
    """One wrong number, row, order, step or total anywhere is a difference, named with its step and field."""
    if path is None:
        pytest.skip(NO_FOLDER)
    assert not_found(path, tmp_path) == []
