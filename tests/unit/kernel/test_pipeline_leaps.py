"""Leaps of pipelines: how often vLLM's scheduler is really asked. Records are those of stepping.

Times in ns with StagedCost: each stage takes 5, or 4 every other, 1 a prefill token more and 2 a decode; the host 3 to
launch a step and 2 to process it, 4 and 1 where the scheduler had nothing to run.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from batchsim.drive.simulate import simulate
from batchsim.kernel.batch import Batch
from batchsim.kernel.core import EngineCore
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import Recorder, Records
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kv.choice import new_kv
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.testing.by_hand import same
from tests.support.stepping import Stages
from tests.support.whole_batches import BLOCK_SIZE, Listed, requests
from tests.unit.kernel.test_leaps import OwnComplete, OwnSchedule

MODES = [pytest.param(False, id="synchronous"), pytest.param(True, id="asynchronous")]


class StagedCost(Stages):
    """See the module's text."""

    def stages_ns(self, batch: Batch) -> tuple[int, ...]:
        work = batch.num_prefill_tokens + 2 * batch.num_decode
        return tuple(5 - stage % 2 + work for stage in range(self.stages))

    def host_ns(self, batch: Batch | None) -> tuple[int, int]:
        return (4, 1) if batch is None else (3, 2)


def leapt(
    arrivals: str, stages: int, *, kind: type[Vllm] = Vllm, nap_ns: int = 50, blocks: int = 1000, **knobs: Any
) -> tuple[Records, int]:
    """The records with leaps, and how often the scheduler was asked; a run that steps leaves the same records."""
    config = VllmConfig(**{"max_num_seqs": 8, "enable_prefix_caching": False, **knobs})
    loop = replace(config.traits.loop.over(stages), nap_ns=nap_ns)
    calls: list[int] = []

    class Counting(kind):
        def _go_on(self) -> None:
            calls.append(0)
            super()._go_on()

    def records(scheduler: type[Vllm], *, leap: bool) -> Records:
        kv = new_kv(config, blocks, BLOCK_SIZE, ids=False)
        executor, context = SimExecutor(StagedCost(stages), 1000, loop), PolicyContext(kv, 1000, loop=loop)
        core = EngineCore(scheduler(config, context), executor, Recorder(), max_model_len=1000, loop=loop)
        simulate(core, Listed(requests(arrivals)), leap=leap)
        core.check_returned()
        return core.recorder.records()

    stepping, leaping = records(kind, leap=False), records(Counting, leap=True)
    same(leaping, stepping)
    return leaping, len(calls)


@pytest.mark.parametrize("ahead", MODES)
@pytest.mark.parametrize(
    ("arrivals", "knobs", "most"),
    [
        pytest.param("0:4->300/600", {}, 12, id="alone, so that most calls have nothing to run"),
        pytest.param("0:4->100/600 0:4->300/600", {}, 18, id="one ends before the other"),
        pytest.param("0:4->200 0:4->300 0:4->250 0:4->260", {}, 36, id="a batch a stage, ended by length"),
        pytest.param("0:4->300/600 9000:4->300/600", {}, 24, id="one comes later"),
        pytest.param("0:4->100/600 0:4->300/600 0:4->300/600", {"max_num_seqs": 2}, 26, id="one waits for a slot"),
        pytest.param("0:9->300/600", {"enable_prefix_caching": True}, 12, id="with a prefix cache"),
    ],
)
def test_the_scheduler_is_asked_where_somebody_joins_or_leaves(
    arrivals: str, knobs: dict[str, Any], most: int, ahead: bool
) -> None:
    """Some six calls a request and stage, not one a step, nor one for each call that has nothing to run."""
    records, calls = leapt(arrivals, 3, async_scheduling=ahead, **knobs)
    assert calls <= most < records.num_steps / 8


@pytest.mark.parametrize("ahead", MODES)
@pytest.mark.parametrize("at_ns", range(200, 212))
def test_a_leap_ends_before_what_comes_as_a_call_is_over(at_ns: int, ahead: bool) -> None:
    """A request comes, or one is given up, at each ns of a period of calls: the records are those of stepping."""
    leapt(f"0:4->40/600 {at_ns}:4->5/600", 3, async_scheduling=ahead)
    leapt(f"0:4->40/600c{at_ns}", 3, async_scheduling=ahead)


@pytest.mark.parametrize("ahead", MODES)
@pytest.mark.parametrize("kind", [OwnSchedule, OwnComplete])
def test_a_policy_derived_from_vllm_that_is_another_is_always_asked(kind: type[Vllm], ahead: bool) -> None:
    """What it does by itself would be leapt over."""
    records, calls = leapt("0:4->50", 2, kind=kind, async_scheduling=ahead)
    assert calls >= records.num_steps == 50


def _drawn(rng: random.Random) -> tuple[str, int, dict[str, Any]]:
    """Arrivals, of whom some give up, stages and knobs."""
    longest, gap, now_ns, arrivals = rng.choice([4, 60]), rng.choice([0, 9, 400]), 0, list[str]()
    for _ in range(rng.randint(1, 9)):
        now_ns += rng.randint(0, gap)
        cap = rng.randint(1, longest)
        cancel = f"c{now_ns + rng.randint(1, 900)}" if rng.random() < 0.2 else ""
        arrivals.append(f"{now_ns}:{rng.randint(1, 30)}->{rng.randint(1, cap)}/{cap}p{rng.randint(0, 2)}{cancel}")
    knobs = {
        "async_scheduling": rng.random() < 0.5,
        "enable_prefix_caching": rng.random() < 0.5,
        "max_num_seqs": rng.choice([2, 3, 8]),
        "max_num_batched_tokens": rng.choice([8, 16, 64]),
        "policy": rng.choice(["fcfs", "priority"]),
        "blocks": rng.choice([24, 30, 1000]),
        "nap_ns": rng.choice([0, 7, 500]),
    }
    return " ".join(arrivals), rng.randint(2, 5), knobs


def test_random_pipelines_leave_the_records_of_stepping() -> None:
    """With preemptions, cancels, full slots, naps, and ends by length or by a stop token."""
    for seed in range(60):
        arrivals, stages, knobs = _drawn(random.Random(seed))
        leapt(arrivals, stages, **knobs)


def test_padding_has_no_time_in_stages() -> None:
    """An executor refuses what it could only drop: the ns by which a padded step of a pipeline is longer."""

    class Padded(StagedCost):
        def pad(self, batch: Batch) -> int:
            return 7

        def unpad(self, batch: Batch) -> None:
            """Nothing was written."""

    loop = VllmConfig().traits.loop.over(2)
    batch = Batch(None, [], 0)
    assert SimExecutor(StagedCost(2), 1000, loop).execute(batch).duration_ns == 9
    with pytest.raises(ValueError, match="no time in a pipeline of stages"):
        SimExecutor(Padded(2), 1000, loop).execute(batch)
