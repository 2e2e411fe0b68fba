"""TensorRT-LLM's C++ runtime, and where PyTorch's differs, by hand: a step takes 10 ns, 1 more a prompt token, 2 a
decode; a KV block holds 4 tokens.

"Rule n" is a numbered rule of the scheduler as its source has it, told again in the test.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.base.errors import ScenarioError, SchedulerStalled
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Arrival
from batchsim.kv.reuse_tree import ReuseTreeKV
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm import TensorrtLlm
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm_config import TensorrtLlmConfig
from tests.plain.systems import Step
from tests.plain.tensorrt_llm import EngineFailsError, Waiting
from tests.support.random_cases import random_cases
from tests.support.stepping import Run, crowds, run, run_every_way
from tests.support.whole_batches import BLOCK_SIZE, blocked, outcomes, requests, times, workloads

CAPACITY = st.sampled_from(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"])
CHUNKING = st.sampled_from([None, "FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"])


def trt(arrivals: str | list[Arrival], blocks: int = 1000, **knobs: Any) -> Run:
    config = TensorrtLlmConfig(**{"enable_block_reuse": False, "backend": "tensorrt", **knobs})
    return run(
        TensorrtLlm, config, arrivals, blocks=blocks, kv=ReuseTreeKV if config.traits.prefix_cache else CountingKV
    )


def evicting(arrivals: str, blocks: int, **knobs: Any) -> Run:
    return trt(arrivals, blocks, capacity_scheduler_policy="MAX_UTILIZATION", **knobs)


def static(arrivals: str, **knobs: Any) -> Run:
    return trt(arrivals, capacity_scheduler_policy="STATIC_BATCH", **knobs)


def test_a_head_that_lacks_tokens_may_come_to_lack_blocks_in_a_leap_too() -> None:
    """Four decodes take all 4 tokens of a step; when each has its second block, the pool of 8 is empty as well."""
    config = TensorrtLlmConfig(max_num_tokens=4, capacity_scheduler_policy="MAX_UTILIZATION", enable_block_reuse=False)
    result = run_every_way(TensorrtLlm, config, requests("0:1->7 0:1->7 0:1->7 0:1->7 5:4->1"), blocks=8)
    assert [(i, why) for _, i, why in blocked(result.records)] == [(4, "token_budget"), (4, "kv_blocks")]


def test_a_leap_ends_where_a_block_is_short() -> None:
    """At 30 both decodes have filled their blocks and one is free; they have been alone since 16."""
    config = TensorrtLlmConfig(capacity_scheduler_policy="MAX_UTILIZATION", enable_block_reuse=False)
    result = run_every_way(TensorrtLlm, config, requests("0:3->9 0:3->9"), blocks=3)
    assert result.preemptions() == [(30, 1, "kv_blocks", 1)]


# ---- GUARANTEED_NO_EVICT


def test_prompts_and_decodes_share_a_step_prompts_first() -> None:
    """Rules 1 and 9: who comes during a step runs beside the decodes from the next one on, before them in the batch."""
    result = trt("0:4->4 5:4->2")
    assert result.items == [[(0, 4)], [(1, 4), (0, 1)], [(0, 1), (1, 1)], [(0, 1)]]
    assert [row.start_ns for row in result.log] == [0, 14, 30, 44]


def test_blocks_for_prompt_and_cap_are_kept_the_last_token_too() -> None:
    """Rule 3: 4 + 5 tokens are 3 blocks, though 8 are ever computed and the output is 1: 6 blocks hold two, 5 one."""
    arrivals = "0:4->1/5 0:4->1/5"
    assert times(trt(arrivals, blocks=6).records, "scheduled_ns") == [(0,), (0,)]
    result = trt(arrivals, blocks=5)
    assert times(result.records, "scheduled_ns") == [(0,), (14,)]
    assert blocked(result.records) == [(0, 1, "kv_blocks")]


def test_what_is_kept_is_not_yet_taken() -> None:
    """Rule 3: of the 3 blocks kept one is held after the prompt, and one more from the fifth token on."""
    assert [row.free for row in trt("0:4->3/8", blocks=6).log] == [5, 4, 4]


def test_the_first_prompt_that_does_not_fit_stops_the_scan() -> None:
    """Rule 3: the third request would fit beside the first; it waits behind the second."""
    result = trt("0:8->5 0:12->1 0:1->1", blocks=6)
    assert times(result.records, "scheduled_ns") == [(0,), (66,), (66,)]
    assert blocked(result.records) == [(0, 1, "kv_blocks")]


def test_nobody_is_paused_when_blocks_are_kept() -> None:
    """Rule 3: with 4 blocks, 2 for each, both run to the end; the third starts when one has ended."""
    result = trt("0:4->4 0:4->4 0:4->1", blocks=4)
    assert not result.preemptions()
    assert times(result.records, "scheduled_ns") == [(0,), (0,), (60,)]


def test_max_batch_size_bounds_the_requests_of_a_step() -> None:
    """Rules 3 and 7: with 2 places the third waits for the first end; with 3 all start together."""
    arrivals = "0:4->3 0:4->1 0:4->1"
    result = trt(arrivals, max_batch_size=2)
    assert times(result.records, "scheduled_ns") == [(0,), (0,), (18,)]
    assert blocked(result.records) == [(0, 2, "no_slot")]
    assert times(trt(arrivals, max_batch_size=3).records, "scheduled_ns") == [(0,), (0,), (0,)]


# ---- the tokens of a step


def test_a_prompt_beyond_the_tokens_left_stops_the_scan() -> None:
    """Rule 7: 6 tokens beside one decode need 7; with 6 they wait for its end, and the short one behind them too."""
    arrivals = "0:4->3 0:6->1 0:1->1"
    late = trt(arrivals, max_num_tokens=6)
    assert late.items == [[(0, 4)], [(0, 1)], [(0, 1)], [(1, 6)], [(2, 1)]]
    assert blocked(late.records) == [(0, 1, "token_budget"), (38, 2, "token_budget")]
    assert trt(arrivals, max_num_tokens=7).items[1] == [(1, 6), (0, 1)]


def test_a_prompt_longer_than_any_step_is_rejected() -> None:
    """Rule 7: 6 tokens run in a step of 6, 7 never could; chunks make it possible."""
    result = trt("0:6->1 0:7->1", max_num_tokens=6)
    assert outcomes(result.records) == [("finished", ""), ("rejected", "over_token_budget")]
    assert result.records.details["over_token_budget"] == "prompt of 7 tokens in one step, max_num_tokens 6"
    assert outcomes(trt("0:7->1", max_num_tokens=6, enable_chunked_prefill=True).records) == [("finished", "")]


def test_why_the_head_waits() -> None:
    """Rule 7: with just the 2 blocks it needs, for tokens; where a step's tokens ended ahead of it, for its blocks."""
    assert blocked(trt("0:4->3 0:6->1", blocks=4, max_num_tokens=6).records) == [(0, 1, "token_budget")]
    chunked = trt("0:8->9 0:8->1", blocks=5, max_num_tokens=8, enable_chunked_prefill=True)
    assert blocked(chunked.records) == [(0, 1, "kv_blocks")]


