"""Ranks of TensorRT-LLM that take requests from one queue, by hand: a step takes 10 ns and 1 for each token.

The rules are those of tensorrt_llm/_torch/pyexecutor/scheduler/adp_router.py (02385f29), `DefaultADPRouter`.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.drive.fleet.lockstep.passes import LockstepCost
from batchsim.drive.fleet.lockstep.rank_costs import RankCosts
from batchsim.drive.fleet.lockstep.shared_queue import SharedQueue
from batchsim.drive.simulate import simulate
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm import TensorrtLlm
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm_config import TensorrtLlmConfig
from batchsim.testing.by_hand import same
from batchsim.testing.life_sums import check_lives
from tests.support.iterations import MAX_MODEL_LEN, PAGE, TokensAndHost
from tests.support.ranks import request
from tests.support.tier_lives import parts_of
from tests.support.whole_batches import Listed


def engine(cost: LockstepCost | TokensAndHost, most: int, ahead: bool = False, blocks: int = 300) -> EngineCore:
    config = TensorrtLlmConfig(enable_block_reuse=False, max_batch_size=most, disable_overlap_scheduler=not ahead)
    loop = config.traits.loop
    scheduler = TensorrtLlm(config, PolicyContext(CountingKV(blocks, PAGE), MAX_MODEL_LEN, loop=loop))
    executor = SimExecutor(cost, MAX_MODEL_LEN, loop)
    return EngineCore(scheduler, executor, Recorder(), max_model_len=MAX_MODEL_LEN, loop=loop)


def shared(
    arrivals: list[Arrival], count: int = 2, most: int = 8, ahead: bool = False, host: tuple[int, int] = (0, 0)
) -> tuple[SharedQueue, list[EngineCore]]:
    """Ranks that have run the requests to their end, and their engines."""
    cost = TokensAndHost(host)
    cores = [engine(LockstepCost(cost), most, ahead) for _ in range(count)]
    ranks = SharedQueue(cores, RankCosts(cost.step_ns, ()), Listed(arrivals), most, logs=True)
    ranks.run()
    for core in cores:
        core.check_returned()
    return ranks, cores


def test_the_longest_prompt_goes_first_to_the_rank_with_the_fewest_tokens() -> None:
    """Of 30, 20 and 8 tokens the third goes beside 20; the fourth, of 6, to the other, as two are enough for a rank."""
    ranks, _ = shared([request(0, 0, 8, 9), request(1, 0, 30, 9), request(2, 0, 20, 9), request(3, 0, 6, 9)])
    assert ranks.routes == [(1, 0), (2, 1), (0, 1), (3, 0)]


def test_equal_ranks_are_taken_by_number_and_active_prompts_count() -> None:
    """The second comes while rank 0 decodes the first; rank 1 has no tokens. The third finds 40 there and 8 at 0."""
    ranks, _ = shared([request(0, 0, 8, 30), request(1, 20, 40, 30), request(2, 120, 5, 2)])
    assert ranks.routes == [(0, 0), (1, 1), (2, 0)]


def test_no_more_are_taken_than_all_ranks_may_have() -> None:
    """With one a rank the third waits in the queue until the first has ended, whichever rank that was on: for a slot,
    from the first iteration on, of 19 ns, to the end of the second, of 11."""
    ranks, cores = shared([request(0, 0, 9, 2), request(1, 0, 8, 6), request(2, 0, 7, 1)], most=1)
    assert ranks.routes == [(0, 0), (1, 1), (2, 0)]
    assert [made.tokens for made in ranks.passes][:3] == [(9, 8), (1, 1), (7, 1)]
    assert parts_of(cores[0].recorder.records(), 2)["queued:no_slot"] == 30
    for core in cores:
        check_lives(core.recorder.records())


def test_a_rank_without_requests_runs_a_dummy_of_one_token() -> None:
    """Which is padding, and ends with the last request of the others."""
    ranks, cores = shared([request(0, 0, 4, 3)])
    assert [(made.start_ns, made.end_ns, made.tokens) for made in ranks.passes] == [
        (0, 14, (4, 0)),
        (14, 25, (1, 0)),
        (25, 36, (1, 0)),
    ]
    steps = cores[1].recorder.records().steps
    assert steps["pad_decode_rows"].tolist() == [1, 1, 1]
    assert steps["duration_ns"].tolist() == [14, 11, 11]


@pytest.mark.parametrize("ahead", [False, True])
def test_one_rank_steps_as_an_engine_alone(ahead: bool) -> None:
    """To the nanosecond, as long as the queue keeps no request from it."""
    arrivals = [request(i, at, 5 + i, 3 + i % 4) for i, at in enumerate((0, 3, 9, 40, 41, 400, 401))]
    _, (core,) = shared(arrivals, count=1, most=64, ahead=ahead, host=(2, 3))
    alone = engine(TokensAndHost((2, 3)), 64, ahead)
    simulate(alone, Listed(arrivals), leap=False)
    same(core.recorder.records(), alone.recorder.records())


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
)
def test_all_are_served_and_no_rank_has_more_than_it_may(
    asked: list[tuple[int, int, int]], count: int, most: int, ahead: bool
) -> None:
    """In as many steps on every rank, all tokens computed once."""
    arrivals = [request(i, at, prompt, output) for i, (at, prompt, output) in enumerate(sorted(asked))]
    ranks, cores = shared(arrivals, count, most, ahead, (1, 2))
    records = [core.recorder.records() for core in cores]
    served = {int(row["request_id"]): int(row["output_tokens"]) for each in records for row in each.requests}
    assert served == {arrival.request.id: arrival.output_tokens for arrival in arrivals}
    assert {len(each.steps) for each in records} == {len(ranks.passes)}
    assert max(each.steps["num_running"].max() for each in records) <= most
