"""Timelines made by hand of vLLM 0.33.0 with the OffloadingConnector. Each test names the rule that it is of.

Blocks of 4 tokens, steps of 5 ms, no host time, 1 ms of sleep after a call that had nothing to run, no prefix cache on
the GPU unless said, 1 ms a chunk in either direction.
Source: vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py and worker.py of the 0.33.0 wheel.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.check.conform.recording import Recording
from batchsim.check.conform.replay import Replay
from batchsim.check.conform.times import StepLaw
from batchsim.kernel.host_link import OffloadLink
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.offload import OffloadConnector
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.tokens import TokenIds, prompt_stream
from batchsim.kernel.types import Arrival, Request
from batchsim.policies.systems.vllm.offload_config import VllmOffloadConfig
from batchsim.policies.systems.vllm.vllm_offload import VllmOffload

MS = 1_000_000
Facts = dict[str, Any]


def _asked(number: int, at_ms: float, prompt: int, output: int, *, like: int | None = None, **more: Any) -> Arrival:
    """A request whose prompt begins as that of request `like`, or as no other's."""
    tokens = TokenIds.of([(prompt_stream(number if like is None else like), 0, prompt)])
    return Arrival(Request(number, int(at_ms * MS), prompt, output, tokens=tokens), output, **more)


def _config(chunks: int = 100, *, ahead: bool = False, cached: bool = False, **knobs: Any) -> VllmOffloadConfig:
    knobs = {"max_num_seqs": 4, "max_num_batched_tokens": 64} | knobs
    return VllmOffloadConfig(cpu_chunks=chunks, async_scheduling=ahead, enable_prefix_caching=cached, **knobs)


def _steps(
    config: VllmOffloadConfig, blocks: int, arrivals: list[Arrival], *, store_ms: float = 1, load_ms: float = 1
) -> list[Facts]:
    """The facts of each call of the scheduler, once processed; all is given back at the end."""
    storing, loading = (OffloadLink(0, int(ms * MS)) for ms in (store_ms, load_ms))
    recording = Recording(
        policy="vllm",
        config=config,
        num_blocks=blocks,
        block_size=4,
        max_model_len=64,
        arrivals=arrivals,
        durations_ns=[],
        steps=[],
        law=StepLaw(5 * MS),
        loop=config.traits.loop,
        new_offload=lambda: OffloadConnector(replace(storing), replace(loading)),
    )
    replay = Replay(recording)
    facts = [step.facts for step in replay.steps()]
    scheduler = replay._core.scheduler  # pyright: ignore[reportPrivateUsage]
    assert isinstance(scheduler, VllmOffload)
    assert scheduler.kv.num_free == scheduler.kv.num_blocks
    assert scheduler.tier.num_evictable == scheduler.tier.num_used
    scheduler.tier.check()
    return facts


def _where(facts: list[Facts], name: str) -> list[tuple[float, Any]]:
    """When the calls were, in ms, in which `name` was not empty, and what it was."""
    return [(step["called_ns"] / MS, step[name]) for step in facts if step[name]]


def _transfers(facts: list[Facts]) -> list[tuple[int, str, float, float]]:
    """Each transfer's request, direction, start and end in ms."""
    return [(i, way, 1e3 * a, 1e3 * b) for step in facts for _, way, i, _, a, b in step["xfers"]]


def test_a_prompt_is_stored_as_it_is_computed_and_loaded_by_the_next_of_its_kind() -> None:
    """Offered in its step, submitted at the next launch, noticed at the one after its end. Later the same prompt loads
    both chunks, waits for the call after that was noticed, and computes its last token again."""
    facts = _steps(_config(), 16, [_asked(0, 0, 8, 2), _asked(1, 20, 8, 1, like=0)])
    assert _where(facts, "offers") == [(0, [[0, 2, 2, 0]])]
    assert _where(facts, "stores_queued") == [(0, [[0, 2, 0]])]
    assert _transfers(facts) == [(0, "s", 5, 7), (1, "l", 20, 22)]
    assert _where(facts, "jobs_done") == [(10, [0]), (22, [1])]
    assert _where(facts, "matched") == [(20, [[1, 0, 8]])]
    assert _where(facts, "chunks_loading") == [(20, [[1, 2, 1]])]
    assert _where(facts, "scheduled") == [(0, [[0, 8]]), (5, [[0, 1]]), (23, [[1, 1]])]
    assert [step["cpu"] for step in facts[:4]] == [[2, 0, 2], [2, 0, 2], [2, 2, 0], [2, 0, 0]]


