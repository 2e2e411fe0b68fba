"""The vLLM policy with its prefix cache against a naive model of vLLM, step by step in random scenarios."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

import pytest

from batchsim.base.errors import SchedulerStalled
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.core import EngineCore
from batchsim.kernel.engine_loop import EngineLoop
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import Recorder, Records
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.tokens import Segment, TokenIds, output_stream, prompt_stream
from batchsim.kernel.types import MISSING, Arrival, Request, Sequence
from batchsim.kv.grouped import GroupedBlocks
from batchsim.kv.prefix_cache import BlockHashKV
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.policies.systems.vllm.vllm_intervals import VllmAtIntervals
from tests.plain.vllm import Naive, NaiveVllm, calls_in_flight
from tests.support.engine import DRIVERS, STEP_NS, Constant, Requests
from tests.support.stepping import Stages

MAX_MODEL_LEN = 160
SCENARIOS = 40


def with_adapters(seed: int, config: VllmConfig, arrivals: list[Arrival]) -> tuple[VllmConfig, list[Arrival]]:
    """The same with one to three LoRA adapters at a time, of which most requests have one of five."""
    pick = random.Random(-1 - seed)
    chosen = [
        replace(each, request=replace(each.request, adapter=pick.choice([MISSING, 0, 0, 1, 2, 3, 4])))
        for each in arrivals
    ]
    return replace(config, max_loras=pick.choice([1, 2, 3])), chosen


def scenario(seed: int) -> tuple[VllmConfig, int, int, list[Arrival]]:
    """Knobs, blocks, block size and requests, many of which share beginnings or go on from others' outputs."""
    pick = random.Random(seed)
    chunked = pick.random() < 0.8
    budget = pick.choice([16, 40, 160]) if chunked else MAX_MODEL_LEN
    size = pick.choice([1, 2, 4, 16])
    requests = []
    at = 0
    for i in range(pick.randint(2, 25)):
        at += pick.choice([0, 0, 0, 7, 10, 40, 200])
        prompt = min(pick.choice([3, 16, 33, 64, 100]) + pick.randint(0, 5), MAX_MODEL_LEN - 1)
        output = pick.choice([1, 3, 12, 40])
        tokens = None if pick.random() < 0.25 else TokenIds.of(segments(pick, i, prompt))
        request = Request(i, at, prompt, output + pick.choice([0, 0, 5]), priority=pick.randint(0, 2), tokens=tokens)
        requests.append(Arrival(request, output))
    config = VllmConfig(
        enable_prefix_caching=pick.random() < 0.9,
        async_scheduling=False,
        max_num_seqs=(seqs := pick.choice([2, 5, 16])),
        max_num_batched_tokens=budget,
        policy=pick.choice(["fcfs", "priority"]),
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=pick.choice([0, 0, 5, 20]),
        long_prefill_token_threshold_adaptive=pick.random() < 0.5,
        scheduler_reserve_full_isl=pick.random() < 0.6,
        watermark=pick.choice([0.0, 0.0, 0.1]),
        max_num_active_seqs=pick.choice([None, None, seqs - 1]),
        max_num_scheduled_tokens=pick.choice([None, None, budget - 5 if chunked else None]),
    )
    return config, -(-MAX_MODEL_LEN // size) + pick.choice([0, 2, 40 // size, 400 // size]), size, requests


def segments(pick: random.Random, request_id: int, prompt: int) -> list[Segment]:
    found: list[Segment] = []
    left = prompt
    while left:
        stream = pick.choice([prompt_stream(0), prompt_stream(1), output_stream(pick.randint(0, request_id + 2))])
        if found and pick.random() < 0.4:
            stream = prompt_stream(100 + request_id)
        length = min(pick.choice([1, 7, 16, 40, prompt]), left)
        found.append((stream, pick.choice([0, 0, 0, 5]), length))
        left -= length
    return found


def steps_of_naive(engine: NaiveVllm, arrivals: list[Arrival], limit: int) -> list[Any]:
    rows: list[Any] = []
    now_ns, left = 0, list(arrivals)
    while len(rows) < limit:
        while left and left[0].request.arrival_ns <= now_ns:
            arrival = left.pop(0)
            engine.add(Naive(arrival.request, arrival.output_tokens or 0))
        row = engine.step()
        if row is not None:
            rows.append((now_ns, *row))
            now_ns += STEP_NS
        elif left:
            now_ns = left[0].request.arrival_ns
        else:
            return rows
    return rows


def steps_of_ours(
    config: VllmConfig, kv: BlockHashKV | GroupedBlocks, arrivals: list[Arrival], limit: int
) -> list[Any]:
    kind = VllmAtIntervals if config.prefill_schedule_interval > 1 else Vllm
    scheduler = kind(config, PolicyContext(kv, MAX_MODEL_LEN))
    core = EngineCore(scheduler, SimExecutor(Constant(), MAX_MODEL_LEN), Recorder(), max_model_len=MAX_MODEL_LEN)
    for arrival in arrivals:
        core.submit(arrival)
    rows: list[Any] = []
    now_ns = 0
    later = [arrival.request.arrival_ns for arrival in arrivals]
    while core.has_work and len(rows) < limit:
        work = core.schedule(now_ns, drain=False)
        if isinstance(work, Idle):
            now_ns = min(ns for ns in later if ns > now_ns)
            continue
        items = [[seq.request.id, n] for seq, n in work.items()]
        cached = [[seq.request.id, n] for seq, n in work.cached]
        preempted, free = [seq.request.id for seq in work.preempted], kv.num_free
        end_ns = core.execute(work, now_ns)
        finished = [event.request.id for event in core.complete(end_ns)]
        kv.check()
        waiting, running = scheduler.num_waiting, scheduler.num_running
        rows.append((now_ns, items, cached, preempted, finished, free, kv.num_free, waiting, running))
        now_ns = end_ns
    if not core.has_work:
        core.check_returned()
    return rows


def equal_rows(ours: list[Any], theirs: list[Any], where: str) -> None:
    """The rows of the steps, or calls, of the scenario `where` are those of the naive model."""
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        assert mine == other, f"{where}, row {number}"
    assert len(ours) == len(theirs), where


def compare(seed: int, interval: int = 1, *, adapters: bool = False) -> list[Any]:
    config, num_blocks, size, arrivals = scenario(seed)
    config = replace(config, prefill_schedule_interval=interval)
    if adapters:
        config, arrivals = with_adapters(seed, config, arrivals)
    limit = 3000
    naive = steps_of_naive(NaiveVllm(config, num_blocks, size, MAX_MODEL_LEN), arrivals, limit)
    kv = BlockHashKV(num_blocks, size, ids=len(arrivals) % 2 == 0)
    try:
        ours = steps_of_ours(config, kv, arrivals, limit)
    except SchedulerStalled:
        pytest.fail(f"scenario {seed} stalls")
    equal_rows(ours, naive, f"scenario {seed}")
    return ours


def test_every_step_equals_the_naive_models() -> None:
    """Scheduled tokens, hits, preemptions, finishes, free blocks and queues are equal; hits and preemptions occur."""
    rows = [row for seed in range(SCENARIOS) for row in compare(seed)]
    assert sum(bool(row[2]) for row in rows) > 50
    assert sum(bool(row[3]) for row in rows) > 50


def test_every_step_at_intervals_equals_the_naive_models() -> None:
    """Parts of prompts in one step of 2, 3 or 5 alone; scheduler.py of vLLM 0.33.0."""
    rows = [row for seed in range(SCENARIOS) for row in compare(seed, (2, 3, 5)[seed % 3])]
    assert sum(bool(row[3]) for row in rows) > 50


def test_requests_of_adapters_are_passed_over_as_by_the_naive_model() -> None:
    """With at most so many adapters at a time, and KV shared within an adapter alone; in some steps a request overtakes
    another that has come before it."""
    rows = [row for seed in range(SCENARIOS) for row in compare(seed, adapters=True)]
    assert sum(bool(row[2]) for row in rows) > 30
    assert sum(bool(row[3]) for row in rows) > 30
    plain = [row for seed in range(SCENARIOS) for row in compare(seed)]
    assert len(rows) > len(plain)


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True])
def test_many_more_scenarios_equal_the_naive_models(adapters: bool) -> None:
    """23 times as many."""
    for seed in range(SCENARIOS, 24 * SCENARIOS):
        compare(seed, adapters=adapters)
        compare(seed, (2, 3, 5)[seed % 3])


