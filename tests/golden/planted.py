"""Single errors planted into a recording that is equal: each must be found at its step, under its field's name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchsim.check.conform import conform
from batchsim.check.conform.kv_transfers import SETS

Json = dict[str, Any]
MICROSECOND = 1e-6


@dataclass(frozen=True)
class Planted:
    """One wrong fact: `recording` with `error` planted at `step` (from 1; 0: in the totals).

    `field` is what must be reported first, "" where the error is a step too few or too many. A step's wrong time may
    also move what a request got at its end.
    """

    error: str
    step: int
    field: str
    recording: Json


def not_found(path: Path, folder: Path, **options: Any) -> list[str]:
    """Those of the errors planted into the recording at `path` that `conform` misses or reports as something else.

    `options` are those of `conform`, under which the recording, which states the law of its times, must be equal.
    Writes into `folder`.
    """
    assert conform(path, **options).difference == ""
    missed: list[str] = []
    changed = folder / path.name
    recording = json.loads(path.read_text(encoding="utf-8"))
    for planted in errors(recording, free_order="free" in (options.get("order"), recording["meta"].get("order"))):
        changed.write_text(json.dumps(planted.recording), encoding="utf-8")
        verdict = conform(changed, **options)
        at = f"step {planted.step} " if planted.step else f"all {len(planted.recording['steps'])} steps are equal"
        names = [difference.name for difference in verdict.differences]
        if not verdict.difference.startswith(at) or (planted.field and planted.field not in names[:1]):
            missed.append(f"{planted.error} at step {planted.step}: {verdict.difference or 'equal'} ({names})")
    return missed


def errors(recording: Json, *, free_order: bool = False) -> Iterator[Planted]:
    """A copy of `recording` for every kind of error that it can have, each at the step nearest the middle it fits."""
    text, steps = json.dumps(recording), recording["steps"]
    middle = len(steps) // 2
    by_middle = sorted(range(len(steps)), key=lambda i: abs(i - middle))
    for error, (field, change) in STEP_ERRORS.items():
        if free_order and error in ORDER_ERRORS:
            continue
        fits = (i for i in by_middle if change(json.loads(json.dumps(steps[i])), recording))
        at = next(fits, None)
        if at is not None:
            copy = json.loads(text)
            change(copy["steps"][at], copy)
            yield Planted(error, at + 1, field, copy)
    for error, change in WHOLE_STEPS.items():
        copy = json.loads(text)
        change(copy["steps"], middle)
        yield Planted(error, middle + 1, "", copy)
    yield from _of_requests(recording, text)
    for name in recording["meta"].get("totals", {}).keys() - UNCOUNTED:
        copy = json.loads(text)
        copy["meta"]["totals"][name] += MICROSECOND if name == "makespan" else 1
        yield Planted(f"totals: {name}", 0, name, copy)


def _of_requests(recording: Json, text: str) -> Iterator[Planted]:
    """One wrong fact each of the middle request to finish, which is settled at its first token or at its end."""
    rows = recording.get("per_request", {})
    if not rows:
        return
    i = sorted(rows, key=lambda i: rows[i]["finish_time"])[len(rows) // 2]
    ends = [step["t_processed"] if "t_processed" in step else step["t_end"] for step in recording["steps"]]
    for name in rows[i]:
        copy = json.loads(text)
        value = rows[i][name]
        more = MICROSECOND if name.endswith("_time") or name == "taken" else 1
        copy["per_request"][i][name] = not value if isinstance(value, bool) else (value or 0) + more
        settled = (value if name == "first_token_time" else None) or rows[i]["finish_time"]
        at = ends.index(settled)
        if name == "wasted_tokens":
            at = max(k for k, step in enumerate(recording["steps"]) if int(i) in dict(step.get("scheduled", ())))
        yield Planted(f"request: {name}", at + 1, f"{name} of request {i}", copy)


Change = Callable[[Json, Json], bool]
"""Changes a step of a recording; False where that step cannot have the error."""


def _more(name: str, by: float) -> Change:
    def change(step: Json, recording: Json) -> bool:
        if name not in step:
            return False
        step[name] += by
        return True

    return change


def _row(name: str, column: int, by: float) -> Change:
    """Changes the last row of a list of rows, or of ids where `column` is -1."""

    def change(step: Json, recording: Json) -> bool:
        rows = step.get(name)
        if not rows:
            return False
        if column < 0:
            rows[-1] += by
        elif len(rows[-1]) <= column or rows[-1][column] is None:
            return False
        else:
            rows[-1][column] += by
        return True

    return change


def _dropped(name: str) -> Change:
    def change(step: Json, recording: Json) -> bool:
        return bool(step.get(name)) and step[name].pop() is not None

    return change


def _added(name: str) -> Change:
    """Adds what did not happen: a request that the list has not."""

    def change(step: Json, recording: Json) -> bool:
        if not any(name in other for other in recording["steps"]) or not step.get("scheduled"):
            return False
        rows, column = step.setdefault(name, []), LISTS[name]
        there = {row[column] if isinstance(row, list) else row for row in rows}
        strange = next((r["id"] for r in recording["requests"] if r["id"] not in there), None)
        if strange is None:
            return False
        if column < 0:
            rows.append(strange)
            return True
        like = next(row for other in recording["steps"] for row in other.get(name, ()))
        rows.append([strange if at == column else value for at, value in enumerate(like)])
        return True

    return change


def _otherwise(name: str) -> Change:
    def change(step: Json, recording: Json) -> bool:
        if not any(name in other for other in recording["steps"]):
            return False
        step[name] = not step.get(name, False)
        return True

    return change


def _at(name: str, at: int) -> Change:
    """Changes one number of a list of numbers."""

    def change(step: Json, recording: Json) -> bool:
        if name not in step:
            return False
        step[name][at] += 1
        return True

    return change


def _known(name: str, column: int) -> Change:
    """Puts a number where a row has none."""

    def change(step: Json, recording: Json) -> bool:
        unknown = [row for row in step.get(name, ()) if row[column] is None]
        for row in unknown[:1]:
            row[column] = 1
        return bool(unknown)

    return change


def _launched() -> Change:
    """Has a step launched after it was scheduled, or later than it was."""

    def change(step: Json, recording: Json) -> bool:
        if "tier" not in recording["meta"]:
            return False
        step["t_launch"] = step.get("t_launch", step["t_scheduled"]) + MICROSECOND
        return True

    return change


def _exchanged(name: str) -> Change:
    """Exchanges two rows of a list whose order counts: that of requests held for a load does, a queue's."""

    def change(step: Json, recording: Json) -> bool:
        if name in SETS and not (name == "remote" and "tier" in recording["meta"]):
            return False
        rows = step.get(name, [])
        if len(rows) < 2:
            return False
        rows[-1], rows[-2] = rows[-2], rows[-1]
        return True

    return change


