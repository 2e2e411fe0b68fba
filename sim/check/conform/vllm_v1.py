"""Reads recordings in batchsim's own form, which is made from vLLM's scheduler and open to any engine."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

from batchsim.base.errors import cut, shown
from batchsim.check.conform import kv_transfers, offload
from batchsim.check.conform import recording as form
from batchsim.check.conform.fields import (
    BLOCK_SIZE,
    BLOCKS,
    COUNT,
    FLAG,
    LIST,
    MODEL_LEN,
    OBJECT,
    SECONDS,
    SHARE,
    TEXT,
    TOKENS,
    BadRecording,
    check_row,
    columns,
    whole,
)
from batchsim.check.conform.kv_transfers import OfConnector, with_connector
from batchsim.check.conform.recorded_requests import (
    ITEMS_META,
    arrivals,
    items_context,
    stream_number,
)
from batchsim.check.conform.recording import ABSENT, ARRIVAL, EXACT, FREE, Facts, Names, Recording, has_adapters
from batchsim.check.conform.step_forms import (
    FORMS,
    StepForm,
    form_of,
    in_lockstep,
    of_pooling,
    with_adapters,
    with_drafts,
    with_items,
)
from batchsim.check.conform.times import US, StepLaw, read_law
from batchsim.kernel.engine_loop import EngineLoop
from batchsim.kernel.kv_transfer import NewLink
from batchsim.kernel.policy_config import Traits
from batchsim.kernel.types import Arrival
from batchsim.policies.evidence import FOLLOWED
from batchsim.policies.registry import POLICIES
from batchsim.policies.systems.vllm.vllm_config import FOLLOWED_VERSION, OLDEST_VERSION, version_numbers

STAGES = whole(1, 1000)
SCHEDULERS = {
    "vllm.v1.core.sched.scheduler.Scheduler": ("vllm", False),
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler": ("vllm", True),
}
"""The policy that follows a class of vLLM, and whether the class is that of async_scheduling."""

PARTS = {"meta": OBJECT, "requests": LIST, "steps": LIST}
SHAPE = {"scheduler": TEXT, "block_size": BLOCK_SIZE, "usable_blocks": BLOCKS, "max_model_len": MODEL_LEN}
MAYBE = {
    "num_gpu_blocks": COUNT,
    "totals": OBJECT,
    "step_time": TEXT,
    "engine_version": TEXT,
    "vllm_version": TEXT,
    "engine_step": TEXT,
    "spec_decode": FLAG,
    "batch_queue_size": STAGES,
    "pipeline_parallel_size": STAGES,
    "pooling": FLAG,
    "host_empty": columns("[to schedule, to process], in seconds", SECONDS, SECONDS),
}
NOTES = {"name", "note", "vllm_commit", "seed", "date", "null_block", "request_id", "prompt_format", "loop", "fields"}
SPEC_META = {
    "spec_method": TEXT,
    "num_spec_tokens": TOKENS,
    "num_lookahead_tokens": COUNT,
    "draft_slots": COUNT,
    "num_prefill_lookahead": COUNT,
    "num_hash_lookahead_tokens": COUNT,
    "accept_rate": SHARE,
}
OF_LOOPS = {name for of_loop in FORMS.values() for name in of_loop.meta}
OFF: dict[str, dict[str, Any]] = {
    "vllm": {"disable_chunked_mm_input": False, "runner": "generate"},
    "tensorrt_llm": {"backend": "tensorrt"},
    "sglang": {"scheduler_recv_interval": 1},
}
"""By policy, the knobs that a recording may leave out: of vLLM what is off without images and in models that
generate; of others those of the engine's main loop, for what is recorded has no such loop: TensorRT-LLM's batch manager
is its C++ runtime's, which waits for each step, and SGLang's scheduler without its receiver is given what has arrived
at every call."""
OF_ONE_VERSION = ("spec_decode", "kv_role", "tier", "max_loras", "encoder_budget", "pooling", "pipeline_parallel_size")
"""What in `meta` says that the engine has a part which is simulated by the rules of the latest version alone."""
STEP_CALLS = {"EngineCore.step": 1, "EngineCore.step_with_batch_queue": 2}
"""vLLM's two main loops, each with the fewest batches that it keeps in flight."""


