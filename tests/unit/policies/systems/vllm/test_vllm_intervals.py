"""`prefill_schedule_interval` by hand: a step takes 10 ns, 1 a prefill token, 2 a decode; a KV block holds 4 tokens.

The rules are those of vllm/v1/core/sched/scheduler.py of vLLM 0.33.0, `schedule` and `_update_after_schedule`.
"""

from __future__ import annotations

from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import SAT_OUT
from batchsim.kernel.tokens import TokenIds, prompt_stream
from batchsim.kernel.types import Arrival, Request
from batchsim.kv.prefix_cache import BlockHashKV
from batchsim.policies.systems.vllm.speculative_config import SpeculativeConfig
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.policies.systems.vllm.vllm_intervals import VllmAtIntervals
from tests.support.stepping import Run, run, run_alike
from tests.support.whole_batches import MAX_MODEL_LEN, blocked


def arrival(id_: int, at: int, prompt: int, output: int, stream: int | None = None) -> Arrival:
    """A request whose prompt is the beginning of a token stream, or of tokens of its own."""
    tokens = None if stream is None else TokenIds.of([(prompt_stream(stream), 0, prompt)])
    return Arrival(Request(id_, at, prompt, output, tokens=tokens), output)


def at_intervals(arrivals: list[Arrival], interval: int, blocks: int = 100, caching: bool = False, **knobs: Any) -> Run:
    """The synchronous run, the same with and without leaps and under both drivers."""
    config = VllmConfig(
        async_scheduling=False, enable_prefix_caching=caching, prefill_schedule_interval=interval, **knobs
    )
    kv = BlockHashKV if caching else CountingKV
    return run_alike(VllmAtIntervals, config, arrivals, blocks=blocks, kv=kv)


def test_prompts_wait_for_their_step_while_others_decode() -> None:
    """With 4, the prompt of step 1 is followed by three steps without one: request 1 begins in step 5."""
    result = at_intervals([arrival(0, 0, 8, 7), arrival(1, 5, 3, 2)], 4)
    assert result.items == [
        [(0, 8)],
        [(0, 1)],
        [(0, 1)],
        [(0, 1)],
        [(0, 1), (1, 3)],
        [(0, 1), (1, 1)],
        [(0, 1)],
    ]
    assert blocked(result.records) == [(18, 1, "prefill_interval")]


def test_with_none_to_decode_nothing_is_deferred() -> None:
    """A prompt in parts goes on in every step; the second one comes at once when the first request has ended."""
    result = at_intervals([arrival(0, 0, 20, 1), arrival(1, 1, 4, 1)], 5, max_num_batched_tokens=8, max_num_seqs=1)
    assert result.items == [[(0, 8)], [(0, 8)], [(0, 4)], [(1, 4)]]


def test_a_running_prompt_is_passed_over_too() -> None:
    """Request 1's second part waits two steps beside request 0, which decodes."""
    arrivals = [arrival(0, 0, 4, 8), arrival(1, 0, 16, 1)]
    result = at_intervals(arrivals, 3, max_num_batched_tokens=12, max_num_seqs=2)
    assert result.items[:4] == [[(0, 4), (1, 8)], [(0, 1)], [(0, 1)], [(0, 1), (1, 8)]]
    states, texts = result.records.states, result.records.texts
    sat_out = [(int(r["request_id"]), texts[r["reason"]]) for r in states[states["state"] == SAT_OUT]]
    assert sat_out == [(1, "prefill_interval")]


def test_a_head_that_lacks_one_token_is_let_in_and_another_ends_the_call() -> None:
    """Requests 1 and 3 have 4 of 5 tokens cached; the one between them lacks more, and nothing behind it is tried."""
    arrivals = [arrival(0, 0, 6, 9, stream=0), arrival(1, 1, 5, 1, stream=0), arrival(2, 2, 5, 1, stream=7)]
    arrivals.append(arrival(3, 3, 5, 1, stream=0))
    result = at_intervals(arrivals, 4, caching=True)
    assert result.items[:5] == [[(0, 6)], [(0, 1), (1, 1)], [(0, 1)], [(0, 1)], [(0, 1), (2, 5), (3, 1)]]


def test_what_waits_for_want_of_capacity_lets_the_next_call_take_prompts() -> None:
    """Four requests for three slots: request 3 waits though the call of step 1 took what it could, so it defers
    nothing while it waits; with a slot free the call of step 3 lets it in, and from then on prompts wait again."""
    arrivals = [arrival(0, 0, 4, 9), arrival(1, 0, 4, 9), arrival(2, 0, 4, 2), arrival(3, 0, 4, 9)]
    arrivals.append(arrival(4, 50, 4, 1))
    result = at_intervals(arrivals, 4, max_num_seqs=3, blocks=100)
    assert result.items[:3] == [[(0, 4), (1, 4), (2, 4)], [(0, 1), (1, 1), (2, 1)], [(0, 1), (1, 1), (3, 4)]]


class Counted(VllmAtIntervals):
    """A rank of several in lockstep whose calls are the passes 1, 2, 3 of a wave."""

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        self.calls = getattr(self, "calls", 0) + 1
        self.begin_pass(self.calls)
        return super().schedule(now_ns, drain)


def test_in_lockstep_the_pass_counter_says_which_calls_take_prompts() -> None:
    """Pass 1 takes the first prompt, as none decodes; the second one waits until pass 3, the third until pass 6."""
    config = VllmConfig(async_scheduling=False, enable_prefix_caching=False, prefill_schedule_interval=3)
    arrivals = [arrival(0, 0, 4, 9), arrival(1, 1, 4, 9), arrival(2, 40, 4, 1)]
    result = run(Counted, config, arrivals)
    prompts = [[i for i, n in items if n > 1] for items in result.items]
    assert prompts[:6] == [[0], [], [1], [], [], [2]]


def test_drafts_and_pipelines_at_intervals_are_refused() -> None:
    """In one line each."""
    with pytest.raises(ValueError, match="prefill_schedule_interval 2 with speculative_config is not simulated"):
        VllmConfig(prefill_schedule_interval=2, speculative_config=SpeculativeConfig("mtp", 1, 0.5))
    config = VllmConfig(prefill_schedule_interval=2, enable_prefix_caching=False)
    loop = config.traits.loop.over(2)
    with pytest.raises(ScenarioError, match="prefill_schedule_interval above 1 in a pipeline is not simulated"):
        VllmAtIntervals(config, PolicyContext(CountingKV(100, 4), MAX_MODEL_LEN, loop=loop))
