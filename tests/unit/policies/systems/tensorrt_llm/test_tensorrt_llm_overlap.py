"""TensorRT-LLM's overlap scheduler, by hand: what the call that comes while a step runs knows of it, and what not.

Times in ns with HostCost: a step is 10 on the GPU, 1 a prefill token, 2 a decode; 3 to launch, 2 to process. A KV block
holds 4 tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st

from batchsim.base.errors import SchedulerStalled
from batchsim.kernel.engine_loop import OVERLAP
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.record import SAT_OUT
from batchsim.kernel.tokens import TokenIds, output_stream, prompt_stream
from batchsim.kernel.types import Arrival
from batchsim.kv.reuse_tree import ReuseTreeKV
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm import TensorrtLlm
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm_config import TensorrtLlmConfig
from tests.plain.tensorrt_llm import EngineFailsError
from tests.plain.tensorrt_llm_overlap import Overlapping
from tests.support.random_cases import few_and_many
from tests.support.stepping import HostCost, Run, column, crowds, lanes, run, run_alike, wasted
from tests.support.whole_batches import BLOCK_SIZE, MAX_MODEL_LEN, blocked, requests
from tests.unit.policies.systems.tensorrt_llm.test_tensorrt_llm_reuse import TEXT, alike, sharing, states

EVICTING = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
STATIC = {"capacity_scheduler_policy": "STATIC_BATCH"}
REUSE = {"enable_block_reuse": True}


def overlapped(
    arrivals: str | list[Arrival], blocks: int = 1000, *, ways: tuple[str, ...] = ("leap", "step"), **knobs: Any
) -> Run:
    """One live run, without block reuse unless told; those by other `ways` must leave the same records."""
    config = TensorrtLlmConfig(**{"enable_block_reuse": False, **knobs})
    kv = ReuseTreeKV if config.traits.prefix_cache else CountingKV
    setting: dict[str, Any] = {"blocks": blocks, "kv": kv, "loop": config.traits.loop, "cost": HostCost()}
    assert config.traits.loop == OVERLAP
    return run_alike(TensorrtLlm, config, arrivals, "live", *ways, **setting)


def turns(first: str, known: int, at: int) -> list[Arrival]:
    """`first`, a request of its own text, and at `at` one of that text, `known` tokens of its answer and one more."""
    one = requests(first)[0]
    text = (TEXT, 0, one.request.prompt_tokens)
    two = requests(f"0:1->1 {at}:{one.request.prompt_tokens + known + 1}->1")[1]
    said = TokenIds.of([text, (output_stream(0), 0, known), (prompt_stream(7), 0, 1)])
    both = ((one, TokenIds.of([text])), (two, said))
    return [replace(arrival, request=replace(arrival.request, tokens=tokens)) for arrival, tokens in both]


# ---- the loop


def test_a_step_is_launched_before_the_one_before_it_is_processed() -> None:
    """The prompt runs from 3 to 17, its decode is scheduled at 3; its token is out at 19, and the next call is then."""
    done = overlapped("0:4->3")
    assert lanes(done) == [(0, 3, 3, 19), (3, 6, 17, 31), (19, 22, 29, 43)]
    assert (column(done, "first_token_ns"), column(done, "last_token_ns")) == ([19], [43])
    assert wasted(done) == [0, 0, 0]


def test_who_ends_by_its_cap_runs_no_step_too_many() -> None:
    """The first token of a cap of 1 is in flight at 3: nothing else is launched."""
    assert lanes(overlapped("0:4->1")) == [(0, 3, 3, 19)]


def test_who_ends_by_the_context_runs_no_step_too_many() -> None:
    """62 tokens leave room for 2 of the 64."""
    done = overlapped("0:62->9")
    assert (column(done, "output_tokens"), wasted(done)) == ([2], [0, 0])


def test_who_ends_by_a_stop_token_runs_one_step_too_many() -> None:
    """Nobody foresees that the third of 8 tokens is the last: it is out at 43 as before, and a fourth step runs."""
    done = overlapped("0:4->3/8")
    assert lanes(done)[3] == (31, 34, 41, 55)
    assert (column(done, "last_token_ns"), column(done, "output_tokens"), wasted(done)) == ([43], [3], [0, 0, 0, 1])


def test_a_chunk_is_launched_before_the_one_before_it_is_over() -> None:
    """4 tokens a step: chunks run from 3, 17 and 31 on, the third scheduled at 19. The token is out at 47."""
    done = overlapped("0:12->1", enable_chunked_prefill=True, max_num_tokens=4)
    assert lanes(done) == [(0, 3, 3, 19), (3, 6, 17, 33), (19, 22, 31, 47)]


def test_steps_alike_are_leapt_over() -> None:
    """300 tokens, the last a stop token: the first two steps are asked for."""
    setting: dict[str, Any] = {"loop": OVERLAP, "cost": HostCost(), "max_model_len": 1000}
    done = run(TensorrtLlm, TensorrtLlmConfig(enable_block_reuse=False), "0:4->300/600", how="leap", **setting)
    assert (len(done.records.steps), len(done.log)) == (301, 2)


# ---- whose last token is in flight


@pytest.mark.parametrize(
    ("knobs", "reason", "second"),
    [
        ({"max_batch_size": 1}, "no_slot", (31, 34, 34, 50)),
        (STATIC, "batch_running", (31, 34, 34, 50)),
        ({"max_batch_size": 2}, "", (19, 22, 29, 45)),
    ],
)
def test_who_is_ending_keeps_its_place(knobs: dict[str, Any], reason: str, second: tuple[int, ...]) -> None:
    """At 19 the last token of 0 is in flight. 1 has a place of its own, or starts when that token is out, at 31."""
    done = overlapped("0:4->2 5:4->1", **knobs)
    assert lanes(done)[2] == second
    assert blocked(done.records) == ([(19, 1, reason)] if reason else [])


def test_who_is_ending_takes_no_tokens_of_the_step() -> None:
    """At 19 all 8 tokens of a step are there for 1, unless 0 goes on."""
    assert overlapped("0:4->2 5:8->1", max_num_tokens=8).items[2] == [(1, 8)]
    assert overlapped("0:4->3 5:8->1", max_num_tokens=8).items[2] == [(0, 1)]


@pytest.mark.parametrize(("blocks", "second"), [(2, (19, 22, 22, 37)), (3, (3, 6, 17, 32))])
def test_who_is_ending_keeps_what_is_reserved_for_it(blocks: int, second: tuple[int, ...]) -> None:
    """4 + 1 tokens are 2 blocks, though the fifth's KV is never computed: the second of them is free from 19 on."""
    assert lanes(overlapped("0:4->1 1:3->1", blocks))[1] == second


