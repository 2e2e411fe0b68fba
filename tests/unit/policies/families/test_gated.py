"""Gated batching, by hand: a step takes 10 ns, 1 more a prefill token, 2 a decode; a KV block holds 4 tokens."""

from __future__ import annotations

from typing import Any

import pytest

from batchsim.policies.families.gated import Gated, GatedConfig
from tests.support.stepping import Run, run, run_every_way
from tests.support.whole_batches import blocked, leap_end_ns, outcomes, requests, times


def gated(arrivals: str, blocks: int = 1000, **knobs: Any) -> Run:
    return run(Gated, GatedConfig(**knobs), arrivals, blocks=blocks)


def test_who_comes_while_a_group_runs_waits_until_all_of_it_has_left() -> None:
    """Request 2 comes at 1; at 32 a slot is empty, but the gate opens at 44, when the longest output has ended too."""
    result = gated("0:4->2 0:4->3 1:4->1")
    assert result.items == [[(0, 4), (1, 4)], [(0, 1), (1, 1)], [(1, 1)], [(2, 4)]]
    assert [row.start_ns for row in result.log] == [0, 18, 32, 44]
    assert times(result.records, "scheduled_ns", "last_token_ns") == [(0, 32), (0, 44), (44, 58)]
    assert blocked(result.records) == [(18, 2, "gate")]


def test_who_comes_at_the_instant_of_the_opening_goes_in_with_the_others() -> None:
    """The only one ends at 26: who comes at 26 shares the next group, who comes at 27 gets a group of its own."""
    result = gated("0:4->2 1:4->1 26:4->1 27:4->1")
    assert result.items == [[(0, 4)], [(0, 1)], [(1, 4), (2, 4)], [(3, 4)]]
    assert [row.start_ns for row in result.log] == [0, 14, 26, 44]


def test_open_at_counts_those_who_still_run() -> None:
    """With one still running the gate is open at 32 under 1 and shut under 0; it lets in beside the one who runs."""
    arrivals = "0:4->2 0:4->4 1:4->2 2:4->1"
    result = gated(arrivals, open_at=1)
    assert result.items == [[(0, 4), (1, 4)], [(0, 1), (1, 1)], [(1, 1), (2, 4), (3, 4)], [(1, 1), (2, 1)]]
    assert [row.start_ns for row in result.log] == [0, 18, 32, 52]
    assert times(gated(arrivals).records, "scheduled_ns") == [(0,), (0,), (56,), (56,)]


def test_a_group_that_exceeds_the_budget_is_prefilled_in_several_steps() -> None:
    """Three prompts of 4 take steps of 6 tokens, decodes first; the last one is inside, and waits for its turn."""
    result = gated("0:4->4 0:4->1 0:4->1 1:1->1", max_num_seqs=3, max_num_batched_tokens=6)
    assert result.items == [[(0, 4), (1, 2)], [(0, 1), (1, 2), (2, 3)], [(0, 1), (2, 1)], [(0, 1)], [(3, 1)]]
    assert [row.start_ns for row in result.log] == [0, 16, 33, 46, 58]
    assert blocked(result.records) == [(0, 2, "token_budget"), (16, 3, "gate")]


def test_the_last_token_of_the_budget_begins_a_prompt() -> None:
    """Of 5 tokens the first prompt leaves one to the second."""
    assert gated("0:4->1 0:4->1", max_num_seqs=2, max_num_batched_tokens=5).items == [[(0, 4), (1, 1)], [(1, 3)]]


def test_slots_and_reserved_memory_bound_a_group() -> None:
    """Two prompts of 4 with caps of 5 reserve 2 blocks each: 2 slots or 5 blocks leave the third outside the gate."""
    arrivals = "0:4->1/5 0:4->1/5 0:4->1/5"
    for knobs, reason in (({"max_num_seqs": 2}, "no_slot"), ({"blocks": 5}, "kv_blocks")):
        result = gated(arrivals, **knobs)
        assert result.items == [[(0, 4), (1, 4)], [(2, 4)]]
        assert blocked(result.records) == [(0, 2, reason)]
    assert gated(arrivals, blocks=6).items == [[(0, 4), (1, 4), (2, 4)]]


def test_decodes_are_leapt_to_the_step_before_the_next_end() -> None:
    """Also while others wait at the gate."""
    assert leap_end_ns(Gated, GatedConfig(max_num_seqs=2), "0:4->20 0:4->30 0:4->1") == 190


def test_what_could_never_fit_is_rejected() -> None:
    """4 prompt and 6 output tokens need 9 tokens of KV, 3 blocks; of 2 only 8 tokens fit."""
    assert outcomes(gated("0:4->6 0:4->5", blocks=2).records) == [("rejected", "never_fits"), ("finished", "")]


def test_every_driver_agrees_when_clients_give_up() -> None:
    """Cancelled: one inside before its prompt began, one that decodes, one at the gate. The next group goes on."""
    arrivals = requests("0:9->3 0:9->30c80 0:9->3c20 5:9->9c30 6:2->2")
    result = run_every_way(Gated, GatedConfig(max_num_seqs=4, max_num_batched_tokens=8), arrivals)
    assert [name for name, _ in outcomes(result.records)] == ["finished", *["cancelled"] * 3, "finished"]


@pytest.mark.parametrize(
    "knobs",
    [{"open_at": 256}, {"max_num_batched_tokens": 255}],
)
def test_knobs_that_contradict_each_other_are_refused(knobs: dict[str, int]) -> None:
    """A gate that never shuts, a budget that cannot hold the decodes."""
    with pytest.raises(ValueError, match=r"must be open_at \d+ < max_num_seqs \d+ <= max_num_batched_tokens"):
        GatedConfig(**knobs)
