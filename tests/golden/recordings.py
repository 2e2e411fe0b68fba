"""The recordings of real engines, in folders of the one that BATCHSIM_GOLDEN names; tests skip where it names none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchsim.check.conform import StepComparison, conform

GOLDEN = Path(os.environ.get("BATCHSIM_GOLDEN", ""))
NO_FOLDER = "BATCHSIM_GOLDEN names no folder of recordings"


def recordings(*folders: str) -> list[Path]:
    """The files of `folders`, in order of their paths."""
    if "BATCHSIM_GOLDEN" not in os.environ:
        return []
    return sorted(path for folder in folders for path in (GOLDEN / folder).glob("*.json"))


def cases(paths: list[Path], slow: Callable[[Path], bool] = lambda path: False) -> list[Any]:
    """`paths` as parameters of a test; without any, one that says why it is skipped."""
    if not paths:
        return [pytest.param(None, id="none", marks=pytest.mark.skip(NO_FOLDER))]
    return [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if slow(path) else []) for path in paths]


def numbers_in(*folders: str) -> list[int]:
    """How many recordings there are in each folder."""
    if "BATCHSIM_GOLDEN" not in os.environ:
        pytest.skip(NO_FOLDER)
    return [len(recordings(folder)) for folder in folders]


def equal(path: Path, policy: str | None = None) -> StepComparison:
    """The comparison with the recording at `path`, all of whose steps are equal."""
    verdict = conform(path, policy)
    assert isinstance(verdict, StepComparison)
    assert verdict.difference == ""
    assert verdict.num_steps == len(json.loads(path.read_text(encoding="utf-8"))["steps"])
    return verdict