@pytest.mark.parametrize(("blocks", "third"), [(3, (34, 37, 37, 52)), (4, (22, 25, 32, 47))])
def test_who_is_ending_counts_for_a_block_of_the_next_step(blocks: int, third: tuple[int, ...]) -> None:
    """At 22 the two blocks of 0 are full, its last token in flight: a free block is left for 1 of 4, not of 3."""
    done = overlapped("0:7->2 5:3->1", blocks, **EVICTING)
    assert lanes(done)[2] == third
    assert blocked(done.records) == ([(22, 1, "kv_blocks")] if blocks == 3 else [])


def test_who_is_ending_can_be_paused() -> None:
    """At 29 both need a third block, 0 to go on and 1 as if it did, and one is free. 1 ends in the queue all the same,
    when its token is out at 43; its blocks are free from 29 on."""
    done = overlapped("0:7->9 0:7->2", 5, **EVICTING)
    assert done.preemptions() == [(29, 1, "kv_blocks", 1)]
    assert (lanes(done)[2], done.log[2].free) == ((29, 32, 41, 55), 2)
    assert (column(done, "last_token_ns")[1], column(done, "output_tokens")) == (43, [9, 2])
    assert not any(wasted(done))


def test_behind_one_that_is_ending_others_are_looked_at() -> None:
    """1, passed over for the first block of 0, is older than 2, so all are walked: 0, ending at 3, and those behind."""
    done = overlapped(alike("0:9->1 0:9->1 0:1->3", 8, 8, 0), **EVICTING, **REUSE)
    assert done.items[:2] == [[(0, 9), (2, 1)], [(1, 9), (2, 1)]]


