"""Policies against schedules recorded from real engines that schedule ahead of results: vLLM 0.33.0, asynchronous,
with pipelines, drafts, adapters or images, with KV passed between engines, and of pooling models; and SGLang 0.5.23
with overlap."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.planted import not_found
from tests.golden.recordings import cases, equal, numbers_in, recordings

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
RECORDINGS = recordings(*FOLDERS)
SMALL = {"a11_single", "po01_whole_prompts"}  # in which errors are planted every time


def test_every_recording_is_there() -> None:
    """None of the recordings is passed over."""
    assert numbers_in(*FOLDERS) == [count for _, count in FOLDERS.values()]


@pytest.mark.parametrize("path", cases(RECORDINGS))
def test_every_step_equals_the_recorded_one(path: Path) -> None:
    """Times of host and device, tokens, hits, preemptions, finishes, blocks, queues and waste are the recorded ones."""
    assert equal(path).policy == FOLDERS[path.parent.name][0]


@pytest.mark.parametrize("path", cases(RECORDINGS, slow=lambda path: path.stem not in SMALL))
def test_every_planted_error_is_found_at_its_step(path: Path, tmp_path: Path) -> None:
    """One wrong number, row, order, step or total anywhere is a difference, named with its step and field."""
    assert not_found(path, tmp_path) == []
