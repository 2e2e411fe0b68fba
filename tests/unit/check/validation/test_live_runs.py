"""Live runs that are cut, that run in real time, or whose host takes time: counts add up and every ns is explained."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from batchsim.base.errors import CalibrationError, ExecutorError, PolicyError, SchedulerStalled, TraceError
from batchsim.drive.live import VirtualClock, WallClock, lag_verdict, live
from batchsim.kernel.batch import Batch, Idle, Landed, StepResult
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import BLOCKED, FINISHED, MISSING, PREFILL, UNFINISHED, Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival, Request
from batchsim.metrics.attribution import attribute
from batchsim.policies.families.gated import Gated, GatedConfig
from batchsim.policies.registry import POLICIES
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.testing.random_engines import built, cases
from tests.support.engine import MAX_MODEL_LEN, Constant, Requests, arrival, engine, outcomes, vllm
from tests.support.metrics_helpers import records_of
from tests.unit.drive.test_live import Chain

# ---- cut runs


class Breaking(SimExecutor):
    """A simulated device that fails its n-th step."""

    def __init__(self, step: int, error: BaseException) -> None:
        super().__init__(Constant(), MAX_MODEL_LEN)
        self.left, self.error = step, error

    def execute(self, batch: Batch) -> StepResult:
        self.left -= 1
        if not self.left:
            raise self.error
        return super().execute(batch)


def breaking(step: int, error: BaseException) -> EngineCore:
    scheduler = vllm(CountingKV(100, 4), max_num_seqs=1)
    return EngineCore(scheduler, Breaking(step, error), Recorder(), max_model_len=MAX_MODEL_LEN)


@pytest.mark.parametrize(
    ("error", "reason", "detail"),
    [
        (ExecutorError("3 GB short. Use fewer blocks.", "out_of_memory"), "out_of_memory", "3 GB short"),
        (ExecutorError("the device is gone.", "step_failed"), "step_failed", "the device is gone"),
        (KeyboardInterrupt(), "interrupted", ""),
    ],
)
@pytest.mark.parametrize("clock", [VirtualClock, WallClock])
def test_a_cut_run_accounts_for_every_request(error, reason, detail, clock):
    """The finished stay; those that ran, waited or were not yet sent end unfinished with the reason, at the cut."""
    core = breaking(5, error)
    arrivals = [arrival(0, 0), arrival(1, 1), arrival(2, 2), arrival(3, 10**15)]
    ended = live(core, Requests(*arrivals), clock())
    rows = outcomes(core.recorder.records())
    assert [(row.outcome, row.reason) for row in rows] == [("finished", "")] + [("unfinished", reason)] * 3
    assert [row.output_tokens for row in rows] == [3, 1, 0, 0]
    assert {row.ended_ns for row in rows[1:]} == {ended.end_ns} and ended.reason == reason
    assert detail in core.recorder.records().details.get(reason, "")


def test_ctrl_c_waits_for_the_end_of_the_step():
    """A signal amid a step cuts the run after it: its tokens count."""

    class Interrupting(SimExecutor):
        def execute(self, batch: Batch) -> StepResult:
            signal.raise_signal(signal.SIGINT)
            return super().execute(batch)

    executor = Interrupting(Constant(), MAX_MODEL_LEN)
    core = EngineCore(vllm(CountingKV(100, 4)), executor, Recorder(), max_model_len=MAX_MODEL_LEN)
    before = signal.getsignal(signal.SIGINT)
    ended = live(core, Requests(arrival(0, 0)), VirtualClock())
    (row,) = outcomes(core.recorder.records())
    assert (ended.reason, row.reason, row.output_tokens, row.first_token_ns) == ("interrupted", "interrupted", 1, 10)
    assert signal.getsignal(signal.SIGINT) is before


class Broken(Requests):
    """A trace whose third row cannot be read."""

    def arrivals(self) -> Iterator[Arrival]:
        yield arrival(0, 0)
        yield arrival(1, 1000)
        raise TraceError("row 3 is broken")


class Unthinking(Requests):
    """Clients that fail at their first answer."""

    def responded(self, request: Request, now_ns: int) -> Arrival | None:
        raise KeyError(request.id)


def test_a_broken_load_source_cuts_the_run():
    """In real time what was read before ends with the reason; in virtual time the error is raised."""
    core = engine(vllm(CountingKV(100, 4)))
    ended = live(core, Broken(), WallClock())
    rows = outcomes(core.recorder.records())
    assert len(rows) == 2 and {row.reason for row in rows} <= {"", "load_source_failed"}
    assert isinstance(ended.error, TraceError) and ended.reason == "load_source_failed"
    assert core.recorder.details[ended.reason] == "row 3 is broken"
    with pytest.raises(TraceError, match="row 3"):
        live(engine(vllm(CountingKV(100, 4))), Broken(), VirtualClock())


def test_clients_that_fail_cut_the_run():
    """Nobody else's requests are lost, those that were not sent yet among them."""
    core = engine(vllm(CountingKV(100, 4)))
    ended = live(core, Unthinking(arrival(0, 0), arrival(1, 10**15)), WallClock())
    rows = outcomes(core.recorder.records())
    assert [(row.outcome, row.reason) for row in rows] == [("finished", ""), ("unfinished", "load_source_failed")]
    assert isinstance(ended.error, KeyError)


