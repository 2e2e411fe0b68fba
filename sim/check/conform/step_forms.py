"""What a recording holds of each step, by how the recorded engine's host and GPU waited for each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from batchsim.check.conform.fields import (
    COUNT,
    ENCODE,
    FLAG,
    HOST_SECONDS,
    IDS,
    NAMES,
    PAIRS,
    SECONDS,
    SPEC,
    Fields,
    Kind,
    ListOf,
    whole,
)
from batchsim.check.conform.recording import Names


def as_here(kind: Kind | ListOf, *names: str) -> dict[str, tuple[str, Kind | ListOf]]:
    """Facts of a kind that have the same names in recording and replay."""
    return {name: (name, kind) for name in names}


_CALLED: Names = {"t_start": ("called_ns", SECONDS)}
_SCHEDULED: Names = {
    **as_here(PAIRS, "scheduled", "cached"),
    **as_here(IDS, "preempted"),
    **as_here(COUNT, "free_blocks_sched"),
}
_RAN: Names = {
    "t_scheduled": ("scheduled_ns", SECONDS),
    "t_gpu_start": ("start_ns", SECONDS),
    "t_end": ("end_ns", SECONDS),
    "t_processed": ("processed_ns", SECONDS),
}
_PROCESSED: Names = {
    "finished": ("finished", IDS),
    "free_blocks_after": ("free_blocks_processed", COUNT),
    **as_here(COUNT, "num_waiting", "num_running"),
}
_REQUEST: Names = {
    "first_token_time": ("first_token_ns", SECONDS),
    "finish_time": ("finish_ns", SECONDS),
    **as_here(COUNT, "num_preemptions", "cached_tokens", "cached_tokens_all", "admissions"),
}
_TOTALS: Names = {
    **as_here(COUNT, "requests", "steps", "preemptions", "tokens", "cached_tokens"),
    "makespan": ("makespan_ns", SECONDS),
}
_VLLM_TOTALS = as_here(
    COUNT,
    *("empty_steps", "self_preempt", "victim_mid_prefill", "victim_already_scheduled", "victim_in_flight"),
    *("wasted_tokens", "stale_outputs", "sleeps", "phantom_hits"),
)


@dataclass(frozen=True)
class StepForm:
    """The fields of a recording under one kind of engine loop.

    The GPU works on a step from its field `start` to `t_end`; steps are in the order of `first`. `if_any` has fields of
    steps and requests that may be left out, with what that says; `meta` the keys that `meta` must have besides those of
    any recording. `read_when` says at which moment a fact that changes is read.
    """

    step: Names
    totals: Names
    start: str
    first: str
    request: Names = field(default_factory=lambda: _REQUEST)
    if_any: Mapping[str, Any] = field(default_factory=lambda: {"cached": []})
    meta: Fields = field(default_factory=dict[str, Kind | ListOf])
    read_when: Mapping[str, str] = field(default_factory=dict[str, str])

    def plus(
        self,
        step: Names | None = None,
        totals: Names | None = None,
        request: Names | None = None,
        if_any: Mapping[str, Any] | None = None,
        *,
        without: Collection[str] = (),
    ) -> StepForm:
        """This form with more fields of steps, totals and requests, more that may be left out, and `without` some of
        its steps' own."""
        kept = {name: fact for name, fact in self.step.items() if name not in without}
        return replace(
            self,
            step={**kept, **(step or {})},
            totals={**self.totals, **(totals or {})},
            request={**self.request, **(request or {})},
            if_any={**self.if_any, **(if_any or {})},
        )