def _encoded(change_items: Callable[[list[int]], object]) -> Change:
    """Changes the items that a request encodes in a step."""

    def change(step: Json, recording: Json) -> bool:
        rows = step.get("encode")
        if not rows:
            return False
        change_items(rows[-1][1])
        return True

    return change


def _renamed(name: str) -> Change:
    """Another item than that which was dropped."""

    def change(step: Json, recording: Json) -> bool:
        if not step.get(name):
            return False
        step[name][-1] += "x"
        return True

    return change


LISTS = {"scheduled": 0, "cached": 0, "preempted": -1, "finished": -1}  # each with the column of its ids
LISTS |= {"loads_started": 0, "loads_done": -1, "sends_started": 0, "sends_done": -1, "remote": -1}
LISTS |= {"loads_failed": -1, "errors": -1, "loras": -1}
LISTS |= {"matched": 0, "offers": 0, "stores_queued": 0, "xfers": 2, "flushed": -1, "jobs_done": -1}
LISTS |= {"wasted": 0, "stale": -1, "retracted": -1, "ignored": -1, "spec": 0, "blocks": 0, "drafts": 0}
CHUNKS = (("loads_started", 1), ("offers", 1), ("offers", 3), ("stores_queued", 1), ("xfers", 3))
JOBS = {"loads_started": 2, "stores_queued": 2, "xfers": 0}
COUNTS = ("free_blocks_sched", "free_blocks_after", "num_waiting", "num_running")
COUNTS += ("enc_free", "enc_freeable", "enc_free_after", "enc_freeable_after")
COUNTS += ("in_flight", "num_waiting_sched", "num_running_sched", "free_blocks_processed")
TIMES = ("t_start", "t_scheduled", "t_gpu_start", "t_end", "t_processed")
STEP_ERRORS: dict[str, tuple[str, Change]] = {
    **{f"{name}: another request": (name, _row(name, column, 1_000_000)) for name, column in LISTS.items()},
    **{
        f"{name}: a token more": (name, _row(name, 1, 1))
        for name in ("scheduled", "cached", "wasted", "spec", "blocks", "loads_started", "sends_started", "matched")
    },
    **{f"{name}: a chunk more in {column}": (name, _row(name, column, 1)) for name, column in CHUNKS},
    **{f"{name}: another job": (name, _row(name, column, 1)) for name, column in JOBS.items()},
    **{f"cpu: {what} more": ("cpu", _at("cpu", at)) for at, what in enumerate(("used", "evictable", "stored"))},
    **{f"xfers: {what} later": ("xfers", _row("xfers", at, MICROSECOND)) for at, what in ((4, "start"), (5, "end"))},
    "matched: known where it was not": ("matched", _known("matched", 2)),
    "t_launch: later": ("t_launch", _launched()),
    **{f"{name}: one left out": (name, _dropped(name)) for name in LISTS},
    **{f"{name}: one too many": (name, _added(name)) for name in LISTS},
    **{f"{name}: two exchanged": (name, _exchanged(name)) for name in LISTS},
    "spec: one more accepted": ("spec", _row("spec", 2, 1)),
    "spec: a token more got": ("spec", _row("spec", 3, 1)),
    "encode: another item": ("encode", _encoded(lambda items: items.append(items.pop() + 1))),
    "encode: an item more": ("encode", _encoded(lambda items: items.append(items[-1] + 1))),
    "encode: another request": ("encode", _row("encode", 0, 1_000_000)),
    "encode: one left out": ("encode", _dropped("encode")),
    "enc_freed: another item": ("enc_freed", _renamed("enc_freed")),
    "enc_freed: one left out": ("enc_freed", _dropped("enc_freed")),
    "skip_drafts: otherwise": ("skip_drafts", _otherwise("skip_drafts")),
    **{f"{name}: more": (name, _more(name, 1)) for name in COUNTS},
    **{f"{name}: later": (name, _more(name, MICROSECOND)) for name in TIMES},
}
ORDER_ERRORS = {f"{name}: two exchanged" for name in LISTS.keys() - {"preempted", "retracted"}}
WHOLE_STEPS: dict[str, Callable[[list[Json], int], object]] = {
    "a step left out": lambda steps, at: steps.pop(at),
    "a step twice": lambda steps, at: steps.insert(at, steps[at - 1]),
    "no more steps": lambda steps, at: steps.__delitem__(slice(at, None)),
}
UNCOUNTED = {"self_preempt", "victim_already_scheduled", "victim_mid_prefill", "phantom_hits"}
"""Totals that are vLLM's own and not always counted here."""
