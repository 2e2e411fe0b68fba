"""The TensorRT-LLM policy against schedules recorded from its batch manager: whole runs, and one rule a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.planted import not_found
from tests.golden.recordings import cases, equal, numbers_in, recordings

RUNS, RULES = recordings("tensorrt_llm"), recordings("tensorrt_llm/minimal")


def test_every_recording_is_there() -> None:
    """None of the recordings is passed over; four runs have a twin that lists its batches by arrival."""
    assert numbers_in("tensorrt_llm", "tensorrt_llm/minimal") == [14, 7]
    assert [path.stem[:2] for path in RUNS if path.stem.endswith("_by_arrival")] == ["09", "11", "13", "17"]


@pytest.mark.parametrize("path", cases(RUNS + RULES))
def test_every_step_equals_the_recorded_one(path: Path) -> None:
    """Batches in their order, prefix hits, pauses, finishes, blocks and queue lengths are equal in every step."""
    assert equal(path, "tensorrt_llm").order == ("arrival" if path.stem.endswith("_by_arrival") else "exact")


@pytest.mark.parametrize("path", cases(RUNS + RULES, slow=lambda path: path in RUNS))
def test_every_planted_error_is_found_at_its_step(path: Path, tmp_path: Path) -> None:
    """One wrong number, row, order, step or total anywhere is a difference, named with its step and field."""
    assert not_found(path, tmp_path) == []
