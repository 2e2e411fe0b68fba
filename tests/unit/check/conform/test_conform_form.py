"""What the form of a recording says and refuses: optional fields, knobs that must be stated, and hostile values."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.check.conform import StepComparison, conform
from batchsim.check.conform.fields import BadRecording
from batchsim.check.conform.read_recording import read_file, recording_of
from batchsim.check.conform.recording import ABSENT, LATER, policy_config
from batchsim.policies.evidence import FOLLOWED
from batchsim.policies.registry import POLICIES
from tests.support.recorded_by_hand import ASYNC, OVERLAP
from tests.unit.cli.test_conform import RECORDING

Json = dict[str, Any]
LAW = "t_end = t_start + 0.005 + 0.001*sum(num_tokens)"

# Blocks of 4 tokens. 1 waits for the first block of 0, which both begin with; 0 and 2 run. Then 1, older than 2, needs
# 4 blocks where 2 are free: 2 is paused for it, and still 1 must wait.
PAUSED: Json = {
    "meta": {"scheduler": "tensorrt_llm", "capacity_scheduler_policy": "MAX_UTILIZATION", "max_batch_size": 4}
    | {"max_num_tokens": 64, "enable_chunked_prefill": False, "enable_block_reuse": True, "enable_partial_reuse": False}
    | {"host_cache_size": 0, "block_size": 4, "usable_blocks": 5, "max_model_len": 64, "step_time": LAW}
    | {"totals": {"preemptions": 1, "self_preempt": 0, "victim_already_scheduled": 0}},
    "requests": [
        {"id": 0, "arrival": 0.0, "prompt_len": 7, "output_len": 2, "prompt": [["g", 0, 7]]},
        {"id": 1, "arrival": 0.0, "prompt_len": 15, "output_len": 1, "prompt": [["g", 0, 7], ["p", 0, 8]]},
        {"id": 2, "arrival": 0.0, "prompt_len": 2, "output_len": 2, "prompt": [["q", 0, 2]]},
    ],
    "steps": [
        {"t_start": 0.0, "t_end": 0.014, "scheduled": [[0, 7], [2, 2]], "preempted": [], "finished": []}
        | {"free_blocks_sched": 2, "free_blocks_after": 2, "num_waiting": 1, "num_running": 2},
        {"t_start": 0.014, "t_end": 0.02, "scheduled": [[0, 1]], "preempted": [2], "finished": [0]}
        | {"free_blocks_sched": 3, "free_blocks_after": 5, "num_waiting": 2, "num_running": 0},
        {"t_start": 0.02, "t_end": 0.039, "scheduled": [[1, 11], [2, 3]], "preempted": [], "finished": [1, 2]}
        | {"free_blocks_sched": 0, "free_blocks_after": 5, "num_waiting": 0, "num_running": 0, "cached": [[1, 4]]},
    ],
}
# Blocks of 4 tokens, 10 of them. 0 may come to hold 36 tokens, so 9 are reserved, and ends with 8; 1 comes after it.
CAPPED: Json = {
    "meta": {"scheduler": "continuous", "max_num_seqs": 4, "max_num_batched_tokens": 64, "chunked_prefill": True}
    | {"order": "decode_first", "block_size": 4, "usable_blocks": 10, "max_model_len": 64, "step_time": LAW},
    "requests": [
        {"id": 0, "arrival": 0.0, "prompt_len": 7, "output_len": 2, "max_new_tokens": 30},
        {"id": 1, "arrival": 0.0, "prompt_len": 9, "output_len": 1},
    ],
    "steps": [
        {"t_start": 0.0, "t_end": 0.012, "scheduled": [[0, 7]], "preempted": [], "finished": []}
        | {"free_blocks_sched": 1, "free_blocks_after": 1, "num_waiting": 1, "num_running": 1},
        {"t_start": 0.012, "t_end": 0.018, "scheduled": [[0, 1]], "preempted": [], "finished": [0]}
        | {"free_blocks_sched": 1, "free_blocks_after": 10, "num_waiting": 1, "num_running": 0},
        {"t_start": 0.018, "t_end": 0.032, "scheduled": [[1, 9]], "preempted": [], "finished": [1]}
        | {"free_blocks_sched": 7, "free_blocks_after": 10, "num_waiting": 0, "num_running": 0},
    ],
}
# Blocks of 4 tokens, 10 tokens a step. The 5 of 0 end a prompt, so that the engine puts the 4 of 1 before them.
PARTED: Json = {
    "meta": PAUSED["meta"]
    | {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT", "enable_chunked_prefill": True, "enable_block_reuse": False}
    | {"max_num_tokens": 10, "totals": {}},
    "requests": [
        {"id": 0, "arrival": 0.0, "prompt_len": 5, "output_len": 1},
        {"id": 1, "arrival": 0.0, "prompt_len": 8, "output_len": 1},
    ],
    "steps": [
        {"t_start": 0.0, "t_end": 0.014, "scheduled": [[1, 4], [0, 5]], "preempted": [], "finished": [0]}
        | {"free_blocks_sched": 1, "free_blocks_after": 3, "num_waiting": 0, "num_running": 1},
        {"t_start": 0.014, "t_end": 0.023, "scheduled": [[1, 4]], "preempted": [], "finished": [1]}
        | {"free_blocks_sched": 3, "free_blocks_after": 5, "num_waiting": 0, "num_running": 0},
    ],
}
VIDUR: Json = {
    "source": {"simulator": "microsoft/vidur", "commit": "7d47513a"},
    "scheduler": {"name": "orca", "batch_size_cap": 2, "effective_max_batch_size": 2, "block_size": 4, "num_blocks": 8}
    | {"watermark_blocks_fraction": 0.05, "watermark_blocks": None, "max_tokens_per_request": 8, "chunk_size": None}
    | {"max_blocks_per_sequence": 2, "max_tokens_in_batch": None, "num_pipeline_stages": 1},
    "cost_model": {"type": "constant", "iteration_time_s": 0.02},
    "requests": [
        {"id": 0, "arrived_at": 0.0, "num_prefill_tokens": 3, "num_decode_tokens": 2},
        {"id": 1, "arrived_at": 0.01, "num_prefill_tokens": 4, "num_decode_tokens": 1},
    ],
    "iterations": [
        {"iter": 0, "start": 0.0, "end": 0.02, "batch": [[0, 3]], "num_processed_before": [0], "phase": ["prefill"]}
        | {"completed": [], "allocated_blocks_after_schedule": 2},
        {"iter": 1, "start": 0.02, "end": 0.04, "batch": [[0, 1], [1, 4]], "num_processed_before": [4, 0]}
        | {"phase": ["decode", "prefill"], "completed": [0, 1], "allocated_blocks_after_schedule": 4},
    ],
    "preemptions": [],
    "results": [
        {"id": 0, "arrived_at": 0.0, "first_scheduled_at": 0.0, "prefill_completed_at": 0.02, "completed_at": 0.04}
        | {"num_restarts": 0},
        {"id": 1, "arrived_at": 0.01, "first_scheduled_at": 0.02, "prefill_completed_at": 0.04, "completed_at": 0.04}
        | {"num_restarts": 0},
    ],
    "error": None,
    "all_completed": True,
}


def written(data: Any, folder: Path) -> Path:
    path = folder / "recording.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def put(data: Json, keys: tuple[str | int, ...], value: Any) -> Json:
    """A copy of `data` with `value` at `keys`."""
    copied = copy.deepcopy(data)
    row: Any = copied
    for key in keys[:-1]:
        row = row[key]
    row[keys[-1]] = value
    return copied


@pytest.mark.parametrize("recording", [PAUSED, CAPPED, PARTED, VIDUR], ids=["paused", "capped", "parted", "vidur"])
def test_recordings_made_by_hand_are_equal(recording: Json, tmp_path: Path) -> None:
    """One paused for a request that only waits; a cap above the output, which reserves KV; an unfinished prompt before
    a finished one; Vidur's form.
    """
    assert str(conform(written(recording, tmp_path))).startswith("recording.json: equal, ")


def test_the_cap_is_the_output_unless_stated(tmp_path: Path) -> None:
    """Without max_new_tokens both requests of CAPPED fit at once; a cap below the output is no recording."""
    uncapped = put(CAPPED, ("requests", 0), {"id": 0, "arrival": 0.0, "prompt_len": 7, "output_len": 2})
    assert conform(written(uncapped, tmp_path)).difference.startswith("step 1 differs in scheduled")
    with pytest.raises(ScenarioError, match=r"requests\[0\] has output_len 2, max_new_tokens 1"):
        conform(written(put(CAPPED, ("requests", 0, "max_new_tokens"), 1), tmp_path))


def test_ignore_eos_reaches_the_policy(tmp_path: Path) -> None:
    """The request that a policy sees was asked to ignore the end of its text, the others were not."""
    path = written(put(CAPPED, ("requests", 1, "ignore_eos"), True), tmp_path)
    assert [arrival.request.ignore_eos for arrival in recording_of(read_file(path), None).arrivals] == [False, True]


FREE = ("steps", 2, "scheduled"), [[2, 3], [1, 11]]


def test_order_free_compares_rows_in_any_order(tmp_path: Path) -> None:
    """Said by the recording or by the caller, who comes first; it is said that the order was not compared."""
    other = put(PAUSED, *FREE)
    assert "differs in scheduled" in conform(written(other, tmp_path)).difference
    assert str(conform(written(other, tmp_path), order="free")).endswith("order within a batch not compared")
    stated = put(put(other, ("meta", "order"), "free"), ("steps", 2, "finished"), [2, 1])
    assert conform(written(stated, tmp_path)).difference == ""
    assert "differs in scheduled, finished" in conform(written(stated, tmp_path), order="exact").difference


@pytest.mark.parametrize("rows", [[[2, 3]], [[2, 3], [1, 10]], [[1, 11], [2, 3], [2, 3]], [[2, 11], [1, 3]]])
def test_order_free_frees_the_order_alone(rows: list[list[int]], tmp_path: Path) -> None:
    """A row that lacks, is too many or has other tokens is a difference."""
    other = put(put(PAUSED, FREE[0], rows), ("meta", "order"), "free")
    assert conform(written(other, tmp_path)).difference.startswith("step 3 differs in scheduled")


@pytest.mark.parametrize(("key", "value"), [("order", "arrival"), ("name", "mine_by_arrival")])
def test_batches_that_are_listed_by_arrival_are_compared_so(key: str, value: str, tmp_path: Path) -> None:
    """PARTED is equal as the engine had it. Listed by arrival it is equal where that is said, as a key or in its name;
    the order still counts, and exact is exact.
    """
    assert conform(written(PARTED, tmp_path)).difference == ""
    listed = put(PARTED, ("steps", 0, "scheduled"), [[0, 5], [1, 4]])
    assert conform(written(listed, tmp_path)).difference.startswith("step 1 differs in scheduled")
    assert str(conform(written(put(listed, ("meta", key), value), tmp_path))).endswith("batches by arrival")
    assert "differs" in conform(written(put(PARTED, ("meta", key), value), tmp_path)).difference
    assert "differs" in conform(written(put(listed, ("meta", key), value), tmp_path), order="exact").difference


@pytest.mark.parametrize("order", ["arrival", "free"])
def test_another_order_is_not_for_vidurs_form(order: str, tmp_path: Path) -> None:
    """It has lists that go by the order of the batch, and is compared exactly or not at all."""
    with pytest.raises(ScenarioError, match=f"order {order} is not for Vidur's form"):
        conform(written(VIDUR, tmp_path), order=order)


def test_a_policy_with_a_knob_named_order_keeps_the_key(tmp_path: Path) -> None:
    """`order` of `continuous` is its knob, so free is none of its values."""
    with pytest.raises(ScenarioError, match=r"meta\.order is 'free': Input should be 'decode_first'"):
        conform(written(put(CAPPED, ("meta", "order"), "free"), tmp_path))


def test_the_output_says_when_free_blocks_are_read(tmp_path: Path) -> None:
    """Two counts of a step, at two moments."""
    other = put(put(PAUSED, ("steps", 1, "free_blocks_sched"), 4), ("steps", 1, "free_blocks_after"), 4)
    text = str(conform(written(other, tmp_path)))
    assert "  free_blocks_sched (once the step is scheduled):\n    here      3\n    recorded  4" in text
    assert "  free_blocks_after (when the scheduler is next asked, after the step's end):\n    here      5" in text


@pytest.mark.parametrize("policy", POLICIES)
def test_every_knob_must_be_stated_but_those_that_are_null_unless_set(policy: str) -> None:
    """What an engine ran with is not guessed: the knob that is left out is named, for every policy."""
    knobs = {field.name: field.default for field in fields(POLICIES[policy][0])}
    for left_out, default in knobs.items():
        if default is None or left_out in ABSENT.keys() | LATER:
            continue
        others = {name: None for name in knobs if name != left_out}
        with pytest.raises(BadRecording, match=rf"meta has no {left_out}, a knob of {policy}\."):
            policy_config(policy, others, "meta")


@pytest.mark.parametrize("policy", FOLLOWED)
def test_another_version_of_the_engine_is_noted(policy: str) -> None:
    """Whatever engine a policy follows: the version is shown beside a difference, and only then."""
    from batchsim.check.conform.recording import version_note

    followed = FOLLOWED[policy]
    assert version_note(policy, followed.engine, followed.version) == ""
    assert version_note(policy, "another engine", "0.1") == ""
    note = f"recorded with {followed.engine} 0.1, the policy follows {followed.version}"
    assert version_note(policy, followed.engine, "0.1") == note


def test_the_version_is_read_from_either_form(tmp_path: Path) -> None:
    """engine_version for any policy, vllm_version as before, a commit in Vidur's form; two that differ are refused."""
    paused = put(PAUSED, ("meta", "engine_version"), "1.0")
    assert (
        recording_of(read_file(written(paused, tmp_path)), None).note
        == "recorded with TensorRT-LLM 1.0, the policy follows cf6abc45"
    )
    vidur = put(VIDUR, ("source", "commit"), "abc")
    assert (
        recording_of(read_file(written(vidur, tmp_path)), None).note
        == "recorded with Vidur abc, the policy follows 7d47513a"
    )
    with pytest.raises(ScenarioError, match=r"engine_version '0\.11\.2', vllm_version '0\.33\.0'\. Keep one"):
        conform(written(put(RECORDING, ("meta", "engine_version"), "0.11.2"), tmp_path))


