"""TensorRT-LLM's block reuse, by hand: a step takes 10 ns, 1 more a prompt token, 2 a decode; a block holds 4 tokens.

Each test tells a part of rule 6 of the scheduler: a prompt that could reuse blocks which another prompt is about to
make is passed over; and what it takes for blocks to be found.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.base.errors import ScenarioError, SchedulerStalled
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import BLOCKED, DECODE, SAT_OUT
from batchsim.kernel.tokens import Segment, TokenIds, output_stream, prompt_stream
from batchsim.kernel.types import Arrival, DecodeGroup, Sequence
from batchsim.kv.reuse_tree import ReuseTreeKV
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm import TensorrtLlm
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm_config import TensorrtLlmConfig
from tests.plain.systems import Step
from tests.plain.tensorrt_llm import EngineFailsError, Waiting
from tests.support.random_cases import random_cases
from tests.support.stepping import Run, crowds, run
from tests.support.whole_batches import BLOCK_SIZE, blocked, requests, times

TEXT = prompt_stream(0)
CAPACITY = st.sampled_from(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"])
CHUNKING = st.sampled_from([None, "FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"])


def alike(text: str, *heads: int) -> list[Arrival]:
    """`text` as for `requests`; the prompts begin with so many tokens of one text each, all other tokens differ."""
    arrivals = []
    for one, head in zip(requests(text), heads, strict=True):
        own = one.request.prompt_tokens - head
        segments = [(TEXT, 0, head)] * (head > 0) + [(prompt_stream(100 + one.request.id), 0, own)] * (own > 0)
        arrivals.append(replace(one, request=replace(one.request, tokens=TokenIds.of(segments))))
    return arrivals


def trt(arrivals: list[Arrival], blocks: int = 1000, **knobs: Any) -> Run:
    config = TensorrtLlmConfig(**{"backend": "tensorrt", **knobs})
    return run(TensorrtLlm, config, arrivals, blocks=blocks, kv=ReuseTreeKV)


def cached(result: Run) -> list[int]:
    return [int(n) for n in result.records.requests["cached_tokens"]]


def states(result: Run, state: int) -> list[tuple[int, int, str, int]]:
    """(time, request, reason, blocker) of every row of that state."""
    rows = result.records.states[result.records.states["state"] == state]
    return [
        (int(r["time_ns"]), int(r["request_id"]), result.records.texts[r["reason"]], int(r["blocker"])) for r in rows
    ]


# ---- what is found


def test_a_prompt_begins_after_its_cached_blocks() -> None:
    """Rule 6, what it waits for: of 9 tokens 8 were computed by one that has ended; 1 is left, in 11 ns."""
    result = trt(alike("0:9->1 100:9->1", 8, 8))
    assert result.items == [[(0, 9)], [(1, 1)]]
    assert times(result.records, "last_token_ns", "cached_tokens") == [(19, 0), (111, 8)]


def test_without_block_reuse_nothing_is_found() -> None:
    """Whatever the pool could do: both prompts are computed whole."""
    assert cached(trt(alike("0:9->1 100:9->1", 8, 8), enable_block_reuse=False)) == [0, 0]


def test_no_part_of_a_block_is_found() -> None:
    """Rule 6: 7 tokens alike are one block; with 3 alike there is none."""
    assert cached(trt(alike("0:9->1 100:9->1", 7, 7))) == [0, 4]
    assert cached(trt(alike("0:9->1 100:9->1", 3, 3))) == [0, 0]


def test_a_begun_block_is_found_by_exactly_its_tokens() -> None:
    """Rule 6: 6 tokens are a block and 2 more. Who has one more token finds all 6; of those that have two more, or one
    less, the begun block would be a part or hold too much, and they find 4.
    """
    assert cached(trt(alike("0:6->1 100:7->1", 6, 6))) == [0, 6]
    assert cached(trt(alike("0:6->1 100:8->1", 6, 6))) == [0, 4]
    assert cached(trt(alike("0:6->1 100:6->1", 6, 6))) == [0, 4]


def test_who_finds_a_begun_block_takes_it_out_of_the_tree() -> None:
    """Rule 6: of two that come at 100 the first takes it, so the second computes 3 tokens; and so does who comes at
    200, as those that both have left by then hold their own seventh token.
    """
    result = trt(alike("0:6->1 100:7->1 100:7->1 200:7->1", 6, 6, 6, 6))
    assert result.items == [[(0, 6)], [(1, 1), (2, 3)], [(3, 3)]]


def test_the_last_prompt_token_is_always_computed() -> None:
    """Rule 6: a prompt of two blocks, both cached, computes the second one anew; one token more and both are used."""
    assert trt(alike("0:8->1 100:8->1", 8, 8)).items[1] == [(1, 4)]
    assert trt(alike("0:9->1 100:9->1", 8, 8)).items[1] == [(1, 1)]


def test_what_was_generated_is_found_when_its_request_has_ended() -> None:
    """Rule 6: 5 + 4 tokens, the last never computed, are 2 blocks; the next turn begins after them."""
    first, second = requests("0:5->4 100:11->1")
    said = TokenIds.of([(TEXT, 0, 5)])
    both = TokenIds.of([(TEXT, 0, 5), (output_stream(0), 0, 4), (prompt_stream(7), 0, 2)])
    turns = [replace(a, request=replace(a.request, tokens=t)) for a, t in ((first, said), (second, both))]
    result = trt(turns)
    assert cached(result) == [0, 8]
    assert result.items[-1] == [(1, 3)]


def test_what_is_being_generated_is_not_found() -> None:
    """Rule 6: at 30 the first has computed 5 + 2 tokens and more to come; of its text only the prompt's block is."""
    arrivals = alike("0:5->9 30:11->1", 5, 5)
    said = TokenIds.of([(TEXT, 0, 5), (output_stream(0), 0, 3), (prompt_stream(7), 0, 3)])
    arrivals[1] = replace(arrivals[1], request=replace(arrivals[1].request, tokens=said))
    assert cached(trt(arrivals)) == [0, 4]