def test_a_rest_that_cannot_be_read_does_not_hide_the_cut():
    """A run that the device cuts keeps its reason where the trace is broken further on."""
    core = breaking(1, ExecutorError("gone.", "step_failed"))

    class Later(Broken):
        def arrivals(self) -> Iterator[Arrival]:
            yield arrival(0, 0)
            yield arrival(1, 10**15)
            yield arrival(2, 10**15)
            raise TraceError("row 4 is broken")

    assert live(core, Later(), WallClock()).reason == "step_failed"
    assert [row.reason for row in outcomes(core.recorder.records())] == ["step_failed"] * 3


class Failing(Gated):
    """A policy whose n-th schedule raises."""

    left, error = 0, Exception()

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        self.left -= 1
        if not self.left:
            raise self.error
        return super().schedule(now_ns, drain)


@pytest.mark.parametrize("error", [PolicyError("no."), SchedulerStalled("waits."), KeyError("mine")])
def test_a_failing_policy_cuts_a_run_in_real_time(error):
    """The records are whole and the error is handed back; in virtual time it is raised."""

    def failing() -> EngineCore:
        scheduler = Failing(GatedConfig(), PolicyContext(CountingKV(100, 4), MAX_MODEL_LEN))
        scheduler.left, scheduler.error = 3, error
        return engine(scheduler)

    core = failing()
    ended = live(core, Requests(arrival(0, 0), arrival(1, 10**15)), WallClock())
    reason = "stalled" if isinstance(error, SchedulerStalled) else "policy_failed"
    rows = outcomes(core.recorder.records())
    assert [(row.outcome, row.reason, row.output_tokens) for row in rows] == [
        ("unfinished", reason, 2),
        ("unfinished", reason, 0),
    ]
    assert ended.error is error and ended.reason == reason
    with pytest.raises(type(error)):
        live(failing(), Requests(arrival(0, 0)), VirtualClock())


@pytest.mark.parametrize("error", [CalibrationError("a step of 9 tokens."), AssertionError(), PolicyError("no.")])
def test_whatever_a_step_raises_cuts_a_run_in_real_time(error):
    """A step too large and a bug of ours lose nothing; the error is handed back for whoever has saved the run."""
    core = breaking(5, error)
    ended = live(core, Requests(arrival(0, 0), arrival(1, 1), arrival(2, 10**15)), WallClock())
    reason = "policy_failed" if isinstance(error, PolicyError) else "step_failed"
    rows = outcomes(core.recorder.records())
    assert [(row.reason, row.output_tokens) for row in rows] == [("", 3), (reason, 1), (reason, 0)]
    assert ended.error is error and core.recorder.details[reason] == (str(error) or "AssertionError")


