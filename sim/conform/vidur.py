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

from typing import Any

from sim.conform import recording as form
from sim.conform.recording import BadRecording, Facts, Recording, StepLaw
from sim.types import Arrival, Request

POLICY_OF = {"vllm": "vllm_v0"}  # the others keep their names
TOLERANCE_NS = 10_000  # times are sums of floats, rounded to 1 us

ITERATION = {
    "iter": "index",
    "start": "start_ns",
    "batch": "scheduled",
    "num_processed_before": "processed_before",
    "phase": "phase",
    "allocated_blocks_after_schedule": "allocated_blocks",
    "end": "end_ns",
    "completed": "finished",
}
RESULT = {
    "arrived_at": "arrival_ns",
    "first_scheduled_at": "scheduled_ns",
    "prefill_completed_at": "first_token_ns",
    "completed_at": "finish_ns",
    "num_restarts": "num_preemptions",
}
OWN_KNOBS = {
    "sarathi": {"chunk_size"},
    "vllm": {"max_tokens_in_batch"},
    "orca": set[str](),
    "faster_transformer": set[str](),
}
SLOTTED = ("orca", "faster_transformer")


def recording(data: dict[str, Any], policy: str | None) -> Recording:
    """The recording of `data`. BadRecording for what is missing, unknown or not simulated."""
    parts = ("source", "scheduler", "cost_model", "requests", "iterations", "preemptions", "results", "error")
    form.check_row(data, "the recording", (*parts, "all_completed"))
    if data["error"] is not None:
        raise BadRecording(f"the recorded run failed: {data['error']}. Record one that ends.")
    meta, cost = data["scheduler"], data["cost_model"]
    if cost.get("type") != "constant":
        raise BadRecording(f"cost_model {cost!r} is not a constant iteration time. Record with one.")
    name: str = meta["name"]
    if name not in OWN_KNOBS:
        raise BadRecording(
            f"scheduler.name {name!r} is none that a policy here stands for. Known: {', '.join(OWN_KNOBS)}."
        )
    arrivals = form.in_order([_arrival(row, f"requests[{i}]") for i, row in enumerate(data["requests"])])
    steps = [form.facts(row, f"iterations[{i}]", ITERATION) for i, row in enumerate(data["iterations"])]
    lengths = form.durations_ns(steps, "start", "end")
    _add_preemptions(steps, data["preemptions"])
    form.check_same_ids([row["id"] for row in data["results"]], arrivals, "results")
    requests = {row["id"]: _result(row, i) for i, row in enumerate(data["results"])}
    ours = policy if policy is not None else POLICY_OF.get(name, name)
    return Recording(
        policy=ours,
        config=form.policy_config(ours, _knobs(meta, name)),
        num_blocks=form.count(meta, "num_blocks", "scheduler"),
        block_size=form.count(meta, "block_size", "scheduler"),
        max_model_len=form.count(meta, "max_tokens_per_request", "scheduler"),
        arrivals=arrivals,
        durations_ns=[form.ns(cost["iteration_time_s"], "cost_model.iteration_time_s")] * len(lengths),
        steps=steps,
        requests=requests,
        totals={"all_completed": ("all_finished", data["all_completed"])},
        law=StepLaw(form.ns(cost["iteration_time_s"], "cost_model.iteration_time_s")),
        tolerance_ns=TOLERANCE_NS,
        steps_name="iterations",
    )


def _knobs(meta: dict[str, Any], name: str) -> dict[str, Any]:
    """The policy's knobs. BadRecording where the recorded ones contradict each other or are not simulated."""
    shape = (
        "name",
        "batch_size_cap",
        "block_size",
        "num_blocks",
        "max_tokens_per_request",
        "watermark_blocks_fraction",
    )
    derived = ("effective_max_batch_size", "watermark_blocks", "max_blocks_per_sequence", "num_pipeline_stages")
    every = {knob for knobs in OWN_KNOBS.values() for knob in knobs}
    form.check_row(meta, "scheduler", shape, (*derived, *every))
    own = {knob: meta[knob] for knob in every if meta.get(knob) is not None}
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
    form.check_row(row, where, ("id", "arrived_at", "num_prefill_tokens", "num_decode_tokens"))
    prompt_tokens, output_tokens = (
        form.count(row, name, where) for name in ("num_prefill_tokens", "num_decode_tokens")
    )
    arrival_ns = form.ns(row["arrived_at"], f"{where}.arrived_at")
    return Arrival(Request(form.count(row, "id", where), arrival_ns, prompt_tokens, output_tokens), output_tokens)


def _result(row: Any, i: int) -> Facts:
    found = form.facts(row, f"results[{i}]", {"id": "id"} | RESULT)
    del found["id"]
    return found


def _add_preemptions(steps: list[Facts], rows: list[Any]) -> None:
    """Gives each step the preemptions made when it was scheduled: request, tokens lost, time."""
    names = {"time": "time_ns", "request_id": "id", "num_processed_tokens_lost": "lost"}
    for step in steps:
        step["preempted"] = ("preempted", [])
        step["num_processed_tokens_lost"] = ("lost_tokens", [])
        step["preemption time"] = ("preempted_at_ns", [])
    before_ns = 0
    for i, row in enumerate(rows):
        found = form.facts(row, f"preemptions[{i}]", names)
        time_ns = found["time"][1]
        if time_ns < before_ns:
            raise BadRecording(f"preemptions[{i}] is earlier than the one before it. Record them in order.")
        before_ns = time_ns
        step = min(steps, key=lambda step: abs(step["start"][1] - time_ns))
        step["preempted"][1].append(found["request_id"][1])
        step["num_processed_tokens_lost"][1].append(found["num_processed_tokens_lost"][1])
        step["preemption time"][1].append(time_ns)