def test_blocks_unused_longest_go_first_and_the_last_of_a_request_before_its_first() -> None:
    """Rule 6: of 4 blocks 3 hold the first prompt. Another one of 2 blocks takes the empty one and the last of these,
    one of 3 blocks the middle one too.
    """
    assert cached(trt(alike("0:9->1 100:5->1 200:9->1", 8, 0, 8), blocks=4)) == [0, 0, 8]
    assert cached(trt(alike("0:9->1 100:9->1 200:9->1", 8, 0, 8), blocks=4)) == [0, 0, 4]


def test_a_use_makes_blocks_young_again() -> None:
    """Rule 6: 6 blocks hold two prompts of 3. The first is used again, so the third text takes the second's blocks."""
    result = trt(alike("0:9->1 100:9->1 200:9->1 300:9->1 400:9->1", 8, 0, 8, 0, 8), blocks=6)
    assert cached(result) == [0, 0, 8, 0, 8]


# ---- who waits


def test_who_could_reuse_a_block_in_the_making_is_passed_over() -> None:
    """Rule 6: of two equal prompts the second waits 19 ns and computes 1 token; else both compute all 9 in 28 ns."""
    result = trt(alike("0:9->1 0:9->1", 8, 8))
    assert result.items == [[(0, 9)], [(1, 1)]]
    assert times(result.records, "last_token_ns") == [(19,), (30,)]
    assert states(result, BLOCKED) == [(0, 1, "waits_for_prefix", 0)]
    blind = trt(alike("0:9->1 0:9->1", 8, 8), enable_prefix_aware_scheduling=False)
    assert blind.items == [[(0, 9), (1, 9)]]


def test_who_waits_for_a_prefix_keeps_its_place() -> None:
    """Rule 6: of two places the second has one, waiting, so that the third gets its own when the second ends, at 32."""
    result = trt(alike("0:9->3 0:9->1 0:2->1", 8, 8, 0), max_batch_size=2)
    assert result.items == [[(0, 9)], [(1, 1), (0, 1)], [(2, 2), (0, 1)]]
    assert states(result, BLOCKED) == [(0, 1, "waits_for_prefix", 0), (19, 2, "no_slot", -1)]