def test_chunks_are_cut_to_whole_blocks_and_the_rest_goes_to_those_behind() -> None:
    """Rule 8: of the 4 tokens left 4 are taken; beside the decode 7 are left, 4 taken, and 1 goes to the third."""
    result = trt("0:4->4 0:14->1 0:1->1", max_num_tokens=8, enable_chunked_prefill=True)
    assert result.items == [[(1, 4), (0, 4)], [(1, 4), (2, 1), (0, 1)], [(1, 6), (0, 1)], [(0, 1)]]


def test_chunks_that_end_a_prompt_go_behind_those_that_do_not() -> None:
    """Rule 9: of 3, 4 and 4 tokens the 3 end a prompt and change places with the last 4; then 6 end one and 4 do not.
    Where all fits, all ends, and nobody moves.
    """
    knobs = {"enable_chunked_prefill": True, "context_chunking_policy": "EQUAL_PROGRESS"}
    result = trt("0:3->1 0:10->1 0:10->1", max_num_tokens=11, **knobs)
    assert result.items == [[(2, 4), (1, 4), (0, 3)], [(2, 4), (1, 6)], [(2, 2)]]
    assert trt("0:3->1 0:4->1 0:4->1", max_num_tokens=11, **knobs).items == [[(0, 3), (1, 4), (2, 4)]]


def test_a_chunk_of_no_tokens_is_not_run() -> None:
    """Rule 8: the 3 tokens that the decode leaves are less than a block: the prompt of 5 has none, one of 3 runs."""
    result = trt("0:1->3 5:5->1 5:3->1", max_num_tokens=4, enable_chunked_prefill=True)
    assert result.items == [[(0, 1)], [(2, 3), (0, 1)], [(0, 1)], [(1, 4)], [(1, 1)]]
    assert blocked(result.records) == [(11, 1, "token_budget")]
    assert times(result.records, "scheduled_ns") == [(0,), (38,), (11,)]