REFUSED: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
    "no length": (("meta", "max_model_len"), 0, "meta.max_model_len is 0, not a whole number from 1 to 10,000,000."),
    "a block for all": (
        ("meta", "block_size"),
        10**30,
        "is 1000000000000000000000000000000, not a whole number from 1",
    ),
    "more blocks than fit": (("meta", "usable_blocks"), 10**9, "meta.usable_blocks is 1000000000, not a whole number"),
    "nothing scheduled": (("steps", 1, "scheduled"), None, "steps[1].scheduled is None, not a list."),
    "half a row": (("steps", 1, "scheduled"), [[0, 1], [1]], "steps[1].scheduled[1] is [1], not [id, tokens]"),
    "no time": (("steps", 1, "t_end"), 0.015, "steps[1] has t_end 0.015, not after its t_start 0.015."),
    "time that runs back": (("steps", 1, "t_end"), 0.014, "steps[1] has t_end 0.014, not after its t_start 0.015."),
    "an arrival never": (
        ("requests", 0, "arrival"),
        1e308,
        "is 1e+308, not a time in seconds from 0 to 1,000,000,000.",
    ),
    "a count below 0": (("steps", 0, "num_waiting"), -1, "steps[0].num_waiting is -1, not a whole number from 0"),
    "a prompt before 0": (("requests", 0, "prompt"), [["a", -1, 7]], "prompt[0] is ['a', -1, 7], not [stream, start"),
    "a prompt of half": (("requests", 0, "prompt"), [["a", 0]], "requests[0].prompt[0] is ['a', 0], not [stream, st"),
    "a prompt of none": (("requests", 0, "prompt"), [["a", 0, 7], ["b", 0, 0]], "prompt[1] is ['b', 0, 0], not [str"),
    "true for 1": (("requests", 1, "output_len"), True, "requests[1].output_len is True, not a whole number"),
    "a knob of words": (("meta", "max_num_seqs"), "4", "meta.max_num_seqs is '4': Input should be a valid integer."),
    "a law of its own": (("meta", "step_time"), "about 5 ms", "meta.step_time is 'about 5 ms', not like t_end = t_s"),
    "a law of dots": (("meta", "step_time"), LAW.replace("0.005", "1.2.3"), "not like t_end = t_start"),
    "no request": (("per_request", "x"), {}, "per_request has 'x', which is no request's id."),
    "no object": (("per_request", "0"), [], "per_request.0 is [], not an object."),
    "order at will": (("meta", "order"), "any", "meta.order is 'any', not exact, arrival or free."),
    "a long echo": (("meta", "scheduler"), "x" * 3000, "xxx... is none that a policy here stands for."),
    "two lines": (("meta", "a\nb"), 1, r"meta.a\nb 1 is not a knob of vllm."),
}


