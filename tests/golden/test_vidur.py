"""The policies that are Vidur's (commit 7d47513a) against schedules recorded from it, step by step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from batchsim.check.conform import conform

FOLDER = Path(os.environ.get("BATCHSIM_GOLDEN", "")) / "vidur"
STEPS = {
    "orca": ("orca", 807),
    "sarathi": ("sarathi", 477),
    "vllm": ("vllm_v0", 477),
    "faster_transformer_leakfixed": ("faster_transformer", 1373),
}
PLANTED = {
    "start": ("sarathi", ("iterations", 300, "start"), 0.001, "step 301 differs in start"),
    "end": ("sarathi", ("iterations", 300, "end"), 0.00002, "step 301 differs in end"),
    "tokens": ("sarathi", ("iterations", 20, "batch", 0, 1), 1, "step 21 differs in batch"),
    "processed": ("orca", ("iterations", 40, "num_processed_before", 2), 1, "step 41 differs in num_processed_before"),
    "blocks": (
        "vllm",
        ("iterations", 99, "allocated_blocks_after_schedule"),
        -1,
        "step 100 differs in allocated_blocks",
    ),
    "lost": ("vllm", ("preemptions", 3, "num_processed_tokens_lost"), 1, "differs in num_processed_tokens_lost"),
    "victim": ("vllm", ("preemptions", 3, "request_id"), 1, "differs in preempted"),
    "restarts": ("sarathi", ("results", 16, "num_restarts"), 1, "differs in num_restarts of request 16"),
    "first token": (
        "orca",
        ("results", 5, "prefill_completed_at"),
        0.02,
        "differs in prefill_completed_at of request 5",
    ),
}


def recording(name: str) -> Path:
    path = FOLDER / f"{name}.json"
    if "BATCHSIM_GOLDEN" not in os.environ or not path.exists():
        pytest.skip("BATCHSIM_GOLDEN names no folder with Vidur's recordings")
    return path


@pytest.mark.parametrize("name", STEPS)
def test_every_step_equals_the_recorded_one(name: str) -> None:
    """Times, batches in order, tokens processed before, completions, blocks and preemptions are the recorded ones."""
    verdict = conform(recording(name))
    assert (verdict.difference, (verdict.policy, verdict.num_steps)) == ("", STEPS[name])


@pytest.mark.parametrize("error", PLANTED)
def test_a_planted_error_is_found_at_its_step(error: str, tmp_path: Path) -> None:
    """One number changed anywhere is a difference, named with its field."""
    name, where, change, expected = PLANTED[error]
    data: Any = json.loads(recording(name).read_text(encoding="utf-8"))
    row = data
    for key in where[:-1]:
        row = row[key]
    row[where[-1]] += change
    path = tmp_path / "planted.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    difference = conform(path).difference
    assert expected in difference and "iterations[" in difference


def test_another_policy_with_the_same_knobs_makes_another_schedule() -> None:
    """Orca lets a request join the batch in which the recorded run-to-completion scheduler makes it wait."""
    assert "differs in batch" in conform(recording("faster_transformer_leakfixed"), "orca").difference
