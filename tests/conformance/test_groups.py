"""What every policy must keep on a model whose layers keep KV in several groups, too."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from batchsim.base.errors import ScenarioError
from batchsim.base.kv_groups import KvLayout
from batchsim.kernel.core import EngineCore
from batchsim.kernel.protocols import PolicyContext, Scheduler
from batchsim.kernel.record import Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kv.choice import new_grouped_kv
from batchsim.policies.registry import POLICIES
from batchsim.testing.by_hand import same
from batchsim.testing.policy_checks import (
    kv_within_pool,
    leap_equals_stepping,
    live_equals_simulated,
    requests_end_once,
    step_budgets,
)
from batchsim.testing.random_configs import MAX_MODEL_LEN, needed
from batchsim.testing.random_engines import Case, TokenCost, built, cases
from tests.conformance.ahead import LaneTokenCost
from tests.conformance.test_conformance import MANY, RANDOM
from tests.unit.policies.systems.vllm.test_naive_vllm_groups import layout_of

KINDS = ["vllm", "continuous", "static", "gated"]
"""The policies that can have groups."""


@dataclass(frozen=True)
class OnGroups(Case):
    """A case whose blocks are of the groups of `layout`."""

    layout: KvLayout | None = None

    def engine(self, *, ids: bool = False) -> EngineCore:
        assert self.layout is not None, "every case has one"
        loop = self.config.traits.loop.over(self.stages)
        cost = TokenCost(stages=self.stages) if self.stages > 1 or not loop.is_ahead else LaneTokenCost()
        kv = new_grouped_kv(self.config, self.layout, self.num_blocks, MAX_MODEL_LEN, self.stages)
        context = PolicyContext(kv, MAX_MODEL_LEN, None, cost, loop)
        scheduler: Scheduler = POLICIES[self.kind][1](self.config, context)
        executor, recorder = SimExecutor(cost, MAX_MODEL_LEN, loop, self.luck), Recorder()
        return EngineCore(scheduler, executor, recorder, max_model_len=MAX_MODEL_LEN, stop_ns=self.stop_ns, loop=loop)


@st.composite
def on_groups(draw: st.DrawFn, kind: str) -> Case | None:
    """A case of `cases` on random groups."""
    case = draw(cases(kind))
    if case is None:
        return None
    caches, speculation = bool(case.config.traits.prefix_cache), case.config.traits.speculation
    pick = random.Random(draw(st.integers(0, 10_000)))
    layout = layout_of(pick, caches=caches, drafts=0 if speculation is None else speculation.num_drafts)
    fixed = {each.name: getattr(case, each.name) for each in fields(Case)}
    num_blocks = case.num_blocks * draw(st.sampled_from([1, 2, 6]))
    return OnGroups(**fixed | {"num_blocks": num_blocks}, layout=layout)


@pytest.mark.parametrize("kind", KINDS)
@RANDOM
@given(data=st.data())
def test_a_random_engine_on_groups_keeps_what_every_policy_must(kind: str, data: st.DataObject) -> None:
    """With and without leaps and by both drivers records are equal; requests end once, and all blocks come back."""
    case = data.draw(on_groups(kind))
    assume(built(case))
    assert case is not None
    core = case.simulate()
    leap_equals_stepping(case)
    live_equals_simulated(case)
    requests_end_once(case, core)
    kv_within_pool(case)
    step_budgets(case)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@MANY
@given(data=st.data())
def test_records_on_groups_are_equal_in_many_more_cases(kind: str, data: st.DataObject) -> None:
    """The records of both drivers, with leaps and without, far more often."""
    case = data.draw(on_groups(kind))
    assume(built(case))
    assert case is not None
    records = case.simulate().recorder.records()
    same(records, case.simulate(leap=False).recorder.records())
    same(records, case.live().recorder.records())


def test_any_other_policy_on_groups_is_refused_in_one_line() -> None:
    """Its own rule for blocks has not been looked at: the policies that can have groups are these."""
    layout = layout_of(random.Random(1), caches=False)
    can = {kind for kind, (config, _) in POLICIES.items() if not needed(config) and config().traits.kv_groups}
    assert can | {"continuous", "static"} == set(KINDS)
    config = POLICIES["sglang"][0]()
    with pytest.raises(ScenarioError, match=r"^Sglang with groups of layers is not simulated\. Use vllm, or .*\.$"):
        new_grouped_kv(config, layout, 100, 64)