@pytest.mark.parametrize("error", REFUSED)
def test_what_is_no_recording_is_refused_in_one_line(error: str, tmp_path: Path) -> None:
    """Wrong kinds and numbers out of range, before anything is made of them: where, what and what is taken."""
    keys, value, expected = REFUSED[error]
    with pytest.raises(ScenarioError) as caught:
        conform(written(put(RECORDING, keys, value), tmp_path))
    assert expected in str(caught.value)
    assert len(str(caught.value).removeprefix(str(tmp_path)).splitlines()) == 1 and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"meta": {}, "meta": {}, "steps": []}', "'meta' is given twice. Record it again."),
        ('{"meta": ' + "1" * 5000 + "}", "not JSON that is to be read: Exceeds the limit (4300 digits)"),
        ('{"meta": {}, "requests": [], "steps": 1}', "the recording.steps is 1, not a list."),
        ("[" * 100_000, "not JSON that is to be read: nested too deeply."),
    ],
)
def test_json_that_is_no_recording_says_why(text: str, expected: str, tmp_path: Path) -> None:
    """A name given twice, a number too long to be read, a part of the wrong kind, nesting without end."""
    path = tmp_path / "recording.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ScenarioError) as caught:
        conform(path)
    assert expected in str(caught.value)


def test_prompts_of_too_many_blocks_are_refused_before_their_keys_are_made(tmp_path: Path) -> None:
    """A request of the longest model, twice: each alone would be taken."""
    row = {"arrival": 0.0, "prompt_len": 6 * 10**6, "output_len": 1}
    requests = [{"id": i, "prompt": [["a", 0, 6 * 10**6]]} | row for i in range(2)]
    long = put(put(put(RECORDING, ("requests",), requests), ("meta", "block_size"), 1), ("meta", "step_time"), LAW)
    with pytest.raises(ScenarioError, match="its prompts have 12,000,000 KV blocks, at most 10,000,000 are taken"):
        conform(written(long, tmp_path))


