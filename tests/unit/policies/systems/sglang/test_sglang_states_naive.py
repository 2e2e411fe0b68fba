"""The SGLang policy with a pool of states against plain loops over lists, step by step on random runs."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from batchsim.base.errors import ScenarioError
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.types import Arrival
from batchsim.kv.states import StateRadixKV
from batchsim.policies.systems.sglang.sglang import Sglang
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from tests.plain.sglang_states import NaiveStates, States
from tests.support.random_cases import few_and_many
from tests.support.stepping import Logged, run
from tests.support.whole_batches import MAX_MODEL_LEN
from tests.unit.policies.systems.sglang.test_sglang_naive import KNOBS, texts

Found = tuple[int, list[tuple[int, int]], list[int], int, int]
"""Start in ns, work, retracted, free pages and states: those that can be evicted are free."""


class Watched(Logged):
    """A scheduler whose pools are proved whole before each call; keeps what of the states is available behind it."""

    states: list[int]

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        self.inner.kv.check()
        work = super().schedule(now_ns, drain)
        if isinstance(work, Batch):
            self.states.append(self.inner.kv.states.available)
        return work


def compared(
    config: SglangConfig, arrivals: list[Arrival], blocks: int, page: int, states: int, buffers: int, every: int
) -> list[Found]:
    """The steps, after proving them those of the plain loops; states are kept at multiples of 4 tokens of a step, and
    of `every` tokens of an answer."""
    made: list[Watched] = []

    def policy(config: Any, context: Any) -> Watched:
        made.append(Watched(Sglang(config, context)))
        made[0].states = []
        return made[0]

    def pool(blocks: int, page: int, swap: int) -> StateRadixKV:
        return StateRadixKV(blocks, page, states, buffers, chunk=4, tracked=every)

    log = run(policy, config, arrivals, kv=pool, blocks=blocks, block_size=page).log
    rows = zip(log, made[0].states, strict=True)
    found: list[Found] = [(row.start_ns, row.items, row.preempted, row.free, left) for row, left in rows]
    naive = NaiveStates(config, arrivals, blocks, page, States(blocks, page, states, buffers, 4, every), MAX_MODEL_LEN)
    expected = [(*step, left) for step, left in zip(naive.steps(), naive.free_states, strict=True)]
    assert found == expected
    at_rest = made[0].inner.kv
    assert at_rest.states.available == at_rest.states.num_blocks
    return found


POOLS = st.sampled_from([(40, 1), (60, 1), (120, 1), (20, 4), (30, 2), (20, 8)])


def _alike(
    knobs: dict[str, Any], arrivals: list[Arrival], pool: tuple[int, int], states: int, buffers: int, every: int
) -> None:
    """Step by step the same work in the same order, retractions, free pages and states, where SGLang starts."""
    alone: dict[str, Any] = {"disable_radix_cache": False} | ({"disable_overlap_schedule": True} if not buffers else {})
    try:
        compared(SglangConfig(**knobs | alone), arrivals, *pool, states, buffers, every)
    except (ValueError, ScenarioError):
        return


CASES = (
    st.fixed_dictionaries(KNOBS),
    texts(),
    POOLS,
    st.integers(4, 24),
    st.sampled_from([0, 0, 1, 2]),
    st.sampled_from([4, 8, 16]),
)


test_the_steps_are_those_of_the_plain_loops, test_they_are_so_in_many_more_cases = few_and_many(
    _alike, *CASES, few=100, many=2000
)