def recording(
    data: dict[str, Any],
    policy: str | None,
    of_connector: OfConnector = with_connector,
    *,
    lockstep: bool = False,
) -> Recording:
    """`data`, a file's JSON, as a Recording. BadRecording for what is missing, unknown or not simulated.

    `of_connector`: the form of an engine that passes KV to others or from them. `lockstep`: of one of several ranks
    that step together.
    """
    check_row(data, "the recording", PARTS, {"per_request": OBJECT})
    meta = data["meta"]
    check_row({name: meta[name] for name in (SHAPE | MAYBE) if name in meta}, "meta", SHAPE, MAYBE)
    name = policy or _policy(meta)
    config = _config(meta, name)
    has_connector, has_tier = "kv_role" in meta, "tier" in meta
    loop = _loop(meta, name, config.traits)
    items = items_context(meta, data["requests"])
    of_connector = offload.with_offload if has_tier else of_connector
    fields_of = _form(data, config, loop, of_connector, lockstep=lockstep, has_items=items is not None)
    if loop.kind == "sync" and fields_of.meta:
        loop = replace(loop, kind=loop.piped)  # the one in which the host takes its time
    if "idle_sleep" in fields_of.meta and loop.kind != "sync":
        loop = replace(loop, nap_ns=form.to_ns(meta["idle_sleep"]))
    streams: dict[str, int] = {}
    entering = arrivals(
        data["requests"],
        streams,
        with_tokens=has_tier or bool(config.traits.prefix_cache),
        with_kv=has_connector,
        with_adapters=has_adapters(config),
        with_items=items,
        pooling=bool(meta.get("pooling")),
    )
    entering = form.in_order(entering, meta["block_size"])
    rows = map(offload.with_launch, data["steps"]) if has_tier else data["steps"]
    steps = [_step(row, f"steps[{i}]", fields_of) for i, row in enumerate(rows)]
    law = _law(meta, fields_of, loop)
    flushes = loop.kind == "sync" and "batch_queue_size" in meta
    if law is None and (flushes or loop.stages > 1):
        raise BadRecording("meta has no step_time in whole microseconds, which nothing else tells here. Write it down.")
    return Recording(
        policy=name,
        config=config,
        num_blocks=meta["usable_blocks"],
        block_size=meta["block_size"],
        max_model_len=meta["max_model_len"],
        arrivals=entering,
        durations_ns=_durations_ns(steps, fields_of, law),
        steps=steps,
        requests=_requests(data.get("per_request"), entering, fields_of),
        totals=_totals(meta.get("totals", {}), fields_of),
        law=law,
        loop=loop,
        flushes=flushes,
        host_ns=_host_ns(meta, fields_of),
        each_host_ns=_each_host_ns(meta, fields_of),
        order=_order(meta, name),
        note=_version_note(meta, name, config),
        drafts=None if _drafter(config) is None else [{"spec": []} | row for row in data["steps"]],
        read_when=fields_of.read_when,
        items=items,
        item_names={stream_number(name, streams): name for name in streams} if items is not None else {},
        new_link=_new_link(data["requests"]) if has_connector else None,
        new_offload=offload.new_offload(meta) if has_tier else None,
    )


def _config(meta: dict[str, Any], policy: str) -> Any:
    """The config of the policy with the recorded knobs, and with what passes or offloads KV."""
    config = form.policy_config(policy, _knobs(meta, policy), "meta")
    if "tier" in meta:
        config = offload.offload_config(config, meta)
    elif "kv_role" in meta:
        config = kv_transfers.connector_config(config, meta, "meta")
    _check_drafter(meta, config)
    blocks = meta["usable_blocks"]
    if meta.get("num_gpu_blocks", blocks + 1) != blocks + 1:
        all_blocks = meta["num_gpu_blocks"]
        raise BadRecording(f"meta.usable_blocks {blocks} is not num_gpu_blocks {all_blocks} less the null block.")
    return config


def _drafter(config: Any) -> Any:
    """The speculative config of an engine that verifies drafts, else None."""
    return getattr(config, "speculative_config", None)


