"""Recordings of an engine of vLLM that pulls KV: one small enough to be made by hand, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.check.conform import conform
from tests.golden.planted import not_found
from tests.unit.check.conform.test_conform_form import put, written

Json = dict[str, Any]


def _step(start_ms: int, end_ms: int, free: tuple[int, int], waiting: int, running: int, **facts: Any) -> Json:
    times = dict.fromkeys(("t_start", "t_scheduled", "t_gpu_start"), start_ms / 1000)
    times |= dict.fromkeys(("t_end", "t_processed"), end_ms / 1000)
    counts = {"free_blocks_sched": free[0], "free_blocks_after": free[1]}
    counts |= {"num_waiting": waiting, "num_running": running}
    return times | {"scheduled": [], "preempted": [], "finished": []} | counts | facts


# 8 blocks of 4 tokens, 5 ms a step, no time of the host. 8 tokens are pulled in 2.5 ms: the engine makes empty steps
# and naps 1 ms after each. The call at 3 ms looks, that at 4 ms computes the last token again; the answer has two.
PULLED: Json = {
    "meta": {"scheduler": "vllm.v1.core.sched.scheduler.Scheduler", "policy": "fcfs", "kv_role": "kv_consumer"}
    | {"block_size": 4, "usable_blocks": 8, "max_model_len": 32, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    | {"enable_chunked_prefill": True, "enable_prefix_caching": False, "async_scheduling": False, "watermark": 0.0}
    | {"long_prefill_token_threshold": 0, "long_prefill_token_threshold_adaptive": False, "batch_queue_size": 1}
    | {"scheduler_reserve_full_isl": True, "host_schedule": 0.0, "host_update": 0.0, "idle_sleep": 0.001}
    | {"defer_block_free": False, "requires_kv_delivery": False, "engine_step": "EngineCore.step"}
    | {"step_time": "t_end = t_gpu_start + 0.005 + 0*sum(num_tokens)"}
    | {"totals": {"requests": 1, "steps": 7, "tokens": 2, "empty_steps": 5, "sleeps": 4, "makespan": 0.014}},
    "requests": [
        {"id": 0, "arrival": 0.0, "prompt_len": 8, "output_len": 2}
        | {"kv": {"do_remote_prefill": True, "transfer_us": 2500}}
    ],
    "steps": [
        _step(0, 0, (6, 6), 1, 0, loads_started=[[0, 8]], remote=[0]),
        _step(1, 1, (6, 6), 1, 0, remote=[0]),
        _step(2, 2, (6, 6), 1, 0, remote=[0]),
        _step(3, 3, (6, 6), 1, 0, remote=[0], loads_done=[0]),
        _step(4, 9, (6, 6), 0, 1, scheduled=[[0, 1]]),
        _step(9, 14, (5, 8), 0, 0, scheduled=[[0, 1]], finished=[0]),
        _step(14, 14, (8, 8), 0, 0),
    ],
    "per_request": {
        "0": {"first_token_time": 0.009, "finish_time": 0.014, "num_preemptions": 0, "admissions": 1}
        | {"cached_tokens": 0, "cached_tokens_all": 0}
    },
}


def test_a_pull_made_by_hand_is_equal_and_every_error_in_it_is_found(tmp_path: Path) -> None:
    """Pulls that begin and end, those under way, and all that any recording has."""
    path = written(PULLED, tmp_path)
    assert str(conform(path)) == "recording.json: equal, 7 steps (vllm)"
    (tmp_path / "changed").mkdir()
    assert not_found(path, tmp_path / "changed") == []


def test_another_time_of_the_transfer_is_noticed(tmp_path: Path) -> None:
    """2 ms are over in the call at 2 ms."""
    changed = put(PULLED, ("requests", 0, "kv", "transfer_us"), 2000)
    assert conform(written(changed, tmp_path)).difference.startswith("step 3 differs in loads_done ")


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (("meta", "kv_role"), "kv_reader", "meta.kv_role is 'kv_reader', not kv_producer, kv_consumer, kv_both."),
        (("meta", "defer_block_free"), True, "meta.defer_block_free is True, that of a kv_consumer"),
        (("meta", "requires_kv_delivery"), True, "meta.requires_kv_delivery is True, that of a kv_consumer"),
        (("meta", "kv_load_failure_policy"), "retry", "meta.kv_load_failure_policy is 'retry', not fail or recompute."),
        (("meta", "pipeline_parallel_size"), 2, "meta.pipeline_parallel_size 2 is not simulated for vllm, only 1."),
        (("requests", 0, "kv"), {"do_remote_prefill": True}, "one of do_remote_prefill and transfer_us without"),
        (("requests", 0, "kv"), {"hold_us": 3}, "one of do_remote_decode and hold_us without the other."),
        (("requests", 0, "kv"), {"push": True}, "requests[0].kv has push, which is not known"),
        (("steps", 0, "pushes_started"), [], "steps[0] has pushes_started, which is not known"),
    ],
)
def test_what_contradicts_or_is_not_simulated_is_refused(
    tmp_path: Path, keys: tuple[Any, ...], value: Any, said: str
) -> None:
    """In one line, with the place and the values."""
    with pytest.raises(ScenarioError) as refusal:
        conform(written(put(PULLED, keys, value), tmp_path))
    assert said in str(refusal.value) and "\n" not in str(refusal.value)
