"""Reads the form that is recorded from vLLM's scheduler, and that anybody's engine may be recorded in."""

from __future__ import annotations

import re
from dataclasses import fields
from decimal import Decimal
from typing import Any

from sim.conform import recording as form
from sim.conform.recording import BadRecording, Facts, Recording, StepLaw
from sim.policies import POLICIES
from sim.tokens import TokenIds, output_stream, prompt_stream
from sim.types import Arrival, Request

SCHEDULERS = {"vllm.v1.core.sched.scheduler.Scheduler": "vllm"}
VERSIONS = {"vllm": "0.33.0"}  # whose rules the policy follows

STEP = {
    "t_start": "start_ns",
    "scheduled": "scheduled",
    "cached": "cached",
    "preempted": "preempted",
    "free_blocks_sched": "free_blocks_sched",
    "t_end": "end_ns",
    "finished": "finished",
    "free_blocks_after": "free_blocks_after",
    "num_waiting": "num_waiting",
    "num_running": "num_running",
}
PER_REQUEST = {
    "first_token_time": "first_token_ns",
    "finish_time": "finish_ns",
    "num_preemptions": "num_preemptions",
    "cached_tokens": "cached_tokens",
    "cached_tokens_all": "cached_tokens_all",
    "admissions": "admissions",
}
TOTALS = {
    "requests": "requests",
    "steps": "steps",
    "preemptions": "preemptions",
    "tokens": "tokens",
    "cached_tokens": "cached_tokens",
    "empty_steps": "empty_steps",
    "self_preempt": "self_preempt",
    "victim_mid_prefill": "victim_mid_prefill",
    "victim_already_scheduled": "victim_already_scheduled",
    "phantom_hits": "phantom_hits",
    "makespan": "makespan_ns",
}

SHAPE = {"scheduler", "block_size", "num_gpu_blocks", "usable_blocks", "max_model_len", "totals", "step_time"}
NOTES = {"name", "note", "vllm_version", "vllm_commit", "seed", "date", "null_block", "request_id", "prompt_format"}
NOTES |= {"loop", "fields"}
ONLY = {"spec_decode": False, "kv_cache_groups": 1, "attention": "full", "async_scheduling": False}
"""What an engine may have and the policies here have not, with the value that stands for its absence."""
STATED = {
    "vllm": """max_num_seqs max_num_batched_tokens policy enable_chunked_prefill enable_prefix_caching async_scheduling
        long_prefill_token_threshold long_prefill_token_threshold_adaptive scheduler_reserve_full_isl watermark"""
}
"""Knobs that a recording must state though the policy has a default: vLLM's own differ by device and by version."""


def recording(data: dict[str, Any], policy: str | None) -> Recording:
    """The recording of `data`. BadRecording for what is missing, unknown or not simulated."""
    form.check_row(data, "the recording", ("meta", "requests", "steps"), ("per_request",))
    meta = data["meta"]
    name = policy or _policy(meta["scheduler"])
    config = form.policy_config(name, _knobs(meta, name))
    blocks = form.count(meta, "usable_blocks", "meta")
    if meta.get("num_gpu_blocks", blocks + 1) != blocks + 1:
        all_blocks = meta["num_gpu_blocks"]
        raise BadRecording(f"meta.usable_blocks {blocks} is not num_gpu_blocks {all_blocks} less the null block.")
    arrivals = form.in_order(_arrivals(data["requests"], with_tokens=bool(getattr(config, "prefix_cache", ""))))
    steps = [form.facts({"cached": []} | row, f"steps[{i}]", STEP) for i, row in enumerate(data["steps"])]
    requests: dict[int, Facts] = {}
    if "per_request" in data:
        rows = data["per_request"].items()
        requests = {int(i): form.facts(row, f"per_request.{i}", PER_REQUEST) for i, row in rows}
        form.check_same_ids(list(requests), arrivals, "per_request")
    return Recording(
        policy=name,
        config=config,
        num_blocks=blocks,
        block_size=form.count(meta, "block_size", "meta"),
        max_model_len=form.count(meta, "max_model_len", "meta"),
        arrivals=arrivals,
        durations_ns=form.durations_ns(steps, "t_start", "t_end"),
        steps=steps,
        requests=requests,
        totals=_totals(meta.get("totals", {})),
        law=_law(meta.get("step_time", "")),
        note=_note(name, meta.get("vllm_version")),
    )