def test_those_behind_who_share_nothing_overtake() -> None:
    """Rule 6: the third does not wait behind the second."""
    result = trt(alike("0:9->1 0:9->1 0:2->1", 8, 8, 0))
    assert result.items == [[(0, 9), (2, 2)], [(1, 1)]]


def test_only_the_first_block_that_is_missing_counts() -> None:
    """Rule 6: one block is cached. The third lacks another one than the second, so both run; the fourth waits."""
    result = trt(alike("0:5->1 100:9->1 100:9->1 100:9->1", 4, 8, 4, 8))
    assert result.items == [[(0, 5)], [(1, 5), (2, 5)], [(3, 1)]]
    assert states(result, BLOCKED) == [(100, 3, "waits_for_prefix", 1)]


def test_less_than_a_block_in_common_is_not_waited_for() -> None:
    """Rule 6: 3 tokens alike are no block; with 4 the second waits."""
    assert trt(alike("0:9->1 0:9->1", 3, 3)).items == [[(0, 9), (1, 9)]]
    assert trt(alike("0:9->1 0:9->1", 4, 4)).items == [[(0, 9)], [(1, 5)]]


def test_the_blocks_of_a_chunked_prompt_are_made_by_its_last_chunk() -> None:
    """Rule 6: the second waits for three chunks of 4, not for the first, and then computes 1 token of 9."""
    result = trt(alike("0:12->1 5:9->1", 8, 8), max_num_tokens=7, enable_chunked_prefill=True)
    assert result.items == [[(0, 4)], [(0, 4)], [(0, 4)], [(1, 1)]]
    assert states(result, BLOCKED) == [(14, 1, "waits_for_prefix", 0)]


@pytest.mark.parametrize(
    ("backend", "head", "steps"),
    [
        ("tensorrt", 20, [[(0, 20)], [(0, 8)], [(1, 1)]]),
        ("pytorch", 20, [[(0, 20)], [(1, 1), (0, 8)]]),
        ("pytorch", 24, [[(0, 20)], [(0, 8)], [(1, 1)]]),
    ],
)
def test_the_pytorch_runtime_stores_a_prompt_chunk_by_chunk(backend: str, head: int, steps: Any) -> None:
    """The first chunk of 28 tokens makes 5 blocks: who wants these 20 tokens finds them beside the second chunk, who
    wants 24 waits for that. The C++ runtime stores none before the prompt's end."""
    arrivals = alike(f"0:28->1 5:{head + 1}->1", head, head)
    assert trt(arrivals, max_num_tokens=20, enable_chunked_prefill=True, backend=backend).items == steps


def test_the_pytorch_runtime_stores_the_last_block_of_a_prompt_too() -> None:
    """Its next token is known by then: both that wait find all they may at once, unlike the next ones."""
    result = trt(alike("0:8->3 0:8->3 0:8->3", 8, 8, 8), backend="pytorch")
    assert result.items[:2] == [[(0, 8)], [(1, 4), (2, 4), (0, 1)]]


def test_equal_prompts_of_whole_blocks_come_one_a_step() -> None:
    """Rule 6: the block of a prompt's last token is not stored with it: the second makes it, the third waits again."""
    result = trt(alike("0:8->3 0:8->3 0:8->3", 8, 8, 8))
    assert result.items[:3] == [[(0, 8)], [(1, 4), (0, 1)], [(2, 4), (0, 1), (1, 1)]]
    assert states(result, BLOCKED) == [(0, 1, "waits_for_prefix", 0), (18, 2, "waits_for_prefix", 1)]


def test_a_static_batch_waits_for_no_prefix() -> None:
    """Rules 4 and 6: both compute all in one step; blocks of an earlier batch are found."""
    result = trt(alike("0:9->1 0:9->1 100:9->1", 8, 8, 8), capacity_scheduler_policy="STATIC_BATCH")
    assert result.items == [[(0, 9), (1, 9)], [(2, 1)]]


# ---- what the two stages count


def test_capacity_counts_cached_blocks_as_if_they_were_new() -> None:
    """Rules 3 and 6: at 19 two of the second's 3 blocks are cached, so 1 new one would do; 2 are free, and it waits."""
    result = trt(alike("0:9->3 0:9->3", 8, 8), blocks=5)
    assert times(result.records, "scheduled_ns") == [(0,), (43,)]
    assert blocked(result.records) == [(0, 1, "waits_for_prefix"), (19, 1, "kv_blocks")]
    assert times(trt(alike("0:9->3 0:9->3", 8, 8), blocks=6).records, "scheduled_ns") == [(0,), (19,)]


