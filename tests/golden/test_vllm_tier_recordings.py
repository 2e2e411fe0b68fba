"""Policy `vllm` with KV offloaded to the host, against recordings of vLLM 0.33.0's scheduler with its real
OffloadingConnector and the manager of its CPU tier: every step, transfer and chunk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from batchsim.check.conform import conform
from tests.golden.planted import not_found

FOLDER = Path(os.environ.get("BATCHSIM_GOLDEN", "")) / "vllm-tiers"
RECORDINGS = sorted(FOLDER.glob("*.json"))
THOROUGH = {"kt05_chunk4", "kt08_slow_links", "kt11_priority_sync"}
"""Recordings that between them have every kind of fact."""


def _cases(*, planted: bool = False) -> list[Any]:
    if "BATCHSIM_GOLDEN" not in os.environ:
        return [pytest.param(None, id="none", marks=pytest.mark.skip("BATCHSIM_GOLDEN names no folder of recordings"))]
    paths = [path for path in RECORDINGS if not planted or path.stem in THOROUGH]
    return [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if planted else []) for path in paths]


def test_every_recording_is_there() -> None:
    """None of the recordings is passed over."""
    if "BATCHSIM_GOLDEN" not in os.environ:
        pytest.skip("BATCHSIM_GOLDEN names no folder of recordings")
    assert len(RECORDINGS) == 7


@pytest.mark.parametrize("path", _cases())
def test_every_step_equals_the_recorded_one(path: Path) -> None:
    """Times, tokens, hits, lookups, loads, stores, flushes, transfers, chunks, blocks and queues."""
    verdict = conform(path, "vllm")
    assert (verdict.difference, verdict.policy) == ("", "vllm")
    assert verdict.num_steps == len(json.loads(path.read_text(encoding="utf-8"))["steps"])


@pytest.mark.parametrize("path", _cases(planted=True))
def test_every_planted_error_is_found_where_it_is(path: Path, tmp_path: Path) -> None:
    """One wrong number, row, order, step or total anywhere is a difference, named with its step."""
    assert not_found(path, tmp_path) == []