_OF_HOST: Fields = {"host_schedule": HOST_SECONDS, "host_update": HOST_SECONDS, "idle_sleep": SECONDS}
_WHEN_SCHEDULED = {"free_blocks_sched": "once the step is scheduled"}
_SYNC = StepForm(
    step={**_CALLED, **_SCHEDULED, "t_end": ("processed_ns", SECONDS), **_PROCESSED},
    totals={**_TOTALS, **_VLLM_TOTALS},
    start="t_start",
    first="t_start",
    read_when=_WHEN_SCHEDULED | {"free_blocks_after": "when the scheduler is next asked, after the step's end"},
)
_SYNC_TIMED = replace(
    _SYNC,
    step={**_CALLED, **_SCHEDULED, **_RAN, **_PROCESSED},
    start="t_gpu_start",
    meta=_OF_HOST,
)
_BATCH_QUEUE = StepForm(
    step={
        **_CALLED,
        **as_here(COUNT, "in_flight"),
        **_SCHEDULED,
        **as_here(COUNT, "num_waiting_sched", "num_running_sched"),
        **_RAN,
        "wasted": ("wasted", PAIRS),
        "stale": ("stale", IDS),
        **_PROCESSED,
    },
    request=_REQUEST | {"wasted_tokens": ("wasted_tokens", COUNT)},
    totals={**_TOTALS, **_VLLM_TOTALS},
    start="t_gpu_start",
    first="t_start",
    if_any={"cached": [], "wasted": [], "stale": [], "wasted_tokens": 0},
    meta=_OF_HOST,
    read_when=_WHEN_SCHEDULED | {"free_blocks_after": "once its results are processed"},
)
OF_QUEUE = ("in_flight", "num_waiting_sched", "num_running_sched")
"""Facts of a step under the batch queue that a recording may lack where the engine waits for each step."""
_OVERLAP = StepForm(
    step={
        "scheduled": ("scheduled", PAIRS),
        "cached": ("cached", PAIRS),
        "retracted": ("preempted", IDS),
        "free_blocks_sched": ("free_blocks_sched", COUNT),
        "num_waiting": ("num_waiting_sched", COUNT),
        "num_running": ("num_running_sched", COUNT),
        **_RAN,
        "ignored": ("ignored", IDS),
        "finished": ("finished", IDS),
        "free_blocks_processed": ("free_blocks_processed", COUNT),
        "free_blocks_after": ("free_blocks_asked", COUNT),
    },
    totals={**_TOTALS, "ignored": ("ignored", COUNT), "empty_calls": ("empty_calls", COUNT)},
    start="t_gpu_start",
    first="t_scheduled",
    if_any={"cached": [], "ignored": []},
    meta=dict.fromkeys(("schedule_us", "process_us", "gpu_fixed_us", "gpu_token_us"), whole(0, 10**9)),
    read_when=_WHEN_SCHEDULED
    | {
        "free_blocks_processed": "once its results are processed",
        "free_blocks_after": "when the scheduler is next asked, before it admits",
    },
)
_DRAFTS: Names = {**as_here(PAIRS, "blocks"), **as_here(SPEC, "spec"), **as_here(FLAG, "skip_drafts")}
_NO_DRAFTS = {"blocks": [], "spec": [], "skip_drafts": False}


def with_drafts(plain: StepForm) -> StepForm:
    """The form of engines that verify draft tokens, `plain` without; steps whose end is waited for give drafts back."""
    given = as_here(PAIRS, "drafts") if plain is _SYNC else {}
    more = plain.plus(
        totals=as_here(COUNT, "drafts_scheduled", "drafts_accepted"),
        if_any={**_NO_DRAFTS, **{name: list[Any]() for name in given}},
    )
    return replace(more, step={**_DRAFTS, **given, **plain.step})


def in_lockstep(row: Collection[str]) -> StepForm:
    """The form of one of several ranks that step together, whose host's times are recorded, by the names of the facts
    of a step `row`: queues of the moment of scheduling are compared where they were recorded."""
    of_rank = as_here(COUNT.or_null, "pass") | as_here(COUNT, "step_counter", "wave") | as_here(FLAG, "throttled")
    more = _BATCH_QUEUE.plus(
        request={"taken": ("taken_ns", SECONDS)},
        if_any={"pass": None, "throttled": False},
        without=[name for name in OF_QUEUE if name not in row],
    )
    return replace(more, step={**of_rank, **more.step})


def with_adapters(plain: StepForm) -> StepForm:
    """The form of engines that serve LoRA adapters, `plain` without."""
    return plain.plus({"loras": ("adapters", IDS)}, {"max_active": ("most_adapters", COUNT)}, if_any={"loras": []})


def with_items(plain: StepForm) -> StepForm:
    """The form of engines that encode images, audios or videos, `plain` without."""
    step: Names = {
        "encode": ("encode", ENCODE),
        "enc_freed": ("encoder_freed", NAMES),
        "enc_free": ("encoder_free_sched", COUNT),
        "enc_freeable": ("encoder_freeable_sched", COUNT),
        "enc_free_after": ("encoder_free_processed", COUNT),
        "enc_freeable_after": ("encoder_freeable_processed", COUNT),
    }
    return plain.plus(step, as_here(COUNT, "encoded", "evicted"), if_any={"encode": [], "enc_freed": []})


def of_pooling(plain: StepForm) -> StepForm:
    """The form of pooling models, whose requests get no token, `plain` with tokens."""
    return plain.plus(request={"first_token_time": ("first_token_ns", SECONDS.or_null)})


FORMS = {"sync": _SYNC, "batch_queue": _BATCH_QUEUE, "overlap": _OVERLAP}
"""By the kind of `batchsim.kernel.engine_loop.EngineLoop`."""


def form_of(kind: str, steps: Sequence[Any]) -> StepForm:
    """The form of `steps` under a loop of this kind: of a synchronous one, times of the device may be stated too."""
    if kind == "sync" and steps and isinstance(steps[0], dict) and "t_processed" in steps[0]:
        return _SYNC_TIMED
    return FORMS[kind]
