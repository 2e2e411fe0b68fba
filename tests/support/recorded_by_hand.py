"""Recordings small enough to be checked by hand, of engines that schedule ahead of results."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def _queued(times_ms: tuple[int, int, int, int, int], scheduled: list[list[int]], **facts: Any) -> Json:
    """A step of a batch queue, of which one is in flight, where `facts` do not say otherwise."""
    names = ("t_start", "t_scheduled", "t_gpu_start", "t_end", "t_processed")
    times = {name: ms / 1000 for name, ms in zip(names, times_ms, strict=True)}
    return times | {"scheduled": scheduled, "preempted": [], "finished": [], "in_flight": 1} | facts


def _counts(sched: tuple[int, int, int], after: tuple[int, int, int]) -> Json:
    """Free blocks, requests waiting and running once the step is scheduled, and once it is processed."""
    names = ("free_blocks_sched", "num_waiting_sched", "num_running_sched")
    names_after = ("free_blocks_after", "num_waiting", "num_running")
    return dict(zip(names + names_after, sched + after, strict=True))


# 6 blocks of 4 tokens, 16 tokens a step, 5 ms a step and 1 ms a token, 1 ms of the host before and after. 1 lacks the
# blocks for its prompt's rest while the first chunk is in flight, and waits until 0 has ended; 0 ends by length, 1 by a
# stop token while its next one is in flight. The fourth and the eighth call find nothing to run; after the fourth 1
# remains, and the engine naps.
ASYNC: Json = {
    "meta": {"scheduler": "vllm.v1.core.sched.async_scheduler.AsyncScheduler", "policy": "fcfs", "model_runner": "v2"}
    | {"block_size": 4, "usable_blocks": 6, "max_model_len": 32, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    | {"enable_chunked_prefill": True, "enable_prefix_caching": False, "async_scheduling": True, "watermark": 0.0}
    | {"long_prefill_token_threshold": 0, "long_prefill_token_threshold_adaptive": False}
    | {"scheduler_reserve_full_isl": True, "engine_step": "EngineCore.step_with_batch_queue", "batch_queue_size": 2}
    | {"pipeline_parallel_size": 1, "host_schedule": 0.001, "host_update": 0.001, "idle_sleep": 0.001}
    | {
        "step_time": "t_scheduled = t_start + host_schedule; t_gpu_start = max(t_scheduled, previous t_end);"
        " t_end = t_gpu_start + 0.005 + 0.001*sum(num_tokens); t_processed = max(host clock, t_end) + host_update;"
        " a step with no token takes no GPU time: t_gpu_start = t_end = t_scheduled",
        "totals": {"requests": 2, "steps": 8, "preemptions": 1, "tokens": 31, "empty_steps": 2, "makespan": 0.067}
        | {"self_preempt": 1, "victim_in_flight": 1, "wasted_tokens": 1, "stale_outputs": 1, "sleeps": 1},
    },
    "requests": [
        {"id": 0, "arrival": 0.0, "prompt_len": 12, "output_len": 3},
        {"id": 1, "arrival": 0.0, "prompt_len": 11, "output_len": 2, "max_tokens": 4},
    ],
    "steps": [
        _queued((0, 1, 1, 22, 23), [[0, 12], [1, 4]], in_flight=0, stale=[1]) | _counts((2, 0, 2), (2, 1, 1)),
        _queued((1, 2, 22, 28, 29), [[0, 1]], preempted=[1]) | _counts((2, 1, 1), (2, 1, 1)),
        _queued((23, 24, 28, 34, 35), [[0, 1]], finished=[0]) | _counts((2, 1, 1), (6, 1, 0)),
        _queued((29, 30, 30, 30, 38), []) | _counts((2, 1, 1), (3, 0, 1)),
        _queued((36, 37, 37, 53, 54), [[1, 11]]) | _counts((3, 0, 1), (3, 0, 1)),
        _queued((38, 39, 53, 59, 60), [[1, 1]], finished=[1]) | _counts((3, 0, 1), (6, 0, 0)),
        _queued((54, 55, 59, 65, 66), [[1, 1]], wasted=[[1, 1]]) | _counts((2, 0, 1), (6, 0, 0)),
        _queued((60, 61, 61, 61, 67), []) | _counts((6, 0, 0), (6, 0, 0)),
    ],
    "per_request": {
        "0": {"first_token_time": 0.023, "finish_time": 0.035, "num_preemptions": 0}
        | {"cached_tokens": 0, "cached_tokens_all": 0, "admissions": 1},
        "1": {"first_token_time": 0.054, "finish_time": 0.06, "num_preemptions": 1}
        | {"cached_tokens": 0, "cached_tokens_all": 0, "admissions": 2, "wasted_tokens": 1},
    },
}


def _overlapped(times_ms: tuple[int, int, int, int], counts: tuple[int, ...], *rows: list[int], **facts: Any) -> Json:
    """A step of an overlap: free blocks and requests waiting and running after the call, free blocks once it is
    processed and as the next call finds them."""
    names = ("t_scheduled", "t_gpu_start", "t_end", "t_processed")
    of = ("free_blocks_sched", "num_waiting", "num_running", "free_blocks_processed", "free_blocks_after")
    times = {name: ms / 1000 for name, ms in zip(names, times_ms, strict=True)}
    return times | {"scheduled": [*rows], "retracted": [], "finished": []} | facts | dict(zip(of, counts, strict=True))


# 8 pages of 4 tokens, chunks of 8 tokens, times as above. 0 has two chunks and ends by a stop token, found as its next
# one runs; 2 finds the two pages of its prompt that 0 has left in the tree.
OVERLAP: Json = {
    "meta": {"scheduler": "sglang", "block_size": 4, "usable_blocks": 8, "max_model_len": 64, "schedule_policy": "fcfs"}
    | {"max_running_requests": 4, "max_prefill_tokens": 64, "chunked_prefill_size": 8, "enable_mixed_chunk": False}
    | {"schedule_conservativeness": 0.0, "disable_radix_cache": False, "retraction_policy": "length"}
    | {"enable_priority_scheduling": False, "disable_priority_preemption": False}
    | {"schedule_low_priority_values_first": False, "priority_scheduling_preemption_threshold": 10}
    | {"disable_overlap_schedule": False, "schedule_us": 1000, "process_us": 1000}
    | {"gpu_fixed_us": 5000, "gpu_token_us": 1000}
    | {"step_time": "t_end = t_gpu_start + gpu_fixed_us + gpu_token_us*sum(num_tokens)"}
    | {"totals": {"requests": 3, "steps": 9, "tokens": 30, "cached_tokens": 8, "empty_calls": 1, "ignored": 1}},
    "requests": [
        {"id": 0, "arrival": 0.0, "prompt_len": 12, "output_len": 2, "max_new_tokens": 4, "prompt": [["a", 0, 12]]},
        {"id": 1, "arrival": 0.0, "prompt_len": 7, "output_len": 6, "prompt": [["b", 0, 7]]},
        {"id": 2, "arrival": 0.035, "prompt_len": 9, "output_len": 4, "prompt": [["a", 0, 9]]},
    ],
    "steps": [
        _overlapped((1, 1, 14, 15), (6, 1, 1, 5, 6), [0, 8]),
        _overlapped((2, 14, 23, 24), (5, 1, 1, 3, 5), [0, 4]),
        _overlapped((16, 23, 35, 36), (3, 0, 2, 2, 3), [1, 7]),
        _overlapped((25, 35, 42, 43), (2, 0, 2, 5, 2), [0, 1], [1, 1], finished=[0]),
        _overlapped((37, 42, 49, 50), (1, 1, 2, 2, 5), [0, 1], [1, 1], ignored=[0]),
        _overlapped((44, 49, 55, 56), (2, 0, 2, 2, 2), [2, 1], cached=[[2, 8]]),
        _overlapped((51, 55, 62, 63), (2, 0, 2, 2, 2), [1, 1], [2, 1]),
        _overlapped((57, 62, 69, 70), (2, 0, 2, 2, 2), [1, 1], [2, 1]),
        _overlapped((64, 69, 76, 77), (2, 0, 2, 8, 2), [1, 1], [2, 1], finished=[1, 2]),
    ],
    "per_request": {
        i: {"first_token_time": first, "finish_time": finish, "num_preemptions": 0, "admissions": 1}
        | {"cached_tokens": hit, "cached_tokens_all": hit}
        for i, first, finish, hit in (("0", 0.024, 0.043, 0), ("1", 0.036, 0.077, 0), ("2", 0.056, 0.077, 8))
    },
}
