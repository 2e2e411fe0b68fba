"""The order of one instant, for every driver: an engine's loop that says what to wait for, and never waits itself.

At one instant, in this order, where the engine waits for each step (where it is ahead of results, the next step is
launched before 1: `kernel/in_flight.py`):

1. **Ends.** The step that ends is completed: tokens get their time, the policy frees finished sequences and returns
   responses. So a finish beats a cancel, and a cancel waits for the end of a step.
2. **Events.** An engine returns what happened as events (`kernel/events.py`); the driver passes them to clients, which
   may send their next request at this instant, a router, an HTTP stream.
3. **Cancels and deadlines** that are due take effect.
4. **Arrivals** enter by (time, id). A deadline that an arrival brings and that has passed takes effect at once.
5. **Again.** Where 3 or 4 caused events, 2 to 4 are repeated: responses to them may arrive at this instant too.
6. **Settling.** Among several processes (`settles`) the driver then yields one event of lower priority than theirs, so
   that an engine gets every arrival of the instant, however many hops it took.
7. **Scheduling.** The scheduler is called, and its step launched.

What happens at which end of a step:

    starts  Scheduler.schedule   takes KV for what it schedules; preempted sequences give theirs back
            EngineCore.execute   the executor returns duration and finished sequences; computed tokens and the group
                                 move on; the step's row is written
            kernel/leaping.py    rows of following steps that are alike and that nothing can interrupt
    ends    EngineCore.complete  first and last tokens get their time (`Journal.tokens`)
            Scheduler.complete   frees the KV of finished sequences (whole-batch policies with their batch), lets done
                                 prompts decode, returns the responses
            Journal.end          the row of each answered request

Drivers (`simulate`, each engine of a fleet, `live`, `conform`) differ in how they wait, not in what they do.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from enum import Enum
from typing import Literal, Protocol

from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import Cancelled, EngineEvent, Finished


class Wait(Enum):
    """What a driver is to do before it sends the loop the time, besides running a Batch or resting for an Idle.

    ENTER: submit every arrival that is due. SETTLE: have all other engines of this instant let theirs in, and submit
    what that brought. THROUGH: nothing is left to do and no arrival is due; end, or, as a server, wait for a client.
    LAND: wait until the oldest step in flight is over, and then for as long as the host needs for its results.
    """

    ENTER = 0
    SETTLE = 1
    THROUGH = 2
    LAND = 3


ENTER, SETTLE, THROUGH, LAND = Wait


class Launch:
    """The host is at work until `until_ns`, and no request enters; then launch the step `batch`, without waiting for
    its end. None: the scheduler was asked and had nothing to run."""

    __slots__ = ("batch", "until_ns")

    def __init__(self) -> None:
        self.batch: Batch | None = None
        self.until_ns = 0


class Busy:
    """The host is at work until `until_ns`, and no request enters; a driver in real time, whose host has worked, goes
    on.

    `work`: `launch` the step just scheduled, which is to be launched later; fill the `masks` of the step just launched;
    `process` a call in flight that had nothing to run; `nap`; or `wait` for the oldest step, with as many in flight as
    there may be. `unchanged`: a nap follows a call since which nothing has changed for the scheduler, so that the next
    call has as little to run unless something comes.
    """

    __slots__ = ("unchanged", "until_ns", "work")

    def __init__(self, work: Literal["launch", "masks", "process", "nap", "wait"]) -> None:
        self.work = work
        self.until_ns = 0
        self.unchanged = False


Waits = Generator[Wait | Idle | Batch | Launch | Busy, int, None]


class Driver(Protocol):
    """The methods that the loop needs of its driver."""

    def is_over(self) -> bool:
        """Whether no arrival will come unless this engine answers something."""
        ...

    def tell(self, events: Iterable[EngineEvent], now_ns: int) -> None:
        """Passes on what happened. Clients may answer with arrivals, at `now_ns` or later."""
        ...


def crank(
    core: EngineCore, driver: Driver, *, drains: Callable[[], bool] | None = None, settles: bool = False
) -> Waits:
    """Runs `core` for ever, by its loop. Yields what to wait for; receives, by `send`, the time in ns at which that is
    over.

    For an Idle the driver waits until its `until_ns` or the next arrival, whichever is sooner; for a Batch it executes
    the step, waits for its end and sends that. A Launch or Busy is the driver's until it sends the time: the loop makes
    one of each kind and fills it in again, several times a step. `drains` returns whether no arrival will come until
    this engine acts, which `schedule` receives; by default `driver.is_over`. `settles`: SETTLE is yielded. Both are for
    several engines.
    """
    loop = {"sync": _sync, "batch_queue": _batch_queue, "overlap": _overlap, "events": _events}[core.loop.kind]
    return loop(core, driver, drains or driver.is_over, settles)


def _sync(core: EngineCore, driver: Driver, drains: Callable[[], bool], settles: bool) -> Waits:
    """A step, then the next: while one runs the host stands still."""
    connected, stalled = core.connected, Busy("launch")
    while True:
        now_ns = yield ENTER
        if not core.has_work and driver.is_over():
            yield THROUGH
            continue
        events = _enter(core, driver, now_ns)
        if not events and settles:
            yield SETTLE
            events = _enter(core, driver, now_ns)
        if events:
            continue
        work = _ask(core, driver, drains, now_ns)
        if type(work) is not Idle:
            if connected is not None:
                stalled.until_ns = connected.connector.before_launch(now_ns, 0)
                if stalled.until_ns > now_ns:
                    yield stalled
            end_ns = yield work
            events = core.complete(end_ns) if core.in_flight.steps else []  # else a leap has delivered the last one
            if events:
                driver.tell(events, end_ns)
        elif core.has_work or not driver.is_over():
            yield _until_a_timer(work, core.next_timer_ns)


def _enter(core: EngineCore, driver: Driver, now_ns: int) -> list[EngineEvent]:
    """Applies cancels, deadlines and arrivals that are due; passes their events to the driver, and returns them."""
    events = core.enter_due(now_ns)
    if events:
        driver.tell(events, now_ns)
    return events


def _ask(core: EngineCore, driver: Driver, drains: Callable[[], bool], now_ns: int) -> Batch | Idle:
    """The scheduler's step or wait; the events of requests it rejected go to the driver."""
    work = core.schedule(now_ns, drains())
    if core.events:
        driver.tell(core.take_events(), now_ns)
    return work