HOST_NS = (2, 3)
NAP_NS = 13


class Lanes(Stages):
    """Every stage takes 4 ns and 1 a token."""

    def stage_ns(self, tokens: int) -> int:
        return 4 + tokens

    def stages_ns(self, batch: Batch) -> tuple[int, ...]:
        return (self.stage_ns(batch.num_prefill_tokens + batch.num_decode),) * self.stages


class Watching(Vllm):
    """Writes down what each call takes and what comes of it."""

    def __init__(self, config: VllmConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        self.rows: list[Any] = []

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        work = super().schedule(now_ns, drain)
        batch = None if isinstance(work, Idle) else work
        items = [[seq.request.id, n] for seq, n in batch.items()] if batch else []
        cached = [[seq.request.id, n] for seq, n in batch.cached] if batch else []
        preempted = [seq.request.id for seq in batch.preempted] if batch else []
        self.rows.append(("call", now_ns, items, cached, preempted, *self.queues))
        return work

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        ended = super().complete(batch, finished, now_ns)
        assert isinstance(self.kv, BlockHashKV | GroupedBlocks)
        self.kv.check()
        self.rows.append(("results", now_ns, [seq.request.id for seq in ended], None, *self.queues))
        return ended

    @property
    def queues(self) -> tuple[int, ...]:
        return self.kv.num_free, self.num_waiting, self.num_running


class WatchingAtIntervals(Watching, VllmAtIntervals):
    """The same of prompts at intervals."""


W = TypeVar("W", bound=Watching)


def compare_in_flight(seed: int, stages: int, ahead: bool, interval: int = 1, *, adapters: bool = False) -> list[Any]:
    """The rows of the calls, which equal the naive model's."""
    config, num_blocks, size, arrivals = scenario(seed)
    if adapters:
        config, arrivals = with_adapters(seed, config, arrivals)
    config = replace(config, async_scheduling=ahead, prefill_schedule_interval=interval)
    kind = WatchingAtIntervals if interval > 1 else Watching
    engine = NaiveVllm(config, num_blocks, size, MAX_MODEL_LEN, stages)
    where = f"scenario {seed} of {stages} stages, {ahead=}"
    return calls_compared(engine, kind, config, lambda: BlockHashKV(num_blocks, size), arrivals, stages, where)


def calls_compared(
    engine: NaiveVllm,
    kind: type[Watching],
    config: VllmConfig,
    new_pool: Callable[[], BlockHashKV | GroupedBlocks],
    arrivals: list[Arrival],
    stages: int,
    where: str,
) -> list[Any]:
    """The rows of the calls, which equal those of the naive `engine`; both drivers leave the same records."""
    loop, lanes = replace(config.traits.loop.over(stages), nap_ns=NAP_NS), Lanes(stages, HOST_NS)
    naive = list(islice(calls_in_flight(engine, arrivals, loop, HOST_NS, lanes.stage_ns), 20_000))
    lived, scheduler = in_both_drivers(
        lambda: kind(config, PolicyContext(new_pool(), MAX_MODEL_LEN, loop=loop)), lanes, loop, arrivals, where
    )
    wasted = iter(lived.lanes["wasted_tokens"].tolist())
    ours = [(*row[:3], next(wasted), *row[4:]) if row[0] == "results" else row for row in scheduler.rows]
    equal_rows(ours, naive, where)
    return ours


def in_both_drivers(
    new_scheduler: Callable[[], W], lanes: Lanes, loop: EngineLoop, arrivals: list[Arrival], where: str
) -> tuple[Records, W]:
    """The records of a live run and its scheduler; the simulation of another one leaves the same."""
    found: list[tuple[Records, W]] = []
    for driver in ("live", "simulate"):
        scheduler, recorder = new_scheduler(), Recorder()
        executor = SimExecutor(lanes, MAX_MODEL_LEN, loop)
        core = EngineCore(scheduler, executor, recorder, max_model_len=MAX_MODEL_LEN, loop=loop)
        DRIVERS[driver](core, Requests(*arrivals))
        core.check_returned()
        found.append((recorder.records(), scheduler))
    (lived, first), (simulated, _) = found
    for table in ("requests", "steps", "states", "lanes"):
        assert getattr(simulated, table).tobytes() == getattr(lived, table).tobytes(), f"{where}, {table}"
    return lived, first


MODES = [(stages, ahead) for stages in (1, 2, 3, 4) for ahead in (False, True) if stages > 1 or ahead]


@pytest.mark.parametrize(
    ("stages", "ahead"), [pytest.param(*mode, marks=[pytest.mark.slow] if mode[0] > 3 else []) for mode in MODES]
)
def test_every_call_in_flight_equals_the_naive_models(stages: int, ahead: bool) -> None:
    """Times, tokens, hits, preemptions, finishes, waste and queues are equal with several batches in flight."""
    rows = [row for seed in (3, 19, 25, 30) for row in compare_in_flight(seed, stages, ahead)]
    assert sum(bool(row[4]) for row in rows if row[0] == "call") > 10
    assert any(row[3] for row in rows if row[0] == "results") == ahead


def test_every_call_at_intervals_ahead_of_results_equals_the_naive_models() -> None:
    """Parts of prompts in one step of 2, 3 or 5 alone, a step in flight as the next is scheduled."""
    rows = [row for seed in (3, 19, 25, 30) for row in compare_in_flight(seed, 1, True, (2, 3, 5)[seed % 3])]
    assert sum(bool(row[4]) for row in rows if row[0] == "call") > 10


@pytest.mark.slow
def test_many_more_calls_at_intervals_equal_the_naive_models() -> None:
    """Forty times as many."""
    for seed in range(SCENARIOS, 5 * SCENARIOS):
        compare_in_flight(seed, 1, True, (2, 3, 5)[seed % 3])


@pytest.mark.parametrize(("stages", "ahead"), [(1, True), (2, False), (2, True)])
def test_every_call_in_flight_equals_the_naive_models_with_adapters(stages: int, ahead: bool) -> None:
    """An adapter is in use until the results of its last request are processed."""
    rows = [row for seed in (3, 19, 25, 30) for row in compare_in_flight(seed, stages, ahead, adapters=True)]
    assert sum(bool(row[4]) for row in rows if row[0] == "call") > 10


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize(("stages", "ahead"), MODES)
def test_many_more_calls_in_flight_equal_the_naive_models(stages: int, ahead: bool, adapters: bool) -> None:
    """Forty times as many."""
    for seed in range(SCENARIOS, 5 * SCENARIOS):
        compare_in_flight(seed, stages, ahead, adapters=adapters)
