"""Masks of constrained answers, by hand: what each engine's loop makes sampling wait for."""

from __future__ import annotations

from typing import Any

import pytest

from batchsim.cost.base import HostPart
from batchsim.cost.constant import Constant
from batchsim.cost.masks import MaskTimes
from batchsim.cost.structured_cost import StructuredCost
from batchsim.kernel.batch import Batch
from batchsim.kernel.core import EngineCore
from batchsim.kernel.policy_config import PolicyConfig
from batchsim.kernel.protocols import PolicyContext, Scheduler
from batchsim.kernel.record import MASKED, Recorder, Records
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival, DecodeGroup, Request, Sequence
from batchsim.kv.choice import new_kv
from batchsim.policies.systems.sglang.sglang import Sglang
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from tests.support.engine import DRIVERS, Requests

VLLM, VLLM_SYNC = VllmConfig(), VllmConfig(async_scheduling=False)
SGLANG, SGLANG_SYNC = SglangConfig(), SglangConfig(disable_overlap_schedule=True)
STEP_NS = 10


def ran(config: PolicyConfig, mask_ns: int, *requests: tuple[int, int, int, bool], driver: str) -> Records:
    """The records of requests of (arrival, prompt, output, constrained); a step with masks needs `mask_ns` for them."""
    kv = new_kv(config, 1000, 16, 0, ids=False)
    kind: Any = Vllm if isinstance(config, VllmConfig) else Sglang
    scheduler: Scheduler = kind(config, PolicyContext(kv, 1000, loop=config.traits.loop))
    executor = SimExecutor(Constant(STEP_NS), 1000, config.traits.loop)
    of = config.traits.masks
    assert of
    executor.masks = MaskTimes(StructuredCost(step=mask_ns), of, HostPart())
    core = EngineCore(scheduler, executor, Recorder(), max_model_len=1000, loop=config.traits.loop)
    made = [Arrival(Request(i, at, p, o, constrained=c), o) for i, (at, p, o, c) in enumerate(requests)]
    DRIVERS[driver](core, Requests(*made))
    return core.recorder.records()


def spans(records: Records) -> list[tuple[int, int]]:
    return [(int(row["start_ns"]), int(row["start_ns"] + row["duration_ns"])) for row in records.steps]


def waits(records: Records) -> list[int]:
    return records.states["blocker"][records.states["state"] == MASKED].tolist()


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("config", [VLLM_SYNC, SGLANG_SYNC])
def test_an_engine_that_waits_fills_masks_while_the_forward_runs(config: PolicyConfig, driver: str) -> None:
    """Masks of 4 ns are ready before the forward of 10 ns is over; those of 25 ns make each step last as long."""
    records = ran(config, 4, (0, 5, 3, True), driver=driver)
    assert (spans(records), waits(records)) == ([(0, 10), (10, 20), (20, 30)], [])
    records = ran(config, 25, (0, 5, 3, True), driver=driver)
    assert (spans(records), waits(records)) == ([(0, 25), (25, 50), (50, 75)], [15, 15, 15])
    assert records.requests["first_token_ns"].tolist() == [25]


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("config", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_ahead_of_results_masks_wait_for_the_tokens_before(config: PolicyConfig, driver: str) -> None:
    """The first step's are filled as it is launched. Those of the second need its token: it is processed at 10, they
    are filled until 14, and it goes out then. With masks of 25 ns the GPU stands still for 15 ns of each step."""
    records = ran(config, 4, (0, 5, 3, True), driver=driver)
    assert (spans(records), waits(records)) == ([(0, 10), (10, 20), (20, 30)], [])
    assert records.lanes["launched_ns"].tolist() == [0, 4, 14]
    assert records.lanes["processed_ns"].tolist() == [14, 24, 30]
    records = ran(config, 25, (0, 5, 3, True), driver=driver)
    assert (spans(records), waits(records)) == ([(0, 25), (25, 50), (50, 75)], [15, 15, 15])
    assert records.lanes["launched_ns"].tolist() == [0, 25, 50]
    assert records.lanes["processed_ns"].tolist() == [50, 75, 75]


@pytest.mark.parametrize("driver", DRIVERS)
def test_vllm_fills_masks_at_once_where_no_token_in_flight_matters(driver: str) -> None:
    """A free answer decodes; at 10 the prompt of a constrained one is launched beside it. vLLM fills its mask at once,
    so that the decode before is processed at 20; SGLang samples no constrained step before it has processed the one
    before, whose results go out at 24."""
    requests = ((0, 5, 4, False), (5, 5, 1, True))
    vllm, sglang = (
        ran(config, 4, *requests, driver=driver)
        for config in (VLLM, SglangConfig(enable_mixed_chunk=True, chunked_prefill_size=64))
    )
    assert vllm.steps["num_chunks"].tolist() == sglang.steps["num_chunks"].tolist() == [1, 0, 1, 0]
    assert vllm.lanes["processed_ns"].tolist() == [10, 20, 30, 40]
    assert sglang.lanes["processed_ns"].tolist() == [10, 24, 30, 40]


def test_masks_are_of_constrained_sequences_alone() -> None:
    """vLLM's of those that get a token: a part of a prompt has none; SGLang fills one for it too. The host's part of a
    step is no time in which it fills any."""
    made = [
        Sequence(Request(i, 0, 20, 5, constrained=constrained)) for i, constrained in enumerate([True, True, False])
    ]
    batch = Batch(None, [(made[0], 20), (made[1], 7), (made[2], 20)], 47)
    cost = StructuredCost(step=100, per_request=10)
    vllm, sglang = (MaskTimes(cost, of, HostPart(base=3)).of(batch) for of in ("sampled", "all"))
    assert vllm is not None and (vllm.sequences, vllm.ns) == ([made[0]], 110)
    assert sglang is not None and (sglang.sequences, sglang.ns) == (made[:2], 120)
    assert MaskTimes(cost, "all", HostPart()).of(Batch(None, [(made[2], 20)], 20)) is None
    assert MaskTimes(cost, "sampled", HostPart()).of(Batch(None, [(made[1], 7)], 7)) is None
    assert MaskTimes(cost, "all", HostPart(base=3, per_sequence=2)).host_ns(batch) == 9
    assert MaskTimes(cost, "all", HostPart()).of(Batch(DecodeGroup(16), [], 0)) is None
