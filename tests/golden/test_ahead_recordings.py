"""Policies against schedules recorded from real engines that schedule ahead of results: vLLM 0.33.0, asynchronous,
with pipelines, drafts, adapters or images, with KV passed between engines, and of pooling models; and SGLang 0.5.23
with overlap."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from batchsim.check.conform import conform
from tests.golden.planted import not_found

GOLDEN = Path(os.environ.get("BATCHSIM_GOLDEN", ""))
FOLDERS = {
    "vllm-async": ("vllm", 7),
    "vllm-pp": ("vllm", 4),
    "vllm-spec": ("vllm", 5),
    "vllm-prefill-interval": ("vllm", 2),
    "vllm-lora": ("vllm", 3),
    "vllm-mm": ("vllm", 5),
    "vllm-pd": ("vllm", 3),
    "sglang-overlap": ("sglang", 11),
}  # the policy that makes these schedules again, and how many there are
RECORDINGS = sorted(path for name in FOLDERS for path in (GOLDEN / name).glob("*.json"))
SMALL = {"a11_single", "po01_whole_prompts"}  # in which errors are planted every time


def _cases(*, planted: bool = False) -> list[Any]:
    if "BATCHSIM_GOLDEN" not in os.environ:
        return [pytest.param(None, id="none", marks=pytest.mark.skip("BATCHSIM_GOLDEN names no folder of recordings"))]
    slow = {path for path in RECORDINGS if planted and path.stem not in SMALL}
    return [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] if p in slow else []) for p in RECORDINGS]


def test_every_recording_is_there() -> None:
    """None of the recordings is passed over."""
    if "BATCHSIM_GOLDEN" not in os.environ:
        pytest.skip("BATCHSIM_GOLDEN names no folder of recordings")
    there = {name: len(list((GOLDEN / name).glob("*.json"))) for name in FOLDERS}
    assert there == {name: count for name, (_, count) in FOLDERS.items()}


@pytest.mark.parametrize("path", _cases())
def test_every_step_equals_the_recorded_one(path: Path) -> None:
    """Times of host and device, tokens, hits, preemptions, finishes, blocks, queues and waste are the recorded ones."""
    verdict = conform(path)
    assert (verdict.difference, verdict.policy) == ("", FOLDERS[path.parent.name][0])
    assert verdict.num_steps == len(json.loads(path.read_text(encoding="utf-8"))["steps"])


@pytest.mark.parametrize("path", _cases(planted=True))
def test_every_planted_error_is_found_at_its_step(path: Path, tmp_path: Path) -> None:
    """One wrong number, row, order, step or total anywhere is a difference, named with its step and field."""
    assert not_found(path, tmp_path) == []
