"""A recording as both forms are read into: knobs, traffic, and what is known of each step, request and the run.

Facts are kept under the recording's own names, each with the name of our fact that it must equal. A fact whose name
ends in `_ns` is a time, or a list of times, and equal within `tolerance_ns`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from batchsim.base.errors import cut, shown
from batchsim.base.files import read_json, told
from batchsim.base.units import NS_PER_S
from batchsim.check.conform.fields import BadRecording, Kind, ListOf, check_row
from batchsim.kernel.types import Arrival
from batchsim.policies.evidence import FOLLOWED
from batchsim.policies.registry import POLICIES

Facts = dict[str, tuple[str, Any]]
"""By the recording's name: our name of the fact, and its recorded value."""
Names = Mapping[str, tuple[str, Kind | ListOf]]
"""By the recording's name: our name of the fact, and what it may be."""

MAX_PROMPT_BLOCKS = 10**7
"""Of all requests: a cache keeps a key for each."""
EXACT, ARRIVAL, FREE = "exact", "arrival", "free"
"""What may be said of the order within a batch: the engine's, put by arrival with prompts before decodes, or none."""
FORM = "The form stands in sim/check/conform/__init__.py."


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

    `requests` and `totals` hold what the recording knows beyond the steps. `order` is that within a batch. `note` says
    what the reader should know.
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
    order: str = EXACT
    steps_name: str = "steps"
    note: str = ""


def read(path: Path, policy: str | None, order: str | None = None) -> Recording:
    """The recording at `path`, for `policy` or the one of its own scheduler; `order` in place of its own.

    Raises BadRecording.
    """
    from batchsim.check.conform import vidur, vllm_v1

    data = _json(path)
    if isinstance(data, dict) and {"meta", "steps"} <= data.keys():
        found = vllm_v1.recording(data, policy)
    elif isinstance(data, dict) and {"scheduler", "iterations"} <= data.keys():
        if order not in (None, EXACT):
            what = f"order {order} is not for Vidur's form, which lists what it knows in batch order"
            raise BadRecording(f"{what}. Drop it.")
        found = vidur.recording(data, policy)
    else:
        raise BadRecording(f"not a recording: needs meta, requests and steps. {FORM}")
    return found if order is None else replace(found, order=order)


def _json(path: Path) -> Any:
    """What the file holds. BadRecording unless it is whole JSON that says nothing twice."""
    try:
        return read_json(path)
    except OSError as error:
        raise BadRecording(f"cannot be read: {told(error)}. Give a recording's path.") from None
    except ValueError as error:
        raise BadRecording(f"not a recording, or not all of one: {error}. Record it again.") from None


def policy_config(policy: str, knobs: dict[str, Any], where: str) -> Any:
    """The config of our `policy` with the recorded `knobs`, as a scenario writes them.

    BadRecording where one is not stated, is not the policy's or not what the policy takes. What an engine ran with is
    not to be guessed, so all knobs must be stated but those that are null unless set.
    """
    config = POLICIES[policy][0]
    names = {f.name for f in fields(config)}
    stated = {f.name for f in fields(config) if f.default is not None} - ABSENT.keys()
    strange, missing = sorted(knobs.keys() - names), sorted(stated - knobs.keys())
    if strange:
        raise BadRecording(f"{policy} has no knob {strange[0]}. Name another policy with --policy.")
    if missing:
        raise BadRecording(f"{where} has no {missing[0]}, a knob of {policy}. Write down what the engine ran with.")
    try:
        return TypeAdapter(config).validate_json(json.dumps(knobs))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what, knob = first["msg"].removeprefix("Value error, ").rstrip("."), ".".join(map(str, first["loc"]))
        why = f"{where}.{knob} is {shown(first['input'])}: {what}" if knob else what
        raise BadRecording(f"{why}.") from None


ABSENT: dict[str, Any] = {
    "spec_decode": False,
    "kv_cache_groups": 1,
    "attention": "full",
    "prefill_schedule_interval": 1,
}
"""What an engine may have and no policy here simulates, with the value that stands for its absence, stated or not."""


def version_note(policy: str, engine: str, version: str | None) -> str:
    """What to say where the recorded `version` of `engine` is not the one that our `policy` follows; "" where it is."""
    followed = FOLLOWED.get(policy)
    if version is None or followed is None or followed.engine != engine or followed.version == version:
        return ""
    return f"recorded with {engine} {cut(version)}, the policy follows {followed.version}"


def facts(row: Any, where: str, names: Names) -> Facts:
    """The facts of one JSON object, which has all of `names` and no other.

    Where our name ends in `_ns`, the recorded value is seconds.
    """
    check_row(row, where, {name: kind for name, (_, kind) in names.items()})
    return {name: (ours, to_ns(row[name]) if ours.endswith("_ns") else row[name]) for name, (ours, _) in names.items()}


def to_ns(seconds: float) -> int:
    """Recorded seconds, which have been checked, as ns."""
    return round(seconds * NS_PER_S)


def durations_ns(steps: list[Facts], start: str, end: str, where: str) -> list[int]:
    """Of each step. BadRecording where a step does not end after its start, or starts before the one before it."""
    if not steps:
        raise BadRecording(f"has no {where}. Record it again.")
    before_ns = 0
    for i, step in enumerate(steps):
        start_ns, end_ns = step[start][1], step[end][1]
        if end_ns <= start_ns:
            raise BadRecording(
                f"{where}[{i}] has {end} {end_ns / NS_PER_S:.9g}, not after its {start} {start_ns / NS_PER_S:.9g}."
                " Record it again."
            )
        if start_ns < before_ns:
            raise BadRecording(f"{where}[{i}] starts before the one before it. Record them in order of time.")
        before_ns = start_ns
    return [step[end][1] - step[start][1] for step in steps]


def in_order(arrivals: list[Arrival], block_size: int) -> list[Arrival]:
    """`arrivals` by (arrival, id). BadRecording if there are none, two of one id, or prompts of too many KV blocks."""
    if not arrivals:
        raise BadRecording("has no requests. Record it again.")
    blocks = sum(-(-arrival.request.prompt_tokens // block_size) for arrival in arrivals)
    if blocks > MAX_PROMPT_BLOCKS:
        raise BadRecording(f"its prompts have {blocks:,} KV blocks, at most {MAX_PROMPT_BLOCKS:,} are taken. Cut it.")
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