def _form(
    data: dict[str, Any],
    config: Any,
    loop: EngineLoop,
    of_connector: OfConnector,
    *,
    lockstep: bool,
    has_items: bool,
) -> StepForm:
    """The form of what is recorded of an engine with this `config` and `loop`. BadRecording where `meta` lacks what
    that needs."""
    meta = data["meta"]
    if lockstep:
        fields_of = in_lockstep(data["steps"][0])
    elif "kv_role" in meta or "tier" in meta:
        fields_of = of_connector(loop.depth)
    else:
        fields_of = form_of(loop.kind, data["steps"])
    _check_of_loop(meta, fields_of)
    if _drafter(config) is not None:
        fields_of = with_drafts(fields_of)
    if has_adapters(config):
        fields_of = with_adapters(fields_of)
    if has_items:
        fields_of = with_items(fields_of)
    return of_pooling(fields_of) if meta.get("pooling") else fields_of


def _new_link(rows: list[Any]) -> NewLink:
    """What makes the link of an engine whose transfers take the times that the recorded requests, which were checked,
    state of them."""
    times = {row["id"]: kv_transfers.transfer_times(row, f"requests[{i}]") for i, row in enumerate(rows)}
    return lambda: kv_transfers.RecordedLink(times)


def _loop(meta: dict[str, Any], policy: str, traits: Traits) -> EngineLoop:
    """The recorded engine's loop: that of the policy, over as many stages as were recorded."""
    loop, stages, depth = traits.loop, meta.get("pipeline_parallel_size", 1), meta.get("batch_queue_size")
    if stages > 1:
        if not traits.pipelines:
            what = f"meta.pipeline_parallel_size {stages} is not simulated for {policy}, only 1"
            raise BadRecording(f"{what}. Record without it.")
        loop = loop.over(stages)
    if depth is not None and depth != loop.depth:
        what = f"meta.batch_queue_size is {depth}, {policy} with the other knobs has {loop.depth}"
        raise BadRecording(f"{what}. Write down what the engine ran with.")
    call: str | None = meta.get("engine_step")
    if call is not None and STEP_CALLS.get(call) != min(loop.depth, 2):
        what = f"meta.engine_step is {shown(call)}, not what an engine with {loop.depth} batches in flight calls"
        raise BadRecording(f"{what}. Write down what the engine ran with.")
    return replace(loop, nap_ns=0)


def _check_of_loop(meta: dict[str, Any], fields_of: StepForm) -> None:
    """BadRecording where what the engine's loop needs of `meta` is not stated, or a field of another loop is."""
    check_row({name: meta[name] for name in fields_of.meta if name in meta}, "meta", fields_of.meta)
    for name in sorted((OF_LOOPS - fields_of.meta.keys()) & meta.keys()):
        if meta[name]:
            what = f"meta.{name} is {shown(meta[name])}, which says nothing of an engine that runs like this one"
            raise BadRecording(f"{what}. Leave it out, or correct the knobs.")


def _host_ns(meta: dict[str, Any], fields_of: StepForm) -> tuple[int, int]:
    """What the host takes to launch a step and to process its results, ns; 0 where it does so between steps. Of calls
    with nothing to run where steps have times of their own."""
    if "host_schedule" in fields_of.meta:
        if isinstance(meta["host_schedule"], list) or isinstance(meta["host_update"], list):
            if "host_empty" not in meta:
                raise BadRecording("meta has no host_empty, of calls with nothing to run. Write it down.")
            return form.to_ns(meta["host_empty"][0]), form.to_ns(meta["host_empty"][1])
        return form.to_ns(meta["host_schedule"]), form.to_ns(meta["host_update"])
    return (meta["schedule_us"] * US, meta["process_us"] * US) if fields_of.meta else (0, 0)


def _each_host_ns(meta: dict[str, Any], fields_of: StepForm) -> list[tuple[int, int]] | None:
    """What the host takes to launch each step that ran and to process its results, ns; None where that is one pair."""
    if "host_schedule" not in fields_of.meta:
        return None
    launch, update = meta["host_schedule"], meta["host_update"]
    if not (isinstance(launch, list) or isinstance(update, list)):
        return None
    if not (isinstance(launch, list) and isinstance(update, list) and len(launch) == len(update)):
        raise BadRecording("meta.host_schedule and meta.host_update are not two lists of one length. Record it again.")
    return [(form.to_ns(a), form.to_ns(b)) for a, b in zip(launch, update, strict=True)]


