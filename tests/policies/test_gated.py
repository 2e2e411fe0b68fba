"""Gated batching, by hand: a step takes 10 ns, 1 more a prefill token, 2 a decode; a KV block holds 4 tokens."""

from __future__ import annotations

from typing import Any

import pytest
from stepping import Run, run, run_every_way
from whole_batches import blocked, requests, times

from sim.policies.gated import Gated, GatedConfig


def gated(arrivals: str, blocks: int = 1000, **knobs: Any) -> Run:
    return run(Gated, GatedConfig(**knobs), arrivals, blocks=blocks)


def test_who_comes_while_a_group_runs_waits_until_all_of_it_has_left() -> None:
    """Request 2 comes at 1; at 34 a slot is empty, but the gate opens at 46, when the longer one has left too.

    Steps: two prompts of 4 (18 ns), two decodes (14), one decode (12), then the prompt of 4 alone (14).
    """
    result = gated("0:4->2 0:4->3 1:4->1")
    assert result.items == [[(0, 4), (1, 4)], [(0, 1), (1, 1)], [(1, 1)], [(2, 4)]]
    assert [row.start_ns for row in result.log] == [0, 18, 32, 44]
    assert times(result.records, "scheduled_ns", "last_token_ns") == [(0, 32), (0, 44), (44, 58)]
    assert blocked(result.records) == [(18, 2, "gate")]