def has_left(events: Iterable[EngineEvent]) -> bool:
    """Whether any request that had entered has ended."""
    return any(isinstance(event, Finished | Cancelled) for event in events)


def _until_a_timer(idle: Idle, timer_ns: int | None) -> Idle:
    """`idle`, ending at `timer_ns`, the next deadline or cancel, where that is sooner."""
    if timer_ns is None or (idle.until_ns is not None and idle.until_ns <= timer_ns):
        return idle
    return Idle(timer_ns)


def _batch_queue(core: EngineCore, driver: Driver, drains: Callable[[], bool], settles: bool) -> Waits:
    """vLLM's queue of calls to the scheduler. While it is not full the scheduler is asked again before any result is
    taken; a call that had nothing to run takes a place like any other.

    Source: vllm/v1/engine/core.py of the 0.33.0 wheel, `step_with_batch_queue` and `_process_engine_step`.
    """
    executor, depth, nap_ns = core.executor, core.loop.depth, core.loop.nap_ns
    queue, connected = core.in_flight.calls, core.connected
    launch, masking, processing, napping = Launch(), Busy("masks"), Busy("process"), Busy("nap")
    untold = False  # whether someone has ended since the scheduler was last asked, which asks it once more
    while True:
        now_ns = yield ENTER
        if not (core.has_work or untold or queue) and driver.is_over():
            yield THROUGH
            continue
        events = _enter(core, driver, now_ns)
        if not events and settles:
            yield SETTLE
            events = _enter(core, driver, now_ns)
        if events:
            untold = untold or has_left(events)
            continue
        if not (core.has_entered or untold or queue):
            if core.has_work or not driver.is_over():  # else the run was cut while only KV was left here
                yield IDLE
            continue
        paused = now_ns < core.paused_until_ns
        if paused and not queue:
            yield _until_a_timer(Idle(core.paused_until_ns), core.next_timer_ns)
            continue
        ran = acted = False
        if not paused and (core.has_entered or untold):
            work = _ask(core, driver, drains, now_ns)
            untold = False
            batch = work if type(work) is Batch and (work.chunks or work.num_decode) else None
            ran, acted = batch is not None, type(work) is not Idle
            host_ns = executor.host_ns(batch)
            if batch is not None:
                batch.host_ns = host_ns
            launch.until_ns, launch.batch = now_ns + host_ns[0], batch
            if connected is not None:
                launch.until_ns = connected.connector.before_launch(launch.until_ns, core.in_flight.computed_ns)
            now_ns = yield launch
            if core.in_flight.busy_until_ns > now_ns:
                masking.until_ns = core.in_flight.busy_until_ns
                now_ns = yield masking
            if connected is not None and batch is None:
                connected.connector.launched(now_ns, core.in_flight.computed_ns)
            queue.append(ran)
            if ran and len(core.in_flight.steps) < sum(queue):  # a leap has landed the oldest
                queue.popleft()
                continue
        if len(queue) >= depth or paused or not (ran or core.has_entered):
            if queue.popleft():
                acted, now_ns = True, (yield LAND)
                events = core.complete(now_ns)
                if events:
                    untold = untold or has_left(events)
                    driver.tell(events, now_ns)
            else:
                processing.until_ns = now_ns + executor.host_ns(None)[1]
                if connected is not None and (events := core.notice(connected, processing.until_ns)):
                    driver.tell(events, processing.until_ns)
                now_ns = yield processing
            if connected is not None and connected.connector.noticed.failed:
                untold = True
        if not ran and nap_ns and not paused and (core.has_entered or untold):
            napping.until_ns = now_ns + nap_ns
            napping.unchanged = not (acted or untold) and (connected is None or connected.connector.noticed.is_empty)
            yield napping


