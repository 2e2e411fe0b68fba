"""Reads recordings in batchsim's own form, which is made from vLLM's scheduler and open to any engine."""

from __future__ import annotations

import re
from dataclasses import fields
from decimal import Decimal
from typing import Any

from batchsim.base.errors import cut, shown
from batchsim.check.conform import recording as form
from batchsim.check.conform.fields import (
    BLOCK_SIZE,
    BLOCKS,
    COUNT,
    FLAG,
    IDS,
    LIST,
    MODEL_LEN,
    OBJECT,
    PAIRS,
    PRIORITY,
    SECONDS,
    SEGMENTS,
    TEXT,
    TOKENS,
    BadRecording,
    check_row,
)
from batchsim.check.conform.recording import ABSENT, ARRIVAL, EXACT, FREE, Facts, Names, Recording, StepLaw
from batchsim.kernel.tokens import TokenIds, output_stream, prompt_stream
from batchsim.kernel.types import Arrival, Request
from batchsim.policies.evidence import FOLLOWED
from batchsim.policies.registry import POLICIES

SCHEDULERS = {"vllm.v1.core.sched.scheduler.Scheduler": "vllm"}

STEP: Names = {
    "t_start": ("start_ns", SECONDS),
    "scheduled": ("scheduled", PAIRS),
    "cached": ("cached", PAIRS),
    "preempted": ("preempted", IDS),
    "free_blocks_sched": ("free_blocks_sched", COUNT),
    "t_end": ("end_ns", SECONDS),
    "finished": ("finished", IDS),
    "free_blocks_after": ("free_blocks_after", COUNT),
    "num_waiting": ("num_waiting", COUNT),
    "num_running": ("num_running", COUNT),
}
PER_REQUEST: Names = {
    "first_token_time": ("first_token_ns", SECONDS),
    "finish_time": ("finish_ns", SECONDS),
    "num_preemptions": ("num_preemptions", COUNT),
    "cached_tokens": ("cached_tokens", COUNT),
    "cached_tokens_all": ("cached_tokens_all", COUNT),
    "admissions": ("admissions", COUNT),
}
TOTALS: Names = {
    "requests": ("requests", COUNT),
    "steps": ("steps", COUNT),
    "preemptions": ("preemptions", COUNT),
    "tokens": ("tokens", COUNT),
    "cached_tokens": ("cached_tokens", COUNT),
    "empty_steps": ("empty_steps", COUNT),
    "self_preempt": ("self_preempt", COUNT),
    "victim_mid_prefill": ("victim_mid_prefill", COUNT),
    "victim_already_scheduled": ("victim_already_scheduled", COUNT),
    "phantom_hits": ("phantom_hits", COUNT),
    "makespan": ("makespan_ns", SECONDS),
}

PARTS = {"meta": OBJECT, "requests": LIST, "steps": LIST}
SHAPE = {"scheduler": TEXT, "block_size": BLOCK_SIZE, "usable_blocks": BLOCKS, "max_model_len": MODEL_LEN}
MAYBE = {"num_gpu_blocks": COUNT, "totals": OBJECT, "step_time": TEXT, "engine_version": TEXT, "vllm_version": TEXT}
NOTES = {"name", "note", "vllm_commit", "seed", "date", "null_block", "request_id", "prompt_format", "loop", "fields"}
REQUEST = {"id": COUNT, "arrival": SECONDS, "prompt_len": TOKENS, "output_len": TOKENS}
REQUEST_MAYBE = {"max_new_tokens": TOKENS, "ignore_eos": FLAG, "priority": PRIORITY, "prompt": SEGMENTS}
LAW = re.compile(r"t_end = t_start \+ (\d{1,9}(?:\.\d{1,12})?) \+ (\d{1,9}(?:\.\d{1,12})?)\*sum\(num_tokens\)")


def recording(data: dict[str, Any], policy: str | None) -> Recording:
    """`data`, a file's JSON, as a Recording. BadRecording for what is missing, unknown or not simulated."""
    check_row(data, "the recording", PARTS, {"per_request": OBJECT})
    meta = data["meta"]
    check_row({name: meta[name] for name in (SHAPE | MAYBE) if name in meta}, "meta", SHAPE, MAYBE)
    scheduler: str = meta["scheduler"]
    name = policy or _policy(scheduler)
    recorded = FOLLOWED.get(SCHEDULERS.get(scheduler, scheduler))
    knobs, order = _knobs(meta, name)
    config = form.policy_config(name, knobs, "meta")
    blocks = meta["usable_blocks"]
    if meta.get("num_gpu_blocks", blocks + 1) != blocks + 1:
        all_blocks = meta["num_gpu_blocks"]
        raise BadRecording(f"meta.usable_blocks {blocks} is not num_gpu_blocks {all_blocks} less the null block.")
    arrivals = _arrivals(data["requests"], with_tokens=bool(config.traits.prefix_cache))
    arrivals = form.in_order(arrivals, meta["block_size"])
    steps = [_step(row, f"steps[{i}]") for i, row in enumerate(data["steps"])]
    return Recording(
        policy=name,
        config=config,
        num_blocks=blocks,
        block_size=meta["block_size"],
        max_model_len=meta["max_model_len"],
        arrivals=arrivals,
        durations_ns=form.durations_ns(steps, "t_start", "t_end", "steps"),
        steps=steps,
        requests=_per_request(data.get("per_request"), arrivals),
        totals=_totals(meta.get("totals", {})),
        law=_law(meta["step_time"]) if "step_time" in meta else None,
        order=order,
        note=form.version_note(name, recorded.engine, _version(meta)) if recorded is not None else "",
    )