def test_a_shared_block_is_held_once() -> None:
    """Rule 6: the second adds 1 block to the 3 of the first."""
    assert [row.free for row in trt(alike("0:9->3 0:9->3", 8, 8), blocks=10).log][:2] == [7, 6]


def test_the_token_budget_counts_cached_tokens() -> None:
    """Rules 7, 8 and 6: 9 tokens of which 8 are cached do not run beside a decode in 9; they do in 10. As a chunk they
    leave nothing of 9 to those behind.
    """
    arrivals = alike("0:9->1 100:2->3 100:9->1", 8, 0, 8)
    assert trt(arrivals, max_num_tokens=9).items == [[(0, 9)], [(1, 2)], [(1, 1)], [(1, 1)], [(2, 1)]]
    assert trt(arrivals, max_num_tokens=10).items == [[(0, 9)], [(1, 2)], [(2, 1), (1, 1)], [(1, 1)]]
    chunked = trt(alike("0:9->1 100:9->1 100:2->1", 8, 8, 0), max_num_tokens=9, enable_chunked_prefill=True)
    assert chunked.items == [[(0, 9)], [(1, 1)], [(2, 2)]]


def test_a_first_chunk_is_as_long_as_its_budget_after_the_cached_blocks() -> None:
    """Rules 8 and 6: of 20 tokens 8 are cached; the chunk of 8 computes the 9th to the 16th."""
    result = trt(alike("0:9->1 100:20->1", 8, 8), max_num_tokens=9, enable_chunked_prefill=True)
    assert result.items[-2:] == [[(1, 8)], [(1, 4)]]


def test_who_was_overtaken_comes_before_the_rest_of_a_prompt_that_overtook() -> None:
    """Rules 3 and 6: the third starts while the second waits for the first. Then the second does not fit, and the scan
    stops before the third, which stands still; at 43 the second takes what was kept for it, and it does again.
    """
    arrivals = alike("0:5->3 0:5->1/7 0:16->1/4", 4, 4, 0)
    result = trt(arrivals, blocks=7, max_num_tokens=12, enable_chunked_prefill=True)
    assert result.items == [[(2, 4), (0, 5)], [(0, 1)], [(0, 1)], [(1, 1)], [(2, 12)]]
    assert [row.start_ns for row in result.log] == [0, 19, 31, 43, 54]
    assert [row[:3] for row in states(result, SAT_OUT)] == [(19, 2, "kv_blocks")]


def test_who_was_overtaken_takes_what_was_kept_for_the_one_that_overtook() -> None:
    """Rules 3 and 6: the third keeps 8 blocks, 4 of them still to be taken; at 19 the second takes 3 of these."""
    arrivals = alike("0:5->3 0:5->1/7 0:16->1/16", 4, 4, 0)
    result = trt(arrivals, blocks=10, max_num_tokens=12, enable_chunked_prefill=True)
    assert result.items[:3] == [[(2, 4), (0, 5)], [(1, 1), (0, 1)], [(2, 8), (0, 1)]]
    assert [row[:3] for row in states(result, SAT_OUT)] == [(19, 2, "kv_blocks")]


# ---- MAX_UTILIZATION


def test_a_paused_request_finds_its_blocks_again() -> None:
    """Rules 5 and 6: paused at 18 with 4 tokens computed, it returns at 66 and computes 1 instead of 5."""
    arrivals = requests("0:4->5 0:4->5")
    result = trt(arrivals, blocks=3, capacity_scheduler_policy="MAX_UTILIZATION")
    assert result.preemptions() == [(18, 1, "kv_blocks", 1)]
    assert result.items[5] == [(1, 1)]
    assert times(result.records, "last_token_ns", "recomputed_tokens") == [(66, 0), (113, 0)]