# ---- pauses


def test_a_paused_request_keeps_its_token_in_flight() -> None:
    """At 29 the last token of 0 is in flight and one block free, for both: 1 is paused with 8 tokens, 1 in flight, and
    nothing is launched. At 43 it comes back with 9; with a block more it goes on."""
    done = overlapped("0:7->2 0:7->9", 5, **EVICTING)
    assert done.preemptions() == [(29, 1, "kv_blocks", 1)]
    assert done.items[:4] == [[(0, 7), (1, 7)], [(0, 1), (1, 1)], [], [(1, 9)]]
    assert lanes(done)[2] == (43, 46, 46, 67)
    assert (column(done, "output_tokens"), column(done, "recomputed_tokens")) == ([2, 9], [0, 8])
    assert not any(wasted(done))
    assert not overlapped("0:7->2 0:7->9", 6, **EVICTING).preemptions()


def test_a_paused_request_may_end_by_its_token_in_flight() -> None:
    """As above, but the second token of 1 ends it, which nobody knew: it is out at 43 and does not come back."""
    done = overlapped("0:7->2 0:7->2/9", 5, **EVICTING)
    assert done.preemptions() == [(29, 1, "kv_blocks", 1)]
    assert (done.items[2:], column(done, "last_token_ns")) == ([[]], [43, 43])


@pytest.mark.parametrize(("tokens", "chunked", "back"), [(17, False, [17]), (14, True, [12, 5])])
def test_who_is_paused_comes_back_with_its_token_in_flight(tokens: int, chunked: bool, back: list[int]) -> None:
    """At 141 both have 16 tokens and one in flight, in 8 of 9 blocks: 1 is paused. It comes back with 17 at once or
    in chunks; where a step takes 16, the scheduler fails."""
    done = overlapped("0:7->20 0:7->20", 9, **EVICTING, max_num_tokens=tokens, enable_chunked_prefill=chunked)
    assert done.preemptions() == [(141, 1, "kv_blocks", 1)]
    assert sum(wasted(done)) == 0
    assert [n for items in done.items[1:] for i, n in items if i == 1 and n > 1] == back
    assert column(done, "output_tokens") == [20, 20]
    with pytest.raises(SchedulerStalled, match="request 1 was paused with 17 tokens, more than max_num_tokens 16"):
        overlapped("0:7->20 0:7->20", 9, **EVICTING, max_num_tokens=16)


def test_a_decode_that_finds_no_tokens_sits_out_with_its_token_in_flight() -> None:
    """1 is passed over for the first block of 0; at 3 nobody makes it any more, and 1 takes the 9 tokens that 0 leaves
    of 10: 2 sits out until 25."""
    done = overlapped(alike("0:9->3 0:9->2 0:1->3", 8, 8, 0), **EVICTING, **REUSE, max_num_tokens=10)
    assert done.items[:3] == [[(0, 9), (2, 1)], [(1, 9), (0, 1)], [(0, 1), (1, 1), (2, 1)]]
    assert [row[:3] for row in states(done, SAT_OUT)] == [(3, 2, "token_budget")]
    assert (column(done, "output_tokens"), sum(wasted(done))) == ([3, 2, 3], 0)


# ---- what the tree has, and when


def test_a_prompt_enters_the_tree_after_the_next_call() -> None:
    """1 waits for the first block of 0, which is not there yet at 3: 1 computes all 9, and 2 waits for it. At 24 the
    blocks of 0 are there: 2 computes 1."""
    done = overlapped(alike("0:9->9 0:9->1 0:9->1", 8, 8, 8), **REUSE)
    assert done.items[:3] == [[(0, 9)], [(1, 9), (0, 1)], [(2, 1), (0, 1)]]
    assert column(done, "cached_tokens") == [0, 0, 8]


