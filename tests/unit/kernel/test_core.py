"""The order of things within one instant, who is turned away and why, and what a step leaves in the records.

Timelines are exact: a step takes 10 ns, and both drivers, with leaping and without, must give the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.base.errors import ScenarioError, SchedulerStalled
from batchsim.base.units import MAX_TIME_NS
from batchsim.kernel.batch import IDLE, Batch, Idle, StepResult
from batchsim.kernel.core import EngineCore
from batchsim.kernel.draft_group import DraftGroup, DraftRows, Verified
from batchsim.kernel.events import Cancelled, Ended, Finished, Rejected, Tokens, Unfinished
from batchsim.kernel.kv_blocks import CountingKV, KVBlockManager, TableKV
from batchsim.kernel.leaps import leap
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import DECODE, MISSING, PREEMPTED, SAT_OUT, SWAPPED, UNFINISHED, Recorder, Records
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival, DecodeGroup, Event, Request, Sequence
from batchsim.policies.families.static import Static, StaticConfig
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.testing.by_hand import same
from tests.support.engine import DRIVERS, MAX_MODEL_LEN, Constant, Outcome, Requests, arrival, engine, outcomes, vllm
from tests.support.random_cases import random_cases

Driver = Callable[[EngineCore, Requests], int]


@pytest.fixture(params=DRIVERS)
def drive(request: pytest.FixtureRequest) -> Driver:
    return DRIVERS[request.param]


def play(drive: Driver, core: EngineCore, *arrivals: Arrival) -> list[Outcome]:
    drive(core, Requests(*arrivals))
    return outcomes(core.recorder.records())


# ---- timelines


def test_a_prefill_samples_the_first_token(drive: Driver) -> None:
    """Three output tokens take three steps; a request that arrives during a step joins at its end."""
    played = play(drive, engine(vllm(CountingKV(100, 4))), arrival(0, 0), arrival(1, 5, output=1))
    assert played == [
        Outcome("finished", "", 0, 10, 30, 30, 3),
        Outcome("finished", "", 10, 20, 20, 20, 1),
    ]


def test_those_of_one_instant_enter_by_id(drive: Driver) -> None:
    """Arrivals of the same nanosecond are served in order of their ids, however they were submitted."""
    core = engine(vllm(CountingKV(100, 4), max_num_seqs=1))
    for id in (2, 0, 1):
        core.submit(arrival(id, 0, output=1))
    assert [o.scheduled_ns for o in play(drive, core)] == [0, 10, 20]


def test_the_client_caps_the_output(drive: Driver) -> None:
    """Generation stops at the true length, the client's cap or the model's limit, whichever is first."""
    core = engine(vllm(CountingKV(1_000, 4), max_num_batched_tokens=MAX_MODEL_LEN))
    arrivals = (
        arrival(0, 0, output=2, cap=9),
        arrival(1, 0, output=9, cap=2),
        arrival(2, 0, prompt=MAX_MODEL_LEN - 2, output=9),
    )
    assert [o.output_tokens for o in play(drive, core, *arrivals)] == [2, 2, 2]


def test_prefill_pairs_count_every_key_of_every_query(drive: Driver) -> None:
    """Chunks of 4 and 3 of a prompt of 7, a prompt of 1 beside the second: token i has i + 1 keys."""
    core = engine(vllm(CountingKV(100, 4), max_num_batched_tokens=4))
    play(drive, core, arrival(0, 0, prompt=7, output=2), arrival(1, 5, prompt=1, output=2))
    assert core.recorder.records().steps["prefill_pairs"].tolist() == [1 + 2 + 3 + 4, 5 + 6 + 7 + 1, 0]


def test_a_front_end_shifts_only_the_delivery(drive: Driver) -> None:
    """Tokens are emitted at step ends and reach the client `per_chunk_ns` later."""
    core = engine(vllm(CountingKV(100, 4)), per_chunk_ns=7)
    play(drive, core, arrival(0, 0))
    (row,) = core.recorder.records().requests
    assert [row[n] for n in ("first_token_ns", "first_delivery_ns", "last_token_ns", "delivered_ns")] == [
        10,
        17,
        30,
        37,
    ]


def test_a_first_token_is_the_later_at_its_client_the_more_answers_stream(drive: Driver) -> None:
    """Two begin at 10, a third at 30 with the last tokens of the others, a fourth, of one token, at 70 and alone.

    The first piece is no later than the last, which nothing delays.
    """
    core = engine(vllm(CountingKV(100, 4)), per_chunk_ns=7, per_stream_ns=3)
    play(drive, core, arrival(0, 0), arrival(1, 0), arrival(2, 15), arrival(3, 60, output=1))
    rows = sorted(core.recorder.records().requests, key=lambda row: row["request_id"])
    assert [int(row["first_delivery_ns"]) for row in rows] == [10 + 7 + 6, 10 + 7 + 6, 30 + 7 + 9, 70 + 7]
    assert [int(row["delivered_ns"] - row["last_token_ns"]) for row in rows] == [7, 7, 7, 7]


def test_clients_are_told_once_each(drive: Driver) -> None:
    """Finished, rejected and cancelled requests are all answered, when it happens."""
    core = engine(vllm(CountingKV(5, 4)))
    workload = Requests(arrival(0, 0), arrival(1, 0, prompt=30), arrival(2, 0, output=9, cancel_ns=12))
    drive(core, workload)
    assert workload.answered == [(1, 0), (2, 20), (0, 30)]


# ---- cancels and deadlines


@pytest.mark.parametrize(("cancel_ns", "outcome"), [(30, "finished"), (21, "finished"), (20, "cancelled")])
def test_a_finish_beats_a_cancel(drive: Driver, cancel_ns: int, outcome: str) -> None:
    """A cancel waits for the step boundary, and there the finish of the same instant comes first."""
    (played,) = play(drive, engine(vllm(CountingKV(100, 4))), arrival(0, 0, cancel_ns=cancel_ns))
    assert played.outcome == outcome


def test_a_held_response_is_nobodys_once_its_client_gave_up(drive: Driver) -> None:
    """Who has its last token but not its answer when its deadline passes is cancelled; its batch goes on."""
    config = StaticConfig(batch_size=2)
    core = engine(Static(config, PolicyContext(CountingKV(100, 4), MAX_MODEL_LEN)))
    played = play(drive, core, arrival(0, 0, output=1, deadline_ns=25), arrival(1, 0, output=5))
    assert played[0] == Outcome("cancelled", "deadline", 0, 10, 10, 30, 1)
    assert core.recorder.records().requests["delivered_ns"].tolist() == [MISSING, 50]


def test_a_cancelled_request_keeps_what_it_made(drive: Driver) -> None:
    """It ends at the boundary after the cancel, with its tokens counted, no last token, and its KV given back."""
    core = engine(vllm(CountingKV(100, 4)))
    (played,) = play(drive, core, arrival(0, 0, output=9, cancel_ns=11))
    assert played == Outcome("cancelled", "client_cancel", 0, 10, MISSING, 20, 2)
    assert core.scheduler.kv.num_free == 100


def test_a_deadline_that_passed_during_the_step_is_seen_at_once(drive: Driver) -> None:
    """A request that arrives and expires within one step is cancelled at the boundary and never scheduled."""
    played = play(drive, engine(vllm(CountingKV(100, 4))), arrival(0, 0), arrival(1, 3, deadline_ns=7))
    assert played[1] == Outcome("cancelled", "deadline", MISSING, MISSING, MISSING, 10, 0)


def test_a_cancel_makes_room_for_an_arrival_of_the_same_instant(drive: Driver) -> None:
    """Cancels take effect before arrivals: the full queue has a place again."""
    core = engine(vllm(CountingKV(100, 4), max_num_seqs=1), max_waiting=1)
    played = play(drive, core, arrival(0, 0), arrival(1, 1, cancel_ns=20), arrival(2, 20))
    assert [o.outcome for o in played] == ["finished", "cancelled", "finished"]


def test_a_deadline_cuts_an_idle_wait_short(drive: Driver) -> None:
    """An engine that waits for nothing else wakes for the deadline; that is no stall."""
    (played,) = play(drive, engine(Sleeper()), arrival(0, 5, deadline_ns=42))
    assert played == Outcome("cancelled", "deadline", MISSING, MISSING, MISSING, 42, 0)


def test_a_scheduler_is_told_when_requests_enter_and_are_given_up() -> None:
    """The time of the instant, not that of the arrival or of the deadline."""
    notified: list[tuple[str, int, int]] = []

    class Notified(Sleeper):
        def add(self, seq: Sequence, now_ns: int) -> None:
            notified.append(("add", seq.request.id, now_ns))
            super().add(seq, now_ns)

        def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
            notified.append(("cancel", seq.request.id, now_ns))
            return super().cancel(seq, now_ns)

    core = engine(Notified())
    core.submit(arrival(0, 3, deadline_ns=7))
    core.enter_due(5)
    core.enter_due(9)
    assert notified == [("add", 0, 5), ("cancel", 0, 9)]


def test_timers_of_the_ended_wake_nobody() -> None:
    """Once a request has ended its deadline is no longer due."""
    core = engine(vllm(CountingKV(100, 4)))
    core.submit(arrival(0, 0, output=1, deadline_ns=500))
    batch = core.schedule(0, drain=True)
    assert core.next_timer_ns == 500
    assert isinstance(batch, Batch)
    core.complete(core.execute(batch, 0))
    assert core.next_timer_ns is None
    assert not core.has_work


def test_who_waits_is_counted_before_it_is_let_in() -> None:
    """`num_waiting` counts the inbox and the scheduler's queue, and not who runs."""
    core = engine(vllm(CountingKV(100, 4), max_num_seqs=1))
    for made in (arrival(0, 0), arrival(1, 0), arrival(2, 5)):
        core.submit(made)
    assert core.num_waiting == 3
    core.schedule(0, drain=False)
    assert core.num_waiting == 2