def test_a_prompt_paused_half_computed_leaves_all_its_blocks() -> None:
    """Rules 5 and 6: paused at 29 with 4 of 12 tokens computed, the second leaves 3 blocks, of which the first takes
    the last. At 65 it finds 8 tokens, 4 of them never computed.
    """
    arrivals = alike("0:3->5 0:12->1", 0, 12)
    knobs = {"capacity_scheduler_policy": "MAX_UTILIZATION", "enable_chunked_prefill": True}
    result = trt(arrivals, blocks=4, max_num_tokens=5, **knobs)
    assert result.preemptions() == [(29, 1, "kv_blocks", 0)]
    assert result.items == [[(0, 3)], [(1, 4), (0, 1)], [(0, 1)], [(0, 1)], [(0, 1)], [(1, 4)]]
    assert times(result.records, "last_token_ns", "cached_tokens_all") == [(65, 0), (79, 8)]


def test_a_decode_behind_an_older_prompt_that_takes_the_tokens_is_left_out() -> None:
    """Rules 5, 7 and 6: of 10 tokens the first's decode takes one and the second's prompt 9, though 8 of them are
    cached. The third, which had overtaken it, sits out from 20 to 33.
    """
    arrivals = alike("0:9->3 0:9->2 0:1->3", 8, 8, 0)
    knobs = {"capacity_scheduler_policy": "MAX_UTILIZATION", "max_num_tokens": 10}
    result = trt(arrivals, **knobs)
    assert result.items == [[(0, 9), (2, 1)], [(1, 1), (0, 1)], [(0, 1), (1, 1), (2, 1)], [(2, 1)]]
    assert [row.start_ns for row in result.log] == [0, 20, 33, 49]
    assert [row[:3] for row in states(result, SAT_OUT)] == [(20, 2, "token_budget")]
    assert [row[:2] for row in states(result, DECODE)] == [(20, 0), (20, 2), (33, 1), (33, 2)]
    for how in ("step", "leap"):
        other = run(TensorrtLlm, TensorrtLlmConfig(**knobs), arrivals, kv=ReuseTreeKV, how=how)
        assert np.array_equal(other.records.steps, result.records.steps)


def test_a_decode_left_out_can_be_given_up() -> None:
    """Rules 5 and 7: cancelled at 25, the third of the test above gives back what it holds."""
    knobs = {"capacity_scheduler_policy": "MAX_UTILIZATION", "max_num_tokens": 10}
    arrivals = alike("0:9->3 0:9->2 0:1->3", 8, 8, 0)
    arrivals[2] = replace(arrivals[2], cancel_ns=25)
    assert trt(arrivals, **knobs).items == [[(0, 9), (2, 1)], [(1, 1), (0, 1)], [(0, 1), (1, 1)]]


def test_who_waits_for_a_prefix_behind_one_that_runs_stops_nobody() -> None:
    """Rules 5 and 6: at 16 the second still waits for the first; the third, which has overtaken it, decodes, and the
    fourth comes in.
    """
    arrivals = alike("0:9->1 0:9->1 0:2->3 5:1->1", 8, 8, 0, 0)
    knobs = {"capacity_scheduler_policy": "MAX_UTILIZATION", "enable_chunked_prefill": True}
    result = trt(arrivals, max_num_tokens=7, **knobs)
    assert result.items[:2] == [[(0, 4), (2, 2)], [(0, 5), (3, 1), (2, 1)]]


def test_a_decode_left_out_may_be_paused() -> None:
    """Rules 5 and 7: left out at 22, the third is paused at 42, when the others need 2 blocks and 1 is free. It comes
    back when the first has ended, and decodes to its end.
    """
    arrivals = alike("0:11->4 0:12->4 0:1->6", 4, 4, 0)
    result = trt(arrivals, blocks=7, capacity_scheduler_policy="MAX_UTILIZATION", max_num_tokens=13)
    assert result.items[:3] == [[(0, 11), (2, 1)], [(1, 8), (0, 1)], [(0, 1), (1, 1)]]
    assert result.items[4:] == [[(2, 2), (1, 1)], [(2, 1)], [(2, 1)], [(2, 1)], [(2, 1)]]
    assert [row[:3] for row in states(result, SAT_OUT)] == [(22, 2, "token_budget")]
    assert result.preemptions() == [(42, 2, "kv_blocks", 1)]


