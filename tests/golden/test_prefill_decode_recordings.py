"""Policy `vllm` against prefill and decode engines of vLLM 0.33.0 recorded end to end, with the real scheduler side of
NixlPullConnector: every step of every engine and every hand-over of the proxy between them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchsim.check.conform import conform
from tests.golden.planted import MICROSECOND, Json, errors
from tests.golden.recordings import cases, numbers_in, recordings

RECORDINGS = recordings("vllm-nixl")
HANDED = ("t", "id", "prefill", "decode", "blocks")


def test_every_recording_is_there() -> None:
    """None of the recordings is passed over."""
    assert numbers_in("vllm-nixl") == [5]


@pytest.mark.parametrize("path", cases(RECORDINGS))
def test_every_step_and_hand_over_equals_the_recorded_one(path: Path) -> None:
    """Of each engine times, tokens, hits, pulls, failures, blocks and queues; of the proxy time, engines and blocks."""
    verdict = conform(path)
    assert (verdict.difference, verdict.policy) == ("", "vllm")
    engines = json.loads(path.read_text(encoding="utf-8"))["engines"]
    assert verdict.num_steps == sum(len(engine["steps"]) for engine in engines)


@pytest.mark.parametrize("path", cases(RECORDINGS, slow=lambda path: True))
def test_every_planted_error_is_found_where_it_is(path: Path, tmp_path: Path) -> None:
    """One wrong number, row, order, step, hand-over or total anywhere is a difference, named with its place."""
    changed, missed = tmp_path / path.name, list[str]()
    for error, starts, field, recording in _planted(json.loads(path.read_text(encoding="utf-8"))):
        changed.write_text(json.dumps(recording), encoding="utf-8")
        verdict = conform(changed)
        names = [difference.name for difference in verdict.differences]
        if not verdict.difference.startswith(starts) or (field and field not in names):
            missed.append(f"{error}: {verdict.difference or 'equal'} ({names})")
    assert missed == []


def _planted(recording: Json) -> Iterator[tuple[str, str, str, Json]]:
    """Errors with what the verdict must start with, and the name of the field, "" for a step too few or too many."""
    text = json.dumps(recording)
    for number, engine in enumerate(recording["engines"]):
        alone = {"meta": {}, "requests": recording["requests"]}
        alone |= {"steps": engine["steps"], "per_request": engine["per_request"]}
        for planted in errors(alone):
            copy = json.loads(text)
            copy["engines"][number] |= {name: planted.recording[name] for name in ("steps", "per_request")}
            name = engine["engine"]
            yield f"{name}: {planted.error}", f"{name}: step {planted.step} ", planted.field, copy
    middle = len(recording["handed"]) // 2
    for column, name in enumerate(HANDED):
        copy = json.loads(text)
        wrong = copy["handed"][middle]
        wrong[column] = "P7" if name in ("prefill", "decode") else wrong[column] + (1 if column else MICROSECOND)
        yield f"handed: {name}", f"hand-over {middle + 1} differs in {name} ", name, copy
    for name, value in recording["meta"]["totals"].items():
        copy = json.loads(text)
        more = {"P0": 1} if isinstance(value, dict) else value + (MICROSECOND if name == "makespan" else 1)
        copy["meta"]["totals"][name] = more
        yield f"totals: {name}", "all ", name, copy
    for number, engine in enumerate(recording["engines"]):
        copy = json.loads(text)
        copy["meta"]["engines"][engine["engine"]]["totals"] = {"steps": len(engine["steps"]) + 1}
        yield f"totals of engine {number}", f"{engine['engine']}: all {len(engine['steps'])} steps", "steps", copy
    copy = json.loads(text)
    copy["handed"].pop()
    yield "a hand-over left out", f"hand-over {len(recording['handed'])} is made", "", copy
    copy = json.loads(text)
    copy["handed"].append(copy["handed"][-1])
    yield "a hand-over twice", f"ends after {len(recording['handed'])} hand-overs", "", copy