def test_the_next_timer_is_the_first_cancel_or_the_end_of_the_run() -> None:
    """Whichever is sooner; the end of the run counts only while somebody is alive."""
    core = engine(vllm(CountingKV(100, 4)), stop_ns=50)
    assert core.next_timer_ns is None
    core.submit(arrival(0, 0, deadline_ns=70))
    core.schedule(0, drain=False)
    assert core.next_timer_ns == 50
    core.submit(arrival(1, 10, cancel_ns=40))
    core.enter_due(10)
    assert core.next_timer_ns == 40


def test_asking_for_a_batch_lets_in_what_fell_due() -> None:
    """A deadline that passed, and the end of the run, take effect though nobody arrives."""
    core = engine(vllm(CountingKV(100, 4)))
    core.submit(arrival(0, 0, deadline_ns=5))
    core.schedule(0, drain=False)
    core.schedule(10, drain=False)
    assert not core.has_work
    core = engine(vllm(CountingKV(100, 4)), stop_ns=5)
    core.submit(arrival(0, 0))
    core.schedule(0, drain=False)
    assert core.schedule(10, drain=False) is IDLE
    assert not core.has_work


# ---- rejections


def test_each_rejection_has_its_reason_and_numbers(drive: Driver) -> None:
    """Too long for the model, too large for the pool, no place in the queue: each is counted under its own name."""
    core = engine(vllm(CountingKV(5, 4), max_num_seqs=1), max_waiting=1)
    arrivals = (
        arrival(0, 0, prompt=MAX_MODEL_LEN),
        arrival(1, 0, prompt=18, output=4),
        arrival(2, 0, prompt=18, output=3),
        arrival(3, 0),
    )
    played = play(drive, core, *arrivals)
    assert [(o.outcome, o.reason) for o in played] == [
        ("rejected", "prompt_too_long"),
        ("rejected", "never_fits"),
        ("finished", ""),
        ("rejected", "queue_full"),
    ]
    assert [o.ended_ns for o in played] == [0, 0, 30, 0]
    assert core.recorder.records().details == {
        "prompt_too_long": "prompt of 1000 tokens, max_model_len 1000",
        "never_fits": "6 KV blocks needed for 21 tokens, 5 in the pool",
        "queue_full": "1 request waits already",
    }


