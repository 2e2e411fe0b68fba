"""The vLLM policy against schedules recorded from the real vLLM 0.33.0 scheduler."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sim.conform import conform

FOLDER = Path(os.environ.get("BATCHSIM_GOLDEN", "")) / "vllm-v1"
NO_FOLDER = "BATCHSIM_GOLDEN names no folder with vllm-v1 recordings"
RECORDINGS = sorted(FOLDER.glob("*.json")) if "BATCHSIM_GOLDEN" in os.environ else []
NUM_RECORDINGS, WITH_PREFIX_CACHING = 18, "11_prefix_on_pressure"


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


@pytest.mark.parametrize("change", ["tokens", "order", "blocks", "cached"])
def test_a_changed_recording_is_noticed(change: str, tmp_path: Path) -> None:
    """One other number anywhere is a difference, named with its step."""
    if not RECORDINGS:
        pytest.skip(NO_FOLDER)
    recording = json.loads((FOLDER / f"{WITH_PREFIX_CACHING}.json").read_text(encoding="utf-8"))
    step = next(i for i, s in enumerate(recording["steps"]) if len(s["scheduled"]) > 1 and s.get("cached"))
    row = recording["steps"][step]
    if change == "tokens":
        row["scheduled"][0][1] += 1
    elif change == "order":
        row["scheduled"].reverse()
    elif change == "blocks":
        row["free_blocks_after"] += 1
    else:
        row["cached"][0][1] += recording["meta"]["block_size"]
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(recording), encoding="utf-8")
    assert conform(path, "vllm").difference.startswith(f"step {step + 1} differs in")