def test_equal_progress_gives_a_block_to_each_in_turn() -> None:
    """Rule 8: of 13 tokens 4, 4 and 3 in the first round; in the second 4 more do not fit, the last 2 of six do."""
    knobs = {"enable_chunked_prefill": True, "context_chunking_policy": "EQUAL_PROGRESS"}
    assert trt("0:10->1 0:6->1 0:3->1", max_num_tokens=13, **knobs).items == [[(0, 4), (1, 6), (2, 3)], [(0, 6)]]
    fcfs = trt("0:10->1 0:6->1 0:3->1", max_num_tokens=13, enable_chunked_prefill=True)
    assert fcfs.items == [[(0, 10), (2, 3)], [(1, 6)]]


def test_nothing_is_cut_where_all_fits() -> None:
    """Rule 8: 19 tokens run whole in a step of 19, under either chunking policy."""
    for policy in ("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"):
        result = trt(
            "0:10->1 0:6->1 0:3->1", max_num_tokens=19, enable_chunked_prefill=True, context_chunking_policy=policy
        )
        assert result.items == [[(0, 10), (1, 6), (2, 3)]]


def test_a_first_chunk_takes_the_blocks_of_the_whole_prompt() -> None:
    """Rule 9's note: 12 tokens are 3 blocks from the first chunk of 4 on."""
    result = evicting("0:12->1", blocks=5, max_num_tokens=4, enable_chunked_prefill=True)
    assert result.items == [[(0, 4)]] * 3
    assert [row.free for row in result.log] == [2, 2, 2]


# ---- STATIC_BATCH


def test_a_static_batch_ends_before_the_next_one_starts() -> None:
    """Rule 4: who comes at 5 waits for the last output of the batch, though a place is free from 18 on."""
    result = static("0:4->3 0:4->1 5:4->1", max_batch_size=2)
    assert result.items == [[(0, 4), (1, 4)], [(0, 1)], [(0, 1)], [(2, 4)]]
    assert blocked(result.records) == [(18, 2, "batch_running")]


def test_a_static_batch_does_not_wait_to_be_full() -> None:
    """Rule 4: a lone request starts at once."""
    assert times(static("3:4->1", max_batch_size=8).records, "scheduled_ns") == [(3,)]


def test_chunks_of_a_static_batch_stand_still_while_anybody_decodes() -> None:
    """Rule 4: the second prompt, half done, goes on only after the first request's last output."""
    result = static("0:4->3 0:12->1", max_num_tokens=8, enable_chunked_prefill=True)
    assert result.items == [[(1, 4), (0, 4)], [(0, 1)], [(0, 1)], [(1, 8)]]
    states = result.records.states
    reasons = [result.records.texts[row["reason"]] for row in states[states["request_id"] == 1]]
    assert "batch_running" in reasons


# ---- MAX_UTILIZATION


def test_a_start_needs_the_blocks_of_this_step_only() -> None:
    """Rule 5: two prompts of a block each start in a pool of 3, where keeping blocks to the end would let in one."""
    assert evicting("0:4->5 0:4->5", blocks=3).items[0] == [(0, 4), (1, 4)]
    assert trt("0:4->5 0:4->5", blocks=3).items[0] == [(0, 4)]


def test_for_want_of_a_block_the_last_started_is_paused_and_computed_anew() -> None:
    """Rule 5: at 18 both need a second block and one is free. The second returns at 66 with 4 + 1 tokens as prompt."""
    result = evicting("0:4->5 0:4->5", blocks=3)
    assert result.preemptions() == [(18, 1, "kv_blocks", 1)]
    assert result.items[1:6] == [[(0, 1)], [(0, 1)], [(0, 1)], [(0, 1)], [(1, 5)]]
    assert times(result.records, "last_token_ns", "recomputed_tokens") == [(66, 0), (117, 4)]


def test_the_paused_come_before_those_that_arrived_after_them() -> None:
    """Rule 5: one prompt token would fit at once; it waits behind the paused one, and both start at 66."""
    result = evicting("0:4->5 0:4->5 20:1->1", blocks=3)
    assert result.items[5] == [(1, 5), (2, 1)]
    assert times(result.records, "scheduled_ns")[2] == (66,)
    assert blocked(result.records) == [(18, 1, "preemption"), (30, 1, "kv_blocks")]


def test_the_list_ends_before_the_last_paused_one() -> None:
    """Rule 5: at 18 the pause of the second leaves a block that the third could take, but it is not looked at."""
    result = evicting("0:4->5 0:4->5 17:1->1", blocks=3)
    assert result.log[1].preempted == [1]
    assert result.log[1].items == [(0, 1)]


