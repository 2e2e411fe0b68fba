"""Engines of a fleet that sleep until somebody comes to them: how often schedulers are asked, and that nothing shows.

Steps take 10 ns with the stated cost, or a line in the context with the roofline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from batchsim.cost.roofline_config import RooflineConfig
from batchsim.deployment.catalog import load_model
from batchsim.drive.fleet.fleet_plan import Failure, FleetPlan
from batchsim.drive.fleet.routing import RoundRobin, RoundRobinConfig, Stage
from batchsim.drive.fleet.simulate_fleet import FleetRun, simulate_fleet
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival, Request
from batchsim.policies.families.continuous import Continuous, ContinuousConfig
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.testing.by_hand import same
from tests.support.engine import Constant, Requests, arrival, engine

LINE = RooflineConfig("h200").build(load_model("llama-3.1-8b"))
PLAIN = VllmConfig(async_scheduling=False, enable_prefix_caching=False, max_num_seqs=8)


class Asked(Vllm):
    """vLLM's scheduler, which counts how often it is asked."""

    calls = 0

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        self.calls += 1
        return super().schedule(now_ns, drain)


class Beside(Constant):
    """A step takes the device 10 ns; the host takes `launch_ns` to launch it, and for its results 2 and 1 a decode."""

    def __init__(self, launch_ns: int = 3) -> None:
        self.launch_ns = launch_ns

    def lanes(self) -> Beside:
        return self

    device_ns = Constant.step_ns

    def stages_ns(self, batch: Batch) -> tuple[int, ...]:
        return (self.step_ns(batch),)

    def host_ns(self, batch: Batch | None) -> tuple[int, int]:
        return self.launch_ns, 2 + (batch.num_decode if batch is not None else 0)


class Odd:
    """A router that sends requests of odd ids to replica 1."""

    def route(self, request: Request, stage: Stage, up: Sequence[int]) -> int:
        return request.id % 2

    def answered(self, request: Request, stage: Stage, replica: int) -> None: ...


class Hesitant(Asked):
    """One that repeats nothing, whatever it derives from foresees."""

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        return False


def fleet(
    *arrivals: Arrival, policy: type[Asked] = Asked, blocks: int = 1000, line: bool = False, leap: bool = True,
    failures: tuple[Failure, ...] = (), ahead: bool = False, launch_ns: int = 3,
) -> tuple[FleetRun, list[int]]:  # fmt: skip
    """Two replicas by id: what they recorded, and how often the scheduler of each was asked."""
    schedulers: list[Asked] = []

    def new_engine(replica: int) -> EngineCore:
        kv = CountingKV(blocks, 4)
        config = replace(PLAIN, async_scheduling=ahead)
        loop = config.traits.loop
        schedulers.append(policy(config, PolicyContext(kv, 1000, loop=loop)))
        if ahead:
            executor = SimExecutor(Beside(launch_ns), 1000, loop)
            return EngineCore(schedulers[-1], executor, Recorder(), max_model_len=1000, loop=loop)
        if not line:
            return engine(schedulers[-1])
        return EngineCore(schedulers[-1], SimExecutor(LINE, 1000), Recorder(), max_model_len=1000)

    plan = FleetPlan(2, failures, "retry" if failures else None)
    found = simulate_fleet(
        new_engine,
        RoundRobin(RoundRobinConfig(), 0) if failures else Odd(),
        plan,
        Requests(*arrivals),
        feeds_back=False,
        leap=leap,
    )
    return found, [scheduler.calls for scheduler in schedulers]


def equal(one: FleetRun, other: FleetRun) -> None:
    same(one.records, other.records)
    assert one.spans == other.spans


STREAM = [
    arrival(i, at, 4, out) for i, (at, out) in enumerate([(0, 200), (0, 3), (95, 2), (400, 3), (400, 2), (702, 2)])
]
"""A long answer of replica 0, to which 2 and 4 go besides, between two boundaries of its steps and at one."""
MS = 1_000_000
SLOW = [arrival(i, at * MS, 4, out) for i, (at, out) in enumerate([(0, 200), (0, 30), (95, 20), (400, 30), (402, 20)])]


def test_only_who_comes_to_an_engine_ends_its_leap() -> None:
    """Its scheduler is asked for the prompt, a decode and the first step not surely quiet, an asynchronous one for the
    step after that, too; for one more request, for its prompt and a decode again."""
    others = [arrival(i, 30 * i, 4, 1 + i % 5) for i in range(1, 80, 2)]
    assert fleet(STREAM[0], *others)[1][0] == 3
    assert fleet(STREAM[0], *others, ahead=True)[1][0] == 4
    assert fleet(STREAM[0], *others, arrival(40, 1234, 4, 1))[1][0] == 5


@pytest.mark.parametrize("line", [False, True])
@pytest.mark.parametrize("blocks", [51, 52, 53, 60, 1000])
@pytest.mark.parametrize("ahead", [False, True])
def test_sleeping_leaves_the_records_of_stepping(line: bool, blocks: int, ahead: bool) -> None:
    """Whether somebody comes between two boundaries, at one, in the first step or twice at once, or blocks run out."""
    stream = SLOW if line else STREAM
    leaping, (calls, _) = fleet(*stream, blocks=blocks, line=line, ahead=ahead)
    stepping, (asked, _) = fleet(*stream, blocks=blocks, line=line, ahead=ahead, leap=False)
    equal(leaping, stepping)
    assert calls < asked / 2


