"""Helpers of the tests of the step-by-step families: runs under every driver, and a log of each batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

from hypothesis import strategies as st

from batchsim.drive.live import VirtualClock, live
from batchsim.drive.simulate import simulate
from batchsim.kernel.acceptance import DraftLuck, DrawnLuck
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.core import EngineCore
from batchsim.kernel.engine_loop import SYNC, EngineLoop
from batchsim.kernel.kv_blocks import CountingKV, TableKV
from batchsim.kernel.protocols import CostModel, DecodeLine, PolicyContext, steady
from batchsim.kernel.record import PREEMPTED, SWAPPED, Recorder, Records
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival, Request
from batchsim.testing.by_hand import same
from tests.support.whole_batches import BLOCK_SIZE, MAX_MODEL_LEN, Listed, requests


class LinearCost:
    """10 ns a step, 1 a prefill token, 2 a decode, 3 a block moved to or from the host."""

    def step_ns(self, batch: Batch) -> int:
        moved = sum(n for _, n in [*batch.swap_out, *batch.swap_in])
        return 10 + batch.num_prefill_tokens + 2 * batch.num_decode + 3 * moved


class HostCost(LinearCost):
    """LinearCost on the GPU; the host takes 3 ns to launch a step and 2 to process its results."""

    def lanes(self) -> HostCost:
        return self

    def device_ns(self, batch: Batch) -> int:
        return self.step_ns(batch)

    def decode_line(self, batch: Batch) -> DecodeLine:
        return 10 + 2 * batch.num_decode, 0.0, inf

    def stages_ns(self, batch: Batch) -> tuple[int, ...]:
        return (self.step_ns(batch),)

    def host_ns(self, batch: Batch | None) -> tuple[int, int]:
        return (3, 2)


class Stages:
    """10 ns for each stage of a pipeline; the host takes `host` ns to launch a step and to process its results."""

    def __init__(self, stages: int, host: tuple[int, int] = (0, 0)) -> None:
        self.stages = stages
        self.host = host

    def stages_ns(self, batch: Batch) -> tuple[int, ...]:
        return (10,) * self.stages

    def device_ns(self, batch: Batch) -> int:
        return sum(self.stages_ns(batch))

    step_ns = device_ns

    def lanes(self) -> Stages:
        return self

    def host_ns(self, batch: Batch | None) -> tuple[int, int]:
        return self.host


class Exact:
    """Predicts the cap, so that a test chooses what is predicted."""

    name = "cap"

    def predict(self, request: Request) -> int:
        return request.max_output_tokens


@dataclass(frozen=True)
class Estimates:
    """Fixed times for a token computed anew and a block moved one way."""

    token_ns: int = 1
    block_ns: int = 1

    def step_ns(self, batch: Batch) -> int:
        return LinearCost().step_ns(batch)

    def recompute_ns(self, num_tokens: int) -> int:
        return num_tokens * self.token_ns

    def swap_ns(self, num_blocks: int) -> int:
        return num_blocks * self.block_ns


@dataclass(frozen=True)
class Row:
    """A step as it was scheduled."""

    start_ns: int
    items: list[tuple[int, int]]  # (request, tokens) in batch order
    decodes: int
    preempted: list[int]
    swap_out: list[tuple[int, int]]
    swap_in: list[tuple[int, int]]
    free: int


@dataclass
class Logged:
    """A scheduler that passes all on and keeps a `Row` for each batch."""

    inner: Any
    log: list[Row] = field(default_factory=list[Row])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def events(self) -> Any:
        return self.inner.events

    @events.setter
    def events(self, value: Any) -> None:
        self.inner.events = value

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        work = self.inner.schedule(now_ns, drain)
        if isinstance(work, Batch):
            ids = [(seq.request.id, n) for seq, n in work.items()]
            out, back = ([(seq.request.id, n) for seq, n in moves] for moves in (work.swap_out, work.swap_in))
            preempted = [seq.request.id for seq in work.preempted]
            self.log.append(Row(now_ns, ids, work.num_decode, preempted, out, back, self.inner.kv.num_free))
        return work


class LoggedSteady(Logged):
    """Of a scheduler that says which steps are steady."""

    def is_steady(self, batch: Batch) -> bool:
        return self.inner.is_steady(batch)


@dataclass
class Run:
    """The outcome of one run."""

    records: Records
    log: list[Row]

    @property
    def items(self) -> list[list[tuple[int, int]]]:
        return [row.items for row in self.log]

    def preemptions(self) -> list[tuple[int, int, str, int]]:
        """(time, request, reason, by) of every preemption."""
        states = self.records.states
        rows = states[(states["state"] == PREEMPTED) | (states["state"] == SWAPPED)]
        return [
            (int(r["time_ns"]), int(r["request_id"]), self.records.texts[r["reason"]], int(r["blocker"])) for r in rows
        ]


def run(
    policy: Any,
    config: Any,
    arrivals: str | list[Arrival],
    *,
    blocks: int = 1000,
    swap_blocks: int = 0,
    how: str = "live",
    kv: Any = CountingKV,
    cost: CostModel | None = None,
    estimates: Estimates | None = None,
    block_size: int = BLOCK_SIZE,
    max_model_len: int = MAX_MODEL_LEN,
    loop: EngineLoop = SYNC,
    luck: DraftLuck | None = None,
) -> Run:
    """One run; `how` is live, leap or step. The pool must be whole at its end, and no sequence left behind. Drafts are
    accepted as the config supposes, or by `luck`."""
    pool = kv(blocks, block_size, swap_blocks)
    recorder = Recorder()
    context = PolicyContext(pool, max_model_len, Exact(), estimates or Estimates(), loop)
    made = policy(config, context)
    scheduler = (LoggedSteady if steady(made) is not None else Logged)(made)
    speculation = config.traits.speculation
    if speculation is not None and luck is None:
        luck = DrawnLuck(0, speculation.positions, speculation.found)
    executor = SimExecutor(cost or LinearCost(), max_model_len, loop, luck)
    core = EngineCore(scheduler, executor, recorder, max_model_len=max_model_len, loop=loop)
    workload = Listed(requests(arrivals) if isinstance(arrivals, str) else arrivals)
    if how == "live":
        live(core, workload, VirtualClock())
    else:
        simulate(core, workload, leap=how == "leap")
    assert (pool.num_free, pool.num_swap_free) == (blocks, swap_blocks)
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 0)
    return Run(recorder.records(), scheduler.log)


def run_alike(policy: Any, config: Any, arrivals: str | list[Arrival], *ways: str, **setting: Any) -> Run:
    """The run in the first of `ways` (all three unless said, live first), which in the others leaves equal records."""
    first, *others = (run(policy, config, arrivals, how=how, **setting) for how in ways or ("live", "leap", "step"))
    for other in others:
        same(first.records, other.records)
    return first


def run_every_way(policy: Any, config: Any, arrivals: list[Arrival], **setting: Any) -> Run:
    """The run, after proving it bit-equal under every driver and KV manager, each request in it once."""
    first = run(policy, config, arrivals, **setting)
    assert [int(i) for i in first.records.requests["request_id"]] == [a.request.id for a in arrivals]
    for how, kv in (("step", CountingKV), ("leap", CountingKV), ("live", TableKV), ("leap", TableKV)):
        other = run(policy, config, arrivals, how=how, kv=kv, **setting)
        same(first.records, other.records)
        assert (first.records.texts, first.records.details) == (other.records.texts, other.records.details)
    return first


def lanes(done: Run) -> list[tuple[int, ...]]:
    """(called, launched, begun on the GPU, processed) of each step of an engine that schedules ahead."""
    rows, starts = done.records.lanes, done.records.steps["start_ns"].tolist()
    called, launched, processed = (rows[f"{name}_ns"].tolist() for name in ("called", "launched", "processed"))
    return list(zip(called, launched, starts, processed, strict=True))


def wasted(done: Run) -> list[int]:
    """Tokens computed in vain, of each step of an engine that schedules ahead."""
    return done.records.lanes["wasted_tokens"].tolist()


def column(done: Run, name: str) -> list[int]:
    """Of each request."""
    return done.records.requests[name].tolist()


@st.composite
def crowds(draw: st.DrawFn) -> list[Arrival]:
    """Requests of three priorities that come faster than they are served; few are given up."""
    arrivals = []
    at = 0
    for i in range(draw(st.integers(3, 9))):
        at += draw(st.sampled_from([0, 0, 9, 23]))
        prompt, output = draw(st.integers(1, 16)), draw(st.integers(1, 16))
        cancel_ns = draw(st.sampled_from([None, None, None, None, at + 40, at + 120]))
        request = Request(i, at, prompt, output + draw(st.sampled_from([0, 0, 3])), priority=draw(st.integers(0, 2)))
        arrivals.append(Arrival(request, output, cancel_ns=cancel_ns))
    return arrivals