def _overlap(core: EngineCore, driver: Driver, drains: Callable[[], bool], settles: bool) -> Waits:
    """SGLang's loop, and TensorRT-LLM's: the scheduler is asked, its step launched, then the step of the call before
    processed. A call that has nothing to run takes no time, and the pipeline drains. A step that is to run `apart` is
    launched last.

    Source: python/sglang/srt/managers/scheduler.py of the 0.5.23 wheel, `event_loop_overlap`;
    tensorrt_llm/_torch/pyexecutor/py_executor.py (00043967), `_executor_loop_overlap`.
    """
    executor = core.executor
    launch, masking, launching = Launch(), Busy("masks"), Busy("launch")
    connected = core.connected
    last: Batch | None = None  # launched by the call before, its results not processed
    while True:
        now_ns = yield ENTER
        if not (core.has_work or last) and driver.is_over():
            yield THROUGH
            continue
        events = _enter(core, driver, now_ns)
        if not events and settles:
            yield SETTLE
            events = _enter(core, driver, now_ns)
        if events:
            continue
        work = _ask(core, driver, drains, now_ns)
        batch = work if type(work) is Batch and (work.chunks or work.num_decode) else None
        apart = False
        if batch is not None:
            batch.host_ns = executor.host_ns(batch)
            launch.until_ns, launch.batch = now_ns + batch.host_ns[0], batch
            if connected is not None:
                launch.until_ns = connected.connector.before_launch(launch.until_ns, core.in_flight.computed_ns)
            apart = batch.apart and last is not None
            if apart:
                launching.until_ns = launch.until_ns
                now_ns = yield launching
            else:
                now_ns = yield launch
            if core.in_flight.busy_until_ns > now_ns:
                masking.until_ns = core.in_flight.busy_until_ns
                now_ns = yield masking
        if last is not None and len(core.in_flight.steps) > (batch is not None and not apart):  # else a leap landed it
            now_ns = yield LAND
            if apart:
                # Scheduled before, with the rows of then: its counters move before the results are processed.
                launch.until_ns = now_ns
                yield launch
            events = core.complete(now_ns)
            if events:
                driver.tell(events, now_ns)
        elif isinstance(work, Idle) and (core.has_work or not driver.is_over()):
            yield _until_a_timer(work, core.next_timer_ns)
        last = batch


def _events(core: EngineCore, driver: Driver, drains: Callable[[], bool], settles: bool) -> Waits:
    """Vidur's replica: at each arrival and at each end of a step the scheduler is asked for one step after another,
    until it has none or as many are in flight as there are stages. A call that had nothing to run takes no place.

    Source: vidur/scheduler/replica_scheduler/base_replica_scheduler.py (7d47513a), `on_schedule`, and vidur/events/*.
    """
    executor, depth, steps = core.executor, core.loop.depth, core.in_flight.steps
    launch, full = Launch(), Busy("wait")
    while True:
        now_ns = yield ENTER
        if not (core.has_work or steps) and driver.is_over():
            yield THROUGH
            continue
        if steps and steps[0].end_ns <= now_ns:
            now_ns = yield LAND
            events = core.complete(now_ns)
            if events:
                driver.tell(events, now_ns)
            continue
        events = _enter(core, driver, now_ns)
        if not events and settles:
            yield SETTLE
            events = _enter(core, driver, now_ns)
        if events:
            continue
        if len(steps) == depth:
            full.until_ns = steps[0].end_ns
            yield full
            continue
        work = _ask(core, driver, drains, now_ns)
        if type(work) is Batch and (work.chunks or work.num_decode):
            work.host_ns = executor.host_ns(work)
            launch.until_ns, launch.batch = now_ns + work.host_ns[0], work
            yield launch
        elif steps:
            yield _until_a_timer(Idle(steps[0].end_ns), core.next_timer_ns)
        elif isinstance(work, Idle) and (core.has_work or not driver.is_over()):
            yield _until_a_timer(work, core.next_timer_ns)
