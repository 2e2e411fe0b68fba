"""vLLM's rules by hand: a step takes 10 ns, 1 more a prefill token, 2 a decode; a KV block holds 4 tokens."""

from __future__ import annotations

from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import SAT_OUT
from batchsim.kernel.tokens import Segment, TokenIds, output_stream, prompt_stream
from batchsim.kernel.types import Arrival, Request
from batchsim.kv.choice import new_kv
from batchsim.kv.prefix_cache import BlockHashKV
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from tests.support.stepping import Run, run_alike
from tests.support.whole_batches import blocked

A, B = prompt_stream(0), prompt_stream(1)


def arrival(id_: int, at: int, output: int, *segments: Segment, prompt: int = 0, priority: int = 0) -> Arrival:
    """A request whose prompt has these segments, or so many tokens of its own."""
    tokens = TokenIds.of(list(segments)) if segments else None
    length = tokens.num_tokens if tokens else prompt
    return Arrival(Request(id_, at, length, output, priority=priority, tokens=tokens), output)


def vllm(arrivals: list[Arrival], blocks: int = 100, max_num_seqs: int = 16, **knobs: Any) -> Run:
    """The synchronous run, the same with and without leaps and under both drivers."""
    config = VllmConfig(async_scheduling=False, max_num_seqs=max_num_seqs, **knobs)
    kv = BlockHashKV if config.enable_prefix_caching else CountingKV
    return run_alike(Vllm, config, arrivals, blocks=blocks, kv=kv)


def cached(result: Run) -> list[tuple[int, int]]:
    """Tokens found in the cache at the first admission and at all, by request."""
    return [(int(r["cached_tokens"]), int(r["cached_tokens_all"])) for r in result.records.requests]


def test_two_equal_prompts_of_one_step_share_what_the_first_was_scheduled() -> None:
    """5.3: the second of two prompts of 13 tokens hits the three full blocks that the first got a moment ago."""
    result = vllm([arrival(0, 0, 1, (A, 0, 13)), arrival(1, 0, 1, (A, 0, 13))])
    assert result.items == [[(0, 13), (1, 1)]]
    assert cached(result) == [(0, 0), (12, 12)]
    assert result.log[0].free == 100 - 5


def test_sharing_within_a_step_ends_with_the_chunk() -> None:
    """5.3: a long prompt capped to 6 tokens a step publishes one block, so the second hits 4 tokens and no more."""
    arrivals = [arrival(0, 0, 1, (A, 0, 13)), arrival(1, 0, 1, (A, 0, 13))]
    result = vllm(arrivals, long_prefill_token_threshold=6)
    assert result.items[0] == [(0, 6), (1, 6)]
    assert cached(result) == [(0, 0), (4, 4)]


def test_the_last_block_of_a_fully_cached_prompt_is_computed_again() -> None:
    """5.2: of 12 cached tokens 8 are hit."""
    result = vllm([arrival(0, 0, 1, (A, 0, 12)), arrival(1, 50, 1, (A, 0, 12))])
    assert result.items == [[(0, 12)], [(1, 4)]]
    assert cached(result)[1] == (8, 8)
    assert result.records.steps["cached_tokens"].tolist() == [0, 8]


def test_a_next_turn_hits_what_the_last_one_generated() -> None:
    """5.1: 6 prompt and 6 computed output tokens are three full blocks of the next prompt."""
    turn = arrival(1, 500, 1, (A, 0, 6), (output_stream(0), 0, 7), (B, 0, 4))
    result = vllm([arrival(0, 0, 7, (A, 0, 6)), turn])
    assert cached(result)[1] == (12, 12)
    assert result.items[-1] == [(1, 5)]


def test_who_was_preempted_finds_its_blocks_again() -> None:
    """3.3 and 5.2: with 8 tokens each both ask for a third block of five; request 1 gives way, then hits all its 8.

    What is hit is neither prefill nor recompute work, and no hit of the first admission.
    """
    result = vllm([arrival(0, 0, 6, prompt=6), arrival(1, 0, 9, prompt=6)], blocks=5)
    assert result.preemptions() == [(50, 1, "kv_blocks", 1)]
    assert blocked(result.records) == [(50, 1, "preemption"), (62, 1, "kv_blocks")]
    assert result.items[3:7] == [[(0, 1)], [(0, 1)], [(0, 1)], [(1, 1)]]
    assert cached(result) == [(0, 0), (0, 8)]
    row = result.records.requests[1]
    assert (row["num_preemptions"], row["recomputed_tokens"]) == (1, 0)


