"""Leaps of engines that wait for each step, where the scheduler foresees its steps: how often it is really asked.

Records are those of stepping. Times in ns with HostCost: a step is 10, 1 a prefill token, 2 a decode.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.base.units import MAX_TIME_NS
from batchsim.drive.simulate import simulate
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import CountingKV, TableKV
from batchsim.kernel.protocols import DecodeLine, PolicyContext
from batchsim.kernel.record import Recorder, Records
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival, Request, Sequence
from batchsim.kv.prefix_cache import BlockHashKV
from batchsim.policies.families.continuous import Continuous, ContinuousConfig
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.testing.by_hand import same
from tests.support.stepping import HostCost
from tests.support.whole_batches import BLOCK_SIZE, Listed, requests
from tests.unit.kernel.test_leaps_ahead import DrawnCost


class AskedCore(EngineCore):
    """An engine that counts how often its scheduler is asked, and the steps that are executed by themselves."""

    asked = executed = 0

    def execute(self, batch: Batch, now_ns: int) -> int:
        self.executed += 1
        return super().execute(batch, now_ns)

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        self.asked += 1
        return super().schedule(now_ns, drain)


def vllm(kv: Any = CountingKV, **knobs: Any) -> VllmConfig:
    return VllmConfig(async_scheduling=False, enable_prefix_caching=kv is BlockHashKV, **{"max_num_seqs": 8, **knobs})


def leapt(arrivals: str | list[Arrival], config: Any = None, **setting: Any) -> tuple[Records, int]:
    """The records with leaps, which are those of stepping, and how often the scheduler was asked."""
    records, core = leaping(arrivals, config, **setting)
    return records, core.asked


def leaping(
    arrivals: str | list[Arrival],
    config: Any = None,
    *,
    policy: Any = Vllm,
    kv: Any = CountingKV,
    blocks: int = 1000,
    cost: HostCost | None = None,
) -> tuple[Records, AskedCore]:
    """The records with leaps, which are those of stepping, and the engine that left them."""
    made = requests(arrivals) if isinstance(arrivals, str) else arrivals
    records, cores = list[Records](), list[AskedCore]()
    for leaps in (True, False):
        pool = kv(blocks, BLOCK_SIZE)
        scheduler = policy(config or vllm(kv), PolicyContext(pool, 1000))
        core = AskedCore(scheduler, SimExecutor(cost or HostCost(), 1000), Recorder(), max_model_len=1000)
        simulate(core, Listed(made), leap=leaps)
        assert (pool.num_free, scheduler.num_running) == (blocks, 0)
        records.append(core.recorder.records())
        cores.append(core)
    leaping, stepping = records
    same(leaping, stepping)
    return leaping, cores[0]


CONTINUOUS = ContinuousConfig(max_num_seqs=2, max_num_batched_tokens=64)


@pytest.mark.parametrize("policy, config", [(Vllm, vllm(max_num_seqs=2)), (Continuous, CONTINUOUS)])
@pytest.mark.parametrize(
    ("arrivals", "asked"),
    [
        pytest.param("0:4->300", 2, id="alone"),
        pytest.param("0:4->100 0:4->300", 2, id="one ends before the other"),
        pytest.param("0:4->100 0:4->100", 2, id="both end at once"),
        pytest.param("0:4->300 900:4->300", 4, id="one comes later"),
        pytest.param("0:4->100 0:4->300 0:4->50", 4, id="one waits"),
    ],
)
def test_the_scheduler_is_asked_for_each_prompt_and_the_step_after_it(
    policy: Any, config: Any, arrivals: str, asked: int
) -> None:
    """Not after an end, unless a request waits."""
    assert leapt(arrivals, config, policy=policy)[1] == asked


@pytest.mark.parametrize(
    "policy, config", [(Vllm, vllm(max_num_batched_tokens=64)), (Continuous, ContinuousConfig(8, 64))]
)
@pytest.mark.parametrize(
    ("arrivals", "executed"),
    [
        pytest.param("0:4->300", 1, id="alone"),
        pytest.param("0:4->300 900:4->300 900:4->9", 2, id="two prompts at once, later"),
        pytest.param("0:4->300 900:4->1", 2, id="ends with its first token"),
        pytest.param("0:4->1 900:4->9", 2, id="nothing is left"),
        pytest.param("0:4->300 5:99->9", 3, id="in chunks"),
        pytest.param("0:4->300 14:4->9", 2, id="another comes as a prompt ends"),
    ],
)
def test_the_decodes_behind_prompts_begin_within_the_leap(
    policy: Any, config: Any, arrivals: str, executed: int
) -> None:
    """Only steps with prompts are executed by themselves."""
    assert leaping(arrivals, config, policy=policy)[1].executed == executed


def test_the_decodes_behind_a_prompt_are_executed_where_the_scheduler_does_not_foresee_them() -> None:
    """As where it preempts the latest for want of a block, of which three prompts take 4 of 5."""
    records, core = leaping("0:4->9 0:4->9 0:8->9", blocks=5)
    assert any(records.steps["num_preempted"]) and core.executed > 1


class OwnSchedule(Vllm):
    """It may return another batch than that which is foreseen."""

    def schedule(self, now_ns: int, drain: bool) -> Any:
        return super().schedule(now_ns, drain)


class OwnComplete(Vllm):
    """It may do something with every step."""

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        return super().complete(batch, finished, now_ns)


@pytest.mark.parametrize("policy", [OwnSchedule, OwnComplete])
def test_a_policy_derived_from_vllm_that_is_another_is_asked_after_each_end(policy: type[Vllm]) -> None:
    assert leapt("0:4->100 0:4->200 0:4->300", policy=policy)[1] == 4


def test_a_deadline_at_the_instant_of_an_end_takes_effect_at_it() -> None:
    """The first of three ends at 10 + 12 + 98 * 16 + 16 ns, at which the client of the second gives up."""
    end_ns = 10 + 12 + 99 * 16
    three = requests("0:4->100 0:4->300 0:4->300")
    three[1] = Arrival(three[1].request, 300, cancel_ns=end_ns)
    records, asked = leapt(three)
    assert records.requests["ended_ns"][:2].tolist() == [end_ns, end_ns]
    assert asked == 3


class Endless(HostCost):
    """Decodes of a fourth of all the time that there is."""

    def step_ns(self, batch: Batch) -> int:
        return MAX_TIME_NS // 4 if batch.num_decode else 10

    def decode_line(self, batch: Batch) -> DecodeLine:
        return MAX_TIME_NS // 4, 0.0, float("inf")


def test_a_last_step_beyond_the_end_of_time_is_refused() -> None:
    """As by stepping, of which it is the fifth."""
    with pytest.raises(ScenarioError, match="beyond the"):
        leapt("0:4->6", cost=Endless())


@pytest.mark.parametrize("kv", [CountingKV, TableKV, BlockHashKV])
@pytest.mark.parametrize("policy", [Vllm, Continuous])
def test_any_leap_leaves_the_records_of_stepping(policy: Any, kv: Any) -> None:
    """Whether blocks or slots are short, requests give up, or the cost turns off its line."""
    rng, few = random.Random(7), 0
    for _ in range(40):
        longest, gap, now_ns, arrivals = rng.choice([4, 60]), rng.choice([0, 9, 400]), 0, list[Arrival]()
        for number in range(rng.randint(1, 9)):
            now_ns += rng.randint(0, gap)
            output = rng.randint(1, longest)
            request = Request(number, now_ns, rng.randint(1, 30), output + rng.choice([0, 5]))
            cancel_ns = now_ns + rng.randint(1, 900) if rng.random() < 0.2 else None
            arrivals.append(Arrival(request, output, cancel_ns=cancel_ns))
        slots, budget = rng.choice([2, 8]), rng.choice([16, 64])
        knobs: dict[str, Any] = {"max_num_seqs": slots, "max_num_batched_tokens": budget}
        config = vllm(kv, **knobs) if policy is Vllm else ContinuousConfig(**knobs)
        blocks = rng.choice([30, 45, 1000])
        records, asked = leapt(arrivals, config, policy=policy, kv=kv, blocks=blocks, cost=DrawnCost(rng))
        few += asked < records.num_steps / 3
    assert few > 10
