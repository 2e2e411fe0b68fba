"""A recorded schedule, the same from both file forms: knobs, requests, known facts of each step, request and the run.

Facts keep the recording's own names, each with the name of the replay's fact that must equal it. A fact whose replay
name ends in `_ns` is a time, or a list of times, and equal within `tolerance_ns`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from batchsim.base.errors import cut, shown
from batchsim.base.units import NS_PER_S
from batchsim.check.conform.fields import BadRecording, Kind, ListOf, check_row
from batchsim.check.conform.times import StepLaw
from batchsim.kernel.engine_loop import SYNC, EngineLoop
from batchsim.kernel.kv_transfer import NewLink
from batchsim.kernel.offload import NewOffload
from batchsim.kernel.policy_config import PolicyConfig
from batchsim.kernel.protocols import ItemsContext
from batchsim.kernel.types import Arrival
from batchsim.policies.evidence import FOLLOWED
from batchsim.policies.registry import POLICIES
from batchsim.policies.systems.vllm.vllm_config import VllmConfig

Facts = dict[str, tuple[str, Any]]
"""By the recording's name of a fact: the replay's name of it, and the recorded value."""
Names = Mapping[str, tuple[str, Kind | ListOf]]
"""By the recording's name of a fact: the replay's name of it, and the kind of value it may hold."""

MAX_PROMPT_BLOCKS = 10**7
"""KV blocks of all prompts together; a prefix cache keeps a key for each."""
EXACT, ARRIVAL, FREE = "exact", "arrival", "free"
"""Orders of the rows within a batch: as the engine had it; by arrival with prompts before decodes; not stated."""


@dataclass(frozen=True)
class Recording:
    """A recorded schedule. `policy` is the name of batchsim's policy that follows the recorded scheduler, `config` its
    config; `durations_ns` has an entry for each step that ran; `law` is the stated formula of step time, None without
    one. `loop` is the recorded engine's, `host_ns` what its host takes to launch a step and to process its results;
    where steps differ in that, `each_host_ns` has it of each that ran, and `host_ns` of calls with nothing to run.
    `flushes`: after an end the scheduler is asked once more even if nothing is left to run, in an empty step of `law`.
    `drafts`: the recorded steps, which say what drafts were worth; None: the engine verified none. `items`: of images,
    audios and videos, None where the engine has no encoder; `item_names`: their recorded identifiers. `new_link` makes
    what passes KV between the engine and others, `new_offload` what offloads it to the host; None: nothing does.

    `requests` holds recorded facts of single requests by id, `totals` those of the whole run. `order` is that of the
    rows within a batch. `note` is a remark for the reader, `read_when` says of facts that change when they are read.
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
    loop: EngineLoop = SYNC
    host_ns: tuple[int, int] = (0, 0)
    each_host_ns: list[tuple[int, int]] | None = None
    flushes: bool = False
    tolerance_ns: int = 0
    order: str = EXACT
    steps_name: str = "steps"
    note: str = ""
    drafts: list[dict[str, Any]] | None = None
    items: ItemsContext | None = None
    item_names: Mapping[int, str] = field(default_factory=dict[int, str])
    read_when: Mapping[str, str] = field(default_factory=dict[str, str])
    new_link: NewLink | None = None
    new_offload: NewOffload | None = None

    def without_steps(self) -> Recording:
        """The same of an engine that had nothing to do."""
        return replace(self, steps=[], durations_ns=[])


@cache
def _adapter(config: type) -> TypeAdapter[Any]:
    """What validates a policy's knobs, made once: to make it takes longer than to read many a recording."""
    return TypeAdapter(config)


def policy_config(policy: str, knobs: dict[str, Any], where: str) -> Any:
    """The config of batchsim's `policy` with the recorded `knobs`, which are written as in a scenario.

    BadRecording where a knob is not stated, unknown to the policy or out of range. What an engine ran with is not to be
    guessed, so every knob must be stated unless its default is null.
    """
    config = POLICIES[policy][0]
    names = {f.name for f in fields(config)}
    stated = {f.name for f in fields(config) if f.default is not None} - ABSENT.keys() - LATER
    strange, missing = sorted(knobs.keys() - names), sorted(stated - knobs.keys())
    if strange:
        raise BadRecording(f"{policy} has no knob {strange[0]}. Name another policy with --policy.")
    if missing:
        raise BadRecording(f"{where} has no {missing[0]}, a knob of {policy}. Write down what the engine ran with.")
    try:
        return _adapter(config).validate_json(json.dumps(knobs))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what, knob = first["msg"].removeprefix("Value error, ").rstrip("."), ".".join(map(str, first["loc"]))
        why = f"{where}.{knob} is {shown(first['input'])}: {what}" if knob else what
        raise BadRecording(f"{why}.") from None