def test_the_last_token_of_a_step_is_enough_to_lose_ones_place() -> None:
    """3.3: of 2 tokens the first decode takes one and the last block; for the other one request 1 finds none."""
    result = vllm([arrival(0, 0, 6, prompt=4), arrival(1, 0, 2, prompt=4)], 4, 2, max_num_batched_tokens=2)
    assert result.items[2:] == [*[[(0, 1), (1, 1)]] * 4, [(0, 1)], [(1, 1)]]
    assert result.preemptions() == [(76, 1, "kv_blocks", 1)]


def test_a_victim_scheduled_in_the_same_step_leaves_phantom_blocks() -> None:
    """5.3: request 0 gets tokens 16 to 21 in the third step, then loses its place in that very step to request 1.

    That chunk is never computed, yet its full block was published: on return 20 tokens are hit, 16 of them computed.
    """
    arrivals = [arrival(0, 0, 1, prompt=26, priority=1), arrival(1, 1, 2, prompt=4)]
    knobs = {"policy": "priority", "max_num_batched_tokens": 10, "long_prefill_token_threshold": 6}
    result = vllm(arrivals, blocks=7, max_num_seqs=4, scheduler_reserve_full_isl=False, **knobs)
    assert result.items == [[(0, 10)], [(0, 6), (1, 4)], [(1, 1)], [(0, 6)]]
    assert [row.preempted for row in result.log] == [[], [], [0], []]
    assert cached(result)[0] == (0, 20)


def test_a_victim_gives_its_tokens_of_the_step_back() -> None:
    """3.3: of 12 tokens request 0 gets 6 and loses its place to the decode; with these the prompt behind has its 6."""
    arrivals = [arrival(0, 0, 1, prompt=26, priority=1), arrival(1, 1, 2, prompt=4), arrival(2, 1, 1, prompt=12)]
    knobs = {"policy": "priority", "max_num_batched_tokens": 12, "long_prefill_token_threshold": 6}
    result = vllm(arrivals, blocks=8, max_num_seqs=4, scheduler_reserve_full_isl=False, **knobs)
    assert result.items[:3] == [[(0, 12)], [(0, 6), (1, 4), (2, 2)], [(1, 1), (2, 6)]]
    assert result.log[2].preempted == [0]


def test_the_gate_asks_for_the_whole_prompt_less_what_is_cached() -> None:
    """4.2: with 6 of 8 blocks free a prompt of 7 blocks waits, and one of which a running one holds 2 is let in."""
    running = arrival(0, 0, 9, (A, 0, 8))
    waits = vllm([running, arrival(1, 1, 1, (B, 0, 27))], blocks=8)
    assert blocked(waits.records) == [(18, 1, "kv_blocks")]
    goes = vllm([running, arrival(1, 1, 1, (A, 0, 8), (B, 0, 15))], blocks=8)
    assert blocked(goes.records) == []
    assert goes.items[1] == [(0, 1), (1, 15)]


def test_a_blocked_head_goes_in_when_a_running_one_generates_what_it_asks_for() -> None:
    """4.2 and 5.1: the head lacks one of 4 blocks; the answer it goes on from fills one that it need not allocate."""
    head = arrival(1, 1, 1, (A, 0, 6), (output_stream(0), 0, 7))
    result = vllm([arrival(0, 0, 10, (A, 0, 6)), head], blocks=4)
    assert blocked(result.records) == [(16, 1, "kv_blocks")]
    assert result.items[:4] == [[(0, 6)], [(0, 1)], [(0, 1), (1, 5)], [(0, 1)]]
    assert cached(result)[1] == (8, 8)


