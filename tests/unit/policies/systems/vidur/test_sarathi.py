"""Sarathi's scheduler, by hand: a KV block holds 4 tokens; a step takes 10 ns, 1 more a prefill token, 2 a decode."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from batchsim.policies.systems.vidur.sarathi import ChunkSchedule, Sarathi, SarathiConfig
from tests.support.random_cases import random_cases
from tests.support.stepping import Run, crowds, run, run_every_way
from tests.support.whole_batches import MAX_MODEL_LEN, blocked, outcomes, times


def sarathi(arrivals: str, blocks: int = 1000, max_model_len: int = MAX_MODEL_LEN, **knobs: Any) -> Run:
    knobs.setdefault("watermark_blocks_fraction", 0.0)
    return run(Sarathi, SarathiConfig(**knobs), arrivals, blocks=blocks, max_model_len=max_model_len)


def preempted(result: Run) -> list[list[int]]:
    return [row.preempted for row in result.log]


def test_decodes_come_first_then_the_prompt_in_progress_then_new_ones() -> None:
    """Of 6 tokens a step the decode takes one, the prompt begun goes on, and the next starts in what is left."""
    result = sarathi("0:4->4 0:8->1 0:3->1", chunk_size=6)
    assert result.items == [[(0, 4), (1, 2)], [(0, 1), (1, 5)], [(0, 1), (1, 1), (2, 3)], [(0, 1)]]


def test_a_decode_less_leaves_a_prompt_one_token_more() -> None:
    """The budget of prompts is chunk_size less the step's decodes."""
    assert sarathi("0:4->4 0:8->1", chunk_size=7).items[:2] == [[(0, 4), (1, 3)], [(0, 1), (1, 5)]]


def test_a_budget_full_of_decodes_lets_nobody_in() -> None:
    """Two decodes fill a chunk of 2; the third comes in when one of them has ended, not before."""
    result = sarathi("0:1->3 0:1->4 0:1->1", chunk_size=2)
    assert result.items == [[(0, 1), (1, 1)], [(0, 1), (1, 1)], [(0, 1), (1, 1)], [(1, 1), (2, 1)]]
    assert blocked(result.records) == [(0, 2, "token_budget")]


def test_a_prompt_gets_all_its_blocks_at_admission() -> None:
    """12 tokens take 3 of 8 blocks though only 4 are computed in the first step."""
    assert [row.free for row in sarathi("0:12->1", chunk_size=4, blocks=8).log] == [5, 5, 5]


def test_admission_leaves_the_watermark_free() -> None:
    """Beside one block in use, 6 more leave 3 of 10 free as 30 % asks; 7 would leave 2 and wait."""
    knobs: dict[str, Any] = {"blocks": 10, "watermark_blocks_fraction": 0.3}
    assert sarathi("0:4->3 0:24->1", **knobs).items[0] == [(0, 4), (1, 24)]
    late = sarathi("0:4->3 0:28->1", **knobs)
    assert late.items == [[(0, 4)], [(0, 1)], [(0, 1)], [(1, 28)]]
    assert blocked(late.records) == [(0, 1, "kv_blocks")]


def test_with_nothing_running_the_watermark_is_waived() -> None:
    """3 of 4 blocks leave fewer than half free, all 4 none, and nobody else will ever free one."""
    for prompt in (12, 16):
        assert sarathi(f"0:{prompt}->1", blocks=4, watermark_blocks_fraction=0.5).items == [[(0, prompt)]]


def test_the_cap_counts_the_running() -> None:
    """With two slots the third waits for an end; behind it nobody overtakes."""
    result = sarathi("0:4->3 0:4->1 0:9->1 0:1->1", batch_size_cap=2)
    assert times(result.records, "scheduled_ns") == [(0,), (0,), (18,), (39,)]
    assert blocked(result.records)[0] == (0, 2, "no_slot")


def test_a_decode_needs_a_free_block_even_if_its_last_has_room() -> None:
    """Two prompts of 5 hold 4 blocks with room for 3 tokens each: 5 are enough, of 4 the last in loses its two."""
    assert preempted(sarathi("0:5->4 0:5->3", blocks=5)) == [[], [], [], []]
    tight = sarathi("0:5->4 0:5->3", blocks=4)
    assert preempted(tight) == [[], [1], [1], []]
    assert tight.preemptions() == [(20, 1, "kv_blocks", 0), (38, 1, "kv_blocks", 0)]


def test_a_victim_may_come_back_in_the_very_same_step() -> None:
    """It is at the front of the queue, its blocks are free, and the budget has room for prompt and generated tokens."""
    assert sarathi("0:5->4 0:5->3", blocks=4).items == [
        [(0, 5), (1, 5)],
        [(0, 1), (1, 6)],
        [(0, 1), (1, 7)],
        [(0, 1)],
    ]


