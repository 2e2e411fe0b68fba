"""By hand: what vLLM's scheduler did otherwise before 0.33. A step takes 10 ns, a KV block holds 4 tokens."""

from __future__ import annotations

from typing import Any

import pytest

from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.types import Arrival, Request
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import Version, VllmConfig
from batchsim.policies.systems.vllm.vllm_intervals import VllmAtIntervals
from tests.support.stepping import Run, run


def arrival(id_: int, prompt: int, output: int, priority: int = 0) -> Arrival:
    return Arrival(Request(id_, 0, prompt, output, priority=priority), output)


def vllm(arrivals: list[Arrival], version: Version | None, blocks: int = 100, **knobs: Any) -> Run:
    """The synchronous run of that version's scheduler without prefix caching."""
    config = VllmConfig(async_scheduling=False, enable_prefix_caching=False, max_num_seqs=16, version=version, **knobs)
    kind = VllmAtIntervals if config.prefill_schedule_interval > 1 else Vllm
    return run(kind, config, arrivals, blocks=blocks, kv=CountingKV)


def test_a_lone_request_was_cut_at_once() -> None:
    """A prompt of 14 tokens that is alone takes three steps of at most 6 tokens, where others wait or not."""
    alone = [arrival(0, 14, 1)]
    assert vllm(alone, "0.30", long_prefill_token_threshold=6).items == [[(0, 6)], [(0, 6)], [(0, 2)]]


@pytest.mark.parametrize("version", ["0.31", "0.32", "0.33", None])
def test_a_lone_request_is_not_cut(version: Version | None) -> None:
    """From 0.31 on one that is alone takes one step; beside another both are cut."""
    assert vllm([arrival(0, 14, 1)], version, long_prefill_token_threshold=6).items == [[(0, 14)]]
    two = vllm([arrival(0, 14, 1), arrival(1, 14, 1)], version, long_prefill_token_threshold=6)
    assert two.items[0] == [(0, 6), (1, 6)]


THREE = [arrival(0, 1, 12), arrival(1, 8, 6, priority=1), Arrival(Request(2, 5, 5, 6), 6)]
"""In a pool of 7 blocks they hold 2, 3 and 2 before the sixth step, in which requests 1 and 2 need one more each."""


@pytest.mark.parametrize(
    ("version", "sixth"), [("0.32", [(0, 1)]), ("0.33", [(0, 1), (2, 1)]), (None, [(0, 1), (2, 1)])]
)
def test_those_behind_one_that_preempts_itself(version: Version | None, sixth: list[tuple[int, int]]) -> None:
    """Request 1, the least important, gives its own blocks back. Up to 0.32 the step ends there; from 0.33 on request 2
    gets one of them."""
    result = vllm(THREE, version, blocks=7, policy="priority")
    assert result.items[4] == [(0, 1), (1, 1), (2, 1)]
    assert result.items[5] == sixth


@pytest.mark.parametrize(("version", "together"), [("0.32", True), ("0.33", False)])
def test_an_engine_alone_did_not_hold_prompts_back(version: Version, together: bool) -> None:
    """Request 1 comes while request 0 decodes: up to 0.32 its prompt is computed in the next step."""
    late = Arrival(Request(1, 12, 4, 2), 2)
    result = vllm([arrival(0, 4, 6), late], version, prefill_schedule_interval=4)
    second = next(step for step, items in enumerate(result.items) if (1, 4) in items)
    assert (second == 1) is together


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"version": "0.30", "max_num_active_seqs": 4}, "version 0.30 has no max_num_active_seqs"),
        ({"version": "0.32", "runner": "pooling", "async_scheduling": False}, "version 0.32 with runner: pooling"),
    ],
)
def test_what_an_older_version_has_not_is_refused(knobs: dict[str, Any], said: str) -> None:
    """In one line that names it."""
    with pytest.raises(ValueError, match=said):
        VllmConfig(**knobs)


def test_an_older_version_serves_text_on_one_gpu() -> None:
    """What else the policy simulates is by the rules of 0.33 alone, so an older one has none of it."""
    traits = VllmConfig(version="0.32").traits
    assert not (traits.pipelines or traits.adapters or traits.takes_items or traits.kv_groups or traits.masks)
    assert VllmConfig(version="0.33").traits == VllmConfig().traits