def test_who_pauses_another_one_is_then_passed_over_for_its_own_blocks() -> None:
    """Rules 5 and 6: the third overtakes the second, which waits for the first's prefix. At 18 the second needs 3
    blocks and finds 2, so the third is paused; looked at again, the second finds its own block in the making and is
    passed over. It starts at 30, and the third, whose block was not given away, is short of one until it ends at 47.
    """
    arrivals = alike("0:5->4 0:9->1 0:3->2", 4, 4, 0)
    result = trt(arrivals, blocks=5, capacity_scheduler_policy="MAX_UTILIZATION")
    assert result.items == [[(0, 5), (2, 3)], [(0, 1)], [(1, 5), (0, 1)], [(2, 1), (0, 1)]]
    assert [row.start_ns for row in result.log] == [0, 18, 30, 47]
    assert result.preemptions() == [(18, 2, "kv_blocks", 1)]
    assert blocked(result.records) == [(0, 1, "waits_for_prefix"), (18, 1, "preemption"), (30, 2, "kv_blocks")]


def test_one_that_waits_for_tokens_pauses_another_one_in_a_leap_too() -> None:
    """Rules 5, 6 and 8: from 79 on 6 decodes leave 2 of 8 tokens. The third, half computed, and the fifth get none, and
    the fourth, the head, waits for the third. At 189 four blocks are free, as many as the first, sixth and seventh and
    the fifth's prompt need; the eighth one's is not there, and the ninth, the last to start, is paused for it.
    """
    arrivals = alike("0:4->20 0:9->20 0:12->1 0:5->1 0:4->1 0:1->20 0:1->20 0:1->20 0:1->20", 4, 4, *[0] * 7)
    third = TokenIds.of([(prompt_stream(102), 0, 4), (prompt_stream(103), 0, 1)])  # a block of the third's text
    arrivals[3] = replace(arrivals[3], request=replace(arrivals[3].request, tokens=third))
    config = TensorrtLlmConfig("MAX_UTILIZATION", max_num_tokens=8, enable_chunked_prefill=True, backend="tensorrt")
    for how in ("step", "leap"):
        result = run(TensorrtLlm, config, arrivals, blocks=22, kv=ReuseTreeKV, how=how)
        assert result.preemptions()[0] == (189, 8, "kv_blocks", 7)
        assert blocked(result.records)[1] == (18, 3, "waits_for_prefix")


# ---- the cache


def manager(blocks: int = 6) -> tuple[ReuseTreeKV, list[Sequence]]:
    """An empty pool and three sequences of 9 tokens, of which the first 8 are alike."""
    return ReuseTreeKV(blocks, BLOCK_SIZE), [Sequence(a.request) for a in alike("0:9->1 0:9->1 0:9->1", 8, 8, 8)]


def test_of_two_equal_blocks_the_first_stored_is_found() -> None:
    """The second's copies stay its own, and are found once the first's have been given to others."""
    kv, (one, two, three) = manager()
    for seq in (one, two):
        assert kv.admit(seq, 9, 0)
        seq.settled_computed_tokens = 9
        kv.store(seq, 8)
    assert kv.cached_blocks == 2
    kv.end(one)
    assert kv.num_free == 3
    other = Sequence(requests("0:12->1")[0].request)
    assert kv.allocate(other, 12)  # what `one` had
    assert (kv.lookup(three), kv.cached_blocks) == (0, 0)
    kv.end(two)
    kv.check()
    assert kv.lookup(three) == 8


def test_what_is_below_a_block_leaves_the_tree_with_it() -> None:
    """The second's third block hangs below the first's second one, of which it has a copy; it is lost with that."""
    kv = ReuseTreeKV(8, BLOCK_SIZE)
    one, two = (Sequence(a.request) for a in alike("0:9->1 0:13->1", 8, 12))
    for seq in (one, two):
        assert kv.admit(seq, seq.num_tokens, 0)
        kv.store(seq, seq.num_tokens - 1)
    assert kv.cached_blocks == 3
    kv.end(one)
    assert kv.allocate(Sequence(requests("0:12->1")[0].request), 12)  # takes the never used one and two of `one`
    kv.check()
    assert kv.cached_blocks == 1