def test_only_whole_chunks_are_stored_and_loaded() -> None:
    """20 tokens in chunks of 2 blocks: two chunks, 16 tokens, are loaded, and 4 computed."""
    facts = _steps(_config(blocks_per_chunk=2), 16, [_asked(0, 0, 20, 1), _asked(1, 20, 20, 1, like=0)])
    assert _where(facts, "matched") == [(20, [[1, 0, 16]])]
    assert _where(facts, "scheduled") == [(0, [[0, 20]]), (23, [[1, 4]])]
    facts = _steps(_config(blocks_per_chunk=2), 16, [_asked(0, 0, 7, 1), _asked(1, 20, 7, 1, like=0)])
    assert _where(facts, "offers") == [] == _where(facts, "matched")


def test_a_request_is_passed_over_while_its_chunks_are_being_stored() -> None:
    """Asked for again at each call; the request behind it, of another prompt, is let in meanwhile."""
    of = [_asked(0, 0, 8, 2), _asked(1, 3, 8, 1, like=0), _asked(2, 4, 4, 1)]
    facts = _steps(_config(), 16, of, store_ms=3)
    assert _where(facts, "matched") == [
        (5, [[1, 0, None]]),
        (10, [[1, 0, None]]),
        (11, [[1, 0, None]]),
        (12, [[1, 0, 8]]),
    ]
    assert _where(facts, "scheduled")[1] == (5, [[0, 1], [2, 4]])


def test_a_load_by_another_is_waited_for_where_the_gpu_will_have_it() -> None:
    """With a prefix cache the second of two waits until the first has the chunks there, and then has one block of it;
    without, both load."""
    of = [_asked(0, 0, 8, 1), _asked(3, 15, 31, 1), _asked(1, 30, 8, 1, like=0), _asked(2, 30, 8, 1, like=0)]
    facts = _steps(_config(cached=True), 8, of, load_ms=1)
    assert _where(facts, "matched") == [
        (30, [[1, 0, 8], [2, 0, None]]),
        (31, [[2, 0, None]]),
        (32, [[2, 0, None]]),
        (33, [[2, 4, 4]]),
    ]
    assert _where(_steps(_config(), 8, of), "matched") == [(30, [[1, 0, 8], [2, 0, 8]])]


def test_a_load_begins_when_the_step_of_its_call_has_ended_on_the_device() -> None:
    """The copy stream waits for the compute stream; the store of the step before goes at once, in the other
    direction. It is noticed at the launch at or after its end."""
    of = [_asked(0, 0, 8, 1), _asked(2, 19, 8, 3), _asked(1, 20, 8, 1, like=0)]
    facts = _steps(_config(), 16, of, load_ms=0.5)
    assert _transfers(facts)[1:] == [(2, "s", 24, 26), (1, "l", 29, 30)]
    assert _where(facts, "loads_done") == [(34, [1])]


def test_transfers_of_a_direction_follow_each_other() -> None:
    """Two loads of one call, one after the other; each is noticed by itself."""
    of = [_asked(0, 0, 8, 1), _asked(1, 30, 8, 1, like=0), _asked(2, 30, 8, 1, like=0)]
    facts = _steps(_config(), 8, of, load_ms=3)
    assert _transfers(facts)[1:] == [(1, "l", 30, 36), (2, "l", 36, 42)]
    assert _where(facts, "remote_in_order")[-1] == (42, [2])


def test_a_launch_waits_for_the_store_of_a_block_that_it_overwrites() -> None:
    """Three blocks: the next prompt needs the two of the one that ended, whose store is submitted and waited for."""
    facts = _steps(_config(), 3, [_asked(0, 0, 8, 1), _asked(1, 3, 12, 1)], store_ms=10)
    assert _where(facts, "flushed") == [(5, [0])]
    assert (facts[1]["scheduled_ns"], facts[1]["launched_ns"], facts[1]["start_ns"]) == (5 * MS, 25 * MS, 25 * MS)
    assert facts[1]["jobs_done"] == [0]
    roomy = _steps(_config(), 5, [_asked(0, 0, 8, 1), _asked(1, 3, 8, 1)], store_ms=10)
    assert _where(roomy, "flushed") == [(5, [0])]  # freed blocks are handed out first


