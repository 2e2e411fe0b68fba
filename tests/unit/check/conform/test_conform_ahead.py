"""Recordings of engines that schedule ahead of results: each field is compared, or refused where it contradicts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.check.conform import conform
from tests.support.recorded_by_hand import ASYNC, OVERLAP
from tests.unit.check.conform.test_conform_form import put, written
from tests.unit.cli.test_conform import RECORDING

Keys = tuple[str | int, ...]
MICROSECOND = 1e-6


def test_recordings_made_by_hand_are_equal(tmp_path: Path) -> None:
    """A victim in flight, finishes by length and by a stop token, calls that find nothing, a nap; chunks in flight."""
    assert str(conform(written(ASYNC, tmp_path))) == "recording.json: equal, 8 steps (vllm)"
    assert str(conform(written(OVERLAP, tmp_path))) == "recording.json: equal, 9 steps (sglang)"


def _other(name: str, value: Any) -> Any:
    """Another value of the field."""
    if isinstance(value, list):
        return [*value, [0, 1] if name in ("scheduled", "wasted") else 0]
    return value + (MICROSECOND if isinstance(value, float) else 1)


def _planted() -> Iterator[tuple[Keys, Any, str]]:
    """Every field of every step and request and the totals, each with another value and what is then reported."""
    for i, step in enumerate(ASYNC["steps"]):
        for name, value in ({"stale": [], "wasted": []} | step).items():
            yield ("steps", i, name), _other(name, value), f"step {i + 1} differs in {name} (steps[{i}], "
    settled = {"first_token_time": (1, 5), "wasted_tokens": (3, 7)}
    for i in (0, 1):
        for name, value in ({"wasted_tokens": 0} | ASYNC["per_request"][str(i)]).items():
            at = settled.get(name, (3, 6))[i]
            yield ("per_request", str(i), name), _other(name, value), f"step {at} differs in {name} of request {i} "
    for name, value in ASYNC["meta"]["totals"].items():
        yield ("meta", "totals", name), _other(name, value), f"all 8 steps are equal, the totals differ in {name}"
    yield ("requests", 1, "max_tokens"), 2, "step 6 differs in wasted_tokens of request 1 "
    yield ("meta", "host_schedule"), 0.002, "step 1 differs in t_scheduled"
    yield ("meta", "host_update"), 0.002, "step 1 differs in t_processed"
    yield ("meta", "idle_sleep"), 0.002, "step 4 differs in t_processed"  # with the call after the nap
    yield ("meta", "step_time"), ASYNC["meta"]["step_time"].replace("0.001*", "0.002*"), "step 1 differs in t_end"


def test_a_wrong_value_of_any_field_is_named(tmp_path: Path) -> None:
    """One wrong number or row: the step, the field and, of a request, whose it is."""
    for keys, value, expected in _planted():
        assert conform(written(put(ASYNC, keys, value), tmp_path)).difference.startswith(expected), keys


def test_a_wrong_value_of_any_field_of_an_overlap_is_named(tmp_path: Path) -> None:
    """Of every step and of the whole, those fields too that this loop alone has; and its clocks."""
    for i, step in enumerate(OVERLAP["steps"]):
        for name, value in ({"ignored": [], "cached": []} | step).items():
            other = [*value, [0, 1]] if name == "cached" else _other(name, value)
            found = conform(written(put(OVERLAP, ("steps", i, name), other), tmp_path)).difference
            assert found.startswith(f"step {i + 1} differs in {name} "), (i, name, found)
    for name, value in OVERLAP["meta"]["totals"].items():
        found = conform(written(put(OVERLAP, ("meta", "totals", name), value + 1), tmp_path)).difference
        assert found == f"all 9 steps are equal, the totals differ in {name}"
    clocks = {
        "schedule_us": "t_scheduled",
        "process_us": "t_processed",
        "gpu_fixed_us": "t_end",
        "gpu_token_us": "t_end",
    }
    for name, field in clocks.items():
        found = conform(written(put(OVERLAP, ("meta", name), OVERLAP["meta"][name] + 1), tmp_path)).difference
        assert found.startswith(f"step 1 differs in {field}")


def test_a_field_may_be_left_out_where_it_says_that_nothing_was_so(tmp_path: Path) -> None:
    """What was not wasted, stale or cached need not be said; what was must be, and any other field of each step."""
    for i, step in enumerate(ASYNC["steps"]):
        for name in step:
            without = {other: value for other, value in step.items() if other != name}
            path = written(put(ASYNC, ("steps", i), without), tmp_path)
            if name in ("stale", "wasted"):
                assert conform(path).difference.startswith(f"step {i + 1} differs in {name} ")
                continue
            with pytest.raises(ScenarioError, match=rf"steps\[{i}\] has no {name}\. Record it again"):
                conform(path)


def test_the_moment_is_named_at_which_free_blocks_are_read(tmp_path: Path) -> None:
    """Of a step in flight, free blocks are read once its results are processed; others were scheduled in between."""
    text = str(conform(written(put(ASYNC, ("steps", 1, "free_blocks_after"), 3), tmp_path)))
    assert "free_blocks_after (once its results are processed):\n    here      2\n    recorded  3" in text


def test_without_a_law_steps_take_their_recorded_time(tmp_path: Path) -> None:
    """Steps that ran take theirs in order, however many calls between them ran nothing."""
    meta = {name: value for name, value in ASYNC["meta"].items() if name != "step_time"}
    assert conform(written(put(ASYNC, ("meta",), meta), tmp_path)).difference == ""
    longer = put(put(ASYNC, ("meta",), meta), ("steps", 6, "t_end"), 0.0655)
    assert conform(written(longer, tmp_path)).difference.startswith("step 7 differs in t_processed")
    with pytest.raises(ScenarioError, match=r"steps\[6\] has t_end 0\.059, not after its t_gpu_start 0\.059"):
        conform(written(put(longer, ("steps", 6, "t_end"), 0.059), tmp_path))


LAW = ASYNC["meta"]["step_time"]
REFUSED: dict[str, tuple[Keys, Any, str]] = {
    "another depth": (("meta", "batch_queue_size"), 3, "meta.batch_queue_size is 3, vllm with the other knobs has 2."),
    "another loop": (("meta", "engine_step"), "EngineCore.step", "is 'EngineCore.step', not what an engine with 2 bat"),
    "another class": (("meta", "scheduler"), "vllm.v1.core.sched.scheduler.Scheduler", "is not that of async_schedul"),
    "another runner": (("meta", "model_runner"), "v1", "meta.model_runner 'v1' is not simulated, only 'v2'."),
    "another engine's host": (("meta", "schedule_us"), 300, "meta.schedule_us is 300, which says nothing of an engine"),
    "no host": (("meta", "host_update"), None, "meta.host_update is None, not a time in seconds"),
    "another start": (
        ("meta", "step_time"),
        LAW.replace("t_end = t_gpu_start", "t_end = t_start"),
        "not like t_end = t_",
    ),
    "another law": (("meta", "step_time"), LAW + "; on Sundays twice that", "meta.step_time is 't_scheduled = t_start"),
    "two caps": (("requests", 1, "max_new_tokens"), 5, "requests[1] has output_len 2, max_tokens 4."),
    "wasted nothing": (("steps", 6, "wasted"), [[1]], "steps[6].wasted[0] is [1], not [id, tokens]"),
    "a sum unknown": (("meta", "totals", "sighs"), 2, "meta.totals has sighs, which is not known"),
    "a field unknown": (("steps", 0, "spec"), [], "steps[0] has spec, which is not known and so cannot be compared"),
}


@pytest.mark.parametrize("error", REFUSED)
def test_what_contradicts_itself_is_refused_in_one_line(error: str, tmp_path: Path) -> None:
    """Of an engine that schedules ahead: what its knobs, its loop and its clock say of each other."""
    keys, value, expected = REFUSED[error]
    with pytest.raises(ScenarioError) as caught:
        conform(written(put(ASYNC, keys, value), tmp_path))
    assert expected in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_the_host_must_be_stated_where_it_works_beside_the_device(tmp_path: Path) -> None:
    """Each of its times; and they say nothing of an engine that waits for each step."""
    for name in ("host_schedule", "host_update", "idle_sleep"):
        meta = {other: value for other, value in ASYNC["meta"].items() if other != name}
        with pytest.raises(ScenarioError, match=rf"meta has no {name}\."):
            conform(written(put(ASYNC, ("meta",), meta), tmp_path))
    with pytest.raises(
        ScenarioError, match=r"meta\.host_update is 0\.001, which says nothing of an engine that runs li"
    ):
        conform(written(put(RECORDING, ("meta", "host_update"), 0.001), tmp_path))


STAGES = (
    "2 stages, each (0.005 + 0.001*sum(num_tokens))/2 rounded down to whole microseconds: stage k of a step starts when"
    " its stage k-1 and stage k of the previous step have ended"
)
PIPED = put(put(ASYNC, ("meta", "pipeline_parallel_size"), 2), ("meta", "batch_queue_size"), 3)


def test_a_pipeline_keeps_a_batch_more_and_takes_its_time_by_stages(tmp_path: Path) -> None:
    """A step of 16 tokens takes two stages of 10.5 ms each; how many stages there are is said twice, and alike."""
    piped = put(PIPED, ("meta", "step_time"), STAGES)
    first = conform(written(put(piped, ("steps", 0, "t_end"), 0.0221), tmp_path)).differences[0]
    assert (first.name, first.here) == ("t_end", "0.022 s")
    with pytest.raises(ScenarioError, match=r"meta\.batch_queue_size is 2, vllm with the other knobs has 3\."):
        conform(written(put(piped, ("meta", "batch_queue_size"), 2), tmp_path))
    for law in (LAW, STAGES.replace("2 stages", "3 stages"), STAGES.replace(")/2", ")/3"), STAGES + "; in turn"):
        with pytest.raises(ScenarioError, match="not like 2 stages, each "):
            conform(written(put(piped, ("meta", "step_time"), law), tmp_path))
    meta = {name: value for name, value in piped["meta"].items() if name != "step_time"}
    with pytest.raises(ScenarioError, match="meta has no step_time in whole microseconds"):
        conform(written(put(piped, ("meta",), meta), tmp_path))


def test_a_queue_of_one_asks_the_scheduler_once_more_after_the_last_end(tmp_path: Path) -> None:
    """vLLM's synchronous loop, where it is said to have been recorded whole: an empty step, which takes time too."""
    whole = put(put(RECORDING, ("meta", "batch_queue_size"), 1), ("meta", "engine_step"), "EngineCore.step")
    assert conform(written(whole, tmp_path)).difference.startswith(
        "step 4 is made where the recording has ended after 3"
    )
    last = {"t_start": 0.032, "t_end": 0.037, "scheduled": [], "preempted": [], "finished": [], "free_blocks_sched": 10}
    last |= {"free_blocks_after": 10, "num_waiting": 0, "num_running": 0}
    totals = RECORDING["meta"]["totals"] | {"steps": 4, "empty_steps": 1, "makespan": 0.037}
    whole = put(put(whole, ("steps",), [*RECORDING["steps"], last]), ("meta", "totals"), totals)
    assert conform(written(whole, tmp_path)).difference == ""
    assert conform(written(put(whole, ("steps", 3, "t_end"), 0.038), tmp_path)).difference.startswith(
        "step 4 differs in t_"
    )