def test_who_holds_nothing_has_nothing_to_give_back() -> None:
    """Nor is there any swap unless asked for."""
    kv, (one, _, _) = manager(3)
    assert (kv.num_blocks, kv.num_free, kv.num_swap_blocks, kv.num_swap_free) == (3, 3, 0, 0)
    for give_back in (kv.free, kv.end):
        give_back(one)
        assert (kv.table(one), kv.held(one), kv.num_free) == ([], 0, 3)


def test_blocks_are_handed_out_to_the_last_one_and_not_beyond() -> None:
    """5 blocks: 2 are admitted, a third is allocated, the fourth and fifth are the group's."""
    kv, _ = manager(5)
    seq = Sequence(requests("0:8->30")[0].request)
    assert kv.admit(seq, 8, 0)
    assert (kv.held(seq), kv.num_free) == (2, 3)
    assert kv.allocate(seq, 9)
    assert (kv.held(seq), kv.num_free) == (3, 2)
    seq.settled_computed_tokens, seq.settled_output_tokens = 8, 1
    group = DecodeGroup(BLOCK_SIZE)
    group.join(seq)
    held = []
    for _ in range(4):
        assert kv.allocate(seq, 12)
        group.advance()
        held.append(kv.held(seq))
    for _ in range(8):
        assert kv.grow_group(group)
        group.advance()
        held.append(kv.held(seq))
        kv.check()
    assert held == [3] * 4 + [4] * 4 + [5] * 4
    assert not kv.grow_group(group)
    assert not kv.allocate(seq, 21)
    assert (kv.num_free, sorted(kv.table(seq))) == (0, [0, 1, 2, 3, 4])
    kv.free(seq)
    group.leave(seq)
    assert (kv.held(seq), kv.num_free) == (0, 5)
    seq.reset_computed()
    assert kv.allocate(seq, 16)
    assert kv.allocate(seq, 20)
    assert (kv.held(seq), kv.num_free) == (5, 0)


@pytest.mark.parametrize("length", [6, 7, 8])
def test_a_begun_block_that_is_found_leaves_queue_and_tree(length: int) -> None:
    """All tokens but the last are left behind in a full and a begun block; the next one with them holds both."""
    kv = ReuseTreeKV(4, BLOCK_SIZE)
    one, two = (Sequence(a.request) for a in alike(f"0:{length}->1 0:{length}->1", length, length))
    assert kv.admit(one, length, 0)
    assert kv.first_missing(two) is not None
    kv.end(one)
    assert (kv.lookup(two), kv.cached_blocks) == (length - 1, 2)
    assert (kv.first_missing(two) is None) is (length < 8)
    assert kv.admit(two, length, length - 1)
    kv.check()
    assert (kv.table(two), kv.num_free, kv.cached_blocks) == ([0, 1], 2, 1)


def test_a_block_of_two_holders_keeps_what_is_left_below_it() -> None:
    """Two go on from one block; when the first has ended and its part is given to others, the second's stays."""
    kv = ReuseTreeKV(6, BLOCK_SIZE)
    one, two, other = (Sequence(a.request) for a in alike("0:9->1 0:9->1 0:12->1", 4, 4, 0))
    assert kv.admit(one, 9, 0)
    kv.store(one, 8)
    assert kv.admit(two, 9, 4)
    kv.store(two, 8)
    kv.check()
    kv.end(one)
    assert kv.allocate(other, 12)
    kv.check()
    assert (kv.table(two), kv.cached_blocks, kv.num_free) == ([0, 3, 4], 2, 0)


def test_who_holds_copies_gives_all_back() -> None:
    """Of the second's blocks the first two are copies, and only the third is in the tree."""
    kv = ReuseTreeKV(8, BLOCK_SIZE)
    one, two = (Sequence(a.request) for a in alike("0:9->1 0:13->1", 8, 12))
    for seq in (one, two):
        assert kv.admit(seq, seq.num_tokens, 0)
        kv.store(seq, seq.num_tokens - 1)
    kv.end(two)
    kv.check()
    assert (kv.cached_blocks, kv.num_free) == (3, 5)


