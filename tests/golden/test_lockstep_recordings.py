"""Ranks in lockstep against recordings of vLLM 0.33.0's engine cores, coordinator and client in virtual time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchsim.check.conform import StepComparison, conform
from tests.golden.planted import MICROSECOND, STEP_ERRORS
from tests.golden.recordings import cases, numbers_in, recordings

RECORDINGS = recordings("vllm-dp")

Json = dict[str, Any]
COLUMNS = {
    "routed": ("time", "id", "rank", "loads", "in_flight", "first"),
    "published": ("time", "loads", "wave", "is_running"),
    "waves": ("time", "what", "number", "count"),
    "passes": ("number", "launched", "start", "end", "tokens"),
}
TIMES = {"time", "launched", "start", "end"}


def verdict_of(path: Path) -> StepComparison:
    verdict = conform(path, "vllm")
    assert isinstance(verdict, StepComparison)
    return verdict


def test_every_recording_is_there() -> None:
    """None of the recordings is passed over."""
    assert numbers_in("vllm-dp") == [3]


@pytest.mark.parametrize("path", cases(RECORDINGS))
def test_every_pass_dummy_message_and_step_equals_the_recorded_one(path: Path) -> None:
    """What was routed, published, said of waves and run; times, tokens and queues of each rank."""
    verdict = verdict_of(path)
    assert verdict.difference == ""
    ranks = json.loads(path.read_text(encoding="utf-8"))["ranks"]
    assert verdict.num_steps == sum(len(rank["steps"]) for rank in ranks)


@pytest.mark.parametrize("path", cases(RECORDINGS, slow=lambda path: True))
def test_every_planted_error_is_found_where_it_is(path: Path, tmp_path: Path) -> None:
    """One wrong value in any column of any table, of a step, a dummy, a request or a total is named with its row."""
    text, missed = path.read_text(encoding="utf-8"), list[str]()
    for where, name, change in errors(json.loads(text)):
        changed = json.loads(text)
        change(changed)
        (tmp_path / path.name).write_text(json.dumps(changed), encoding="utf-8")
        verdict = verdict_of(tmp_path / path.name)
        names = [difference.name for difference in verdict.differences]
        if not verdict.difference.startswith(where) or (name and name not in names[:1]):
            missed.append(f"{where} {name}: {verdict.difference or 'equal'} ({names})")
    assert missed == []


Errors = Iterator[tuple[str, str, Callable[[Json], object]]]


def errors(recording: Json) -> Errors:
    """Where an error is, the name of what is wrong, and what plants it."""
    for table, columns in COLUMNS.items():
        middle = len(recording[table]) // 2
        for column, name in enumerate(columns):
            at = next(i for i in range(middle, -1, -1) if recording[table][i][column] is not None)
            yield f"{table}[{at}]", name, lambda r, t=table, i=at, c=column: _spoil(r[t][i], c)
        yield f"{table}[{middle}]", "", lambda r, t=table, i=middle: r[t].pop(i)
        yield f"{table}[{middle}]", "", lambda r, t=table, i=middle: r[t].insert(i, r[t][i - 1])
        last = len(recording[table]) - 1
        yield f"{table}[{last}] is here and not in the recording", "", lambda r, t=table: r[t].pop()
    for i, rank in enumerate(recording["ranks"]):
        middle = len(rank["dummies"]) // 2
        for column, name in enumerate(("pass", "time")):
            where = f"ranks[{i}].dummies[{middle}]"
            yield where, name, lambda r, i=i, m=middle, c=column: _spoil(r["ranks"][i]["dummies"][m], c)
        yield f"ranks[{i}].dummies[{middle}]", "", lambda r, i=i, m=middle: r["ranks"][i]["dummies"].pop(m)
        yield from _of_steps(recording, i)
    yield from _of_requests(recording)
    for name, value in recording["meta"]["totals"].items():
        yield f"all {_num_steps(recording)} steps are equal", name, lambda r, n=name, v=value: _spoil_total(r, n, v)


def _num_steps(recording: Json) -> int:
    return sum(len(rank["steps"]) for rank in recording["ranks"])


def _of_steps(recording: Json, rank: int) -> Errors:
    steps = recording["ranks"][rank]["steps"]
    middle = len(steps) // 2
    by_middle = sorted(range(len(steps)), key=lambda k: abs(k - middle))
    for field, change in STEP_ERRORS.values():
        alone = {"steps": steps, "requests": recording["requests"], "meta": recording["meta"]}
        at = next((k for k in by_middle if change(json.loads(json.dumps(steps[k])), alone)), None)
        if at is not None:
            where = f"ranks[{rank}].steps[{at}]"
            yield where, field, lambda r, k=at, a=alone, f=change: f(r["ranks"][rank]["steps"][k], a)
    for name in ("pass", "step_counter", "wave", "throttled"):
        where = f"ranks[{rank}].steps[{middle}]"
        yield where, name, lambda r, n=name: _spoil_step(r["ranks"][rank]["steps"][middle], n)
    yield f"ranks[{rank}].steps[{middle}]", "", lambda r: r["ranks"][rank]["steps"].pop(middle)


def _of_requests(recording: Json) -> Errors:
    rows = recording["per_request"]
    request = sorted(rows, key=lambda i: rows[i]["finish_time"])[len(rows) // 2]
    for name in rows[request]:
        where = f"per_request.{request}" if name == "taken" else "ranks["
        by = MICROSECOND if name.endswith("_time") or name == "taken" else 1
        reported = name if name == "taken" else f"{name} of request {request}"
        yield where, reported, lambda r, n=name, b=by: _add(r["per_request"][request], n, b)


def _add(row: Json, name: str, by: float) -> None:
    row[name] += by


def _spoil(row: list[Any], column: int) -> None:
    """Makes a value of a row another one: a time, a count, a flag, a word or the last count of a list."""
    value = row[column]
    if isinstance(value, bool):
        row[column] = not value
    elif isinstance(value, str):
        row[column] = value + "?"
    elif isinstance(value, list):
        last = value[-1]
        value[-1] = [last[0] + 1, *last[1:]] if isinstance(last, list) else last + 1
    else:
        row[column] += MICROSECOND if isinstance(value, float) else 1


def _spoil_step(step: Json, name: str) -> None:
    step[name] = not step.get(name, False) if name == "throttled" else step[name] + 1


def _spoil_total(recording: Json, name: str, value: Any) -> None:
    totals = recording["meta"]["totals"]
    totals[name] = (
        [*value[:-1], value[-1] + 1] if isinstance(value, list) else value + (MICROSECOND if name == "makespan" else 1)
    )
