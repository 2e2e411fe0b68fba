"""Reads schedules recorded from Vidur's replica schedulers: orca, faster_transformer, vllm (its first form), sarathi.

    scheduler    `name` and knobs by Vidur's names; `num_blocks`, `block_size`, `max_tokens_per_request`
    cost_model   a constant `iteration_time_s`
    requests     `id`, `arrived_at`, `num_prefill_tokens`, `num_decode_tokens`
    iterations   `iter`, `start`, `end`, `batch` [[id, tokens]...], `num_processed_before` and `phase` of each in it,
                 `completed`, `allocated_blocks_after_schedule`
    preemptions  `time`, `request_id`, `num_processed_tokens_lost`, in order
    results      `id`, `arrived_at`, `first_scheduled_at`, `prefill_completed_at`, `completed_at`, `num_restarts`

Vidur counts a generated token as processed at once, so a request that decodes has all its known tokens processed.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from batchsim.base.errors import shown
from batchsim.check.conform import recording as form
from batchsim.check.conform.fields import (
    ANY,
    BLOCK_SIZE,
    BLOCKS,
    COUNT,
    FLAG,
    IDS,
    LIST,
    MODEL_LEN,
    OBJECT,
    PAIRS,
    SECONDS,
    SHARE,
    TEXT,
    TOKENS,
    BadRecording,
    Kind,
    ListOf,
    check_row,
)
from batchsim.check.conform.recording import Facts, Names, Recording
from batchsim.check.conform.times import StepLaw
from batchsim.kernel.types import Arrival, Request

POLICY_OF = {"vllm": "vllm_v0"}  # Vidur's other schedulers are policies of the same name
TOLERANCE_NS = 10_000  # recorded times are sums of floats, rounded to 1 us

ITERATION: Names = {
    "iter": ("index", COUNT),
    "start": ("start_ns", SECONDS),
    "batch": ("scheduled", PAIRS),
    "num_processed_before": ("processed_before", IDS),
    "phase": ("phase", ListOf(Kind("prefill or decode", lambda value: value in ("prefill", "decode")))),
    "allocated_blocks_after_schedule": ("allocated_blocks", COUNT),
    "end": ("end_ns", SECONDS),
    "completed": ("finished", IDS),
}
RESULT: Names = {
    "id": ("id", COUNT),
    "arrived_at": ("arrival_ns", SECONDS),
    "first_scheduled_at": ("scheduled_ns", SECONDS),
    "prefill_completed_at": ("first_token_ns", SECONDS),
    "completed_at": ("finish_ns", SECONDS),
    "num_restarts": ("num_preemptions", COUNT),
}
PREEMPTION: Names = {
    "time": ("time_ns", SECONDS),
    "request_id": ("id", COUNT),
    "num_processed_tokens_lost": ("lost", COUNT),
}
PARTS = {
    "source": ANY,
    "scheduler": OBJECT,
    "cost_model": OBJECT,
    "requests": LIST,
    "iterations": LIST,
    "preemptions": LIST,
    "results": LIST,
    "error": TEXT.or_null,
    "all_completed": FLAG,
}
SCHEDULER = {
    "name": TEXT,
    "batch_size_cap": COUNT,
    "block_size": BLOCK_SIZE,
    "num_blocks": BLOCKS,
    "max_tokens_per_request": MODEL_LEN,
    "watermark_blocks_fraction": SHARE,
}
DERIVED = {
    "effective_max_batch_size": COUNT,
    "watermark_blocks": COUNT.or_null,
    "max_blocks_per_sequence": COUNT,
    "num_pipeline_stages": COUNT,
}
REQUEST = {"id": COUNT, "arrived_at": SECONDS, "num_prefill_tokens": TOKENS, "num_decode_tokens": TOKENS}
OWN_KNOBS = {
    "sarathi": {"chunk_size"},
    "vllm": {"max_tokens_in_batch"},
    "orca": set[str](),
    "faster_transformer": set[str](),
}
EVERY = {knob for knobs in OWN_KNOBS.values() for knob in knobs}
SLOTTED = ("orca", "faster_transformer")


def recording(data: dict[str, Any], policy: str | None) -> Recording:
    """`data`, a file's JSON, as a Recording. BadRecording for what is missing, unknown or not simulated."""
    check_row(data, "the recording", PARTS)
    if data["error"] is not None:
        raise BadRecording(f"the recorded run failed: {shown(data['error'])}. Record one that ends.")
    meta = data["scheduler"]
    check_row(meta, "scheduler", SCHEDULER, DERIVED | dict.fromkeys(EVERY, COUNT.or_null))
    step_ns = _step_ns(data["cost_model"])
    name: str = meta["name"]
    if name not in OWN_KNOBS:
        raise BadRecording(
            f"scheduler.name {shown(name)} is none that a policy here stands for. Known: {', '.join(OWN_KNOBS)}."
        )
    arrivals = form.in_order(
        [_arrival(row, f"requests[{i}]") for i, row in enumerate(data["requests"])], meta["block_size"]
    )
    steps = [form.facts(row, f"iterations[{i}]", ITERATION) for i, row in enumerate(data["iterations"])]
    form.durations_ns(steps, "start", "end", "iterations")  # only checked: every step takes the stated time
    _add_preemptions(steps, data["preemptions"])
    ours = policy if policy is not None else POLICY_OF.get(name, name)
    return Recording(
        policy=ours,
        config=form.policy_config(ours, _knobs(meta, name), "scheduler"),
        num_blocks=meta["num_blocks"],
        block_size=meta["block_size"],
        max_model_len=meta["max_tokens_per_request"],
        arrivals=arrivals,
        durations_ns=[step_ns] * len(steps),
        steps=steps,
        requests=_results(data["results"], arrivals),
        totals={"all_completed": ("all_finished", data["all_completed"])},
        law=StepLaw(step_ns),
        tolerance_ns=TOLERANCE_NS,
        note=form.version_note(ours, "Vidur", _commit(data["source"])),
        steps_name="iterations",
    )