@pytest.mark.parametrize("line", [False, True])
def test_a_failure_finds_the_steps_done_that_began_before_it(line: bool) -> None:
    failure = Failure(0, 505 * (MS if line else 1), 10)
    stream = SLOW if line else STREAM
    equal(
        fleet(*stream, failures=(failure,), line=line)[0], fleet(*stream, failures=(failure,), line=line, leap=False)[0]
    )


def test_a_step_is_not_launched_by_an_engine_that_fails_between_call_and_launch() -> None:
    """A replica that fails at every instant of two steps leaves what it does without leaps."""
    for at_ns in range(500, 530):
        failure = Failure(0, at_ns, 10)
        leaping, _ = fleet(*STREAM, failures=(failure,), ahead=True)
        equal(leaping, fleet(*STREAM, failures=(failure,), ahead=True, leap=False)[0])


EVERY = [pytest.param(launch_ns, 1, marks=pytest.mark.slow) for launch_ns in (3, 20)]


@pytest.mark.parametrize(("launch_ns", "stride_ns"), [(3, 7), (20, 7), *EVERY])
def test_nor_the_decodes_that_follow_the_last_prompts(launch_ns: int, stride_ns: int) -> None:
    """At whatever instant a replica fails, also where somebody's prompt has just ended."""
    lengths = [(0, 40), (0, 3), (95, 20), (96, 3), (120, 12)]
    stream = [arrival(i, at_ns, 4, output) for i, (at_ns, output) in enumerate(lengths)]
    for at_ns in range(1, 400, stride_ns):
        failures = (Failure(0, at_ns, 10),)
        leaping, _ = fleet(*stream, failures=failures, ahead=True, launch_ns=launch_ns)
        equal(leaping, fleet(*stream, failures=failures, ahead=True, leap=False, launch_ns=launch_ns)[0])


def test_who_comes_at_the_instant_of_a_launch_is_not_leapt_over() -> None:
    """An arrival at every instant of some steps, with which or without which somebody ends before the next."""
    for at_ns in range(60):
        for output in (1, 3):
            stream = [arrival(0, 0, 4, 200), arrival(2, at_ns, 4, output)]
            equal(fleet(*stream, ahead=True)[0], fleet(*stream, ahead=True, leap=False)[0])


def test_a_host_that_is_through_sooner_with_fewer_is_so_wherever_a_leap_is_cut() -> None:
    """Answers of the other replica cut leaps before and after somebody has ended in them."""
    for at_ns in range(61):
        stream = [arrival(i, 0, 4, output, cap=100) for i, output in ((0, 80), (2, 30), (4, 21))]
        stream += [arrival(1 + 2 * k, at_ns + 61 * k, 4, 2) for k in range(16)]
        equal(fleet(*stream, ahead=True)[0], fleet(*stream, ahead=True, leap=False)[0])


class LastAnswered:
    """A router that sends to whoever answered last, first to replica 0 and 1."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def route(self, request: Request, stage: Stage, up: Sequence[int]) -> int:
        return request.id if request.id < 2 else self.told[-1][1]

    def answered(self, request: Request, stage: Stage, replica: int) -> None:
        self.told.append((request.id, replica))


def test_of_one_instant_who_finishes_is_told_before_who_gives_up() -> None:
    """Replica 1 ends a request at 30, as the deadline of one of replica 0 is due: 2 goes to replica 0."""
    given = [arrival(0, 0, 4, 50, deadline_ns=30), arrival(1, 0, 4, 3), arrival(2, 35, 4, 3)]
    for leap in (True, False):
        router = LastAnswered()

        def new_engine(replica: int) -> EngineCore:
            return engine(Vllm(PLAIN, PolicyContext(CountingKV(1000, 4), 1000, loop=PLAIN.traits.loop)))

        simulate_fleet(new_engine, router, FleetPlan(2), Requests(*given), feeds_back=False, leap=leap)
        assert router.told[:2] == [(1, 1), (0, 0)], leap


def test_a_scheduler_with_a_repeat_of_its_own_is_asked_every_step() -> None:
    leaping, (calls, _) = fleet(*STREAM, policy=Hesitant)
    stepping, (asked, _) = fleet(*STREAM, policy=Hesitant, leap=False)
    equal(leaping, stepping)
    assert calls == asked


def test_the_continuous_family_takes_no_blocks_as_it_decodes() -> None:
    """All are reserved: the free blocks of steps alike are those of the first."""

    def new_engine(replica: int) -> EngineCore:
        config = ContinuousConfig(max_num_seqs=8, max_num_batched_tokens=64)
        return engine(Continuous(config, PolicyContext(CountingKV(60, 4), 1000)))

    runs = [
        simulate_fleet(
            new_engine, RoundRobin(RoundRobinConfig(), 0), FleetPlan(2), Requests(*STREAM), feeds_back=False, leap=leap
        )
        for leap in (True, False)
    ]
    equal(*runs)
    steps = runs[0].records.steps
    assert len(np.unique(steps["free_blocks"])) < 5