class Minding(SimExecutor):
    """Counts how often each sequence that began has ended."""

    def __init__(self) -> None:
        super().__init__(Constant(), MAX_MODEL_LEN)
        self.ends: dict[int, int] = {}

    def begin(self, seq: Sequence, output_tokens: int | None) -> None:
        super().begin(seq, output_tokens)
        self.ends[seq.request.id] = 0

    def end(self, seq: Sequence) -> None:
        super().end(seq)
        self.ends[seq.request.id] = self.ends.get(seq.request.id, 0) + 1


def test_the_executor_is_told_of_every_end(drive: Driver) -> None:
    """Finished, cancelled, cut by a deadline or rejected: whoever began ends once, or a long run fills the memory."""
    executor = Minding()
    core = EngineCore(vllm(CountingKV(5, 4)), executor, Recorder(), max_model_len=MAX_MODEL_LEN)
    arrivals = (
        arrival(0, 0),
        arrival(1, 0, output=9, cancel_ns=25),
        arrival(2, 0, output=9, deadline_ns=35),
        arrival(3, 0, prompt=30),
    )
    played = play(drive, core, *arrivals)
    assert [o.outcome for o in played] == ["finished", "cancelled", "cancelled", "rejected"]
    assert executor.ends == {0: 1, 1: 1, 2: 1, 3: 1}


def test_a_simulation_needs_lengths() -> None:
    """A request without its true output length cannot be simulated, and says so."""
    core = engine(vllm(CountingKV(5, 4)))
    core.submit(Arrival(Request(3, 0, 4, 4), None))
    with pytest.raises(ValueError, match="request 3 has no output length"):
        core.schedule(0, drain=True)