def _policy(meta: dict[str, Any]) -> str:
    """The name of the policy that follows the recorded scheduler, which is a class path of vLLM or a policy's name."""
    scheduler: str = meta["scheduler"]
    name, is_async = SCHEDULERS.get(scheduler, (scheduler, None))
    if name not in POLICIES:
        raise BadRecording(
            f"meta.scheduler {shown(scheduler)} is none that a policy here stands for. Name one with --policy."
        )
    if is_async is not None and meta.get("async_scheduling", is_async) is not is_async:
        what = f"meta.scheduler {shown(scheduler)} is not that of async_scheduling {shown(meta['async_scheduling'])}"
        raise BadRecording(f"{what}. Write down what the engine ran with.")
    return name


def _knobs(meta: dict[str, Any], policy: str) -> dict[str, Any]:
    """The policy's knobs stated in `meta`.

    BadRecording for a key of `meta` that is neither a knob, nor switched off, nor a note.
    """
    known = {f.name for f in fields(POLICIES[policy][0])}
    others = ABSENT.keys() | SHAPE.keys() | MAYBE.keys() | OF_LOOPS | SPEC_META.keys() | NOTES | {"order"}
    others |= ITEMS_META.keys() & meta.keys() if "max_num_encoder_input_tokens" in known else set()
    if "kv_role" in meta:
        others |= kv_transfers.META.keys() | kv_transfers.META_MAYBE.keys() | kv_transfers.NOTES
    if "tier" in meta:
        others |= offload.META.keys()
    for name, value in meta.items():
        if name in ABSENT and (value != ABSENT[name] or isinstance(value, bool) != isinstance(ABSENT[name], bool)):
            raise BadRecording(
                f"meta.{name} {shown(value)} is not simulated, only {ABSENT[name]!r}. Record without it."
            )
        if name in known | others:
            continue
        if value is None or value is False or value == "" or (value == 0 and isinstance(value, int | float)):
            continue
        what = f"meta.{cut(name)} {shown(value)} is not a knob of {policy}"
        raise BadRecording(f"{what}. If it is a note, put it into meta.note.")
    knobs = OFF.get(policy, {}) | {name: meta[name] for name in known & meta.keys()}
    if meta.get("pooling"):
        if "runner" not in known:
            raise BadRecording(f"meta.pooling {shown(meta['pooling'])} is not simulated for {policy}.")
        knobs["runner"] = "pooling"
    if "max_num_encoder_input_tokens" in known:
        names = {"encoder_budget": "max_num_encoder_input_tokens", "encoder_cache": "encoder_cache_size"}
        knobs |= {knob: meta[name] for name, knob in names.items() if name in meta}
    if meta.get("spec_decode"):
        if "speculative_config" not in known:
            raise BadRecording(f"meta.spec_decode {shown(meta['spec_decode'])} is not simulated for {policy}.")
        check_row({name: meta[name] for name in SPEC_META if name in meta}, "meta", SPEC_META)
        law = {"method": meta["spec_method"], "num_speculative_tokens": meta["num_spec_tokens"]}
        knobs["speculative_config"] = law | {"acceptance": meta["accept_rate"]}
    if "version" in known - meta.keys() and not any(meta.get(name) for name in OF_ONE_VERSION):
        version = _version(meta)
        numbers = None if version is None else version_numbers(version)
        if numbers is not None and OLDEST_VERSION <= numbers < FOLLOWED_VERSION:
            knobs["version"] = f"{numbers[0]}.{numbers[1]}"
    return knobs


def _check_drafter(meta: dict[str, Any], config: Any) -> None:
    """BadRecording where the numbers of the recorded drafter are not those of its method."""
    drafter = _drafter(config)
    if drafter is None:
        return
    hashes = drafter.hash_lookahead if config.traits.prefix_cache else 0
    ours = {
        "num_lookahead_tokens": drafter.lookahead,
        "draft_slots": drafter.slots,
        "num_hash_lookahead_tokens": hashes,
    }
    ours["num_prefill_lookahead"] = drafter.hash_lookahead
    for name, value in ours.items():
        if meta[name] != value:
            what = f"meta.{name} is {meta[name]}, {drafter.method} here has {value}"
            raise BadRecording(f"{what}. Record with the engine's own.")