def test_a_decode_behind_a_prompt_whose_cap_grows_sits_out() -> None:
    """3.1: when one of three ends, the prompt's cap goes from 8 // 3 to 8 // 2, which is all 4 tokens of a step."""
    arrivals = [arrival(0, 0, 1, prompt=12), arrival(1, 0, 4, prompt=1), arrival(2, 0, 2, prompt=1)]
    knobs = {"long_prefill_token_threshold": 2, "long_prefill_token_threshold_adaptive": True}
    result = vllm(arrivals, max_num_seqs=4, max_num_batched_tokens=8, max_num_scheduled_tokens=4, **knobs)
    assert result.items[:5] == [[(0, 2), (1, 1), (2, 1)], [(0, 2), (1, 1), (2, 1)], [(0, 4)], [(0, 4)], [(1, 1)]]
    states = result.records.states
    (out,) = states[states["state"] == SAT_OUT]
    assert (out["time_ns"], out["request_id"], result.records.texts[out["reason"]]) == (30, 1, "token_budget")


def test_who_sat_out_and_lost_its_place_decodes_again() -> None:
    """3.1 and 3.3: the same in 3 blocks: at 44 the prompt takes the last one of request 1, which comes back at 58."""
    arrivals = [arrival(0, 0, 1, prompt=12), arrival(1, 0, 4, prompt=1), arrival(2, 0, 2, prompt=1)]
    knobs = {"long_prefill_token_threshold": 2, "long_prefill_token_threshold_adaptive": True}
    knobs |= {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_num_scheduled_tokens": 4}
    result = vllm(arrivals, blocks=3, scheduler_reserve_full_isl=False, **knobs)
    assert result.preemptions() == [(44, 1, "kv_blocks", 0)]
    assert [row.start_ns for row in result.log][3:] == [44, 58, 71]
    assert result.items[2:] == [[(0, 4)], [(0, 4)], [(1, 3)], [(1, 1)]]


def test_a_prompt_behind_one_whose_cap_grows_stands_still() -> None:
    """3.1: the same, and the last of the three is a prompt too."""
    arrivals = [arrival(0, 0, 1, prompt=12), arrival(1, 0, 2, prompt=1), arrival(2, 0, 1, prompt=12)]
    knobs = {"long_prefill_token_threshold": 2, "long_prefill_token_threshold_adaptive": True}
    result = vllm(arrivals, max_num_seqs=4, max_num_batched_tokens=8, max_num_scheduled_tokens=4, **knobs)
    assert result.items[:3] == [[(0, 2), (1, 1), (2, 1)], [(0, 2), (1, 1), (2, 1)], [(0, 4)]]
    assert result.items[3:] == [[(0, 4)], [(2, 4)], [(2, 4)], [(2, 2)]]


def test_max_num_active_seqs_and_max_num_scheduled_tokens_bound_a_step() -> None:
    """3 and 3.2: two run although max_num_seqs is 16, and a step has 5 tokens although 64 may be batched."""
    arrivals = [arrival(i, 0, 2, prompt=4) for i in range(3)]
    slots = vllm(arrivals, max_num_active_seqs=2)
    assert slots.items == [[(0, 4), (1, 4)], [(0, 1), (1, 1)], [(2, 4)], [(2, 1)]]
    assert blocked(slots.records) == [(0, 2, "no_slot")]
    tokens = vllm(arrivals, max_num_batched_tokens=64, max_num_scheduled_tokens=5)
    assert tokens.items == [[(0, 4), (1, 1)], [(0, 1), (1, 3), (2, 1)], [(1, 1), (2, 3)], [(2, 1)]]
    assert blocked(tokens.records) == [(0, 2, "token_budget")]


def test_without_chunked_prefill_prompts_fill_a_step_to_its_last_token() -> None:
    """3: two of 32 make a step of 64, of 32 and 33 the second waits."""
    knobs: dict[str, Any] = {"max_num_batched_tokens": 64, "enable_chunked_prefill": False}
    assert vllm([arrival(0, 0, 1, prompt=32), arrival(1, 0, 1, prompt=32)], **knobs).items == [[(0, 32), (1, 32)]]
    late = vllm([arrival(0, 0, 1, prompt=32), arrival(1, 0, 1, prompt=33)], **knobs)
    assert late.items == [[(0, 32)], [(1, 33)]]
    assert blocked(late.records) == [(0, 1, "token_budget")]


def test_the_watermark_holds_blocks_back_only_while_somebody_runs() -> None:
    """4.2: of 8 blocks int(0.5 * 9) stay free: a prompt of 4 waits beside one of 1, and one of 8 starts alone."""
    arrivals = [arrival(0, 0, 2, prompt=4), arrival(1, 0, 1, prompt=16), arrival(2, 500, 1, prompt=32)]
    result = vllm(arrivals, blocks=8, watermark=0.5)
    assert result.items == [[(0, 4)], [(0, 1)], [(1, 16)], [(2, 32)]]
    assert blocked(result.records) == [(0, 1, "kv_blocks")]


@pytest.mark.parametrize("whole", [True, False])
def test_without_prefix_caching_the_gate_is_the_same(whole: bool) -> None:
    """4.2: beside one block in use and 4 held back of 8, a prompt of 3 comes in and one of 4 waits for the end."""
    knobs: dict[str, Any] = {"blocks": 8, "watermark": 0.5, "scheduler_reserve_full_isl": whole}
    running = arrival(0, 0, 4, prompt=4)
    goes = vllm([running, arrival(1, 0, 1, prompt=12)], enable_prefix_caching=False, **knobs)
    assert goes.items[0] == [(0, 4), (1, 12)]
    waits = vllm([running, arrival(1, 0, 1, prompt=13)], enable_prefix_caching=False, **knobs)
    assert waits.items == [[(0, 4)], [(0, 1)], [(0, 1)], [(0, 1)], [(1, 13)]]
    assert blocked(waits.records) == [(0, 1, "kv_blocks")]
    chunks = vllm([arrival(0, 0, 1, prompt=20)], enable_prefix_caching=False, max_num_batched_tokens=16)
    assert chunks.items == [[(0, 16)], [(0, 4)]]


def test_a_blocked_head_that_loses_cached_blocks_lacks_tokens_instead() -> None:
    """4.2: of 63 tokens 4 are cached, so 59 would go beside two decodes in 64; at 142 a decode takes that block."""
    arrivals = [arrival(0, 0, 1, (A, 0, 4)), arrival(1, 50, 5, prompt=26), arrival(2, 50, 5, prompt=28)]
    arrivals.append(arrival(3, 60, 1, (A, 0, 4), (B, 0, 59)))
    result = vllm(arrivals, blocks=16, max_num_batched_tokens=64, enable_chunked_prefill=False)
    assert blocked(result.records) == [(114, 3, "kv_blocks"), (142, 3, "token_budget")]


@pytest.mark.parametrize(
    ("knobs", "complaint"),
    [
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "max_num_batched_tokens 8 must be at least max_num_seqs 9"),
        ({"max_num_seqs": 4, "max_num_active_seqs": 5}, "max_num_active_seqs 5 must be at most max_num_seqs 4"),
        ({"max_num_scheduled_tokens": 8193}, "max_num_scheduled_tokens 8193 must be at most max_num_batched_tokens"),
    ],
)
def test_what_vllm_refuses_is_refused_by_its_names(knobs: dict[str, Any], complaint: str) -> None:
    """One line with the numbers."""
    with pytest.raises(ValueError, match=complaint):
        VllmConfig(**knobs)


@pytest.mark.parametrize("knob", ["max_num_batched_tokens", "max_num_scheduled_tokens"])
def test_without_chunked_prefill_a_step_must_hold_the_longest_prompt(knob: str) -> None:
    """Otherwise a prompt might never be scheduled."""
    config = VllmConfig(max_num_seqs=1, enable_chunked_prefill=False, **{knob: 63})
    with pytest.raises(ScenarioError, match=f"without chunked prefill {knob} 63 must be at least max_model_len 64"):
        Vllm(config, PolicyContext(new_kv(config, 100, 4, ids=False), 64))


def test_caching_on_blocks_without_identity_is_refused() -> None:
    """It would silently be no caching."""
    with pytest.raises(ScenarioError, match="enable_prefix_caching: true cannot work on a CountingKV"):
        Vllm(VllmConfig(), PolicyContext(CountingKV(100, 4), 64))