def _policy(scheduler: str) -> str:
    """The name of the policy that follows `scheduler`, which is a class path of vLLM or a policy's name."""
    name = SCHEDULERS.get(scheduler, scheduler)
    if name not in POLICIES:
        raise BadRecording(
            f"meta.scheduler {shown(scheduler)} is none that a policy here stands for. Name one with --policy."
        )
    return name


def _knobs(meta: dict[str, Any], policy: str) -> tuple[dict[str, Any], str]:
    """The policy's knobs stated in `meta`, and the order of the rows within a batch.

    BadRecording for a key of `meta` that is neither a knob, nor switched off, nor a note.
    """
    known = {f.name for f in fields(POLICIES[policy][0])}
    for name, value in meta.items():
        if name in ABSENT and (value != ABSENT[name] or isinstance(value, bool) != isinstance(ABSENT[name], bool)):
            raise BadRecording(
                f"meta.{name} {shown(value)} is not simulated, only {ABSENT[name]!r}. Record without it."
            )
        if name in known | ABSENT.keys() | SHAPE.keys() | MAYBE.keys() | NOTES | {"order"}:
            continue
        if value is None or value is False or value == "" or (value == 0 and isinstance(value, int | float)):
            continue
        what = f"meta.{cut(name)} {shown(value)} is not a knob of {policy}"
        raise BadRecording(f"{what}. If it is a note, put it into meta.note.")
    knobs = {name: meta[name] for name in known & meta.keys()}
    if "order" in known or "order" not in meta:
        return knobs, ARRIVAL if str(meta.get("name", "")).endswith("_by_arrival") else EXACT
    if meta["order"] not in (EXACT, ARRIVAL, FREE):
        what = f"meta.order is {shown(meta['order'])}, not {EXACT}, {ARRIVAL} or {FREE}"
        raise BadRecording(f"{what}. Record it again.")
    return knobs, meta["order"]


def _version(meta: dict[str, Any]) -> str | None:
    """The version of the recorded engine; None if it is not stated."""
    versions = [meta[name] for name in ("engine_version", "vllm_version") if name in meta]
    if len(set(versions)) > 1:
        raise BadRecording(
            f"meta has engine_version {shown(versions[0])}, vllm_version {shown(versions[1])}. Keep one."
        )
    return versions[0] if versions else None


def _arrivals(rows: list[Any], *, with_tokens: bool) -> list[Arrival]:
    """The recorded requests; `with_tokens`: with the identity of their prompt tokens, as a prefix cache needs."""
    streams: dict[str, int] = {}
    arrivals = []
    for i, row in enumerate(rows):
        where = f"requests[{i}]"
        check_row(row, where, REQUEST, REQUEST_MAYBE)
        prompt_tokens, output_tokens = row["prompt_len"], row["output_len"]
        cap = row.get("max_new_tokens", output_tokens)
        if output_tokens > cap:
            raise BadRecording(f"{where} has output_len {output_tokens}, max_new_tokens {cap}. Record it again.")
        tokens = None
        if "prompt" in row:
            tokens = TokenIds.of([(_stream(name, streams), start, length) for name, start, length in row["prompt"]])
            if tokens.num_tokens != prompt_tokens:
                lengths = f"{tokens.num_tokens} tokens, prompt_len says {prompt_tokens}"
                raise BadRecording(f"{where}.prompt has {lengths}. Record it again.")
        elif with_tokens:
            raise BadRecording(f"{where} has no prompt, and prefix caching is on. Record the prompts' segments.")
        request = Request(
            row["id"],
            form.to_ns(row["arrival"]),
            prompt_tokens,
            cap,
            priority=row.get("priority", 0),
            tokens=tokens if with_tokens else None,
            ignore_eos=row.get("ignore_eos", False),
        )
        arrivals.append(Arrival(request, output_tokens))
    return arrivals


def _stream(name: str, numbers: dict[str, int]) -> int:
    """The number of a token stream: `o<i>` is what request i generates, any other is prompt text, see `numbers`."""
    if re.fullmatch(r"o[0-9]{1,15}", name):
        return output_stream(int(name[1:]))
    return prompt_stream(numbers.setdefault(name, len(numbers)))


def _step(row: Any, where: str) -> Facts:
    OBJECT.check(row, where)
    return form.facts({"cached": []} | row, where, STEP)


def _per_request(rows: dict[str, Any] | None, arrivals: list[Arrival]) -> dict[int, Facts]:
    """Recorded facts of each request, by id; empty if none were recorded."""
    if rows is None:
        return {}
    for i in rows:
        if not re.fullmatch(r"0|[1-9][0-9]{0,15}", i):
            raise BadRecording(f"per_request has {shown(i)}, which is no request's id. Record it again.")
    requests = {int(i): form.facts(row, f"per_request.{i}", PER_REQUEST) for i, row in rows.items()}
    form.check_same_ids(list(requests), arrivals, "per_request")
    return requests


def _totals(totals: dict[str, Any]) -> Facts:
    """The recorded totals as facts; a total that the replay cannot count is compared with nothing."""
    return form.facts(totals, "meta.totals", {name: fact for name, fact in TOTALS.items() if name in totals})


def _law(text: str) -> StepLaw | None:
    """The formula of step time in `text`; None if it is finer than recorded times. BadRecording for another form."""
    match = LAW.match(text)
    if match is None:
        raise BadRecording(
            f"meta.step_time is {shown(text)}, not like t_end = t_start + 0.005 + 0.00002*sum(num_tokens). Write it so,"
            " or into meta.note."
        )
    base_ns, per_token_ns = (Decimal(number) * 10**9 for number in match.groups())
    whole_us = base_ns % 1000 == 0 and per_token_ns % 1000 == 0  # recorded times are rounded to 1 us
    return StepLaw(int(base_ns), int(per_token_ns)) if whole_us else None