def _policy(scheduler: str) -> str:
    """The policy that stands for the recorded scheduler."""
    name = SCHEDULERS.get(scheduler, scheduler)
    if name not in POLICIES:
        raise BadRecording(f"meta.scheduler {scheduler} is none that a policy here stands for. Name one with --policy.")
    return name


def _knobs(meta: dict[str, Any], policy: str) -> dict[str, Any]:
    """The policy's knobs in `meta`. BadRecording if one is not stated, or if `meta` has one that the policy has not."""
    known = {f.name for f in fields(POLICIES[policy][0])}
    for name, value in meta.items():
        if name in ONLY and value != ONLY[name]:
            raise BadRecording(f"meta.{name} {value!r} is not simulated, only {ONLY[name]!r}. Record without it.")
        if name in known | ONLY.keys() | SHAPE | NOTES or value in (None, False, 0, ""):
            continue
        raise BadRecording(f"meta.{name} {value!r} is not a knob of {policy}. If it is a note, put it into meta.note.")
    for name in STATED.get(policy, "").split():
        if name not in meta:
            raise BadRecording(f"meta has no {name}, a knob of {policy}. Write down what the engine ran with.")
    return {name: meta[name] for name in known & meta.keys()}


def _note(policy: str, version: str | None) -> str:
    """What to say where the recorded version is not the one that the policy follows; "" where it is."""
    followed = VERSIONS.get(policy)
    if version is None or followed is None or version == followed:
        return ""
    return f"recorded with vLLM {version}, the policy follows {followed}"


def _arrivals(rows: list[Any], *, with_tokens: bool) -> list[Arrival]:
    """The requests, with the identity of their tokens if it matters."""
    streams: dict[str, int] = {}
    arrivals = []
    for i, row in enumerate(rows):
        where = f"requests[{i}]"
        form.check_row(row, where, ("id", "arrival", "prompt_len", "output_len"), ("priority", "prompt"))
        tokens = None
        if "prompt" in row:
            tokens = TokenIds.of([(_stream(name, streams), start, length) for name, start, length in row["prompt"]])
            if tokens.num_tokens != row["prompt_len"]:
                lengths = f"{tokens.num_tokens} tokens, prompt_len says {row['prompt_len']}"
                raise BadRecording(f"{where}.prompt has {lengths}. Record it again.")
        elif with_tokens:
            raise BadRecording(f"{where} has no prompt, and prefix caching is on. Record the prompts' segments.")
        output_tokens = form.count(row, "output_len", where)
        request = Request(
            form.count(row, "id", where),
            form.ns(row["arrival"], f"{where}.arrival"),
            form.count(row, "prompt_len", where),
            output_tokens,
            priority=form.count({"priority": 0} | row, "priority", where),
            tokens=tokens if with_tokens else None,
        )
        arrivals.append(Arrival(request, output_tokens))
    return arrivals


def _stream(name: str, numbers: dict[str, int]) -> int:
    """The number of a recorded stream: `o<i>` is what request i generates, all else is prompt text."""
    if re.fullmatch(r"o\d+", name):
        return output_stream(int(name[1:]))
    return prompt_stream(numbers.setdefault(name, len(numbers)))


def _totals(totals: dict[str, Any]) -> Facts:
    """Those that are recorded; one that our replay cannot count is compared with nothing."""
    return form.facts(totals, "meta.totals", {name: fact for name, fact in TOTALS.items() if name in totals})


def _law(text: str) -> StepLaw | None:
    """The law of the steps' times, if `step_time` states one in the known form."""
    match = re.search(r"t_end = t_start \+ ([0-9.]+) \+ ([0-9.]+)\*sum\(num_tokens\)", text)
    if match is None:
        return None
    base_ns, per_token_ns = (Decimal(number) * 10**9 for number in match.groups())
    whole_us = base_ns % 1000 == 0 and per_token_ns % 1000 == 0  # else the recorded times are rounded
    return StepLaw(int(base_ns), int(per_token_ns)) if whole_us else None
