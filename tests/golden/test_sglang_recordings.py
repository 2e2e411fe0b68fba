"""The SGLang policy against schedules recorded from the real SGLang 0.5.23 scheduler, without overlap."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchsim.check.conform import conform

FOLDER = Path(os.environ.get("BATCHSIM_GOLDEN", "")) / "sglang"
NO_FOLDER = "BATCHSIM_GOLDEN names no folder with sglang recordings"
RECORDINGS = sorted(FOLDER.glob("*.json")) if "BATCHSIM_GOLDEN" in os.environ else []
NUM_RECORDINGS = 13
NUM_PLANTED = 4
"""How many of them the fast tests change, each in every way."""


def one_token_more(step: dict[str, Any]) -> None:
    step["scheduled"][0][1] += 1


def other_order(step: dict[str, Any]) -> None:
    step["scheduled"].reverse()


def one_block_more(step: dict[str, Any]) -> None:
    step["free_blocks_after"] += 1


def other_end(step: dict[str, Any]) -> None:
    step["finished"].append(step["finished"][0] + 1)


def one_waits_more(step: dict[str, Any]) -> None:
    step["num_waiting"] += 1


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], None], Callable[[dict[str, Any]], bool]]] = {
    "tokens": (one_token_more, lambda step: True),
    "order": (other_order, lambda step: len(step["scheduled"]) > 1),
    "blocks": (one_block_more, lambda step: True),
    "finished": (other_end, lambda step: bool(step["finished"])),
    "waiting": (one_waits_more, lambda step: True),
}
"""What is changed of a step, and in which steps it can be."""


def test_every_recording_is_there() -> None:
    """None of the recordings is passed over."""
    if not FOLDER.is_dir():
        pytest.skip(NO_FOLDER)
    assert len(RECORDINGS) == NUM_RECORDINGS


@pytest.mark.parametrize("path", RECORDINGS or [None], ids=lambda path: path.stem if path else "none")
def test_every_step_equals_the_recorded_one(path: Path | None) -> None:
    """Scheduled tokens, prefix hits, retractions, finishes, blocks and queue lengths are equal in every step."""
    if path is None:
        pytest.skip(NO_FOLDER)
    verdict = conform(path, "sglang")
    assert verdict.difference == ""
    assert verdict.num_steps == len(json.loads(path.read_text(encoding="utf-8"))["steps"])


@pytest.mark.parametrize(
    "path",
    [
        *(RECORDINGS[:NUM_PLANTED] or [None]),
        *(pytest.param(path, marks=pytest.mark.slow) for path in RECORDINGS[NUM_PLANTED:]),
    ],
    ids=lambda path: path.stem if path else "none",
)
def test_a_planted_error_is_noticed(path: Path | None, tmp_path: Path) -> None:
    """One other number in the first step that has it is a difference, named with its step."""
    if path is None:
        pytest.skip(NO_FOLDER)
    text = path.read_text(encoding="utf-8")
    for name, (change, possible) in CHANGES.items():
        recording = json.loads(text)
        index = next(i for i, step in enumerate(recording["steps"]) if possible(step))
        change(recording["steps"][index])
        changed = tmp_path / f"{name}.json"
        changed.write_text(json.dumps(recording), encoding="utf-8")
        assert conform(changed, "sglang").difference.startswith(f"step {index + 1} differs in"), name