def test_a_prompt_half_computed_needs_no_more_blocks() -> None:
    """Rule 5: at 70 the first and the third fill a block each and 1 is free: the third is paused for its own one, as
    the second, between them, has the 6 of its prompt.
    """
    result = evicting("0:1->9 0:24->1 0:1->9", blocks=9, max_num_tokens=6, enable_chunked_prefill=True)
    assert result.items[:2] == [[(1, 4), (0, 1), (2, 1)], [(1, 4), (0, 1), (2, 1)]]
    assert result.preemptions()[0] == (70, 2, "kv_blocks", 2)


def test_one_that_waits_pauses_those_started_behind_it() -> None:
    """Rule 5: with chunks of no tokens the second waits while the third, behind it, decodes; when the first needs its
    third block, 2 are left: enough for the second's prompt, not for the third's growth as well. The third is paused.
    """
    result = evicting("0:4->9 5:8->1 5:3->9", blocks=5, max_num_tokens=4, enable_chunked_prefill=True)
    assert result.items[:3] == [[(0, 4)], [(2, 3), (0, 1)], [(0, 1), (2, 1)]]
    assert result.preemptions()[0][1:] == (2, "kv_blocks", 2)


def test_one_that_waits_may_pause_in_vain() -> None:
    """Rule 5: the third waits for tokens, the fourth has overtaken it. At 59 the first two need 2 of 2 free blocks: the
    fourth is paused, and the third one's 2 blocks are not there all the same.
    """
    result = evicting("0:1->9 0:1->9 5:8->1 5:1->9", blocks=5, max_num_tokens=5, enable_chunked_prefill=True)
    assert result.preemptions()[0] == (59, 3, "kv_blocks", 2)
    assert blocked(result.records)[:2] == [(12, 2, "token_budget"), (59, 2, "kv_blocks")]


def test_one_that_waits_comes_before_the_only_one_that_runs() -> None:
    """Rule 5: from 26 on the third decodes alone and leaves 3 of 4 tokens, less than a block, to the second."""
    result = evicting("0:1->2 5:5->1 5:3->3", blocks=9, max_num_tokens=4, enable_chunked_prefill=True)
    assert result.items == [[(0, 1)], [(2, 3), (0, 1)], [(2, 1)], [(2, 1)], [(1, 4)], [(1, 1)]]
    assert not result.preemptions()


def test_what_could_never_end_is_rejected() -> None:
    """16 tokens to the end fill 4 blocks; 17 need a fifth, but pausing counts the 16 computed ones only."""
    arrivals = "0:8->8 0:8->9"
    assert outcomes(trt(arrivals, blocks=4).records) == [("finished", ""), ("rejected", "never_fits")]
    assert outcomes(evicting(arrivals, blocks=4).records) == [("finished", ""), ("finished", "")]
    assert outcomes(evicting("0:8->10", blocks=4).records) == [("rejected", "never_fits")]
    details = "5 KV blocks to completion, 4 in the pool"
    assert trt(arrivals, blocks=4).records.details == {"never_fits": details}


def test_a_pause_cuts_off_what_one_step_could_not_compute_anew() -> None:
    """Paused at 74 with 4 + 5 tokens, the second keeps the 8 that fit a step, though not beside the first's decode. It
    returns at 158, when that has ended, makes its fifth token again by 176 and has all 12 at 260.
    """
    result = evicting("0:4->12 0:4->12", blocks=5, max_num_tokens=8)
    assert result.preemptions() == [(74, 1, "kv_blocks", 1)]
    assert result.items[12] == [(1, 8)]
    assert [row.start_ns for row in result.log[12:14]] == [158, 176]
    assert times(result.records, "last_token_ns", "output_tokens") == [(158, 12), (260, 12)]


def test_the_pytorch_runtime_takes_a_paused_request_back_whole() -> None:
    """As above with its 9 tokens, which are just what a step takes: at 158 all are computed, and it has 12 at 249."""
    result = evicting("0:4->12 0:4->12", blocks=5, max_num_tokens=9, backend="pytorch")
    assert result.preemptions() == [(74, 1, "kv_blocks", 1)]
    assert result.items[12] == [(1, 9)]
    assert [row.start_ns for row in result.log[12:14]] == [158, 177]
    assert times(result.records, "last_token_ns", "output_tokens") == [(158, 12), (249, 12)]