def _step_ns(cost: dict[str, Any]) -> int:
    """The constant duration of an iteration, ns. BadRecording for any other cost model."""
    if cost.get("type") != "constant":
        raise BadRecording(f"cost_model {shown(cost)} is not a constant iteration time. Record with one.")
    check_row(cost, "cost_model", {"type": TEXT, "iteration_time_s": SECONDS})
    step_ns = form.to_ns(cost["iteration_time_s"])
    if step_ns < 1:
        raise BadRecording(f"cost_model.iteration_time_s is {cost['iteration_time_s']}, no time. Record with one.")
    return step_ns


def _commit(source: Any) -> str | None:
    """The commit of Vidur that was recorded; None if it is not stated."""
    commit = source.get("commit") if isinstance(source, dict) else None
    return commit if isinstance(commit, str) else None


def _knobs(meta: dict[str, Any], name: str) -> dict[str, Any]:
    """The recorded knobs by the policy's names. BadRecording where they contradict each other or are not simulated."""
    own = {knob: meta[knob] for knob in EVERY if meta.get(knob) is not None}
    if own.keys() != OWN_KNOBS[name]:
        raise BadRecording(f"scheduler has {sorted(own)}, the knobs of {name} are {sorted(OWN_KNOBS[name])}.")
    watermark = None if name in SLOTTED else int(meta["watermark_blocks_fraction"] * meta["num_blocks"])
    slot_blocks = meta["max_tokens_per_request"] // meta["block_size"]
    expected = {"watermark_blocks": watermark, "max_blocks_per_sequence": slot_blocks, "num_pipeline_stages": 1}
    if name not in SLOTTED:
        expected["effective_max_batch_size"] = meta["batch_size_cap"]
    for knob, value in expected.items():
        if knob in meta and meta[knob] != value:
            raise BadRecording(
                f"scheduler.{knob} is {meta[knob]!r} where the other knobs, or what is simulated, say {value!r}."
            )
    if name in SLOTTED:
        cap = meta.get("effective_max_batch_size", meta["batch_size_cap"])
        return own | {"batch_size_cap": cap, "max_tokens_per_request": slot_blocks * meta["block_size"]}
    return own | {knob: meta[knob] for knob in ("batch_size_cap", "watermark_blocks_fraction")}


def _arrival(row: Any, where: str) -> Arrival:
    check_row(row, where, REQUEST)
    prompt_tokens, output_tokens = row["num_prefill_tokens"], row["num_decode_tokens"]
    request = Request(row["id"], form.to_ns(row["arrived_at"]), prompt_tokens, output_tokens)
    return Arrival(request, output_tokens)


def _results(rows: list[Any], arrivals: list[Arrival]) -> dict[int, Facts]:
    """Recorded facts of each request, by id."""
    requests = [form.facts(row, f"results[{i}]", RESULT) for i, row in enumerate(rows)]
    ids = [row.pop("id")[1] for row in requests]
    form.check_same_ids(ids, arrivals, "results")
    return dict(zip(ids, requests, strict=True))


def _add_preemptions(steps: list[Facts], rows: list[Any]) -> None:
    """Adds the recorded preemptions to the step nearest in time: request, tokens lost, time."""
    for step in steps:
        step["preempted"] = ("preempted", [])
        step["num_processed_tokens_lost"] = ("lost_tokens", [])
        step["preemption time"] = ("preempted_at_ns", [])
    starts_ns = [step["start"][1] for step in steps]
    before_ns = 0
    for i, row in enumerate(rows):
        preemption = form.facts(row, f"preemptions[{i}]", PREEMPTION)
        time_ns = preemption["time"][1]
        if time_ns < before_ns:
            raise BadRecording(f"preemptions[{i}] is earlier than the one before it. Record them in order.")
        before_ns = time_ns
        after = bisect_left(starts_ns, time_ns)
        nearest = min(range(max(after - 1, 0), min(after + 1, len(steps))), key=lambda j: abs(starts_ns[j] - time_ns))
        step = steps[nearest]
        step["preempted"][1].append(preemption["request_id"][1])
        step["num_processed_tokens_lost"][1].append(preemption["num_processed_tokens_lost"][1])
        step["preemption time"][1].append(time_ns)