ABSENT: dict[str, Any] = {
    "kv_cache_groups": 1,
    "attention": "full",
    "model_runner": "v2",
}
"""Features of an engine that no policy simulates, each with the value that means it is off, stated or not."""
LATER = {"prefill_schedule_interval"}
"""Knobs that recordings may leave out, each at its default then: those older than the knob's simulation do."""


def has_adapters(config: PolicyConfig) -> bool:
    """Whether the recorded engine serves LoRA adapters, by vLLM's knob: of no other are recordings with adapters."""
    return isinstance(config, VllmConfig) and config.max_loras is not None


def version_note(policy: str, engine: str, version: str | None) -> str:
    """A remark, where `version` of `engine` is known not to be the one that `policy` follows; else ""."""
    followed = FOLLOWED.get(policy)
    if version is None or followed is None or followed.engine != engine or followed.version == version:
        return ""
    return f"recorded with {engine} {cut(version)}, the policy follows {followed.version}"


def facts(row: Any, where: str, names: Names) -> Facts:
    """The facts of one JSON object, which must have all of `names` and no other field.

    Where the replay's name ends in `_ns`, the recorded value is in seconds.
    """
    check_row(row, where, {name: kind for name, (_, kind) in names.items()})
    return {name: (ours, _fact(ours, row[name])) for name, (ours, _) in names.items()}


def _fact(ours: str, value: Any) -> Any:
    return to_ns(value) if ours.endswith("_ns") and value is not None else value


def to_ns(seconds: float) -> int:
    """Recorded seconds, already checked, as ns."""
    return round(seconds * NS_PER_S)


def durations_ns(
    steps: list[Facts], start: str, end: str, where: str, *, first: str | None = None, stated: bool = False
) -> list[int]:
    """Duration of each step that ran, ns. BadRecording for steps that are not in order of `first`, unless given their
    start, and for one that ends at or before its start, unless a law is `stated` that says when it ends. Given `first`,
    a step that scheduled no token and ends as it starts did not run.
    """
    if not steps:
        raise BadRecording(f"has no {where}. Record it again.")
    durations: list[int] = []
    before_ns = 0
    for i, step in enumerate(steps):
        start_ns, end_ns, first_ns = step[start][1], step[end][1], step[first or start][1]
        ran = first is None or end_ns != start_ns or step["scheduled"][1]
        if ran and end_ns <= start_ns and not stated:
            raise BadRecording(
                f"{where}[{i}] has {end} {end_ns / NS_PER_S:.9g}, not after its {start} {start_ns / NS_PER_S:.9g}."
                " Record it again."
            )
        if first_ns < before_ns:
            raise BadRecording(f"{where}[{i}] starts before the one before it. Record them in order of time.")
        before_ns = first_ns
        if ran:
            durations.append(end_ns - start_ns)
    return durations


def in_order(arrivals: list[Arrival], block_size: int) -> list[Arrival]:
    """`arrivals` sorted by (arrival, id). BadRecording for none, a repeated id, or prompts of too many KV blocks."""
    if not arrivals:
        raise BadRecording("has no requests. Record it again.")
    blocks = sum(-(-arrival.request.prompt_tokens // block_size) for arrival in arrivals)
    if blocks > MAX_PROMPT_BLOCKS:
        raise BadRecording(f"its prompts have {blocks:,} KV blocks, at most {MAX_PROMPT_BLOCKS:,} are taken. Cut it.")
    check_unique([arrival.request.id for arrival in arrivals], "requests")
    return sorted(arrivals, key=lambda a: (a.request.arrival_ns, a.request.id))


def check_same_ids(ids: list[int], arrivals: list[Arrival], where: str) -> None:
    """Raises BadRecording unless `ids`, listed in `where`, are those of `arrivals`, each once."""
    check_unique(ids, where)
    strange = set(ids) ^ {arrival.request.id for arrival in arrivals}
    if strange:
        raise BadRecording(f"only one of requests and {where} has request {min(strange)}. Record it again.")


def check_unique(ids: list[int], where: str) -> None:
    """Raises BadRecording if an id occurs twice in `ids`."""
    seen: set[int] = set()
    for i in ids:
        if i in seen:
            raise BadRecording(f"{where} has request {i} twice. Record it again.")
        seen.add(i)
