"""The form of recordings of engines that offload KV to the host: what it must state, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.check.conform import StepComparison, conform

Json = dict[str, Any]

# Blocks of 4 tokens, 8 ms for a prompt of 8. Both chunks are stored from 8 ms on, for 2.2 ms, and the engine makes
# empty steps until that is noticed.
AFTER = {"scheduled": [], "preempted": [], "finished": [], "free_blocks_sched": 8, "free_blocks_after": 8}
AFTER |= {"num_waiting": 0, "num_running": 0, "cpu": [2, 0, 2]}


def _at(t: float, **more: Any) -> Json:
    return dict.fromkeys(("t_start", "t_scheduled", "t_gpu_start", "t_end", "t_processed"), t) | AFTER | more


RECORDING: Json = {
    "meta": {"scheduler": "vllm.v1.core.sched.scheduler.Scheduler", "async_scheduling": False, "batch_queue_size": 1}
    | {"policy": "fcfs", "max_num_seqs": 4, "max_num_batched_tokens": 64, "enable_chunked_prefill": True}
    | {"enable_prefix_caching": True, "long_prefill_token_threshold": 0, "scheduler_reserve_full_isl": True}
    | {"long_prefill_token_threshold_adaptive": False, "watermark": 0.0, "block_size": 4, "usable_blocks": 8}
    | {"max_model_len": 64, "host_schedule": 0.0, "host_update": 0.0, "idle_sleep": 0.001}
    | {"step_time": "t_end = t_gpu_start + 0.004 + 0.0005*sum(num_tokens)"}
    | {"tier": {"cpu_chunks": 4}, "link": {"fixed": 0.0002, "store_per_chunk": 0.001, "load_per_chunk": 0.002}}
    | {"totals": {"chunks_stored": 2, "chunks_loaded": 0, "stores_refused": 0, "evicted": 0, "flushed_jobs": 0}},
    "requests": [{"id": 0, "arrival": 0.0, "prompt_len": 8, "output_len": 1, "prompt": [["g", 0, 8]]}],
    "steps": [
        _at(0.0, t_end=0.008, t_processed=0.008, scheduled=[[0, 8]], finished=[0], free_blocks_sched=6)
        | {"offers": [[0, 2, 2, 0]], "stores_queued": [[0, 2, 0]]},
        _at(0.008, xfers=[[0, "s", 0, 2, 0.008, 0.0102]]),
        _at(0.009),
        _at(0.01),
        _at(0.011, jobs_done=[0], cpu=[2, 2, 0]),
    ],
}


def _conform(recording: Json, folder: Path) -> StepComparison:
    path = folder / "recording.json"
    path.write_text(json.dumps(recording), encoding="utf-8")
    verdict = conform(path)
    assert isinstance(verdict, StepComparison)
    return verdict


def test_a_recording_made_by_hand_is_equal(tmp_path: Path) -> None:
    """Its five steps, of which four are empty."""
    assert str(_conform(RECORDING, tmp_path)) == "recording.json: equal, 5 steps (vllm)"


def test_a_transfer_that_differs_is_shown(tmp_path: Path) -> None:
    """With its job, direction, request, chunks, start and end in seconds, both ways."""
    wrong = copy.deepcopy(RECORDING)
    wrong["steps"][1]["xfers"][0][5] = 0.0103
    verdict = _conform(wrong, tmp_path)
    assert verdict.difference == "step 2 differs in xfers (steps[1], 0.008000 s)"
    (difference,) = verdict.differences
    assert difference.here == "[[0, 's', 0, 2, 0.008, 0.0102]]"
    assert difference.recorded == "[[0, 's', 0, 2, 0.008, 0.0103]]"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tier": {}}, "meta.tier has no cpu_chunks"),
        ({"tier": {"cpu_chunks": 0}}, "meta.tier.cpu_chunks is 0, not a whole number from 1"),
        ({"tier": {"cpu_chunks": 4, "eviction_policy": "fifo"}}, "'fifo', not lru or arc"),
        ({"tier": {"cpu_chunks": 4, "secondary_tiers": ["fs"]}}, "secondary_tiers, which is not known"),
        ({"tier": {"cpu_chunks": 4, "blocks_per_chunk": 0}}, "meta.tier.blocks_per_chunk is 0"),
        ({"tier": 4}, "meta.tier is 4, not an object"),
        ({"link": None}, "meta.link is None, not an object"),
        ({"link": {"fixed": 0, "store_per_chunk": 1}}, "meta.link has no load_per_chunk"),
        ({"link": {"fixed": -1, "store_per_chunk": 1, "load_per_chunk": 1}}, "meta.link.fixed is -1"),
        ({"kv_role": "kv_both"}, "meta has kv_role and tier"),
    ],
)
def test_a_tier_that_is_not_simulated_is_refused_in_one_line(change: Json, words: str, tmp_path: Path) -> None:
    """What is missing, out of range or unknown, by its name."""
    wrong = copy.deepcopy(RECORDING)
    wrong["meta"] |= change
    with pytest.raises(ScenarioError) as caught:
        _conform(wrong, tmp_path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_tier_of_another_policy_is_refused(tmp_path: Path) -> None:
    """Only vLLM's connector is simulated."""
    path = tmp_path / "recording.json"
    other = copy.deepcopy(RECORDING)
    other["meta"] = {
        "scheduler": "continuous",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "chunked_prefill": True,
    }
    other["meta"] |= {
        "block_size": 4,
        "usable_blocks": 10,
        "max_model_len": 64,
        "tier": {"cpu_chunks": 4},
        "order": "decode_first",
    }
    path.write_text(json.dumps(other), encoding="utf-8")
    with pytest.raises(ScenarioError, match=r"meta\.tier is not simulated for this policy, only for vllm"):
        conform(path)