def test_two_that_end_in_one_step_end_in_batch_order() -> None:
    """A prompt that was let in before the decode comes before it, though decodes are looked at first."""
    group, decode, prompt = DecodeGroup(4), Sequence(Request(0, 0, 4, 2)), Sequence(Request(1, 0, 4, 1))
    executor = SimExecutor(Constant(), MAX_MODEL_LEN)
    executor.begin(decode, 2)
    executor.begin(prompt, 1)
    prompt.order, decode.order = 0, 1
    decode.settled_computed_tokens, decode.settled_output_tokens = 4, 1
    group.join(decode)
    assert executor.execute(Batch(group, [(prompt, 4)], 4)).finished == [prompt, decode]


# ---- schedulers that do not move


class Sleeper:
    """Answers a queue that is not empty with `work`, and never moves it."""

    streams = True
    evidence = "none"
    num_running = 0

    def __init__(self, work: Batch | Idle = IDLE) -> None:
        self.kv: KVBlockManager = CountingKV(8, 4)
        self.events: list[Event] = []
        self.work = work
        self.queue: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        return len(self.queue)

    def add(self, seq: Sequence, now_ns: int) -> None:
        self.queue.append(seq)

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        self.queue.remove(seq)
        return []

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        return self.work if self.queue else IDLE

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        return False

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        return []


@pytest.mark.parametrize(
    ("work", "complaint"),
    [
        (IDLE, "nothing is due after 5 ns and the scheduler waits"),
        (Idle(5), "asks at 5 ns to wait until 5 ns"),
        (Idle(4), "asks at 5 ns to wait until 4 ns"),
        (Batch(None, [], 0), "empty batch at 5 ns with nothing preempted"),
    ],
)
def test_a_scheduler_that_would_wait_for_ever_is_stopped(drive: Driver, work: Batch | Idle, complaint: str) -> None:
    """Waiting for nothing, for the past or in empty steps raises one line that says who waits on what."""
    with pytest.raises(SchedulerStalled, match=complaint) as error:
        play(drive, engine(Sleeper(work)), arrival(0, 5))
    assert "Sleeper: 1 waiting, 0 running, 8 of 8 KV blocks free; oldest: Sequence(request 0" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_run_whose_times_no_column_could_hold_is_an_error(drive: Driver) -> None:
    """A step may end 146 years after the start, the next one may not: the error names the cost."""

    class Endless:
        def step_ns(self, batch: Batch) -> int:
            return MAX_TIME_NS // 4

    core = engine(vllm(CountingKV(100, 4)))
    core.executor = SimExecutor(Endless(), MAX_MODEL_LEN)
    with pytest.raises(ScenarioError, match=r"^cost: a step of 36\.6 years would end 183 years after the start"):
        play(drive, core, arrival(0, 0, output=9))
    assert core.recorder.num_steps == 4


def test_waiting_is_no_stall_while_something_may_come() -> None:
    """Without drain a scheduler may wait for the next arrival."""
    core = engine(Sleeper())
    core.submit(arrival(0, 0))
    assert core.schedule(0, drain=False) is IDLE


