"""Slots by KV memory, by hand: a step takes 10 ns, 1 more a prefill token, 2 a decode; a KV block holds 4 tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from batchsim.policies.families.memory_seqs import MemorySeqs, MemorySeqsConfig
from tests.support.random_cases import random_cases
from tests.support.stepping import Run, crowds, run, run_every_way

LIMITS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "watermark": 0.0}


def by_memory(arrivals: str, blocks: int, **knobs: Any) -> Run:
    return run(MemorySeqs, MemorySeqsConfig(**LIMITS | knobs), arrivals, blocks=blocks)


def test_as_many_run_as_the_blocks_hold_of_what_the_running_have_now() -> None:
    """One that runs with 2 blocks of 9: 0.95 x 9 / 2 are 4 slots, so three of the four that wait come in."""
    result = by_memory("0:8->3 1:4->1 1:4->1 1:4->1 1:4->1", 9)
    assert result.items[1] == [(0, 1), (1, 4), (2, 4), (3, 4)]
    assert result.items[2] == [(0, 1), (4, 4)]


def test_the_share_is_of_all_blocks_and_rounded_down() -> None:
    """8 blocks of which a sequence has 2: under 100 % four slots, under 99 % three."""
    assert [len(by_memory("0:7->3 1:1->1 1:1->1 1:1->1", 8, factor=f).items[1]) for f in (1.0, 0.99)] == [4, 3]


def test_what_runs_is_a_lower_bound_and_stated_numbers_are_the_outer_ones() -> None:
    """By memory a single slot: the second comes in under a least of 2; under a most of 2 the third does not."""
    assert [len(items) for items in by_memory("0:20->2 1:1->2 1:1->1", 6, factor=0.9).items[:2]] == [1, 1]
    assert [len(items) for items in by_memory("0:20->2 1:1->2 1:1->1", 8, min_num_seqs=2).items[:2]] == [1, 2]
    assert [len(items) for items in by_memory("0:4->2 1:1->2 1:1->1", 99, max_num_seqs=2).items[:2]] == [1, 2]


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"min_num_seqs": 9}, "min_num_seqs 9 must be at most max_num_seqs 8"),
        ({"factor": 0.0}, "factor 0 uses no KV memory. Write a share above 0"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MemorySeqsConfig(**LIMITS | knobs)


@random_cases(25)
@given(crowds())
def test_every_driver_agrees(arrivals: Any) -> None:
    run_every_way(MemorySeqs, MemorySeqsConfig(**LIMITS), arrivals, blocks=12)
