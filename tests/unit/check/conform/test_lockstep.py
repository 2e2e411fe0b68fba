"""Recordings of ranks in lockstep, one by hand: what is read, compared, and refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.check.conform import conform

Json = dict[str, Any]
META: Json = {
    "scheduler": "vllm.v1.core.sched.scheduler.Scheduler",
    "vllm_version": "0.33.0",
    "data_parallel_size": 2,
    "hop": 0.001,
    "dp_sync_interval": 1,
    "batch_queue_size": 1,
    "policy": "fcfs",
    "block_size": 16,
    "usable_blocks": 8,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": False,
    "long_prefill_token_threshold": 0,
    "long_prefill_token_threshold_adaptive": False,
    "scheduler_reserve_full_isl": True,
    "watermark": 0.0,
    "async_scheduling": False,
    "host_schedule": 0.0,
    "host_update": 0.0,
    "idle_sleep": 0.001,
    "step_time": "t_end = t_gpu_start + 0.005 + 0.001*max(1, largest number of tokens of a rank)",
}


def step(at: float, end: float, number: int, tokens: int, free: int, **after: Any) -> Json:
    """A step of request 0, called and scheduled at once."""
    times = {"t_start": at, "t_scheduled": at, "t_gpu_start": max(at, 0.013), "t_end": end, "t_processed": end}
    facts = {"pass": number, "step_counter": number, "wave": 0, "scheduled": [[0, tokens]], "preempted": []}
    queues = {"num_waiting": 0, "num_running": 1, "finished": []}
    return times | facts | {"free_blocks_sched": free, "free_blocks_after": free} | queues | after


def recording() -> Json:
    """A request of 4 + 2 tokens that arrives at 10 ms; messages take 1 ms, a pass 5 ms and 1 a token of the fullest
    rank. Two passes, with all ranks meeting behind each; the wave ends with the second."""
    flush = {"t_start": 0.028, "t_scheduled": 0.028, "t_gpu_start": 0.028, "t_end": 0.028, "t_processed": 0.028}
    flush |= {"step_counter": 0, "wave": 1, "scheduled": [], "preempted": [], "finished": []}
    flush |= {"free_blocks_sched": 8, "free_blocks_after": 8, "num_waiting": 0, "num_running": 0}
    steps = [step(0.011, 0.022, 0, 4, 7), step(0.022, 0.028, 1, 1, 7, finished=[0], free_blocks_after=8, num_running=0)]
    request = {"first_token_time": 0.022, "finish_time": 0.028, "num_preemptions": 0, "cached_tokens": 0}
    return {
        "meta": META,
        "requests": [{"id": 0, "arrival": 0.01, "prompt_len": 4, "output_len": 2}],
        "routed": [[0.01, 0, 0, [[0, 0, 0.0], [0, 0, 0.0]], [0, 0], 0]],
        "published": [[0.013, None, 0, True], [0.03, None, 1, False], [0.03, [[0, 1, 0.125], [0, 0, 0.0]], 1, False]],
        "waves": [
            [0.011, "wave_started_by", 0, 0],
            [0.012, "start_wave", 0, 0],
            [0.022, "sync", 0, 1],
            [0.022, "wave_started_by", 0, 0],
            [0.028, "sync", 1, 0],
            [0.028, "wave_complete", 0, 0],
        ],
        "passes": [[0, 0.013, 0.013, 0.022, [4, 0]], [1, 0.022, 0.022, 0.028, [1, 0]]],
        "ranks": [
            {"rank": 0, "dummies": [], "steps": [*steps, flush]},
            {"rank": 1, "dummies": [[0, 0.013], [1, 0.022]], "steps": []},
        ],
        "per_request": {"0": request | {"cached_tokens_all": 0, "admissions": 1, "taken": 0.011}},
    }


def verdict(data: Json, folder: Path, **options: Any) -> Any:
    path = folder / "recording.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return conform(path, **options)


def test_a_recording_by_hand_is_equal(tmp_path: Path) -> None:
    """One rank without any step of its own included; coordinator and clients too."""
    compared = verdict(recording(), tmp_path, policy="vllm")
    assert (compared.difference, compared.num_steps) == ("", 3)


def test_what_differs_first_in_time_is_reported(tmp_path: Path) -> None:
    """A dummy at 22 ms, not the end of the wave at 28 ms; with both values."""
    data = recording()
    data["waves"][4][3] = 1
    data["ranks"][1]["dummies"][1][1] = 0.0221
    compared = verdict(data, tmp_path)
    assert compared.difference == "ranks[1].dummies[1] differs in time (0.022000 s)"
    assert "    here      0.022 s\n    recorded  0.0221 s" in str(compared)


def test_a_missing_row_is_named(tmp_path: Path) -> None:
    """The table, and how many rows the recording has."""
    data = recording()
    data["passes"].append([2, 0.03, 0.03, 0.036, [0, 0]])
    assert verdict(data, tmp_path).difference == "passes[2] is not here, the recording has 3 (0.030000 s)"


@pytest.mark.parametrize("name", ["hop", "host_schedule", "host_update"])
def test_a_replay_that_would_take_for_ever_is_given_up(name: str, tmp_path: Path) -> None:
    """Where a message or the host takes decades, in which the coordinator publishes loads every few seconds."""
    data = recording()
    data["meta"] = META | {name: 10**9}
    compared = verdict(data, tmp_path)
    assert compared.difference and "it goes on long after the recording has ended" in str(compared)


def put(*path: Any) -> Callable[[Json], None]:
    """Puts the last of `path` where the others lead."""
    *where, name, value = path

    def change(data: Json) -> None:
        for key in where:
            data = data[key]
        data[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (put("meta", META | {"data_parallel_size": 3}), "meta.data_parallel_size is 3, and there are 2 ranks"),
        (put("meta", META | {"totals": {"joules": 3}}), "meta.totals has joules, which is not known"),
        (put("meta", META | {"step_time": "at once"}), "meta.step_time is 'at once', not like t_end = t_gpu_start"),
        (put("meta", META | {"spec_decode": True}), "has drafts, which are not simulated of ranks that step together"),
        (put("meta", META | {"kv_role": "kv_producer"}), "meta has kv_role, which is not simulated of ranks that step"),
        (put("meta", META | {"tier": {"cpu_chunks": 4}}), "meta has tier, which is not simulated of ranks that step"),
        (put("meta", META | {"order": "free"}), "meta has order, which is not simulated of ranks that step together"),
        (put("ranks", 1, "steps", [7]), r"ranks\[1\].steps\[0\] is 7, not an object"),
        (put("meta", META | {"replicas": 3}), "meta.replicas 3 is not a knob of vllm"),
        (put("meta", META | {"totals": {"waves": True}}), "meta.totals.waves is True, not a whole number"),
        (put("meta", META | {"totals": {"makespan": [1]}}), r"meta.totals.makespan is \[1\], not a time in seconds"),
        (put("meta", META | {"totals": {"steps": 3}}), "meta.totals.steps is 3, not a list"),
        (put("requests", 0, {"rank": 0, "id": [0]}), r"requests\[0\].id is \[0\], not a whole number"),
        (put("requests", 0, {"rank": 0}), r"requests\[0\].id is None, not a whole number"),
        (put("ranks", 1, "rank", 0), r"ranks\[1\].rank is 0, not a whole number from 1 to 1"),
        (put("requests", 0, "rank", 2), r"requests\[0\].rank is 2, not a whole number from 0 to 1"),
        (put("routed", 0, [0.01, 0, 0]), r"routed\[0\] has 3 columns, not 6"),
        (put("passes", 0, 0, -1), r"passes\[0\], number is -1, not a whole number"),
        (put("published", 0, 1, [[0, 0]]), r"published\[0\], loads is .*, not loads by rank or null"),
        (put("published", 1, 1, [[0, 0, 1e400]] * 2), r"published\[1\], loads is .*, not loads by rank or null"),
        (put("ranks", 0, "steps", []), "has no steps of any rank"),
        (put("devices", []), "the recording has devices, which is not known"),
    ],
)
def test_what_is_no_whole_recording_is_refused(change: Callable[[Json], None], complaint: str, tmp_path: Path) -> None:
    """In one line, with where."""
    data = recording()
    change(data)
    with pytest.raises(ScenarioError, match=complaint):
        verdict(data, tmp_path)


def test_another_order_is_refused(tmp_path: Path) -> None:
    """Batches of ranks are in the engine's order."""
    with pytest.raises(ScenarioError, match="Drop --order"):
        verdict(recording(), tmp_path, order="free")
