"""Runs and hand-written records for the tests of metrics, with the tokens' times logged one by one beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from batchsim.drive.live import VirtualClock, live
from batchsim.kernel.batch import Batch, StepResult
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import CountingKV, KVBlockManager
from batchsim.kernel.lane_rows import LANE_DTYPE
from batchsim.kernel.protocols import PolicyContext, Scheduler
from batchsim.kernel.record import (
    FINISHED,
    MISSING,
    REQUEST_DTYPE,
    STATE_DTYPE,
    STEP_DTYPE,
    Recorder,
    Records,
)
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival, Request
from batchsim.metrics.point_inputs import PointInputs
from batchsim.policies.families.dynamic import Dynamic, DynamicConfig
from batchsim.policies.families.preemptive import Preemptive, PreemptiveConfig
from batchsim.policies.families.static import Static, StaticConfig
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from tests.support.whole_batches import Listed

MS = 1_000_000
BLOCK_SIZE = 4
MAX_MODEL_LEN = 64


@dataclass(frozen=True)
class LinearCost:
    """base + per_token for each token computed, padding included."""

    base: int = 1000
    per_token: int = 7

    def step_ns(self, batch: Batch) -> int:
        rows = batch.num_prefill_tokens + batch.num_decode + batch.pad_prefill_tokens + batch.pad_decode_rows
        return self.base + self.per_token * rows


@dataclass(frozen=True)
class Item:
    """What one sequence did in one step."""

    request_id: int
    decodes: bool
    gives_token: bool


class LoggingExecutor(SimExecutor):
    """A SimExecutor that writes down every step's items, which records do not hold."""

    def __init__(self, cost: LinearCost, max_model_len: int) -> None:
        super().__init__(cost, max_model_len)
        self.log: list[list[Item]] = []

    def execute(self, batch: Batch) -> StepResult:
        items = []
        for seq, n in batch.items():
            gives_token = seq.group is not None or seq.settled_computed_tokens + n == seq.num_tokens
            items.append(Item(seq.request.id, seq.group is not None, gives_token))
        self.log.append(items)
        return super().execute(batch)


@dataclass(frozen=True)
class Run:
    """Records, and the items of each step in the order of `records.steps`."""

    records: Records
    log: list[list[Item]]

    def token_times(self) -> dict[int, list[int]]:
        """When each request's tokens were made, from the log alone."""
        times: dict[int, list[int]] = {}
        steps = self.records.steps
        for step, items in zip(steps, self.log, strict=True):
            for item in items:
                if item.gives_token:
                    times.setdefault(item.request_id, []).append(int(step["start_ns"] + step["duration_ns"]))
        return times


def vllm(kv: KVBlockManager, max_num_seqs: int = 4, max_num_batched_tokens: int = 16) -> Vllm:
    """vLLM's scheduler, small enough to run out of everything."""
    config = VllmConfig(
        False,
        False,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        scheduler_reserve_full_isl=False,
    )
    return Vllm(config, PolicyContext(kv, MAX_MODEL_LEN))


def swapping(kv: KVBlockManager) -> Preemptive:
    """Preemption by swap; prefill-first, so that decodes sit out whole steps."""
    config = PreemptiveConfig(max_num_seqs=4, max_num_batched_tokens=16, by="swap", order="prefill_first")
    return Preemptive(config, PolicyContext(kv, MAX_MODEL_LEN))


def static(kv: KVBlockManager) -> Static:
    """Padded batches of three; responses are held until the batch ends."""
    return Static(StaticConfig(batch_size=3, max_wait=2000), PolicyContext(kv, MAX_MODEL_LEN))


def dynamic(kv: KVBlockManager) -> Dynamic:
    """Batches of up to three after a delay; responses are held until the batch ends."""
    return Dynamic(DynamicConfig(max_batch_size=3, max_queue_delay=2000), PolicyContext(kv, MAX_MODEL_LEN))


POLICIES = {"vllm": vllm, "swapping": swapping, "static": static, "dynamic": dynamic}


