"""Pooling models under vLLM and SGLang: prompts alone, whole or in chunks, and no token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from batchsim.base.errors import ScenarioError
from batchsim.cost.constant import Linear
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext, Scheduler
from batchsim.kernel.record import DECODE, MISSING, Recorder, Records
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival, Request
from batchsim.kv.choice import new_kv
from batchsim.metrics.attribution import attribute
from batchsim.metrics.latencies import OF_TOKENS, values_ns
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.policies.systems.sglang.sglang_drafts import SglangWithDrafts
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.policies.systems.vllm.vllm_drafts import VllmWithDrafts
from tests.support.engine import DRIVERS, Requests

CHUNKED = VllmConfig(
    **{"runner": "pooling", "async_scheduling": False, "max_num_seqs": 8, "max_num_batched_tokens": 100}
)
WHOLE = VllmConfig(
    **{"runner": "pooling", "pooling_type": "CLS", "max_num_seqs": 8, "max_num_batched_tokens": 100},
    **VllmConfig.stated_defaults({"runner": "pooling", "pooling_type": "CLS"}),
)
SGLANG = SglangConfig(
    **{"is_embedding": True, "chunked_prefill_size": 96}, **SglangConfig.stated_defaults({"is_embedding": True})
)


def run(config: Any, *prompts: int, driver: str = "simulate") -> Records:
    """The records of prompts that arrive at once; a step takes 100 ns and 1 a token."""
    context = PolicyContext(new_kv(config, 100, 16, ids=False), 100, loop=config.traits.loop)
    scheduler: Scheduler = (VllmWithDrafts if isinstance(config, VllmConfig) else SglangWithDrafts)(config, context)
    loop = config.traits.loop
    core = EngineCore(scheduler, SimExecutor(Linear(100, 1), 100, loop), Recorder(), max_model_len=100, loop=loop)
    DRIVERS[driver](core, Requests(*(Arrival(Request(i, 0, p, 0), 0) for i, p in enumerate(prompts))))
    core.check_returned()
    return core.recorder.records()


@pytest.mark.parametrize("driver", DRIVERS)
def test_whole_prompts_come_in_order_until_one_does_not_fit(driver: str) -> None:
    """60 and 30 tokens fit a step of 100; 50 do not, and nothing overtakes them."""
    records = run(WHOLE, 60, 30, 50, 5, driver=driver)
    assert records.steps["num_prefill_tokens"].tolist() == [90, 55]
    assert records.requests["delivered_ns"].tolist() == [190, 190, 345, 345]


def test_a_causal_model_takes_chunks() -> None:
    """The third prompt has 10 of its tokens in the first step, and ends with the second."""
    records = run(CHUNKED, 60, 30, 50, 5)
    assert records.steps["num_prefill_tokens"].tolist() == [100, 45]
    assert records.requests["delivered_ns"].tolist() == [200, 200, 345, 345]


@pytest.mark.parametrize("config", [CHUNKED, WHOLE, SGLANG], ids=["chunked", "whole", "sglang"])
def test_no_request_has_a_token(config: Any) -> None:
    """No output, no first token, no decode; no latency of tokens, but an E2E; all of a life is in its parts."""
    records = run(config, 60, 30, 50)
    requests = records.requests
    assert requests["output_tokens"].tolist() == requests["max_output_tokens"].tolist() == [0, 0, 0]
    assert set(requests["first_token_ns"].tolist()) == {MISSING}
    assert records.steps["num_sampled_chunks"].sum() == records.steps["num_decode"].sum() == 0
    assert DECODE not in records.states["state"]
    latencies = values_ns(requests)
    assert all(np.isnan(latencies[name]).all() for name in OF_TOKENS if name != "itl")
    assert latencies["e2e"].tolist() == requests["delivered_ns"].tolist()
    assert attribute(records).groupby("request_id")["ns"].sum().tolist() == latencies["e2e"].tolist()


def test_pooling_in_a_pipeline_is_refused() -> None:
    """In one line, before any request comes."""
    loop = CHUNKED.traits.loop.over(2)
    with pytest.raises(ScenarioError, match=r"^vllm: runner: pooling in a pipeline of 2 stages .* Set pp to 1\.$"):
        VllmWithDrafts(CHUNKED, PolicyContext(new_kv(CHUNKED, 100, 16, ids=False), 100, loop=loop))


def test_defaults_of_pooling_models() -> None:
    """Not asynchronous, and with pooling of all tokens neither chunked nor cached; other models keep theirs."""
    assert VllmConfig.stated_defaults({"runner": "pooling"}) == {"async_scheduling": False}
    whole = {"async_scheduling": False, "enable_chunked_prefill": False, "enable_prefix_caching": False}
    assert VllmConfig.stated_defaults({"runner": "pooling", "pooling_type": "MEAN"}) == whole
    assert VllmConfig.stated_defaults({"max_num_seqs": 3}) == {}
    assert SglangConfig.stated_defaults({"is_embedding": True}) == {"disable_overlap_schedule": True}
    assert SglangConfig.stated_defaults({}) == {}
    assert isinstance(new_kv(WHOLE, 10, 16, ids=False), CountingKV)
