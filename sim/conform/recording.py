"""A recording as both forms are read into: knobs, traffic, and what is known of each step, request and the run.

Facts are kept under the recording's own names, each with the name of our fact that it must equal. A fact whose name
ends in `_ns` is a time, or a list of times, and equal within `tolerance_ns`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any

from sim.policies import POLICIES
from sim.types import Arrival
from sim.units import NS_PER_S

Facts = dict[str, tuple[str, Any]]
"""By the recording's name: our name of the fact, and its recorded value."""


class BadRecording(Exception):  # noqa: N818
    """What is wrong with a recording, in one line that ends with what to do."""


@dataclass(frozen=True)
class StepLaw:
    """The time of a step as the recording states it: a constant and a time per scheduled token."""

    base_ns: int
    per_token_ns: int = 0

    def step_ns(self, num_tokens: int) -> int:
        return self.base_ns + self.per_token_ns * num_tokens


@dataclass(frozen=True)
class Recording:
    """`policy` is ours by name, `config` its; `durations_ns` of the steps; `law` None: no law is stated.

    `requests` and `totals` hold what the recording knows beyond the steps. `note` says what the reader should know.
    """

    policy: str
    config: Any
    num_blocks: int
    block_size: int
    max_model_len: int
    arrivals: list[Arrival]
    durations_ns: list[int]
    steps: list[Facts]
    requests: dict[int, Facts] = field(default_factory=dict[int, Facts])
    totals: Facts = field(default_factory=dict[str, tuple[str, Any]])
    law: StepLaw | None = None
    tolerance_ns: int = 0
    steps_name: str = "steps"
    note: str = ""


def read(path: Path, policy: str | None) -> Recording:
    """The recording at `path`, for `policy` or the one of its own scheduler. Raises BadRecording."""
    from sim.conform import vidur, vllm_v1

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadRecording(f"cannot be read: {error.strerror}. Give a recording's path.") from None
    except (ValueError, RecursionError) as error:
        raise BadRecording(f"not a recording, or not all of one: {error}. Record it again.") from None
    if not isinstance(data, dict) or not (
        {"meta", "steps"} <= data.keys() or {"scheduler", "iterations"} <= data.keys()
    ):
        raise BadRecording(
            "not a recording: needs meta, requests and steps. The form stands in sim/conform/__init__.py."
        )
    form = vllm_v1 if "meta" in data else vidur
    try:
        return form.recording(data, policy)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise BadRecording(f"not a recording: {what}. The form stands in sim/conform/__init__.py.") from None


def policy_config(policy: str, knobs: dict[str, Any]) -> Any:
    """The config of our `policy` with the recorded `knobs`. BadRecording if it has no such knobs or refuses them."""
    config = POLICIES[policy][0]
    names = {f.name for f in fields(config)}
    required = {f.name for f in fields(config) if f.default is MISSING}
    strange, missing = sorted(knobs.keys() - names), sorted(required - knobs.keys())
    if strange or missing:
        knob, what = (strange[0], "has no knob") if strange else (missing[0], "needs a knob that is not recorded:")
        raise BadRecording(f"{policy} {what} {knob}. Record what the engine ran with, or name another policy.")
    try:
        return config(**knobs)
    except (TypeError, ValueError) as error:
        raise BadRecording(f"{error}.") from None


def facts(row: Any, where: str, names: Mapping[str, str]) -> Facts:
    """The facts of one JSON object, which has all of `names` and no other.

    Where our name ends in `_ns`, the recorded value is seconds.
    """
    row = check_row(row, where, names)
    found: Facts = {}
    for name, ours in names.items():
        found[name] = (ours, ns(row[name], f"{where}.{name}") if ours.endswith("_ns") else row[name])
    return found


def check_row(row: Any, where: str, required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Any]:
    """`row` if it is a JSON object with all `required` names and none beyond them and the `optional` ones."""
    if not isinstance(row, dict):
        raise BadRecording(f"{where} is {row!r}, not an object. Record it again.")
    for name in required:
        if name not in row:
            raise BadRecording(f"{where} has no {name}. Record it again.")
    for name in row:
        if name not in required and name not in optional:
            raise BadRecording(f"{where} has {name}, which is not known and so cannot be compared. Leave it out.")
    return row


def count(row: dict[str, Any], name: str, where: str) -> int:
    """The whole number that `row` has under `name`."""
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRecording(f"{where}.{name} is {value!r}, not a whole number. Record it again.")
    return value


def ns(seconds: Any, where: str) -> int:
    """Recorded seconds as ns. BadRecording if it is no number."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not isfinite(seconds):
        raise BadRecording(f"{where} is {seconds!r}, not a time in seconds. Record it again.")
    return round(seconds * NS_PER_S)


def durations_ns(steps: list[Facts], start: str, end: str) -> list[int]:
    """Of each step. One that ends before it starts gets 1 ns, so that its end differs from ours."""
    if not steps:
        raise BadRecording("has no steps. Record it again.")
    return [max(step[end][1] - step[start][1], 1) for step in steps]


def in_order(arrivals: list[Arrival]) -> list[Arrival]:
    """`arrivals` by (arrival, id). BadRecording if there are none, or two of one id."""
    if not arrivals:
        raise BadRecording("has no requests. Record it again.")
    check_unique([arrival.request.id for arrival in arrivals], "requests")
    return sorted(arrivals, key=lambda a: (a.request.arrival_ns, a.request.id))


def check_same_ids(ids: list[int], arrivals: list[Arrival], where: str) -> None:
    """BadRecording unless `ids`, listed in `where`, are those of `arrivals`, each once."""
    check_unique(ids, where)
    strange = set(ids) ^ {arrival.request.id for arrival in arrivals}
    if strange:
        raise BadRecording(f"only one of requests and {where} has request {min(strange)}. Record it again.")


def check_unique(ids: list[int], where: str) -> None:
    """BadRecording if one of `ids` is there twice."""
    seen: set[int] = set()
    for i in ids:
        if i in seen:
            raise BadRecording(f"{where} has request {i} twice. Record it again.")
        seen.add(i)