def test_a_lookup_sees_what_came_and_went_since_the_last_one() -> None:
    """A block is stored, and another one handed out to others, which is one more change and not one less."""
    kv = ReuseTreeKV(5, BLOCK_SIZE)
    gone, one, head, other = (Sequence(a.request) for a in alike("0:5->1 0:5->1 0:9->1 0:9->1", 0, 4, 4, 4))
    assert kv.admit(gone, 5, 0)
    kv.end(gone)
    assert kv.admit(one, 5, 0)
    assert (kv.lookup(head), kv.lookup(other)) == (0, 0)
    kv.store(one, 4)
    assert kv.lookup(head) == 4
    assert kv.allocate(Sequence(requests("0:12->1")[0].request), 12)
    assert kv.cached_blocks == 1
    assert kv.lookup(other) == 4
    kv.end(one)
    assert one not in kv._known


def test_an_admission_beyond_what_is_cached_is_refused() -> None:
    """Hits that are not there, or are no whole blocks, are the policy's error; want of blocks is an answer."""
    kv, (one, two, _) = manager(4)
    with pytest.raises(ValueError, match="cannot admit with 4 cached tokens"):
        kv.admit(one, 9, 4)
    assert kv.admit(one, 9, 0)
    assert not kv.admit(two, 9, 0)
    assert kv.num_free == 1
    kv.check()


def test_reuse_needs_its_manager() -> None:
    """Another KV manager is refused, with the way out."""
    with pytest.raises(ScenarioError, match=r"needs a ReuseTreeKV, not a CountingKV\. Set enable_block_reuse: false"):
        TensorrtLlm(TensorrtLlmConfig(), PolicyContext(CountingKV(4, 4), 64))


# ---- all together


@st.composite
def sharing(draw: st.DrawFn) -> list[Arrival]:
    """Requests that begin alike, go on from what others generated, or share nothing, faster than they are served."""
    arrivals: list[Arrival] = []
    for arrival in draw(crowds()):
        request = arrival.request
        segments: list[Segment] = []
        left = request.prompt_tokens
        earlier = st.sampled_from([0, 2, *(output_stream(a.request.id) for a in arrivals)])
        for stream, length in draw(st.lists(st.tuples(earlier, st.sampled_from([3, 4, 8, 16])), max_size=3)):
            if left:
                start = segments[-1][1] + segments[-1][2] if segments and segments[-1][0] == stream else 0
                segments.append((stream, start, min(length, left)))
                left -= min(length, left)
        own = [(prompt_stream(100 + request.id), 0, left)] if left else []
        tokens = TokenIds.of(segments + own) if segments else None
        arrivals.append(replace(arrival, request=replace(request, tokens=tokens), cancel_ns=None))
    return arrivals


@pytest.mark.slow
@random_cases(400)
@given(
    arrivals=sharing(),
    capacity=CAPACITY,
    size=st.sampled_from([2, 4, 100]),
    tokens=st.sampled_from([5, 9, 21, 36]),
    chunking=CHUNKING,
    aware=st.booleans(),
    backend=st.sampled_from(["tensorrt", "pytorch"]),
    blocks=st.integers(9, 18),
)
def test_with_block_reuse_the_steps_are_those_of_the_plain_loops(
    arrivals: list[Arrival],
    capacity: Any,
    size: int,
    tokens: int,
    chunking: Any,
    aware: bool,
    backend: Any,
    blocks: int,
) -> None:
    """Rule 6: step by step the same starts, cached tokens, waits, pauses and free blocks as the rules told as loops."""
    config = TensorrtLlmConfig(
        capacity,
        size,
        tokens if chunking else max(tokens, 16),
        chunking is not None,
        chunking,
        enable_prefix_aware_scheduling=aware,
        backend=backend,
    )
    try:
        steps = Waiting(config, arrivals, blocks, BLOCK_SIZE).run()
    except EngineFailsError:
        with pytest.raises(SchedulerStalled, match="was paused with"):
            run(TensorrtLlm, config, arrivals, blocks=blocks, kv=ReuseTreeKV)
        return
    log = run(TensorrtLlm, config, arrivals, blocks=blocks, kv=ReuseTreeKV).log
    found: list[Step] = [(row.start_ns, row.items, row.preempted, row.free) for row in log]
    assert found == steps
