"""Policy `vllm` with KV offloaded to the host, against recordings of vLLM 0.33.0's scheduler with its real
OffloadingConnector and the manager of its CPU tier: every step, transfer and chunk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.planted import not_found
from tests.golden.recordings import cases, equal, numbers_in, recordings

RECORDINGS = recordings("vllm-tiers")
THOROUGH = {"kt05_chunk4", "kt08_slow_links", "kt11_priority_sync"}
"""Recordings that between them have every kind of fact."""


def test_every_recording_is_there() -> None:
    """None of the recordings is passed over."""
    assert numbers_in("vllm-tiers") == [7]


@pytest.mark.parametrize("path", cases(RECORDINGS))
def test_every_step_equals_the_recorded_one(path: Path) -> None:
    """Times, tokens, hits, lookups, loads, stores, flushes, transfers, chunks, blocks and queues."""
    assert equal(path, "vllm").policy == "vllm"


@pytest.mark.parametrize("path", cases([one for one in RECORDINGS if one.stem in THOROUGH], slow=lambda path: True))
def test_every_planted_error_is_found_where_it_is(path: Path, tmp_path: Path) -> None:
    """One wrong number, row, order, step or total anywhere is a difference, named with its step."""
    assert not_found(path, tmp_path) == []
