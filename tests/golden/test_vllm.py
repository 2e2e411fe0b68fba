"""The vLLM policy against schedules recorded from the real vLLM 0.33.0 scheduler."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sim.conform import conform
from sim.errors import ScenarioError

FOLDER = Path(os.environ.get("BATCHSIM_GOLDEN", "")) / "vllm-v1"
NO_FOLDER = "BATCHSIM_GOLDEN names no folder with vllm-v1 recordings"
WITHOUT_PREFIX_CACHING = 14


def recordings(prefix_caching: bool) -> list[Path]:
    if "BATCHSIM_GOLDEN" not in os.environ or not FOLDER.is_dir():
        return []
    meta = {path: json.loads(path.read_text(encoding="utf-8"))["meta"] for path in sorted(FOLDER.glob("*.json"))}
    return [path for path, knobs in meta.items() if knobs["enable_prefix_caching"] is prefix_caching]


def test_every_recording_without_prefix_caching_is_there() -> None:
    """None of the recordings is passed over."""
    if not FOLDER.is_dir():
        pytest.skip(NO_FOLDER)
    assert len(recordings(False)) == WITHOUT_PREFIX_CACHING


@pytest.mark.parametrize("path", recordings(False) or [None], ids=lambda path: path.stem if path else "none")
def test_every_step_equals_the_recorded_one(path: Path | None) -> None:
    """Scheduled tokens, preemptions, finishes, blocks and queue lengths are equal in every step."""
    if path is None:
        pytest.skip(NO_FOLDER)
    verdict = conform(path, "vllm")
    assert verdict.difference == ""
    assert verdict.num_steps == len(json.loads(path.read_text(encoding="utf-8"))["steps"])


@pytest.mark.parametrize("change", ["tokens", "order", "blocks"])
def test_a_changed_recording_is_noticed(change: str, tmp_path: Path) -> None:
    """One other number anywhere is a difference, named with its step."""
    paths = recordings(False)
    if not paths:
        pytest.skip(NO_FOLDER)
    recording = json.loads(paths[0].read_text(encoding="utf-8"))
    step = next(i for i, s in enumerate(recording["steps"]) if len(s["scheduled"]) > 1)
    if change == "tokens":
        recording["steps"][step]["scheduled"][0][1] += 1
    elif change == "order":
        recording["steps"][step]["scheduled"].reverse()
    else:
        recording["steps"][step]["free_blocks_after"] += 1
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(recording), encoding="utf-8")
    assert conform(path, "vllm").difference.startswith(f"step {step + 1} differs in")


def test_prefix_caching_is_refused_not_ignored() -> None:
    """A recording with a knob that is not simulated is an error."""
    paths = recordings(True)
    if not paths:
        pytest.skip(NO_FOLDER)
    with pytest.raises(ScenarioError, match="enable_prefix_caching: true is not simulated"):
        conform(paths[0], "vllm")