# ---- real time


def test_the_load_thread_sends_everything_at_or_after_its_time():
    """Known requests and those that answers cause are all served, none before its time, with the lag on record."""
    core = engine(vllm(CountingKV(100, 4)))
    workload = Chain(arrival(0, 0), arrival(1, 200_000), arrival(2, 200_000), think_ns=50_000, total=20)
    ended = live(core, workload, WallClock())
    requests = core.recorder.records().requests
    assert len(requests) == 20 and set(requests["outcome"]) == {FINISHED} and ended.reason == ""
    assert (requests["lag_ns"] >= 0).all() and (requests["lag_ns"] > 0).any()
    assert (requests["scheduled_ns"] >= requests["arrival_ns"] + requests["lag_ns"]).all()
    answered = dict(workload.answered)
    assert all(requests["arrival_ns"][i] in {ns + 50_000 for ns in answered.values()} for i in range(3, 20))
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_arrivals_do_not_depend_on_how_late_the_engine_is():
    """A slow engine changes when requests are answered, never when those known in advance are due."""
    due = [arrival(i, 1000 * i) for i in range(50)]
    core = engine(vllm(CountingKV(100, 4), max_num_seqs=1))
    live(core, Requests(*due), WallClock())
    assert core.recorder.records().requests["arrival_ns"].tolist() == [1000 * i for i in range(50)]


class Behind(SimExecutor):
    """A device behind the host: tells, when a step lands, when it began and ended by the monotonic clock."""

    def __init__(self) -> None:
        super().__init__(Constant(), MAX_MODEL_LEN)
        self.ran: list[tuple[int, int, int]] = []

    def execute(self, batch: Batch) -> StepResult:
        result = super().execute(batch)
        through_ns = time.monotonic_ns()
        free_ns = self.ran[-1][2] if self.ran else 0
        begun_ns = max(through_ns, free_ns)
        self.ran.append((through_ns, begun_ns, begun_ns + 100_000))
        return StepResult(0, [], landing=partial(Landed, result.finished, self.ran[-1]))


def test_steps_behind_the_host_are_on_record_when_the_device_ran_them():
    """However long the host takes between its look at the clock and the device's, which differs from step to step."""
    config = VllmConfig(enable_prefix_caching=False, max_num_seqs=4, max_num_batched_tokens=64)
    loop = config.traits.loop
    scheduler = Vllm(config, PolicyContext(CountingKV(100, 4), MAX_MODEL_LEN, loop=loop))
    device, clock = Behind(), WallClock()
    core = EngineCore(scheduler, device, Recorder(), max_model_len=MAX_MODEL_LEN, loop=loop)
    live(core, Requests(*[arrival(i, 1000 * i, output=9) for i in range(8)]), clock)
    records = core.recorder.records()
    steps, lanes = records.steps, records.lanes
    recorded = np.stack([lanes["launched_ns"], steps["start_ns"], steps["start_ns"] + steps["duration_ns"]], axis=1)
    assert (recorded + clock.start_ns).tolist() == [list(ran) for ran in device.ran] != []


