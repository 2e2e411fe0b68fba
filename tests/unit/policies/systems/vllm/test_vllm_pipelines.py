"""vLLM's pipelines by hand: a stage takes 10 ns whatever its batch, the host none; a KV block holds 4 tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from batchsim.kernel.engine_loop import EngineLoop
from batchsim.kernel.record import STATE_NAMES
from batchsim.kernel.types import Arrival
from batchsim.policies.systems.vllm.cohorts import Cohorts
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from tests.support.stepping import Run, Stages, run_alike
from tests.support.whole_batches import blocked
from tests.unit.policies.systems.vllm.test_vllm import arrival

MS = 1_000_000
SYNC_OF, ASYNC_OF = {"async_scheduling": False}, {"async_scheduling": True}


def pipeline(arrivals: list[Arrival], stages: int, blocks: int = 100, nap_ns: int = 0, **knobs: Any) -> Run:
    """The run, stepping; the same with leaps and under both drivers. Without vLLM's sleep unless `nap_ns` says so."""
    config = VllmConfig(**{"enable_prefix_caching": False, "max_num_seqs": 8, **knobs})
    loop = replace(config.traits.loop.over(stages), nap_ns=nap_ns)
    ways = ("step", "leap", "live")
    return run_alike(Vllm, config, arrivals, *ways, blocks=blocks, cost=Stages(stages), loop=loop)


def timeline(result: Run) -> list[tuple[int, list[tuple[int, int]]]]:
    """When the scheduler was asked and what it took, where it took any."""
    return [(row.start_ns, row.items) for row in result.log]


def answered(result: Run) -> list[tuple[int, int]]:
    """First and last token of each request."""
    return [(int(r["first_token_ns"]), int(r["last_token_ns"])) for r in result.records.requests]


@pytest.mark.parametrize(("mode", "loop"), [(SYNC_OF, (4, MS)), (ASYNC_OF, (5, MS))])
def test_as_many_batches_as_stages_are_in_flight_and_one_more_if_asynchronous(
    mode: dict[str, Any], loop: tuple[int, int]
) -> None:
    """A queue of P batches, or of P + 1, and 1 ms of sleep in both."""
    traits = VllmConfig(**mode).traits
    assert traits.pipelines
    assert traits.loop.over(4) == EngineLoop("batch_queue", *loop, stages=4)


def test_one_request_alone_pays_the_whole_pipeline_and_a_sleep_for_each_token() -> None:
    """Batch, empty batch, wait for the first, sleep 1 ms, and again."""
    result = pipeline([arrival(0, 0, 3, prompt=4)], 2, nap_ns=MS, **SYNC_OF)
    assert timeline(result) == [(0, [(0, 4)]), (20 + MS, [(0, 1)]), (40 + 2 * MS, [(0, 1)])]
    assert answered(result) == [(20, 60 + 2 * MS)]


def test_who_was_admitted_together_stays_together() -> None:
    """Of three prompts two fill a batch; so it remains, 2 and 1, each batch behind the other by a stage."""
    arrivals = [arrival(i, 0, 3, prompt=4) for i in range(3)]
    result = pipeline(arrivals, 2, max_num_batched_tokens=8, **SYNC_OF)
    pair, third = [(0, 1), (1, 1)], [(2, 1)]
    first = [(0, [(0, 4), (1, 4)]), (0, [(2, 4)])]
    assert timeline(result) == [*first, (20, pair), (30, third), (40, pair), (50, third)]
    assert answered(result) == [(20, 60), (20, 60), (30, 70)]


def test_chunks_of_one_prompt_run_back_to_back() -> None:
    """Three are in flight at once, the last one alone samples, and the decode comes three calls behind that."""
    result = pipeline([arrival(0, 0, 2, prompt=10)], 3, max_num_seqs=4, max_num_batched_tokens=4, **SYNC_OF)
    assert timeline(result) == [(0, [(0, 4)]), (0, [(0, 4)]), (0, [(0, 2)]), (50, [(0, 1)])]
    assert result.records.steps["start_ns"].tolist() == [0, 10, 20, 50]
    assert answered(result) == [(50, 80)]


def test_one_whose_token_is_in_flight_keeps_its_place() -> None:
    """With one slot the second request waits until the first has ended, not until it merely is away."""
    arrivals = [arrival(0, 0, 2, prompt=4), arrival(1, 0, 1, prompt=4)]
    result = pipeline(arrivals, 2, max_num_seqs=1, **SYNC_OF)
    assert timeline(result) == [(0, [(0, 4)]), (20, [(0, 1)]), (40, [(1, 4)])]
    assert blocked(result.records) == [(0, 1, "no_slot")]


def test_an_asynchronous_decode_comes_every_so_many_calls_as_there_are_stages() -> None:
    """The calls between are empty; the next decode is scheduled while the last one is in flight."""
    result = pipeline([arrival(0, 0, 4, prompt=4)], 2, **ASYNC_OF)
    assert timeline(result) == [(0, [(0, 4)]), (0, [(0, 1)]), (20, [(0, 1)]), (30, [(0, 1)])]
    assert answered(result) == [(20, 50)]
    assert result.records.lanes["wasted_tokens"].tolist() == [0, 0, 0, 0]


def test_an_asynchronous_stop_token_wastes_one_step_whatever_the_stages() -> None:
    """Found out at 40, when the fourth token, after the last, has been scheduled; by length it would not have been."""
    stop = arrival(0, 0, 3, prompt=4)
    stop = replace(stop, request=replace(stop.request, max_output_tokens=9))
    result = pipeline([stop], 2, **ASYNC_OF)
    assert [start for start, _ in timeline(result)] == [0, 0, 20, 30]
    assert answered(result) == [(20, 40)]
    assert result.records.lanes["wasted_tokens"].tolist() == [0, 0, 0, 1]