def test_a_prompt_of_whole_blocks_enters_the_tree_whole() -> None:
    """Its first token is known by then; in the C++ runtime it is not, and the block of the last token is not found."""
    arrivals = alike("0:8->9 50:12->1", 8, 8)
    assert column(overlapped(arrivals, **REUSE), "cached_tokens") == [0, 8]
    waits = run(TensorrtLlm, TensorrtLlmConfig(backend="tensorrt"), arrivals, kv=ReuseTreeKV)
    assert column(waits, "cached_tokens") == [0, 4]


@pytest.mark.parametrize(("tokens", "cached"), [(28, 24), (25, 24), (24, 20)])
def test_a_chunk_enters_the_tree_with_the_results_of_the_one_before(tokens: int, cached: int) -> None:
    """At 35 the results of 20 tokens are there and all the prompt is launched: it is stored, but for the last token of
    one whose next token is in flight. Who wants 24 of them is launched at once, behind the second chunk."""
    arrivals = alike(f"0:{tokens}->1 1:25->1", 24, 24)
    done = overlapped(arrivals, **REUSE, enable_chunked_prefill=True, max_num_tokens=20)
    assert column(done, "cached_tokens") == [0, cached]
    assert lanes(done)[2][:2] == (35, 38)


def test_who_has_ended_is_stored_before_the_prompts_of_its_step() -> None:
    """0 and 1 begin with equal blocks; that of 1, which has ended with its first token, is in the tree. 2 takes it with
    3 others that are free for longer than those of 0, and 3 finds nothing; in the C++ runtime it finds that of 0."""
    arrivals = alike("0:5->3 0:5->1 100:15->1 200:5->1", 4, 4, 0, 4)
    assert column(overlapped(arrivals, 6, **STATIC, **REUSE), "cached_tokens") == [0, 0, 0, 0]
    config = TensorrtLlmConfig("STATIC_BATCH", backend="tensorrt")
    waits = run(TensorrtLlm, config, arrivals, blocks=6, kv=ReuseTreeKV)
    assert column(waits, "cached_tokens") == [0, 0, 0, 4]


@pytest.mark.parametrize("cap", [3, 9])
def test_a_step_too_many_is_not_in_the_tree(cap: int) -> None:
    """Of 8 + 3 tokens all but the last are found, whether or not its KV was computed, in vain."""
    assert column(overlapped(turns(f"0:8->3/{cap}", 2, 200), **REUSE), "cached_tokens") == [0, 10]


def test_a_cancel_leaves_what_is_known() -> None:
    """Cancelled at 25, 0 ends at 35 with 8 + 2 known tokens and one in flight: of the known ones 9 are found."""
    done = overlapped(turns("0:8->9c25", 1, 200), **REUSE)
    assert (column(done, "ended_ns")[0], column(done, "cached_tokens")[1]) == (35, 9)
    assert wasted(done)[2] == 1


@pytest.mark.parametrize(("first", "head", "cached"), [("0:8->9c1", 8, 4), ("0:13->1c1", 12, 12)])
def test_a_cancel_of_a_prompt_leaves_what_is_known(first: str, head: int, cached: int) -> None:
    """At 3 all 8 tokens of 0 are in flight, and the first one to come: 7 are stored, a whole block of them. Or 8 of 13
    are: of a prompt half computed all is stored but its last token."""
    arrivals = alike(f"{first} 200:{head + 1}->1", head, head)
    done = overlapped(arrivals, **REUSE, enable_chunked_prefill=True, max_num_tokens=9)
    assert column(done, "ended_ns")[0] == 3
    assert column(done, "cached_tokens") == [0, cached]


def test_a_pause_leaves_what_is_known() -> None:
    """Of 8 known tokens 7 are stored at 29, a block and 3 more. With the ninth 1 finds the block only."""
    done = overlapped("0:7->2 0:7->9", 5, **EVICTING, **REUSE)
    assert done.preemptions() == [(29, 1, "kv_blocks", 1)]
    assert done.items[3] == [(1, 5)]