def _order(meta: dict[str, Any], policy: str) -> str:
    """The order of the rows within a batch."""
    if "order" in {f.name for f in fields(POLICIES[policy][0])} or "order" not in meta:
        return ARRIVAL if str(meta.get("name", "")).endswith("_by_arrival") else EXACT
    if meta["order"] not in (EXACT, ARRIVAL, FREE):
        what = f"meta.order is {shown(meta['order'])}, not {EXACT}, {ARRIVAL} or {FREE}"
        raise BadRecording(f"{what}. Record it again.")
    return meta["order"]


def _version_note(meta: dict[str, Any], policy: str, config: Any) -> str:
    """A remark, where the version of the recorded engine is not the one that `policy` follows; else ""."""
    if getattr(config, "version", None) is not None:
        return f"recorded with {cut(_version(meta) or 'no version')}, compared by the rules of {config.version}"
    scheduler: str = meta["scheduler"]
    recorded = FOLLOWED.get(SCHEDULERS.get(scheduler, (scheduler,))[0])
    return form.version_note(policy, recorded.engine, _version(meta)) if recorded is not None else ""


def _version(meta: dict[str, Any]) -> str | None:
    """The version of the recorded engine; None if it is not stated."""
    versions = [meta[name] for name in ("engine_version", "vllm_version") if name in meta]
    if len(set(versions)) > 1:
        raise BadRecording(
            f"meta has engine_version {shown(versions[0])}, vllm_version {shown(versions[1])}. Keep one."
        )
    return versions[0] if versions else None


def _step(row: Any, where: str, fields_of: StepForm) -> Facts:
    OBJECT.check(row, where)
    return form.facts(_with_if_any(row, fields_of, fields_of.step), where, fields_of.step)


def _durations_ns(steps: list[Facts], fields_of: StepForm, law: StepLaw | None) -> list[int]:
    start, first = fields_of.start, fields_of.first
    if first == start:
        return form.durations_ns(steps, start, "t_end", "steps")
    return form.durations_ns(steps, start, "t_end", "steps", first=first, stated=law is not None)


def _with_if_any(row: dict[str, Any], fields_of: StepForm, names: Names) -> dict[str, Any]:
    return {name: value for name, value in fields_of.if_any.items() if name in names} | row


def _requests(rows: dict[str, Any] | None, arrivals: list[Arrival], fields_of: StepForm) -> dict[int, Facts]:
    """Recorded facts of each request, by id: its output, and those of `per_request`, if they were recorded."""
    requests: dict[int, Facts] = {}
    for i, row in (rows or {}).items():
        if not re.fullmatch(r"0|[1-9][0-9]{0,15}", i):
            raise BadRecording(f"per_request has {shown(i)}, which is no request's id. Record it again.")
        OBJECT.check(row, where := f"per_request.{i}")
        requests[int(i)] = form.facts(_with_if_any(row, fields_of, fields_of.request), where, fields_of.request)
    if rows is not None:
        form.check_same_ids(list(requests), arrivals, "per_request")
    for arrival in arrivals:
        output: Facts = {"output_len": ("output_tokens", arrival.output_tokens)}
        requests[arrival.request.id] = requests.get(arrival.request.id, {}) | output
    return requests


def _totals(totals: dict[str, Any], fields_of: StepForm) -> Facts:
    """The recorded totals as facts; a total that the replay cannot count is compared with nothing."""
    return form.facts(totals, "meta.totals", {name: fact for name, fact in fields_of.totals.items() if name in totals})


def _law(meta: dict[str, Any], fields_of: StepForm, loop: EngineLoop) -> StepLaw | None:
    """The stated formula of step time; None if none is."""
    named_us = {name: meta[name] for name in fields_of.meta if name.startswith("gpu_")}
    return read_law(meta["step_time"], fields_of.start, loop.stages, named_us) if "step_time" in meta else None
