"""Replays a schedule recorded from a real engine and compares every step of ours with it.

A recording is JSON with `meta` (the engine's knobs), `requests` (with lengths) and `steps`; every step takes the time
that was recorded. Equal means: start, scheduled tokens in batch order, preemptions in order, finished in
order, free blocks after scheduling and after the step, queue lengths and end, for every step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.core import EngineCore, SimExecutor
from sim.errors import ScenarioError
from sim.kv import CountingKV
from sim.live import Traffic, VirtualClock
from sim.policies.systems.vllm import Vllm, VllmConfig
from sim.record import Recorder
from sim.types import Arrival, Batch, CostModel, Idle, PolicyContext, Request
from sim.units import NS_PER_S


@dataclass(frozen=True)
class Verdict:
    """How many steps were compared, and the first difference or "" if there is none."""

    path: Path
    num_steps: int
    difference: str

    def __str__(self) -> str:
        return f"{self.path.name}: {self.difference or f'equal, {self.num_steps} steps'}"


class _RecordedSteps:
    """Each step takes what the recording says; a step beyond its end takes 1 ns and is reported as too many."""

    def __init__(self, steps: list[dict[str, Any]]) -> None:
        self._durations_ns = iter([_ns(step["t_end"]) - _ns(step["t_start"]) for step in steps])

    def step_ns(self, batch: Batch) -> int:
        return next(self._durations_ns, 1)


class _Recorded:
    """The arrivals of a recording."""

    def __init__(self, requests: list[dict[str, Any]]) -> None:
        self._rows = sorted(requests, key=lambda row: (row["arrival"], row["id"]))

    def arrivals(self) -> Iterator[Arrival]:
        for row in self._rows:
            request = Request(
                row["id"], _ns(row["arrival"]), row["prompt_len"], row["output_len"], priority=row["priority"]
            )
            yield Arrival(request, row["output_len"])

    def responded(self, request: Request, now_ns: int) -> Arrival | None:
        return None


def conform(path: Path, policy: str) -> Verdict:
    """Compares the recording at `path` with our `policy`. ScenarioError if it is not a recording of that system."""
    if policy != "vllm":
        raise ScenarioError(f"conform: no recordings of {policy} can be read. Known is vllm.")
    try:
        recording = json.loads(path.read_text(encoding="utf-8"))
        meta, expected = recording["meta"], recording["steps"]
        core = _engine(meta, _RecordedSteps(expected))
        workload = _Recorded(recording["requests"])
        recorded = [_expected_row(step) for step in expected]
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror}. Give a recording's path.") from None
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ValueError) and "not simulated yet" in str(error):
            raise ScenarioError(f"{path}: {error}.") from None
        raise ScenarioError(
            f"{path}: not a recording of {policy}: {error!r}. See sim/conform.py for the form."
        ) from None
    count = 0
    for count, row in enumerate(_replay(core, workload), start=1):
        if count > len(recorded):
            return Verdict(path, count, f"step {count} is made where the recording has ended after {len(recorded)}")
        for name, ours, theirs in zip(_NAMES, row, recorded[count - 1], strict=True):
            if ours != theirs:
                return Verdict(path, count, f"step {count} differs in {name}: {ours} here, {theirs} recorded")
    if count < len(recorded):
        return Verdict(path, count, f"ends after {count} steps, the recording has {len(recorded)}")
    return Verdict(path, count, "")


_NAMES = (
    "start_ns",
    "scheduled [id, tokens]",
    "free blocks after scheduling",
    "preempted",
    "finished",
    "free blocks after the step",
    "waiting",
    "running",
    "end_ns",
)


def _replay(core: EngineCore, workload: _Recorded) -> Iterator[tuple[object, ...]]:
    """One row a step, as `_NAMES` lists it."""
    clock, traffic, scheduler = VirtualClock(), Traffic(workload), core.scheduler
    while True:
        now_ns = clock.now_ns()
        traffic.submit_due(core, now_ns)
        if traffic.next_ns is None and not core.has_work:
            return
        work = core.schedule(now_ns, drain=traffic.next_ns is None)
        if isinstance(work, Idle):
            if traffic.next_ns is not None:
                clock.sleep_until(traffic.next_ns)
            continue
        scheduled = [[seq.request.id, tokens] for seq, tokens in work.items()]
        free_blocks, preempted = scheduler.kv.num_free, [seq.request.id for seq in work.preempted]
        end_ns = core.execute(work, now_ns)
        clock.sleep_until(end_ns)
        core.complete(end_ns)
        finished = [request.id for request in core.responses]
        core.responses = []
        yield (
            now_ns,
            scheduled,
            free_blocks,
            preempted,
            finished,
            scheduler.kv.num_free,
            scheduler.num_waiting,
            scheduler.num_running,
            end_ns,
        )


def _expected_row(step: dict[str, Any]) -> tuple[object, ...]:
    return (
        _ns(step["t_start"]),
        step["scheduled"],
        step["free_blocks_sched"],
        step["preempted"],
        step["finished"],
        step["free_blocks_after"],
        step["num_waiting"],
        step["num_running"],
        _ns(step["t_end"]),
    )


def _engine(meta: dict[str, Any], cost: CostModel) -> EngineCore:
    config = VllmConfig(
        enable_prefix_caching=meta["enable_prefix_caching"],
        async_scheduling=meta["async_scheduling"],
        max_num_seqs=meta["max_num_seqs"],
        max_num_batched_tokens=meta["max_num_batched_tokens"],
        policy=meta["policy"],
        enable_chunked_prefill=meta["enable_chunked_prefill"],
        long_prefill_token_threshold=meta["long_prefill_token_threshold"],
        long_prefill_token_threshold_adaptive=meta["long_prefill_token_threshold_adaptive"],
        scheduler_reserve_full_isl=meta["scheduler_reserve_full_isl"],
        watermark=meta["watermark"],
    )
    kv = CountingKV(meta["usable_blocks"], meta["block_size"])
    max_model_len = meta["max_model_len"]
    scheduler = Vllm(config, PolicyContext(kv, max_model_len))
    return EngineCore(scheduler, SimExecutor(cost, max_model_len), Recorder(), max_model_len=max_model_len)


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)