OTHERS = [arrival(0, 0, 4, prompt=8), arrival(1, 0, 2, prompt=7)]
"""Under 8 tokens a step: both and the third's first token fill two calls, its other seven take the third. In the fourth
call, at 30, the first finds no block of 6, and the third, in the second and the third batch, loses its place."""
BUDGET = {"max_num_batched_tokens": 8, **SYNC_OF}


def test_one_behind_a_victim_in_flight_comes_in_before_it() -> None:
    """At 40 the victim's last chunk is still in flight, so it is passed over, and the fourth takes the block left."""
    arrivals = [*OTHERS, arrival(2, 0, 2, prompt=8), arrival(3, 35, 1, prompt=4)]
    result = pipeline(arrivals, 3, blocks=6, **BUDGET)
    assert timeline(result)[:5] == [
        (0, [(0, 8)]),
        (0, [(1, 7), (2, 1)]),
        (0, [(2, 7)]),
        (30, [(0, 1)]),
        (40, [(1, 1), (3, 4)]),
    ]
    assert result.log[3].preempted == [2]
    assert answered(result)[2][0] == 50  # delivered to one that waits
    assert sum(dict(items).get(2, 0) for items in result.items[5:]) == 9  # comes back with that token known


def test_a_result_in_flight_may_finish_its_victim_where_it_waits() -> None:
    """Its only token is delivered at 50; it never comes back."""
    result = pipeline([*OTHERS, arrival(2, 0, 1, prompt=8)], 3, blocks=6, **BUDGET)
    assert answered(result)[2] == (50, 50)
    assert result.records.requests["num_preemptions"].tolist() == [0, 0, 1]
    assert [2 in dict(items) for items in result.items[3:]] == [False] * len(result.items[3:])


def test_the_queue_is_held_by_results_in_flight_where_nothing_else_holds_it() -> None:
    """A step that preempts admits nobody; then the victim's results are in flight; then there is no KV for it."""
    result = pipeline([*OTHERS, arrival(2, 0, 2, prompt=8)], 3, blocks=6, **BUDGET)
    held = [(30, 2, "preemption"), (40, 2, "in_flight"), (50, 2, "kv_blocks")]
    assert blocked(result.records) == [(0, 1, "token_budget"), *held]


SHARED = {"long_prefill_token_threshold": 2, "long_prefill_token_threshold_adaptive": True, "max_num_batched_tokens": 8}
"""With 4 tokens a step: a prompt gets 2 of them beside two others, and all 4 beside one."""


def sat_out(result: Run) -> list[tuple[int, int, str]]:
    """(time, request, state) from the first time on that anyone sat out, of those who did."""
    rows = [(int(r["time_ns"]), int(r["request_id"]), STATE_NAMES[int(r["state"])]) for r in result.records.states]
    out = {request for _, request, state in rows if state == "sat_out"}
    begin = next(i for i, (_, _, state) in enumerate(rows) if state == "sat_out")
    return [row for row in rows[begin:] if row[1] in out]


def test_who_sat_out_joins_the_cohort_of_the_call_that_takes_it() -> None:
    """Request 1 decodes in the odd calls; at 40, in the fifth, the prompt takes all, so that the even ones have it."""
    arrivals = [arrival(0, 0, 1, prompt=12), arrival(1, 0, 4, prompt=1), arrival(2, 0, 2, prompt=1)]
    result = pipeline(arrivals, 2, max_num_seqs=4, max_num_scheduled_tokens=4, **SHARED, **SYNC_OF)
    all_three = [(0, 2), (1, 1), (2, 1)]
    assert timeline(result)[:4] == [(0, all_three), (0, [(0, 2)]), (20, all_three), (30, [(0, 2)])]
    assert timeline(result)[4:] == [(40, [(0, 4)]), (50, [(1, 1)]), (70, [(1, 1)])]
    assert sat_out(result) == [(40, 1, "sat_out"), (50, 1, "decode")]


def test_one_may_sit_out_with_its_first_token_in_flight() -> None:
    """Request 3 could decode at 20, before its first token is there at 30, but the prompt takes all 4 tokens."""
    arrivals = [arrival(0, 0, 1, prompt=12), arrival(1, 0, 2, prompt=1), arrival(2, 0, 1, prompt=1)]
    arrivals += [arrival(3, 5, 2, prompt=1)]
    result = pipeline(arrivals, 1, max_num_seqs=4, max_num_scheduled_tokens=4, **SHARED, **ASYNC_OF)
    assert timeline(result)[1:] == [
        (0, [(0, 2), (1, 1)]),
        (10, [(0, 2), (3, 1)]),
        (20, [(0, 4)]),
        (30, [(0, 2), (3, 1)]),
    ]
    assert answered(result)[3] == (30, 50)
    assert sat_out(result) == [(20, 3, "sat_out"), (30, 3, "decode")]


def test_cohorts_have_their_turns_in_the_order_that_is_told() -> None:
    """Three, one a call: the next ones as listed, the present one behind them; two calls at once pass over one."""
    cohorts = Cohorts(3, 16)
    first, (second, third, last) = cohorts.group, cohorts.next_groups()
    assert last is first and len({first, second, third}) == 3
    assert [cohorts.turn() for _ in range(3)] == [second, third, first]
    assert cohorts.turn(2) is third is cohorts.group
    assert cohorts.next_groups() == [first, second, third]
