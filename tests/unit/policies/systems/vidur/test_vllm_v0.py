"""vLLM's first scheduler, by hand: a KV block has 4 tokens; a step takes 10 ns, 1 more a prefill token, 2 a decode."""

from __future__ import annotations

from typing import Any

from hypothesis import given

from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Request, Sequence
from batchsim.policies.systems.vidur.vllm_v0 import VllmV0, VllmV0Config
from tests.support.random_cases import random_cases
from tests.support.stepping import Run, crowds, run, run_every_way
from tests.support.whole_batches import blocked, outcomes, times


def vllm_v0(arrivals: str, blocks: int = 1000, **knobs: Any) -> Run:
    knobs.setdefault("watermark_blocks_fraction", 0.0)
    return run(VllmV0, VllmV0Config(**knobs), arrivals, blocks=blocks)


def preempted(result: Run) -> list[list[int]]:
    return [row.preempted for row in result.log]


def test_a_step_is_prompts_only_if_any_can_come_in() -> None:
    """The decode stands still while the second prompt runs, then both decode."""
    result = vllm_v0("0:4->3 12:4->2")
    assert result.items == [[(0, 4)], [(1, 4)], [(0, 1), (1, 1)], [(0, 1)]]
    assert [row.start_ns for row in result.log] == [0, 14, 28, 42]


def test_the_count_of_prompts_times_the_longest_bounds_a_step() -> None:
    """Three prompts of 4 count 12; with one of 5 they would count 15, so that it goes next."""
    assert vllm_v0("0:4->1 0:4->1 0:4->1", max_tokens_in_batch=12).items == [[(0, 4), (1, 4), (2, 4)]]
    result = vllm_v0("0:4->1 0:4->1 0:5->1", max_tokens_in_batch=12)
    assert result.items == [[(0, 4), (1, 4)], [(2, 5)]]
    assert blocked(result.records) == [(0, 2, "token_budget")]


def test_decodes_are_not_bound_by_the_tokens_of_a_batch() -> None:
    """Three prompts of one token come in by the budget of 1, one a step; then all three decode at once."""
    result = vllm_v0("0:1->2 0:1->2 0:1->2", max_tokens_in_batch=1)
    assert result.items == [[(0, 1)], [(1, 1)], [(2, 1)], [(0, 1), (1, 1), (2, 1)]]


def test_admission_leaves_the_watermark_free() -> None:
    """Beside one block in use, 6 more leave 3 of 10 free as 30 % asks; 7 would leave 2 and wait."""
    knobs: dict[str, Any] = {"blocks": 10, "watermark_blocks_fraction": 0.3}
    assert vllm_v0("0:4->3 0:24->1", **knobs).items[0] == [(0, 4), (1, 24)]
    late = vllm_v0("0:4->3 0:28->1", **knobs)
    assert late.items == [[(0, 4)], [(0, 1)], [(0, 1)], [(1, 28)]]
    assert blocked(late.records) == [(0, 1, "kv_blocks")]


def test_with_nothing_running_the_watermark_is_waived() -> None:
    """3 of 4 blocks leave fewer than half free, and nobody else will ever free one."""
    assert vllm_v0("0:12->1", blocks=4, watermark_blocks_fraction=0.5).items == [[(0, 12)]]


def test_the_cap_counts_the_running_and_nobody_overtakes() -> None:
    """With two slots the third waits for an end, and the short one behind it with it."""
    result = vllm_v0("0:4->3 0:4->2 0:9->1 0:1->1", batch_size_cap=2)
    assert result.items == [[(0, 4), (1, 4)], [(0, 1), (1, 1)], [(2, 9)], [(3, 1)], [(0, 1)]]
    assert blocked(result.records)[0] == (0, 2, "no_slot")


def test_a_decode_needs_a_free_block_even_if_its_last_has_room() -> None:
    """Two prompts of 5 hold 4 blocks with room for 3 tokens each: 5 are enough, of 4 the last in loses its two."""
    assert preempted(vllm_v0("0:5->4 0:5->3", blocks=5)) == [[], [], [], []]
    tight = vllm_v0("0:5->4 0:5->3", blocks=4)
    assert preempted(tight) == [[], [1], [], [1], [], []]
    assert blocked(tight.records) == [(20, 1, "preemption"), (48, 1, "preemption")]


def test_a_victim_comes_back_first_in_a_step_of_prompts() -> None:
    """It computes prompt and generated tokens anew while the other decode stands still."""
    result = vllm_v0("0:5->4 0:5->3", blocks=4)
    assert result.items[1:] == [[(0, 1)], [(1, 6)], [(0, 1)], [(1, 7)], [(0, 1)]]


def test_the_last_of_the_running_preempts_itself() -> None:
    """The first decode takes the last free block and behind the second is nobody."""
    result = vllm_v0("0:4->3 0:5->3", blocks=4, watermark_blocks_fraction=0.25)
    assert result.items == [[(0, 4), (1, 5)], [(0, 1)], [(0, 1)], [(1, 6)], [(1, 1)]]
    assert result.preemptions() == [(19, 1, "kv_blocks", 1)]


def test_a_prompt_beyond_the_batch_is_rejected() -> None:
    """As long as max_tokens_in_batch it runs, one token more never could."""
    result = vllm_v0("0:6->1 0:7->1", max_tokens_in_batch=6)
    assert outcomes(result.records) == [("finished", ""), ("rejected", "over_token_budget")]
    detail = "prompt of 7 tokens in one step, max_tokens_in_batch 6"
    assert result.records.details == {"over_token_budget": detail}


def test_what_was_said_before_a_step_is_still_there_to_be_read() -> None:
    """One is rejected, then one of two that come in at most one at a time is blocked."""
    scheduler = VllmV0(VllmV0Config(batch_size_cap=1, max_tokens_in_batch=6), PolicyContext(CountingKV(8, 4), 64))
    for i, prompt in enumerate((2, 7, 2)):
        scheduler.add(Sequence(Request(i, 0, prompt, 4)), 0)
    scheduler.schedule(0, drain=True)
    assert [(event.kind, event.seq.request.id) for event in scheduler.events] == [("rejected", 1), ("blocked", 2)]


def test_one_that_has_outgrown_the_batch_comes_back_when_nothing_else_runs() -> None:
    """Preempted with 6 known tokens it returns at once, with 7 it waits for the end of the other."""
    result = vllm_v0("0:5->6 0:5->3", blocks=4, max_tokens_in_batch=6)
    assert result.items == [
        [(0, 5)],
        [(1, 5)],
        [(0, 1)],
        [(1, 6)],
        [(0, 1)],
        [(0, 1)],
        [(0, 1)],
        [(0, 1)],
        [(1, 7)],
    ]
    assert times(result.records, "num_preemptions") == [(0,), (2,)]


def test_what_could_not_end_alone_is_rejected() -> None:
    """7 computed tokens and a free block before the last need 3 blocks; a prompt alone needs no free one."""
    result = vllm_v0("0:5->4 0:8->1", blocks=2)
    assert outcomes(result.records) == [("rejected", "never_fits"), ("finished", "")]


@random_cases(60, derandomize=True)
@given(arrivals=crowds())
def test_every_driver_gives_the_same_records_under_pressure(arrivals: Any) -> None:
    """Leaping, stepping, the wall-clock driver and both KV managers agree where blocks are short."""
    run_every_way(VllmV0, VllmV0Config(5, 20, 0.1), arrivals, blocks=12)