def test_preemptions_between_which_tokens_are_made_are_no_circle(
    drive: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only preemptions in a row stop a run: three with tokens of prompts or of decodes between them are valid."""
    monkeypatch.setattr("batchsim.kernel.core.MAX_FRUITLESS_PREEMPTIONS", 1)
    core = engine(vllm(CountingKV(3, 4), max_num_seqs=2))
    drive(core, Requests(*(arrival(i, 0, prompt=4, output=8) for i in range(4))))
    requests = core.recorder.records().requests
    assert (requests["num_preemptions"].sum(), requests["output_tokens"].tolist()) == (3, [8] * 4)


@pytest.mark.parametrize("tokens", ["of a prompt", "of a decode"])
def test_any_token_ends_a_row_of_fruitless_preemptions(tokens: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that makes a token, by a prompt's end or by a decode, lets as many preemptions follow as before it."""
    monkeypatch.setattr("batchsim.kernel.core.MAX_FRUITLESS_PREEMPTIONS", 1)
    scheduler = Sleeper()
    core = engine(scheduler)
    victim, other = Sequence(Request(0, 0, 4, 9)), Sequence(Request(1, 0, 4, 9))
    for seq in (victim, other):
        core.journal.begin(seq, Arrival(seq.request, 9))
        core.executor.begin(seq, 9)
        assert scheduler.kv.allocate(seq, 8)
    scheduler.add(victim, 0)
    group = DecodeGroup(4)
    if tokens == "of a decode":
        other.settled_computed_tokens, other.settled_output_tokens = 4, 1
        group.join(other)

    def step(work: Batch, now_ns: int) -> None:
        scheduler.work = work
        core.execute(core.schedule(now_ns, drain=False), now_ns)

    step(Batch(None, [], 0, preempted=[victim]), 0)
    step(Batch(group, [], 0) if len(group) else Batch(None, [(other, 4)], 4), 10)
    step(Batch(None, [], 0, preempted=[victim]), 20)
    with pytest.raises(SchedulerStalled, match="2 preemptions without a token by 30 ns"):
        step(Batch(None, [], 0, preempted=[victim]), 30)


@pytest.mark.parametrize("change", ["left", "joined", "preempted", "swap_in"])
def test_each_change_in_a_batch_is_written_down(change: str) -> None:
    """A decode that sits out, returns, is preempted or swapped in leaves a row, though nothing else changes."""
    scheduler = Sleeper()
    core = engine(scheduler)
    group, seq, other = DecodeGroup(4), Sequence(Request(0, 0, 4, 9)), Sequence(Request(1, 0, 4, 9))
    for one in (seq, other):
        core.journal.begin(one, Arrival(one.request, 9))
        one.settled_computed_tokens, one.settled_output_tokens, one.state = 4, 1, DECODE
        group.join(one)
    scheduler.add(seq, 0)

    def schedule(now_ns: int, **more: list) -> None:
        scheduler.work = Batch(group, [], 0, **more)
        core.schedule(now_ns, drain=False)

    schedule(0)
    if change == "preempted":
        schedule(10, preempted=[seq])
    elif change == "swap_in":
        seq.state = SWAPPED
        schedule(10, swap_in=[(seq, 1)])
    else:
        group.leave(seq)
        schedule(10)
        if change == "joined":
            group.join(seq)
            schedule(20)
    expected = {
        "left": [SAT_OUT], "joined": [SAT_OUT, DECODE], "preempted": [PREEMPTED], "swap_in": [DECODE],
    }  # fmt: skip
    assert core.recorder.records().states["state"].tolist() == expected[change]


@pytest.mark.parametrize(("chunks", "end_ns"), [(True, 10), (False, 10 + 10 * 6)])
def test_only_a_step_of_decodes_is_repeated(chunks: bool, end_ns: int) -> None:
    """Whatever the policy says: a step that computes a prompt too stands alone; decodes go on to before the last."""

    class Repeats(Sleeper):
        def repeat(self, batch: Batch, now_ns: int) -> bool:
            batch.again()
            return True

    core = engine(Repeats())
    group, seq, other = DecodeGroup(4), Sequence(Request(0, 0, 4, 9)), Sequence(Request(1, 0, 4, 9))
    for one in (seq, other):
        core.journal.begin(one, Arrival(one.request, 9))
        core.executor.begin(one, 9)
        assert core.scheduler.kv.allocate(one, 13)
    seq.settled_computed_tokens, seq.settled_output_tokens = 4, 1
    group.join(seq)
    batch = Batch(group, [(other, 3)], 3) if chunks else Batch(group, [], 0)
    assert leap(core, simulated(core), batch, core.execute(batch, 0), lambda: math.inf) == end_ns


def simulated(core: EngineCore) -> SimExecutor:
    """The executor of an engine that is simulated."""
    assert isinstance(core.executor, SimExecutor)
    return core.executor


def test_idle_until_is_kept(drive: Driver) -> None:
    """A scheduler that names a time is asked again then, and not before unless something happens."""

    asked: list[int] = []

    class Until100(Sleeper):
        def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
            if self.queue:
                asked.append(now_ns)
            return Idle(100) if self.queue and now_ns < 100 else IDLE

    play(drive, engine(Until100()), arrival(0, 5, deadline_ns=300), arrival(1, 60, deadline_ns=301))
    assert asked == [5, 60, 100, 300]


# ---- the end


def test_closing_ends_all_that_is_open() -> None:
    """What runs, waits or has not yet entered becomes `unfinished` with the reason given."""
    core = engine(vllm(CountingKV(100, 4), max_num_seqs=1))
    for made in (arrival(0, 0, output=9), arrival(1, 0), arrival(2, 500)):
        core.submit(made)
    batch = core.schedule(0, drain=False)
    assert isinstance(batch, Batch)
    core.complete(core.execute(batch, 0))
    core.close(10, "time_limit")
    assert outcomes(core.recorder.records()) == [
        Outcome("unfinished", "time_limit", 0, 10, MISSING, 10, 1),
        Outcome("unfinished", "time_limit", MISSING, MISSING, MISSING, 10, 0),
        Outcome("unfinished", "time_limit", MISSING, MISSING, MISSING, 10, 0),
    ]
    assert not core.has_work


@pytest.mark.parametrize(("stop_ns", "tokens"), [(19, 2), (20, 2), (21, 3)])
def test_a_run_stops_at_the_first_boundary_at_or_after_its_end(drive: Driver, stop_ns: int, tokens: int) -> None:
    """A step that ends at `stop_ns` to the nanosecond is the last."""
    core = engine(vllm(CountingKV(100, 4)), stop_ns=stop_ns)
    (played,) = play(drive, core, arrival(0, 0, output=9))
    assert played == Outcome("unfinished", "drain_limit", 0, 10, MISSING, 10 * tokens, tokens)


def test_an_engine_may_fail_before_its_first_step() -> None:
    """Nothing runs that could be cut; what was open comes back in order of entering, those not let in last."""
    core = engine(vllm(CountingKV(100, 4)))
    made = [arrival(0, 0), arrival(1, 0), arrival(2, 50)]
    for one in made:
        core.submit(one)
    core.enter_due(0)
    assert core.fail(10, "replica_failed") == made
    assert [(o.outcome, o.ended_ns) for o in outcomes(core.recorder.records())] == [("unfinished", 10)] * 3


def test_an_engine_may_fail_in_a_step_in_which_nobody_decodes() -> None:
    """The token that the cut step would have made is lost."""
    scheduler = Sleeper()
    core = engine(scheduler)
    one = arrival(0, 0)
    core.submit(one)
    core.enter_due(0)
    assert scheduler.kv.allocate(scheduler.queue[0], 4)
    scheduler.work = Batch(None, [(scheduler.queue[0], 4)], 4)
    core.execute(core.schedule(0, drain=False), 0)
    assert core.fail(5, "replica_failed") == [one]
    assert core.recorder.records().requests["output_tokens"].tolist() == [0]


def test_the_simulation_driver_wants_a_simulated_executor() -> None:
    """A real model cannot be cranked in simulated time."""

    class Real:
        pass

    core = engine(vllm(CountingKV(5, 4)))
    core.executor = Real()  # type: ignore[assignment]
    with pytest.raises(TypeError, match="a simulation needs a SimExecutor, not Real"):
        DRIVERS["simulate"](core, Requests())


# ---- any load

LOADS = st.lists(
    st.tuples(
        st.integers(0, 400),  # arrival
        st.integers(1, 30),  # prompt
        st.integers(1, 40),  # output
        st.one_of(st.none(), st.integers(0, 600)),  # deadline
        st.one_of(st.none(), st.integers(0, 600)),  # cancel
    ),
    min_size=1,
    max_size=12,
)


def records_of(
    drive: Driver, kv: CountingKV | TableKV, load: list[tuple[int, int, int, int | None, int | None]]
) -> Records:
    core = EngineCore(
        vllm(kv, 4, 24), SimExecutor(Constant(), MAX_MODEL_LEN), engine(vllm(kv)).recorder, max_model_len=MAX_MODEL_LEN
    )
    arrivals = [
        arrival(id, at_ns, prompt, output, deadline_ns=deadline, cancel_ns=cancel)
        for id, (at_ns, prompt, output, deadline, cancel) in enumerate(load)
    ]
    drive(core, Requests(*arrivals))
    assert kv.num_free == kv.num_blocks
    assert not core.has_work
    return core.recorder.records()


@random_cases(60)
@given(LOADS, st.integers(12, 40))
def test_drivers_managers_and_leaping_agree(load: list, num_blocks: int) -> None:
    """Both drivers, both KV managers, leaping or not: the same bytes, and every KV block given back."""
    first, *others = (
        records_of(drive, manager(num_blocks, 4), load)
        for drive in DRIVERS.values()
        for manager in (CountingKV, TableKV)
    )
    for other in others:
        assert other.texts == first.texts
        same(other, first)


@random_cases(60)
@given(LOADS, st.integers(12, 40))
def test_tokens_are_conserved(load: list, num_blocks: int) -> None:
    """Steps compute each finished request's tokens once, and again only what is counted as recomputed."""
    load = [(at_ns, prompt, output, None, None) for at_ns, prompt, output, _, _ in load]
    records = records_of(DRIVERS["simulate"], CountingKV(num_blocks, 4), load)
    done = records.requests[records.requests["outcome"] == 0]
    steps = records.steps
    computed = int(steps["num_prefill_tokens"].sum() + steps["num_decode_tokens"].sum())
    assert computed == (done["prompt_tokens"] + done["output_tokens"] - 1 + done["recomputed_tokens"]).sum()
    assert steps["num_sampled_chunks"].sum() + steps["num_decode"].sum() == done["output_tokens"].sum()
    assert steps["num_preempted"].sum() == done["num_preemptions"].sum()


# ---- what happened, as drivers are told


def test_a_client_that_gives_up_before_its_time_takes_nobody_with_it() -> None:
    """Of two that have not entered yet, the one that was cancelled is given up as it enters."""
    core = engine(vllm(CountingKV(100, 4)))
    for made in (arrival(0, 5), arrival(1, 5)):
        core.submit(made)
    core.cancel(1, 3)
    assert [(type(event), event.request.id) for event in core.enter_due(5)] == [(Cancelled, 1)]


def test_an_engine_says_who_ended_and_why() -> None:
    """Each call returns what happened in it, once: rejected and cancelled as they enter, finished with their step."""
    core = engine(vllm(CountingKV(100, 4)), max_waiting=2)
    for made in (arrival(0, 0, output=1), arrival(1, 0, deadline_ns=0), arrival(2, 0, prompt=MAX_MODEL_LEN)):
        core.submit(made)
    notified = core.enter_due(0)
    assert [(type(event), event.request.id, event.reason) for event in notified if isinstance(event, Ended)] == [
        (Cancelled, 1, "deadline"),
        (Rejected, 2, "prompt_too_long"),
    ]
    batch = core.schedule(0, drain=True)
    assert isinstance(batch, Batch)
    assert core.take_events() == []
    core.submit(arrival(3, 5))
    (finished,) = core.complete(core.execute(batch, 0))
    assert (type(finished), finished.request.id) == (Finished, 0)
    core.close(10, "drain_limit")
    (unfinished,) = core.take_events()
    assert (type(unfinished), unfinished.request.id, unfinished.outcome) == (Unfinished, 3, UNFINISHED)
    assert core.take_events() == []


def test_tokens_are_told_to_whoever_asks() -> None:
    """The last chunk of a prompt and each decode have one; in a leap each decode has one a step, before its end."""
    core = engine(vllm(CountingKV(100, 4), max_num_batched_tokens=4), tells_tokens=True)
    core.submit(arrival(0, 0, prompt=5, output=5))
    notified, now_ns = [], 0
    while core.has_work:
        batch = core.schedule(now_ns, drain=True)
        assert isinstance(batch, Batch)
        now_ns = core.execute(batch, now_ns)
        now_ns = leap(core, simulated(core), batch, now_ns, (now_ns + 15).__float__)
        notified.append([(e.count if isinstance(e, Tokens) else "end", e.request.id) for e in core.complete(now_ns)])
    assert notified == [[], [(1, 0)], [(3, 0)], [(1, 0), ("end", 0)]]


def test_tokens_are_told_to_nobody_who_did_not_ask() -> None:
    """Unless a driver asks, a step says who has ended and nothing else."""
    core = EngineCore(
        vllm(CountingKV(100, 4)), SimExecutor(Constant(), MAX_MODEL_LEN), Recorder(), max_model_len=MAX_MODEL_LEN
    )
    core.submit(arrival(0, 0))
    batch = core.schedule(0, drain=True)
    assert isinstance(batch, Batch)
    assert core.complete(core.execute(batch, 0)) == []


@pytest.mark.parametrize(("at_ns", "outcome"), [(0, "cancelled"), (5, "cancelled"), (15, "finished")])
def test_a_client_may_give_up_at_any_time(at_ns: int, outcome: str) -> None:
    """Before it entered, while a step runs, which it waits for, and after its last step has begun: a finish wins."""
    core = engine(vllm(CountingKV(100, 4)))
    core.submit(arrival(0, 0, output=2))
    now_ns = 0
    while core.has_work:
        work = core.schedule(now_ns, drain=True) if now_ns != at_ns else None
        if now_ns <= at_ns < now_ns + 10:
            core.cancel(0, at_ns)
            core.cancel(7, at_ns)
            work = work or core.schedule(now_ns, drain=True)
        if isinstance(work, Batch):
            now_ns = core.execute(work, now_ns)
            core.complete(now_ns)
    core.cancel(0, now_ns)
    assert core.next_timer_ns is None
    (ended,) = outcomes(core.recorder.records())
    assert ended.outcome == outcome
    assert core.scheduler.kv.num_free == 100


@pytest.mark.parametrize("given_up", [0, 1])
def test_one_who_gives_up_is_the_one_who_is_cancelled(given_up: int) -> None:
    """Of two who run, by its id, with the reason of a client's cancel."""
    core = engine(vllm(CountingKV(100, 4)))
    for made in (arrival(0, 0, output=9), arrival(1, 0, output=9)):
        core.submit(made)
    core.enter_due(0)
    core.cancel(given_up, 5)
    (cancelled,) = core.enter_due(5)
    assert isinstance(cancelled, Cancelled)
    assert (cancelled.request.id, cancelled.reason) == (given_up, "client_cancel")


def test_the_deadline_of_one_that_ended_hides_no_other_of_that_time() -> None:
    """Both fall due at 50; who has ended by then is passed over."""
    core = engine(vllm(CountingKV(100, 4)))
    core.submit(arrival(0, 0, output=1, deadline_ns=50))
    core.submit(arrival(1, 0, output=99, deadline_ns=50))
    batch = core.schedule(0, drain=True)
    assert isinstance(batch, Batch)
    (finished,) = core.complete(core.execute(batch, 0))
    (cancelled,) = core.enter_due(50)
    assert (type(finished), finished.request.id, type(cancelled), cancelled.request.id) == (Finished, 0, Cancelled, 1)


def test_a_policy_is_told_when_a_step_ended_and_what_it_says_then_has_that_time() -> None:
    """Its `complete` has the time, and a head that it calls blocked is so from then on."""

    class Ends(Vllm):
        ended: ClassVar[list[int]] = []

        def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
            self.ended.append(now_ns)
            self.events.append(Event("blocked", finished[0], "kv_blocks"))
            return super().complete(batch, finished, now_ns)

    core = engine(vllm(CountingKV(100, 4), kind=Ends))
    core.submit(arrival(0, 0, output=1))
    batch = core.schedule(0, drain=True)
    assert isinstance(batch, Batch)
    core.complete(core.execute(batch, 0))
    assert Ends.ended == [10]
    assert core.recorder.records().states["time_ns"].tolist() == [0, 10]


def test_tokens_accepted_by_a_step_are_those_of_the_executor() -> None:
    """A member that got 3 in one step has 3 more, and the row of the step says so; it is told of them if it lives."""

    class Accepts(SimExecutor):
        def execute(self, batch: Batch) -> StepResult:
            return StepResult(10, [], Verified(np.array([3])))

    core = engine(Sleeper())
    core.executor = Accepts(Constant(), MAX_MODEL_LEN)
    group, seq = DraftGroup(4), Sequence(Request(0, 0, 4, 99))
    seq.settled_computed_tokens, seq.settled_output_tokens = 4, 1
    group.join(seq)
    batch = Batch(group, [], 0)
    batch.verify(DraftRows([seq], np.array([4]), {}))
    core.execute(batch, 0)
    assert seq.num_output_tokens == 4
    row = core.recorder.records().steps[0]
    assert [row[name] for name in ("num_decode", "num_decode_tokens", "num_accepted_tokens")] == [1, 4, 2]
    (step,) = core.in_flight.steps
    assert list(step.tokens([seq])) == [Tokens(seq.request, 3)] and not list(step.tokens([]))


def test_a_scheduler_that_foresees_its_steps_is_known_by_that() -> None:
    """Leaps ask it then, which changes how often, and no record."""
    foresees = vllm(CountingKV(100, 4))
    assert engine(foresees).steady is foresees and engine(Sleeper()).steady is None


def test_an_answer_that_is_held_is_given_up_without_the_policy() -> None:
    """It has its last token: its client's deadline ends it, and the policy, which let it go, is not asked to cancel."""

    class Holds(Sleeper):
        def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
            self.queue.clear()
            return []

        def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
            raise AssertionError("asked to cancel what it let go")

    policy = Holds()
    core = engine(policy)
    core.submit(arrival(0, 0, prompt=4, output=1, deadline_ns=50))
    core.enter_due(0)
    (seq,) = policy.queue
    assert policy.kv.allocate(seq, 4)
    policy.work = Batch(None, [(seq, 4)], 4)
    batch = core.schedule(0, drain=True)
    assert isinstance(batch, Batch)
    core.complete(core.execute(batch, 0))
    (cancelled,) = core.enter_due(50)
    assert isinstance(cancelled, Cancelled)
    assert not core.executor._targets  # type: ignore[attr-defined]


def test_one_cut_to_a_lower_cap_says_so_with_the_numbers(drive: Driver) -> None:
    """A policy lowers 9 to 4: it ends with 4 as cut; one that ends by itself before that does not."""

    class Cuts(Vllm):
        def add(self, seq: Sequence, now_ns: int) -> None:
            seq.max_output_tokens = 4
            super().add(seq, now_ns)

    core = engine(vllm(CountingKV(100, 4), kind=Cuts))
    play(drive, core, arrival(0, 0, output=9), arrival(1, 0, output=3, cap=9))
    assert [o.reason for o in outcomes(core.recorder.records())] == ["cap_cut", ""]
    assert core.recorder.details == {"cap_cut": "9 output tokens asked for, 4 allowed"}


def test_after_the_end_nobody_waits() -> None:
    """What was in the inbox has ended too; and a scheduler that stalls with nobody there says that it does."""
    core = engine(vllm(CountingKV(100, 4)))
    core.submit(arrival(0, 5))
    core.close(0, "drain_limit")
    assert (core.num_waiting, core.has_work) == (0, False)

    class Waits(Sleeper):
        def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
            return Idle(5)

    with pytest.raises(SchedulerStalled, match="oldest: None"):
        engine(Waits()).schedule(5, drain=True)