def test_who_ends_paused_leaves_what_was_known() -> None:
    """As above, of 1 whose last token is in flight at 29: 2 goes on from it, and finds one block of 8 tokens."""
    text, own = (TEXT, 0, 7), (prompt_stream(9), 0, 1)
    prompts = [None, TokenIds.of([text]), TokenIds.of([text, (output_stream(1), 0, 1), own])]
    arrivals = [
        replace(one, request=replace(one.request, tokens=tokens))
        for one, tokens in zip(requests("0:7->3 0:7->2 200:9->1"), prompts, strict=True)
    ]
    done = overlapped(arrivals, 5, **EVICTING, **REUSE)
    assert done.preemptions() == [(29, 1, "kv_blocks", 1)]
    assert column(done, "cached_tokens") == [0, 0, 4]


# ---- all together


KNOBS = {
    "capacity": st.sampled_from(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "MAX_UTILIZATION", "STATIC_BATCH"]),
    "chunking": st.sampled_from([None, None, "FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"]),
    "size": st.sampled_from([2, 4, 100]),
    "tokens": st.sampled_from([5, 9, 21, 36]),
    "reuse": st.booleans(),
    "aware": st.booleans(),
}
CROWDS = st.one_of(crowds(), sharing())


def config_of(knobs: dict[str, Any], least: int = 0) -> dict[str, Any]:
    """The config of some KNOBS; a step has room for `least` tokens, and for whole prompts where those are not cut."""
    reuse, chunking = knobs["reuse"], knobs["chunking"]
    return {
        "capacity_scheduler_policy": knobs["capacity"],
        "max_batch_size": knobs["size"],
        "max_num_tokens": max(knobs["tokens"], least if chunking else 16),
        "enable_chunked_prefill": chunking is not None,
        "context_chunking_policy": chunking,
        "enable_block_reuse": reuse,
        "enable_prefix_aware_scheduling": knobs["aware"] if reuse else None,
    }


def check_told(done: Run, naive: Overlapping) -> None:
    """When each call came, its work in order, pauses, free blocks and when tokens were out, as the plain loop has it;
    with steps in flight also what was computed in vain."""
    assert [(row.start_ns, row.items, row.preempted, row.free) for row in done.log] == naive.calls
    if naive.config.traits.loop.is_ahead:
        assert [(row[-1], in_vain) for row, in_vain in zip(lanes(done), wasted(done), strict=True)] == naive.processed
    ours = zip(*(column(done, name) for name in ("request_id", "first_token_ns", "last_token_ns")), strict=True)
    assert sorted(ours) == sorted((row.id, row.first_ns, row.last_ns) for row in naive.done)


def compared(knobs: dict[str, Any], arrivals: list[Arrival], blocks: int) -> Run | None:
    """The run, after proving it that of the loop told naively; None if both fail."""
    config = config_of(knobs)
    arrivals = [replace(arrival, cancel_ns=None) for arrival in arrivals]
    try:
        naive = Overlapping(TensorrtLlmConfig(**config), arrivals, blocks, BLOCK_SIZE, MAX_MODEL_LEN).run()
    except EngineFailsError:
        with pytest.raises(SchedulerStalled, match="was paused with"):
            overlapped(arrivals, blocks, **config)
        return None
    done = overlapped(arrivals, blocks, ways=("leap",), **config)
    check_told(done, naive)
    return done


test_every_call_is_that_of_the_naive_loop, test_they_are_so_in_many_more_cases = few_and_many(
    compared, st.fixed_dictionaries(KNOBS), CROWDS, st.integers(9, 16), few=150, many=1000
)


def test_the_naive_loop_pauses_in_flight_too() -> None:
    """Four fill 9 blocks for long: pauses and steps too many are compared; with 16 tokens a step both fail."""
    knobs = {"capacity": EVICTING["capacity_scheduler_policy"], "size": 100, "tokens": 36, "reuse": True, "aware": True}
    arrivals = requests("0:7->16 0:7->16/20 0:5->9/11 9:3->12")
    done = compared({**knobs, "chunking": None}, arrivals, 9)
    assert done is not None
    assert len(done.preemptions()) > 2
    assert sum(wasted(done)) == 2
    assert compared({**knobs, "chunking": None, "tokens": 16}, arrivals, 9) is None