def test_without_a_prefix_cache_the_last_block_of_a_request_is_used_first() -> None:
    """block_pool.py `free_blocks`: a request that ended had two blocks being stored and one of output. One that needs
    one block takes that, one that needs two has the launch wait."""
    before = _asked(0, 0, 8, 5)
    assert _where(_steps(_config(), 3, [before, _asked(1, 23, 3, 1)], store_ms=20), "flushed") == []
    assert _where(_steps(_config(), 3, [before, _asked(1, 23, 7, 1)], store_ms=20), "flushed") == [(25, [0])]


def test_the_stores_of_a_preempted_request_are_flushed_and_what_it_lost_is_loaded() -> None:
    """Two prompts of 8 tokens in 5 blocks: both need a third at 5 ms and the younger is preempted. The launch waits for
    its store, which follows the other's; once the older has ended it loads its prompt and computes one token."""
    facts = _steps(_config(), 5, [_asked(0, 0, 8, 6), _asked(1, 0, 8, 6)], store_ms=4)
    assert _where(facts, "preempted") == [(5, [1])] and _where(facts, "flushed") == [(5, [1])]
    assert _transfers(facts) == [(0, "s", 5, 13), (1, "s", 13, 21), (1, "l", 46, 48)]
    assert facts[1]["launched_ns"] == 21 * MS
    assert _where(facts, "matched") == [(at, [[1, 0, 8]]) for at in (26, 31, 36, 41, 46)]
    assert _where(facts, "chunks_loading") == [(46, [[1, 2, 2]])]
    assert _where(facts, "scheduled")[6] == (49, [[1, 1]])


def test_what_finds_no_room_is_offered_at_each_step() -> None:
    """One place for two chunks: refused at all three steps and once more after the end."""
    facts = _steps(_config(1), 16, [_asked(0, 0, 8, 3)])
    assert _where(facts, "offers") == [(at, [[0, 2, None, 0]]) for at in (0, 5, 10, 15)]


def test_generated_tokens_are_stored_where_that_is_asked_for() -> None:
    """6 tokens of prompt and 7 of output, the last of which is never computed: 12 tokens, three chunks. An engine that
    schedules ahead offers a chunk once its last token is known, a step later, the last one as the request has ended."""
    facts = _steps(_config(offload_prompt_only=False), 16, [_asked(0, 0, 6, 7)])
    assert _where(facts, "offers") == [(at, [[0, 1, 1, 0]]) for at in (0, 10, 30)]
    facts = _steps(_config(offload_prompt_only=False, ahead=True), 16, [_asked(0, 0, 6, 7)])
    assert _where(facts, "offers") == [(at, [[0, 1, 1, 0]]) for at in (0, 10, 36)]
    assert [step["scheduled"] for step in facts if step["offers"]] == [[[0, 6]], [[0, 1]], []]


def test_a_request_given_up_while_it_loads_keeps_its_blocks_until_the_load_is_over() -> None:
    """Cancelled at 22 ms, its load over at 30: the blocks are free once that is noticed."""
    of = [_asked(0, 0, 8, 1), _asked(1, 20, 8, 1, like=0, cancel_ns=22 * MS)]
    facts = _steps(_config(), 4, of, load_ms=5)
    free = {step["called_ns"] / MS: step["free_blocks_processed"] for step in facts}
    assert (free[20], free[29], free[30]) == (2, 2, 4)
    assert _where(facts, "scheduled") == [(0, [[0, 8]])]


def test_a_pool_without_ids_is_refused() -> None:
    """Which blocks are given to others would not be known."""
    config = _config()
    context = PolicyContext(CountingKV(8, 4), 64, loop=config.traits.loop, connector=_connector())
    with pytest.raises(ScenarioError, match="have ids"):
        VllmOffload(config, context)


def _connector() -> OffloadConnector:
    return OffloadConnector(OffloadLink(0, MS), OffloadLink(0, MS))


def test_nothing_of_a_run_depends_on_the_order_of_sets() -> None:
    """The same requests give the same facts, flushes of several blocks and all."""
    of = [_asked(i, 2 * i, 4 + 5 * (i % 3), 2 + i % 4, like=i % 4) for i in range(12)]
    once, again = (
        json.dumps(_steps(_config(6, cached=True, ahead=True), 8, of, store_ms=4), default=str) for _ in "ab"
    )
    assert once == again
