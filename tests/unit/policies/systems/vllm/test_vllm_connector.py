"""Timelines made by hand of vLLM 0.33.0's scheduler with a KV connector. Each test names the source of its rule.

Blocks of 4 tokens, steps of 5 ms, no host time, 1 ms of sleep after a call that had nothing to run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from batchsim.check.conform.kv_transfers import RecordedLink, TransferTimes
from batchsim.check.conform.recording import Recording
from batchsim.check.conform.replay import Replay
from batchsim.check.conform.times import StepLaw
from batchsim.kernel.kv_transfer import Noticed
from batchsim.kernel.tokens import TokenIds, prompt_stream
from batchsim.kernel.types import Arrival, Request
from batchsim.policies.systems.vllm.connector_config import VllmConnectorConfig
from batchsim.policies.systems.vllm.vllm_config import VllmConfig

MS = 1_000_000
Facts = dict[str, Any]


def _pulled(ms: float) -> TransferTimes:
    return TransferTimes(pull_ns=int(ms * MS))


def _kept(ms: float) -> TransferTimes:
    return TransferTimes(keep_ns=int(ms * MS))


HERE = TransferTimes()
"""Of a request that is computed here and goes nowhere."""


def _asked(
    number: int, at_ms: float, prompt: int, output: int, *, cap: int = 0, stream: int | None = None, priority: int = 0
) -> Arrival:
    """A request that ends by a stop token where its `cap` is above `output`; equal `stream`s are equal prompts."""
    tokens = None if stream is None else TokenIds.of([(prompt_stream(stream), 0, prompt)])
    request = Request(number, int(at_ms * MS), prompt, cap or output, priority=priority, tokens=tokens)
    return Arrival(request, output)


class _Failing(RecordedLink):
    """Transfers as stated, of which all pulls fail."""

    def over(self, now_ns: int) -> Noticed:
        noticed = super().over(now_ns)
        return Noticed(noticed.loaded, list(noticed.loaded), noticed.sent)


def _config(role: str, *, ahead: bool = False, failed: str = "fail", **knobs: Any) -> VllmConnectorConfig:
    knobs = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "enable_prefix_caching": False} | knobs
    return VllmConnectorConfig(
        kv_role=role,  # pyright: ignore[reportArgumentType]
        kv_load_failure_policy=failed,  # pyright: ignore[reportArgumentType]
        async_scheduling=ahead,
        **knobs,
    )


def _steps(
    config: VllmConnectorConfig, blocks: int, of: list[tuple[Arrival, TransferTimes]], link: Any = RecordedLink
) -> list[Facts]:
    """The facts of each call of the scheduler, once processed."""
    times = {arrival.request.id: time for arrival, time in of}
    recording = Recording(
        policy="vllm",
        config=config,
        num_blocks=blocks,
        block_size=4,
        max_model_len=64,
        arrivals=[arrival for arrival, _ in of],
        durations_ns=[],
        steps=[],
        law=StepLaw(5 * MS),
        loop=config.traits.loop,
        new_link=lambda: link(times),
    )
    replay = Replay(recording)
    facts = [step.facts for step in replay.steps()]
    assert replay.rejected == []
    kv = replay._core.scheduler.kv  # pyright: ignore[reportPrivateUsage]
    assert kv.num_free == kv.num_blocks
    return facts


def _where(facts: list[Facts], name: str) -> list[tuple[float, Any]]:
    """When the calls were, in ms, in which `name` was not empty, and what it was."""
    return [(step["called_ns"] / MS, step[name]) for step in facts if step[name]]


def test_a_prompt_is_pulled_into_its_blocks_and_its_last_token_computed_again() -> None:
    """scheduler.py `_update_waiting_for_remote_kv`: 8 tokens, 2 blocks taken as the pull begins. It is over at 2.5 ms;
    the call at 3 ms looks, the next one computes the last token, whose step samples the first of two."""
    facts = _steps(_config("kv_consumer"), 8, [(_asked(0, 0, 8, 2), _pulled(2.5))])
    assert _where(facts, "loads_started") == [(0, [[0, 8]])]
    assert _where(facts, "loads_done") == [(3, [0])]
    assert _where(facts, "scheduled") == [(4, [[0, 1]]), (9, [[0, 1]])]
    assert [step["free_blocks_sched"] for step in facts] == [6, 6, 6, 6, 6, 5, 8]
    assert [step["num_waiting"] for step in facts] == [1, 1, 1, 1, 0, 0, 0]


def test_no_pull_begins_while_all_slots_are_taken() -> None:
    """scheduler.py, `schedule`: the second pass stops at max_num_seqs, although a pull takes no slot."""
    of = [(_asked(0, 0, 4, 2), HERE), (_asked(1, 1, 4, 1), _pulled(1))]
    assert _where(_steps(_config("kv_consumer", max_num_seqs=1), 8, of), "loads_started") == [(10, [[1, 4]])]
    assert _where(_steps(_config("kv_consumer", max_num_seqs=2), 8, of), "loads_started") == [(5, [[1, 4]])]


def test_a_pull_leaves_the_blocks_that_prompts_in_the_making_need() -> None:
    """scheduler.py, `_inflight_prefill_reserved_blocks`: 4 of 16 tokens are computed, 5 of 6 blocks free, 3 of these
    are the prompt's to come. 12 tokens to be pulled wait for it to end; computed here they would be let in."""
    config = _config("kv_consumer", max_num_batched_tokens=4)
    long = (_asked(0, 0, 16, 1), HERE)
    assert _where(_steps(config, 6, [long, (_asked(1, 1, 12, 1), _pulled(1))]), "loads_started") == [(20, [[1, 12]])]
    wide = replace(config, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    facts = _steps(wide, 6, [long, (_asked(1, 1, 12, 1), HERE)])
    assert _where(facts, "scheduled")[1] == (5, [[0, 4], [1, 4]])


def test_what_is_pulled_is_found_by_others_only_once_it_was_looked_at() -> None:
    """scheduler.py, `_update_waiting_for_remote_kv`: the first pull is over at 6 ms and looked at in the call at 7; a
    request at 6.5 ms looks with it. One at 30 ms finds two blocks and pulls one token."""
    config = _config("kv_consumer", enable_prefix_caching=True)
    of = [(_asked(i, at, 9, 1, stream=0), _pulled(6)) for i, at in ((0, 0), (1, 1), (2, 30))]
    facts = _steps(config, 16, of)
    assert _where(facts, "loads_started") == [(0, [[0, 9]]), (1, [[1, 9]]), (30, [[2, 1]])]
    assert _where(facts, "cached") == [(30, [[2, 8]])]


def test_held_requests_come_first_and_by_priority() -> None:
    """scheduler.py, `schedule`: both pulls are over in the call at 2 ms; of one free slot the more important one of
    those held takes it, before an even more important one that waits."""
    config = _config("kv_consumer", policy="priority", max_num_seqs=1)
    of = [(_asked(0, 0, 4, 1, priority=3), _pulled(2)), (_asked(1, 0, 4, 1, priority=2), _pulled(2))]
    facts = _steps(config, 8, [*of, (_asked(2, 2.5, 4, 1, priority=1), HERE)])
    assert [ids for _, ids in _where(facts, "scheduled")] == [[[1, 1]], [[0, 1]], [[2, 4]]]


def test_a_preempted_request_computes_its_prompt_here() -> None:
    """nixl/pull_scheduler.py: the flag to pull is used up. Two prompts of 8 tokens fill 4 of 5 blocks; the second one
    loses them to the first, and computes 8 tokens and one more when it is back."""
    of = [(_asked(i, 0, 8, 7), _pulled(1)) for i in (0, 1)]
    facts = _steps(_config("kv_consumer"), 5, of)
    assert [ids for _, ids in _where(facts, "loads_started")] == [[[0, 8], [1, 8]]]
    assert [ids for _, ids in _where(facts, "preempted")] == [[1]]
    assert [[1, 9]] in [rows for _, rows in _where(facts, "scheduled")]


def test_an_ended_prompt_keeps_its_blocks_until_they_are_sent() -> None:
    """scheduler.py, `_connector_finished`: 3 of 4 blocks are kept from 5 ms for 4 ms. The engine goes round with empty
    calls; the next prompt of 2 blocks waits until the call at 9 ms has seen them sent."""
    of = [(_asked(0, 0, 12, 1), _kept(4)), (_asked(1, 6, 8, 1), _kept(1))]
    facts = _steps(_config("kv_producer"), 4, of)
    assert _where(facts, "sends_started") == [(0, [[0, 3]]), (10, [[1, 2]])]
    assert _where(facts, "sends_done") == [(9, [0]), (16, [1])]
    assert _where(facts, "scheduled") == [(0, [[0, 12]]), (10, [[1, 8]])]
    assert [step["free_blocks_processed"] for step in facts][:6] == [1, 1, 1, 1, 1, 4]


def test_a_token_in_flight_of_a_preempted_request_is_dropped_where_kv_is_kept() -> None:
    """scheduler.py, `_preempt_request`, `requires_kv_delivery`: three times request 1 is preempted with its first token
    in flight. Each time it is back with the 4 tokens of its prompt, not with 5 as where that token is delivered."""
    of = [(_asked(0, 0, 4, 6), HERE), (_asked(1, 0, 4, 6), HERE)]
    dropped = _steps(_config("kv_producer", ahead=True), 3, of)
    assert [ids for _, ids in _where(dropped, "stale")] == [[1], [1], [1]]
    back = [dict(rows)[1] for _, rows in _where(dropped, "scheduled") if dict(rows).get(1, 0) > 1]
    assert back == [4, 4, 4, 4]
    assert sum(len(step["finished"]) for step in dropped) == 2


def test_blocks_that_a_step_in_flight_may_write_are_free_once_it_is_processed() -> None:
    """scheduler.py, `_request_blocks_can_be_freed`: a stop token at 10 ms, its successor in flight until 15 ms. An
    engine that only keeps KV frees the blocks at once."""
    of = [(_asked(0, 0, 4, 2, cap=9), HERE)]
    late, soon = (_steps(_config(role, ahead=True), 8, of) for role in ("kv_consumer", "kv_producer"))
    for facts, free in ((late, [6, 8]), (soon, [8, 8])):
        assert [step["processed_ns"] / MS for step in facts[1:3]] == [10, 15]
        assert [step["finished"] for step in facts[1:3]] == [[0], []]
        assert [step["free_blocks_processed"] for step in facts[1:3]] == free


def test_who_is_in_flight_is_not_preempted_where_blocks_are_freed_late() -> None:
    """scheduler.py, `schedule`, `defer_block_free`: in the second call request 1 lacks a block, and is the last one
    and in the step in flight: none is preempted, it waits. In the third call it is in no step, and is preempted."""
    of = [(_asked(0, 0, 4, 6), HERE), (_asked(1, 0, 4, 6), HERE)]
    consumer, producer = (_steps(_config(role, ahead=True), 3, of) for role in ("kv_consumer", "kv_producer"))
    assert [step["preempted"] for step in producer[:3]] == [[], [1], []]
    assert [step["preempted"] for step in consumer[:3]] == [[], [], [1]]
    assert [step["scheduled"] for step in consumer[:3]] == [[[0, 4], [1, 4]], [[0, 1]], [[0, 1]]]
    assert all(not step["stale"] for step in consumer)


def test_a_failed_pull_ends_its_request_or_has_its_prompt_computed_here() -> None:
    """scheduler.py, `_update_from_kv_xfer_finished`, `kv_load_failure_policy`: noticed in the call at 2 ms."""
    of = [(_asked(0, 0, 8, 1), _pulled(2))]
    ended = _steps(_config("kv_consumer"), 8, of, _Failing)
    assert (_where(ended, "errors"), _where(ended, "scheduled")) == ([(2, [0])], [])
    assert [step["free_blocks_processed"] for step in ended] == [6, 6, 8, 8]
    again = _steps(_config("kv_consumer", failed="recompute"), 8, of, _Failing)
    assert (_where(again, "errors"), _where(again, "scheduled")) == ([], [(3, [[0, 8]])])
    assert [step["free_blocks_processed"] for step in again] == [6, 6, 6, 8, 8]


def test_a_cancelled_pull_gives_its_blocks_back_once_it_is_over() -> None:
    """scheduler.py, `_free_request`: the KV comes into the blocks until 6 ms, although the client gave up at 2 ms."""
    arrival = replace(_asked(0, 0, 8, 1), cancel_ns=2 * MS)
    facts = _steps(_config("kv_consumer"), 8, [(arrival, _pulled(6)), (_asked(1, 3, 4, 4), HERE)])
    assert _where(facts, "loads_done") == [(8, [0])]
    assert [step["free_blocks_sched"] for step in facts if step["called_ns"] == 3 * MS] == [5]


def test_what_an_engine_with_a_connector_does_not_have() -> None:
    """Pipelines, adapters, items, groups of layers and masks; its loop has empty steps though it waits for each."""
    plain = VllmConfig(max_loras=2, async_scheduling=False)
    config = VllmConnectorConfig.of(plain, "kv_producer", "recompute")
    assert (config.kv_role, config.kv_load_failure_policy, config.max_loras) == ("kv_producer", "recompute", 2)
    assert plain.traits.adapters is not None and plain.traits.loop.kind != "batch_queue"
    lacking = {"pipelines": False, "knobs": (), "adapters": None, "takes_items": False, "kv_groups": False, "masks": ""}
    assert config.traits == replace(plain.traits, loop=replace(plain.traits.loop, kind="batch_queue"), **lacking)
    assert all(getattr(plain.traits, name) != value for name, value in lacking.items())