def run(
    arrivals: Sequence[Arrival],
    policy: Callable[[KVBlockManager], Scheduler] = vllm,
    num_blocks: int = 1000,
    *,
    num_swap_blocks: int = 0,
    cost: LinearCost | None = None,
    per_chunk_ns: int = 0,
    per_stream_ns: int = 0,
) -> Run:
    """`arrivals` through `policy` in virtual time."""
    executor = LoggingExecutor(cost or LinearCost(), MAX_MODEL_LEN)
    recorder = Recorder()
    scheduler = policy(CountingKV(num_blocks, BLOCK_SIZE, num_swap_blocks))
    front_end = {"per_chunk_ns": per_chunk_ns, "per_stream_ns": per_stream_ns}
    core = EngineCore(scheduler, executor, recorder, max_model_len=MAX_MODEL_LEN, **front_end)
    live(core, Listed(arrivals), VirtualClock())
    return Run(recorder.records(), executor.log)


def arrival(request_id: int, at_ns: int, prompt: int, output: int, **more: int) -> Arrival:
    """One request; `more` may hold cancel_ns, sent_ns, deadline_ns."""
    request = Request(request_id, at_ns, prompt, output, deadline_ns=more.pop("deadline_ns", None))
    return Arrival(request, output, **more)


@st.composite
def traffic(draw: st.DrawFn) -> list[Arrival]:
    """A few requests that meet: prompts over several steps, cancels, deadlines, a front end."""
    now, arrivals = 0, []
    for i in range(draw(st.integers(1, 12))):
        now += draw(st.sampled_from((0, 0, 300, 1000, 5000, 40_000)))
        front_end = draw(st.sampled_from((0, 0, 250)))
        made = arrival(i, now + front_end, draw(st.integers(1, 30)), draw(st.integers(1, 20)), sent_ns=now)
        gives_up = draw(st.sampled_from((None,) * 4 + (1, 2500, 12_000)))
        if gives_up is not None and draw(st.booleans()):
            made = replace(made, cancel_ns=made.request.arrival_ns + gives_up)
        elif gives_up is not None:
            made = replace(made, request=replace(made.request, deadline_ns=made.request.arrival_ns + gives_up))
        arrivals.append(made)
    return sorted(arrivals, key=lambda made: (made.request.arrival_ns, made.request.id))


def records_of(
    requests: Sequence[dict[str, int]],
    steps: Sequence[dict[str, int]] = (),
    states: Sequence[tuple[int, int, int, int, int]] = (),
    texts: tuple[str, ...] = ("",),
    lanes: Sequence[tuple[int, int, int, int]] = (),
) -> Records:
    """Hand-written records; what a row does not name is 0, or MISSING where that is a time not reached."""
    rows = np.zeros(len(requests), REQUEST_DTYPE)
    for i, request in enumerate(requests):
        given = {"request_id": i, "outcome": FINISHED, "prompt_tokens": 1, "output_tokens": 1} | request
        given.setdefault("sent_ns", given.get("arrival_ns", 0))
        given.setdefault("arrival_ns", given["sent_ns"])
        given.setdefault("scheduled_ns", given["arrival_ns"])
        given.setdefault("delivered_ns", given.get("ended_ns", MISSING) if given["outcome"] == FINISHED else MISSING)
        given.setdefault("ended_ns", given["delivered_ns"])
        given.setdefault("first_delivery_ns", given["delivered_ns"])
        given.setdefault("last_token_ns", given["ended_ns"])
        for name, value in given.items():
            rows[i][name] = value
    step_rows = np.zeros(len(steps), STEP_DTYPE)
    for i, step in enumerate(steps):
        for name, value in step.items():
            step_rows[i][name] = value
        step_rows[i]["num_decode_tokens"] = step.get("num_decode_tokens", step.get("num_decode", 0))
    return Records(
        rows, step_rows, np.array(list(states), STATE_DTYPE), texts, {}, lanes=np.array(list(lanes), LANE_DTYPE)
    )


def inputs_of(records: Records, **more: object) -> PointInputs:
    """A point over one second unless told, of an engine that streams."""
    given: dict[str, object] = {
        "window_ns": (0, 1000 * MS),
        "num_blocks": 100,
        "block_size": BLOCK_SIZE,
        "streams": True,
    }
    return PointInputs(records, **(given | more))  # type: ignore[arg-type]
