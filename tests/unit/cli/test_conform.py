"""`batchsim conform` on a recording small enough to be read, and on all the ways in which it can be wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_scenario import batchsim

# Two requests, blocks of 4 tokens, 5 ms a step and 1 ms a token. The second comes during the first step.
RECORDING: dict[str, Any] = {
    "meta": {
        "scheduler": "vllm.v1.core.sched.scheduler.Scheduler",
        "vllm_version": "0.33.0",
        "note": "by hand",
        "block_size": 4,
        "num_gpu_blocks": 11,
        "usable_blocks": 10,
        "max_model_len": 32,
        "policy": "fcfs",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "long_prefill_token_threshold": 0,
        "long_prefill_token_threshold_adaptive": False,
        "scheduler_reserve_full_isl": True,
        "watermark": 0.0,
        "spec_decode": False,
        "kv_cache_groups": 1,
        "attention": "full",
        "step_time": "t_end = t_start + 0.005 + 0.001*sum(num_tokens)",
        "totals": {"requests": 2, "steps": 3, "preemptions": 0, "tokens": 14, "cached_tokens": 4, "makespan": 0.032},
    },
    "requests": [
        {"id": 0, "arrival": 0.003, "prompt_len": 7, "output_len": 3, "prompt": [["a", 0, 7]]},
        {"id": 1, "arrival": 0.005, "prompt_len": 9, "output_len": 1, "prompt": [["a", 0, 6], ["b", 0, 3]]},
    ],
    "steps": [
        {"t_start": 0.003, "t_end": 0.015, "scheduled": [[0, 7]], "preempted": [], "finished": []}
        | {"free_blocks_sched": 8, "free_blocks_after": 8, "num_waiting": 0, "num_running": 1},
        {"t_start": 0.015, "t_end": 0.026, "scheduled": [[0, 1], [1, 5]], "preempted": [], "finished": [1]}
        | {"free_blocks_sched": 6, "free_blocks_after": 8, "num_waiting": 0, "num_running": 1, "cached": [[1, 4]]},
        {"t_start": 0.026, "t_end": 0.032, "scheduled": [[0, 1]], "preempted": [], "finished": [0]}
        | {"free_blocks_sched": 7, "free_blocks_after": 10, "num_waiting": 0, "num_running": 0},
    ],
    "per_request": {
        "0": {"first_token_time": 0.015, "finish_time": 0.032, "num_preemptions": 0}
        | {"cached_tokens": 0, "cached_tokens_all": 0, "admissions": 1},
        "1": {"first_token_time": 0.026, "finish_time": 0.026, "num_preemptions": 0}
        | {"cached_tokens": 4, "cached_tokens_all": 4, "admissions": 1},
    },
}

Change = Callable[[dict[str, Any]], Any]


def written(path: Path, change: Change | None = None) -> Path:
    """The recording, changed if asked, as a file."""
    data = copy.deepcopy(RECORDING)
    if change is not None:
        change(data)
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_an_equal_recording_is_exit_0_and_its_steps_are_counted(tmp_path: Path) -> None:
    """Without --policy the recorded scheduler decides who is compared."""
    result = batchsim("conform", written(tmp_path / "a.json"))
    assert (result.exit_code, result.stdout) == (0, "a.json: equal, 3 steps (vllm)\n")


def test_the_first_difference_is_shown_with_both_sides_and_the_state_around_it(tmp_path: Path) -> None:
    """The report names step and field, what is here and what was recorded, and what stood before that step."""
    bad = written(tmp_path / "bad.json", lambda d: d["steps"][1]["scheduled"].reverse())
    result = batchsim("conform", written(tmp_path / "good.json"), bad)
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "good.json: equal, 3 steps (vllm)",
        "bad.json: step 2 differs in scheduled (steps[1], 0.015000 s)",
        "  scheduled:",
        "    here      [[0, 1], [1, 5]]",
        "    recorded  [[1, 5], [0, 1]]",
        "  before it: free blocks: 8",
        "             1 running (computed of known tokens): 0 (7 of 8)",
        "             1 waiting, by arrival: 1",
        "  step 1, the last equal one: scheduled [[0, 7]], free blocks 8 once scheduled, 8 when next asked",
    ]


def test_json_holds_the_same(tmp_path: Path) -> None:
    """With --json a row per file, the differences as a list."""
    bad = written(tmp_path / "bad.json", lambda d: d["meta"]["totals"].update(tokens=15))
    rows = json.loads(batchsim("conform", written(tmp_path / "a.json"), bad, "--json").stdout)
    assert [(row["equal"], row["num_steps"]) for row in rows] == [(True, 3), (False, 3)]
    assert rows[1]["differences"] == [{"name": "tokens", "here": "14", "recorded": "15"}]


PLANTED: dict[str, tuple[Change, str]] = {
    "start": (lambda d: d["steps"][1].update(t_start=0.016), "step 2 differs in t_start"),
    "end": (lambda d: d["steps"][2].update(t_end=0.033), "step 3 differs in t_end"),
    "tokens": (lambda d: d["steps"][0]["scheduled"][0].__setitem__(1, 6), "step 1 differs in scheduled"),
    "preempted": (lambda d: d["steps"][1]["preempted"].append(0), "step 2 differs in preempted"),
    "finished": (lambda d: d["steps"][1]["finished"].clear(), "step 2 differs in finished"),
    "free after scheduling": (
        lambda d: d["steps"][1].update(free_blocks_sched=5),
        "step 2 differs in free_blocks_sched",
    ),
    "free after the step": (lambda d: d["steps"][2].update(free_blocks_after=9), "step 3 differs in free_blocks_after"),
    "waiting": (lambda d: d["steps"][0].update(num_waiting=1), "step 1 differs in num_waiting"),
    "running": (lambda d: d["steps"][0].update(num_running=2), "step 1 differs in num_running"),
    "hit": (lambda d: d["steps"][1]["cached"][0].__setitem__(1, 8), "step 2 differs in cached"),
    "no hit": (lambda d: d["steps"][1].pop("cached"), "step 2 differs in cached"),
    "first token": (
        lambda d: d["per_request"]["0"].update(first_token_time=0.026),
        "step 1 differs in first_token_time of request 0",
    ),
    "finish": (lambda d: d["per_request"]["1"].update(finish_time=0.027), "step 2 differs in finish_time of request 1"),
    "request's hit": (
        lambda d: d["per_request"]["1"].update(cached_tokens_all=8),
        "step 2 differs in cached_tokens_all of request 1",
    ),
    "a knob": (lambda d: d["meta"].update(max_num_batched_tokens=5), "step 1 differs in scheduled"),
    "no caching": (lambda d: d["meta"].update(enable_prefix_caching=False), "step 2 differs in scheduled, cached"),
    "arrival": (lambda d: d["requests"][1].update(arrival=0.016), "step 2 differs in scheduled"),
    "a step too few": (lambda d: d["steps"].pop(), "step 3 is made where the recording has ended after 2"),
    "a step too many": (lambda d: d["steps"].append(d["steps"][2]), "ends after 3 steps, the recording has 4"),
    "totals": (lambda d: d["meta"]["totals"].update(makespan=0.033), "the totals differ in makespan"),
    "too long for the pool": (
        lambda d: (d["meta"].update(usable_blocks=2, num_gpu_blocks=3), d["meta"].update(max_model_len=64)),
        "KV blocks needed",
    ),
}


@pytest.mark.parametrize("error", PLANTED)
def test_a_planted_error_is_exit_1_and_named(error: str, tmp_path: Path) -> None:
    """One wrong field of a step, a request or the whole: the first step that differs is named with its field."""
    change, expected = PLANTED[error]
    result = batchsim("conform", written(tmp_path / "x.json", change))
    assert result.exit_code == 1 and result.stderr == ""
    assert expected in result.stdout


REFUSED: dict[str, tuple[Change, str]] = {
    "speculation": (lambda d: d["meta"].update(spec_decode=True), "meta has no spec_method"),
    "two groups": (lambda d: d["meta"].update(kv_cache_groups=2), "meta.kv_cache_groups 2 is not simulated, only 1"),
    "another scheduler": (lambda d: d["meta"].update(scheduler="AsyncScheduler"), "Name one with --policy"),
    "unknown knob": (lambda d: d["meta"].update(max_num_partial_prefills=2), "is not a knob of vllm"),
    "missing knob": (lambda d: d["meta"].pop("watermark"), "meta has no watermark, a knob of vllm"),
    "knobs it refuses": (lambda d: d["meta"].update(max_num_seqs=9), "must be at least max_num_seqs 9"),
    "blocks": (lambda d: d["meta"].update(num_gpu_blocks=10), "is not num_gpu_blocks 10 less the null block"),
    "no steps": (lambda d: d["steps"].clear(), "has no steps"),
    "no requests": (lambda d: d["requests"].clear(), "has no requests"),
    "half a step": (lambda d: d["steps"][1].pop("finished"), "steps[1] has no finished"),
    "unknown field": (lambda d: d["steps"][1].update(swapped=[1]), "steps[1] has swapped, which is not known"),
    "a time that is none": (lambda d: d["steps"][1].update(t_end="soon"), "steps[1].t_end is 'soon', not a time"),
    "a time without end": (lambda d: d["steps"][1].update(t_end=float("inf")), "steps[1].t_end is inf, not a time"),
    "a count that is none": (lambda d: d["requests"][1].update(output_len=1.5), "not a whole number"),
    "a request twice": (lambda d: d["requests"].append(d["requests"][0]), "requests has request 0 twice"),
    "a request unknown": (lambda d: d["per_request"].pop("1"), "only one of requests and per_request has request 1"),
    "no tokens": (lambda d: d["requests"][0].pop("prompt"), "has no prompt, and prefix caching is on"),
    "other tokens": (lambda d: d["requests"][0].update(prompt_len=8), "prompt has 7 tokens, prompt_len says 8"),
    "no meta": (lambda d: d.pop("meta"), "needs meta, requests and steps"),
    "no scheduler": (lambda d: d["meta"].pop("scheduler"), "meta has no scheduler"),
    "order of steps": (lambda d: d["steps"].reverse(), "steps[1] starts before the one before it"),
}


@pytest.mark.parametrize("error", REFUSED)
def test_a_recording_that_cannot_be_compared_is_exit_2_in_one_line(error: str, tmp_path: Path) -> None:
    """What is missing, contradicts itself or is not simulated is refused, never passed over."""
    change, expected = REFUSED[error]
    result = batchsim("conform", written(tmp_path / "x.json", change))
    assert result.exit_code == 2 and result.stdout == ""
    assert expected in result.stderr and len(result.stderr.splitlines()) == 1


TWICE = json.dumps(RECORDING)[:-1] + f', "meta": {json.dumps(RECORDING["meta"])}}}'


@pytest.mark.parametrize("text", ["", "[]", "{", json.dumps(RECORDING)[:900], "[" * 100_000, TWICE])
def test_a_file_that_is_cut_or_empty_is_exit_2_in_one_line(text: str, tmp_path: Path) -> None:
    """Whatever JSON or half of it: the line says that it is no recording."""
    path = tmp_path / "cut.json"
    path.write_text(text, encoding="utf-8")
    result = batchsim("conform", path)
    assert result.exit_code == 2
    assert "cut.json: not a recording" in result.stderr and len(result.stderr.splitlines()) == 1


def test_a_policy_may_be_named_and_must_have_the_recorded_knobs(tmp_path: Path) -> None:
    """The recorded scheduler's own name is the default; one without its knobs cannot be compared."""
    path = written(tmp_path / "a.json")
    assert batchsim("conform", path, "--policy", "vllm").exit_code == 0
    other = batchsim("conform", path, "--policy", "orca")
    assert other.exit_code == 2 and "is not a knob of orca" in other.stderr
    unknown = batchsim("conform", path, "--policy", "vlm")
    assert unknown.exit_code == 2 and "vlm is no policy here. Known: static" in unknown.stderr


def test_a_recording_of_another_version_says_so_where_it_differs(tmp_path: Path) -> None:
    """The schedule is the judge; the version explains."""
    old = written(tmp_path / "old.json", lambda d: d["meta"].update(vllm_version="0.11.2"))
    assert batchsim("conform", old).exit_code == 0
    worse = written(
        tmp_path / "worse.json",
        lambda d: (d["meta"].update(vllm_version="0.11.2"), d["steps"][0].update(num_running=2)),
    )
    assert "recorded with vLLM 0.11.2, the policy follows 0.33.0" in batchsim("conform", worse).stdout