class Creeping:
    """A clock that moves on by pseudo-random times at every look at it: a host that takes time for everything."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._now_ns = 0

    def now_ns(self) -> int:
        self._now_ns += self._random.choice((0, 1, 3, 40, 700))
        return self._now_ns

    def sleep_until(self, ns: int) -> None:
        self._now_ns = max(self._now_ns, ns + self._random.choice((0, 5)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", POLICIES)
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_parts_sum_to_the_life_where_the_host_takes_time(kind, data, seed):
    """With gaps between steps and late schedules, attribution still sums to E2E and steps do not overlap."""
    case = data.draw(cases(kind))
    assume(built(case))
    core = case.engine()
    ended = live(core, case.workload, Creeping(seed))
    records = core.recorder.records()
    parts = attribute(records)
    assert (parts["ns"] > 0).all()
    total = parts.groupby("request_id", observed=True)["ns"].sum()
    for row in records.requests:
        end_ns = row["delivered_ns"] if row["outcome"] == FINISHED else row["ended_ns"]
        assert total.get(row["request_id"], 0) == end_ns - row["sent_ns"]
    starts, durations = records.steps["start_ns"], records.steps["duration_ns"]
    assert case.stages > 1 or (starts[1:] >= (starts + durations)[:-1]).all()
    assert list(ended.rested) == sorted(set(ended.rested)) and set(ended.rested) <= set(range(len(starts)))


def test_steps_after_a_rest_are_named():
    """A step that began after nothing was to be run is rested; one that followed at once is not."""
    core = engine(vllm(CountingKV(100, 4)))
    ended = live(core, Requests(arrival(0, 5, output=2), arrival(1, 100, output=1)), VirtualClock())
    assert core.recorder.records().steps["start_ns"].tolist() == [5, 15, 100]
    assert ended.rested == (0, 2)


def test_host_time_before_a_first_step_is_the_hosts():
    """Scheduling after an arrival at an idle engine is a host gap, whatever held the queue's head before."""
    records = records_of(
        [{"sent_ns": 0, "ended_ns": 100}, {"sent_ns": 20, "ended_ns": 130}, {"sent_ns": 200, "ended_ns": 230}],
        [{"start_ns": start, "duration_ns": 20, "num_chunks": 1} for start in (5, 100, 207)],
        [
            (2, 0, PREFILL, 0, MISSING),
            (26, 1, BLOCKED, 1, MISSING),
            (98, 1, PREFILL, 0, MISSING),
            (204, 2, PREFILL, 0, MISSING),
        ],
        ("", "no_slot"),
    )
    rows = attribute(records)
    parts = {
        i: dict(rows.loc[rows["request_id"] == i, ["part", "ns"]].itertuples(index=False, name=None)) for i in (1, 2)
    }
    assert parts[1] == {"waiting_step": 5, "host_gap": 1 + 2 + 10, "queued:no_slot": 72, "prefill": 20}
    assert parts[2] == {"host_gap": 4 + 3 + 3, "prefill": 20}


# ---- the load source's lag


def late(lag_ns: int, *, ttft_ns: int = 1000, step_ns: int = 100) -> str:
    return lag_verdict(
        records_of(
            [{"arrival_ns": 0, "lag_ns": lag_ns, "first_delivery_ns": ttft_ns, "ended_ns": ttft_ns} for _ in range(3)],
            [{"start_ns": 0, "duration_ns": step_ns}],
        )
    )


def test_a_late_load_source_voids_the_run():
    """Void from a lag above a mean step and 5 % of the mean TTFT on; the requests beyond it are counted."""
    assert late(150) == ""
    assert "p99 of its lag is 151 ns, and 3 of 3 requests came later" in late(151) and "void" in late(151)
    assert late(151, ttft_ns=2000) == ""


def test_where_nobody_finished_the_lag_is_judged_by_a_step_alone():
    """Above a mean step it voids the run; where no step ran either, nothing tells."""
    open_ones = [{"ended_ns": 10, "lag_ns": ns, "outcome": UNFINISHED} for ns in (0, 101)]
    step = [{"start_ns": 0, "duration_ns": 100}]
    assert "1 of 2 requests came later than a mean step of 100 ns. The run is void" in lag_verdict(
        records_of(open_ones, step)
    )
    assert lag_verdict(records_of([request | {"lag_ns": 100} for request in open_ones], step)) == ""
    assert lag_verdict(records_of(open_ones)) == ""