def test_the_last_of_the_running_preempts_itself() -> None:
    """The first decode takes the last free block, behind the second is nobody; one block of watermark keeps it out."""
    result = sarathi("0:4->3 0:5->3", blocks=4, watermark_blocks_fraction=0.25)
    assert result.items == [[(0, 4), (1, 5)], [(0, 1)], [(0, 1)], [(1, 6)], [(1, 1)]]
    assert result.preemptions() == [(19, 1, "kv_blocks", 1)]
    assert [row.free for row in result.log] == [1, 2, 2, 2, 2]


def test_victims_return_in_their_old_order() -> None:
    """Four decodes need a block each of a full pool: two give theirs, the last first, and come back as they came."""
    result = sarathi("0:4->3 0:4->3 0:4->3 0:4->3", blocks=4)
    assert preempted(result) == [[], [3, 2], [1], [], [3]]
    assert result.items[1:] == [[(0, 1), (1, 1)], [(0, 1), (1, 6)], [(2, 5), (3, 5)], [(2, 1), (3, 6)]]


def test_a_prompt_in_progress_is_the_first_victim_and_starts_anew() -> None:
    """Its 3 computed tokens of 8 are lost each time; when the other has ended it runs through."""
    result = sarathi("0:4->4 0:8->1", blocks=4, chunk_size=4)
    assert result.items == [[(0, 4)], [(0, 1), (1, 3)], [(0, 1), (1, 3)], [(0, 1), (1, 3)], [(1, 4)], [(1, 1)]]
    assert preempted(result) == [[], [], [1], [1], [], []]


def test_what_could_not_end_alone_is_rejected() -> None:
    """7 computed tokens and a free block before the last need 3 blocks; a prompt alone needs no free one."""
    result = sarathi("0:5->4 0:8->1", blocks=2)
    assert outcomes(result.records) == [("rejected", "never_fits"), ("finished", "")]
    detail = "3 KV blocks needed with the one that each decode finds free, 2 in the pool"
    assert result.records.details == {"never_fits": detail}
    assert outcomes(sarathi("0:5->4", blocks=3).records) == [("finished", "")]
    assert outcomes(sarathi("0:3->4", blocks=2).records) == [("rejected", "never_fits")]
    assert outcomes(sarathi("0:3->3", blocks=2).records) == [("finished", "")]


def test_a_cancelled_request_frees_its_blocks() -> None:
    """The head that waited for blocks comes in at the next step."""
    result = sarathi("0:8->5c30 1:12->1", blocks=4)
    assert result.items == [[(0, 8)], [(0, 1)], [(1, 12)]]


@random_cases(60, derandomize=True)
@given(arrivals=crowds())
def test_every_driver_gives_the_same_records_under_pressure(arrivals: Any) -> None:
    """Leaping, stepping, the wall-clock driver and both KV managers agree where blocks are short."""
    run_every_way(Sarathi, SarathiConfig(5, 12, 0.1), arrivals, blocks=12)


def test_a_schedule_gives_a_prompt_fewer_tokens_the_further_it_is() -> None:
    """Three stages of 34 of 100 tokens: 96 at first, then, at 96, of the last stage 32, less the decodes of a step."""
    schedule = ChunkSchedule(32, 96, 100, 3)
    assert (schedule.sizes, schedule.tokens_per_stage) == ((96, 64, 32), 34)
    result = sarathi("0:1->2 1:100->1", dynamic_chunking=schedule, max_model_len=200)
    assert result.items == [[(0, 1)], [(0, 1), (1, 95)], [(1, 5)]]


def test_a_prompt_whose_stage_leaves_it_no_token_waits_beside_a_new_one() -> None:
    """33 decodes are more than the 32 tokens of the last stage; a new prompt is in the first one, of 64."""
    arrivals = " ".join(["0:1->5"] * 33 + ["1:60->1", "12:2->1"])
    result = sarathi(arrivals, dynamic_chunking=ChunkSchedule(32, 64, 64, 2))
    prompts = [[(i, n) for i, n in items if i > 32] for items in result.items]
    assert prompts[:4] == [[], [(33, 31)], [(33, 29), (34, 2)], []]


def test_sizes_are_even_steps_rounded_to_32() -> None:
    """32, 74.67 and on to 160 are 32, 64, 128 and 160; a single stage is the low one, as numpy's linspace has it."""
    assert ChunkSchedule(32, 160, 1000, 4).sizes == (160, 128, 64, 32)
    assert ChunkSchedule(32, 160, 1000, 1).sizes == (32,)


def test_what_may_outgrow_the_stages_is_rejected() -> None:
    """Of 40 tokens of prompt and 2 of output 41 may be computed; stages of 21 and 21 hold 42, of 20 and 20 but 40."""
    for tokens, outcome in ((42, "finished"), (40, "rejected")):
        result = sarathi("0:40->2", dynamic_chunking=ChunkSchedule(32, 64, tokens, 2))
        assert [name for name, _ in outcomes(result.records)] == [outcome]


@pytest.mark.parametrize(("low", "high"), [(31, 64), (32, 65), (64, 32)])
def test_a_schedule_of_other_sizes_is_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match=f"low_chunk_size {low} and high_chunk_size {high} must be multiples of 32"):
        ChunkSchedule(low, high, 100, 2)