NEVER = (None, -1, float("nan"), float("-inf"), {"a": 1}, [None], [[[0]]], json.loads("[" * 900 + "]" * 900))
HOSTILE = (True, "", "soon", "x" * 3000, 0, 1.5, 10**7, 10**15, 10**30, 10**400, 2**63, 1e308, [], {}, [[]], [[1]])
ANYTHING = {("meta", "note"), ("source",), ("source", "simulator"), ("source", "commit"), ("error",)}
ANYTHING |= {
    ("meta", knob)
    for knob in ("max_running_requests", "chunked_prefill_size", "priority_scheduling_preemption_threshold")
}
"""Where what is in NEVER may stand; so may null where it stands already, or where a knob is null unless set."""


def _places(value: Any, keys: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*keys, key)
        yield from _places(item, (*keys, key))


def _at(data: Any, keys: tuple[str | int, ...]) -> Any:
    for key in keys:
        data = data[key]
    return data


HOSTILE_TO = {"vllm": RECORDING, "trt": PAUSED, "vidur": VIDUR, "async": ASYNC, "overlap": OVERLAP}


@pytest.mark.parametrize("one_in", [pytest.param(1, marks=pytest.mark.slow), 29])
@pytest.mark.parametrize("recording", HOSTILE_TO.values(), ids=HOSTILE_TO)
def test_hostile_values_at_every_key_end_in_one_line_or_in_a_verdict(
    recording: Json, one_in: int, tmp_path: Path
) -> None:
    """Whatever stands at a key: refused in one short line, or compared; null, -1 and the like are always refused."""
    for i, keys in enumerate(_places(recording)):
        for j, value in enumerate((*NEVER, *HOSTILE)):
            if (i + j) % one_in:
                continue
            try:
                found = conform(written(put(recording, keys, value), tmp_path))
            except ScenarioError as error:
                message = str(error)
                assert len(message.splitlines()) == 1 and len(message) < 700, (keys, value)
                continue
            assert isinstance(found, StepComparison) and str(found), (keys, value)
            may = keys in ANYTHING or (value is None and _at(recording, keys) is None)
            assert may or j >= len(NEVER), (keys, value, found.difference)
