"""What SGLang must keep where windows or states have a pool of their own, scheduling ahead or not."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from batchsim.base.errors import ScenarioError
from batchsim.base.kv_pools import KvPools
from batchsim.kernel.core import EngineCore
from batchsim.kernel.protocols import PolicyContext, Scheduler
from batchsim.kernel.record import Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kv.choice import new_pooled_kv
from batchsim.kv.pooled_radix import PooledRadixKV
from batchsim.kv.states import StateRadixKV, StatesKV
from batchsim.kv.windows import PooledKV
from batchsim.policies.registry import POLICIES
from batchsim.testing.by_hand import same
from batchsim.testing.policy_checks import (
    leap_equals_stepping,
    live_equals_simulated,
    requests_end_once,
    step_budgets,
)
from batchsim.testing.random_configs import MAX_MODEL_LEN, needed
from batchsim.testing.random_engines import Case, TokenCost, built, cases
from tests.conformance.ahead import LaneTokenCost
from tests.conformance.test_conformance import MANY, RANDOM


@dataclass(frozen=True)
class OnPools(Case):
    """A case with `pools` beside that of its blocks."""

    pools: KvPools | None = None

    def engine(self, *, ids: bool = False) -> EngineCore:
        assert self.pools is not None, "every case has some"
        loop = self.config.traits.loop
        cost = LaneTokenCost() if loop.is_ahead else TokenCost()
        kv = new_pooled_kv(self.config, self.pools, self.num_blocks, self.block_size)
        context = PolicyContext(kv, MAX_MODEL_LEN, None, cost, loop)
        scheduler: Scheduler = POLICIES[self.kind][1](self.config, context)
        executor, recorder = SimExecutor(cost, MAX_MODEL_LEN, loop, self.luck), Recorder()
        return EngineCore(scheduler, executor, recorder, max_model_len=MAX_MODEL_LEN, stop_ns=self.stop_ns, loop=loop)


@st.composite
def on_pools(draw: st.DrawFn) -> Case | None:
    """A case of `cases` with a random pool of windows or states."""
    case = draw(cases("sglang"))
    if case is None or not case.config.traits.kv_pools:
        return None
    pick = random.Random(draw(st.integers(0, 10_000)))
    pools = KvPools(pick.choice([2, 5, 9, 17]), pick.choice([60, 100, 180, 300]), pick.choice([1, 3, 8]))
    if pick.random() < 0.5:
        pools = KvPools(states=pick.choice([5, 8, 12, 30]), extra_buffer=pick.random() < 0.6)
    fixed = {each.name: getattr(case, each.name) for each in fields(Case)}
    return OnPools(**fixed, pools=pools)


def built_on(case: Case | None) -> bool:
    """Whether SGLang starts on the case."""
    try:
        return built(case) and case is not None and bool(case.engine())
    except ScenarioError:
        return False


@RANDOM
@given(data=st.data())
def test_a_random_engine_with_pools_apart_keeps_what_every_policy_must(data: st.DataObject) -> None:
    """With and without leaps and by both drivers records are equal; requests end once, and all blocks come back."""
    case = data.draw(on_pools())
    assume(built_on(case))
    assert case is not None
    core = case.simulate()
    leap_equals_stepping(case)
    live_equals_simulated(case)
    requests_end_once(case, core)
    step_budgets(case)
    if case.stop_ns is None:
        kv = core.scheduler.kv
        assert isinstance(kv, PooledKV | PooledRadixKV | StatesKV | StateRadixKV)
        side = kv.windows if isinstance(kv, PooledKV | PooledRadixKV) else kv.states
        assert side.available == side.num_blocks
        if not isinstance(kv, StatesKV):
            kv.check()


@pytest.mark.slow
@MANY
@given(data=st.data())
def test_records_with_pools_apart_are_equal_in_many_more_cases(data: st.DataObject) -> None:
    """The records of both drivers, with leaps and without, far more often."""
    case = data.draw(on_pools())
    assume(built_on(case))
    assert case is not None
    records = case.simulate().recorder.records()
    same(records, case.simulate(leap=False).recorder.records())
    same(records, case.live().recorder.records())


def test_any_other_policy_with_pools_apart_is_refused_in_one_line() -> None:
    """The policies that can have them are SGLang's without drafts."""
    pools = KvPools(128, 4096)
    can = {kind for kind, (config, _) in POLICIES.items() if not needed(config) and config().traits.kv_pools}
    assert can == {"sglang"}
    with pytest.raises(ScenarioError, match=r"^Vllm with a pool of windows apart is not simulated\. Use sglang .*\.$"):
        new_pooled_kv(POLICIES["vllm"][0](), pools, 100, 16)