def test_the_pytorch_runtime_fails_at_one_longer_than_a_step() -> None:
    """Its scheduler raises as soon as the blocks for 9 tokens are there, of which a step takes 8; in chunks, never."""
    knobs: dict[str, Any] = {"blocks": 5, "max_num_tokens": 8, "backend": "pytorch"}
    with pytest.raises(SchedulerStalled, match="request 1 was paused with 9 tokens, more than max_num_tokens 8,"):
        evicting("0:4->12 0:4->12", **knobs)
    chunked = evicting("0:4->12 0:4->12", enable_chunked_prefill=True, **knobs)
    assert times(chunked.records, "output_tokens") == [(12,), (12,)]


# ---- all together


def test_a_cancel_gives_its_reserved_blocks_back() -> None:
    """The request that waits starts at the step boundary of the cancel."""
    result = trt("0:4->5c5 0:4->5", blocks=3)
    assert times(result.records, "scheduled_ns") == [(0,), (14,)]


def test_the_cache_that_a_config_needs() -> None:
    """A tree of blocks to be reused, or none."""
    assert TensorrtLlmConfig().traits.prefix_cache == "reuse"
    assert TensorrtLlmConfig(enable_block_reuse=False).traits.prefix_cache == ""


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"enable_partial_reuse": True}, "enable_partial_reuse: true is not simulated"),
        ({"host_cache_size": 1}, "host_cache_size 1 is not simulated"),
        ({"enable_block_reuse": False, "enable_prefix_aware_scheduling": True}, "needs enable_block_reuse: true"),
        ({"context_chunking_policy": "EQUAL_PROGRESS"}, "needs enable_chunked_prefill: true"),
        ({"backend": "tensorrt", "disable_overlap_scheduler": False}, "backend tensorrt never overlaps. Leave it out"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(knobs: Any, message: str) -> None:
    """Each wrong knob is named with its value."""
    with pytest.raises(ValueError, match=message):
        TensorrtLlmConfig(**knobs)


def test_chunks_need_room_for_a_block() -> None:
    """Chunks are whole blocks of 4, so a step of 3 tokens could never start one."""
    config = TensorrtLlmConfig(max_num_tokens=3, enable_chunked_prefill=True, enable_block_reuse=False)
    with pytest.raises(ScenarioError, match="max_num_tokens 3 must be at least the block size 4"):
        TensorrtLlm(config, PolicyContext(CountingKV(4, 4), 64))


@random_cases(80)
@given(
    arrivals=st.one_of(workloads(), crowds()),
    capacity=CAPACITY,
    size=st.integers(1, 5),
    tokens=st.sampled_from([5, 9, 40]),
    chunking=CHUNKING,
    blocks=st.integers(8, 16),
)
def test_every_driver_agrees_and_the_limits_hold(
    arrivals: list[Arrival], capacity: Any, size: int, tokens: int, chunking: Any, blocks: int
) -> None:
    """Bit-equal records under every driver, leap and KV manager; limits kept; only MAX_UTILIZATION ever pauses."""
    backend = "pytorch" if chunking else "tensorrt"
    config = TensorrtLlmConfig(capacity, size, tokens, chunking is not None, chunking, False, backend=backend)
    result = run_every_way(TensorrtLlm, config, arrivals, blocks=blocks)
    for row in result.log:
        assert len(row.items) <= size
        assert sum(n for _, n in row.items) <= tokens
        assert capacity == "MAX_UTILIZATION" or not row.preempted


@random_cases(200)
@given(
    arrivals=crowds(),
    capacity=CAPACITY,
    size=st.sampled_from([2, 4, 100]),
    tokens=st.sampled_from([5, 9, 21, 36]),
    chunking=CHUNKING,
    backend=st.sampled_from(["tensorrt", "pytorch"]),
    blocks=st.integers(9, 14),
)
def test_the_steps_are_those_of_the_plain_loops(
    arrivals: list[Arrival], capacity: Any, size: int, tokens: int, chunking: Any, backend: Any, blocks: int
) -> None:
    """Step by step the same starts, work, pauses and free blocks as the rules told as loops over all requests."""
    budget = tokens if chunking else max(tokens, 16)
    config = TensorrtLlmConfig(capacity, size, budget, chunking is not None, chunking, False, backend=backend)
    arrivals = [replace(arrival, cancel_ns=None) for arrival in arrivals]
    try:
        steps = Waiting(config, arrivals, blocks, BLOCK_SIZE).run()
    except EngineFailsError:
        with pytest.raises(SchedulerStalled, match="was paused with"):
            run(TensorrtLlm, config, arrivals, blocks=blocks)
        return
    log = run(TensorrtLlm, config, arrivals, blocks=blocks).log
    found: list[Step] = [(row.start_ns, row.items, row.preempted, row.free) for row in log]
    assert found == steps
