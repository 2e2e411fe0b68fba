"""The SGLang policy against schedules recorded from the real SGLang 0.5.23 scheduler, without overlap."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.planted import not_found
from tests.golden.recordings import cases, equal, numbers_in, recordings

RECORDINGS = recordings("sglang")
SMALL = "09_no_chunks_max_prefill"  # in which errors are planted every time


def test_every_recording_is_there() -> None:
    """None of the recordings is passed over."""
    assert numbers_in("sglang") == [13]


@pytest.mark.parametrize("path", cases(RECORDINGS))
def test_every_step_equals_the_recorded_one(path: Path) -> None:
    """Scheduled tokens, prefix hits, retractions, finishes, blocks and queue lengths are equal in every step."""
    equal(path, "sglang")


@pytest.mark.parametrize("path", cases(RECORDINGS, slow=lambda path: path.stem != SMALL))
def test_every_planted_error_is_found_at_its_step(path: Path, tmp_path: Path) -> None:
    """One wrong number, row, order, step or total anywhere is a difference, named with its step and field."""
    assert not_found(path, tmp_path, policy="sglang") == []
