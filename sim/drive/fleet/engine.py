"""One engine among others behind a router: its process, in the phases of an instant that all of them share."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, Protocol

import simpy

from batchsim.drive.fleet.fleet_plan import DRAINING
from batchsim.drive.fleet.fleet_records import work_of_steps
from batchsim.drive.fleet.scaling.autoscaler import EngineLoad, EngineWork
from batchsim.drive.instant import ENTER, LAND, SETTLE, Busy, Launch, crank
from batchsim.drive.simulate import Phase
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import EngineEvent
from batchsim.kernel.leaping import Leaps

# Phases of an instant, after all events of SimPy's own priorities; replicas follow each other inside one.
END, CONTROL, ROUTE, ENTER_PHASE, SCHEDULE = (k << 32 for k in range(1, 6))
Steps = Generator[simpy.Event, Any, None]


class Slot:
    """The place of a replica by its number: its `state` since `since_ns`; "" while there is no replica."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.state = ""
        self.since_ns = 0
        self.engine: Engine | None = None
        self.is_noticed = False  # to be taken away


class Home(Protocol):
    """A fleet, as its engines and the clients of them see it. `leap`: steps alike are simulated at once; `plans`: an
    engine may sleep beyond the next arrival."""

    env: simpy.Environment
    leap: bool
    plans: bool

    @property
    def is_streaming(self) -> bool:
        """Whether arrivals may come that no answer causes."""
        ...

    def drain(self, engine: Engine) -> bool:
        """Whether no arrival will come to `engine` until it acts itself."""
        ...

    def rouse_undrained(self) -> None:
        """Wakes engines that went to sleep waiting for arrivals, where by now none will come."""
        ...

    def horizon_ns(self) -> float:
        """The time in ns up to which nothing can happen that an engine must know of at the end of a step."""
        ...

    def tell(self, engine: Engine, events: Iterable[EngineEvent], now_ns: int) -> None:
        """Passes the events of `engine` to router and clients."""
        ...

    def retire(self, slot: Slot) -> None:
        """Removes a replica without work at once."""
        ...

    def check_done(self) -> bool:
        """Whether every request has ended, none will come and no engine is at work; if so, the run is done."""
        ...


class SharedGpu(Protocol):
    """A GPU that runs the steps of several engines."""

    def execute(self, core: EngineCore, batch: Batch, now_ns: int) -> int:
        """Launches a step of `core` at `now_ns`; returns its end in ns."""
        ...


class Engine:
    """One engine from the start of its replica to its end or failure."""

    def __init__(self, fleet: Home, slot: Slot, core: EngineCore, gpu: SharedGpu | None = None) -> None:
        self.fleet = fleet
        self.gpu = gpu  # that runs the steps of other engines too
        self.slot = slot
        self.core = core
        self.leaps = Leaps(core, leaps=fleet.leap)
        self.alive = True
        self._is_ahead = core.loop.is_ahead
        self.wake: simpy.Event | None = None
        self.asked_to_drain = False
        self._counted_steps = 0  # whose work is in the reported counters
        self._is_asleep = False  # over steps that are not simulated yet, as they have no observable events
        self._alarm: simpy.Event | None = None  # before which it need not wake
        self._reached_ns = 0  # the end of the last step that was simulated, or ahead of results of its launch

    def load(self) -> EngineLoad:
        """What the engine's metrics say now."""
        scheduler, kv = self.core.scheduler, self.core.scheduler.kv
        return EngineLoad(self.core.num_waiting, scheduler.num_running, 1 - kv.num_free / kv.num_blocks)

    def demand(self) -> float:
        """The KV in use, and the tokens of the prompts that wait, as a share of what the KV memory holds."""
        kv = self.core.scheduler.kv
        return 1 - kv.num_free / kv.num_blocks + self.core.queued_prompt_tokens / (kv.num_blocks * kv.block_size)

    def work(self, now_ns: int) -> EngineWork:
        """What the steps did that have ended since this was last asked."""
        count, output_tokens, busy_ns = work_of_steps(self.core.recorder, self._counted_steps, now_ns)
        self._counted_steps += count
        return EngineWork(output_tokens, busy_ns)

    def rouse(self) -> None:
        """Wakes the engine if it sleeps."""
        if self.wake is not None:
            wake, self.wake = self.wake, None
            wake.succeed()

    def cut(self, now_ns: int) -> None:
        """Wakes the engine if it sleeps, for a request or a reader of its load: simulates steps up to `now_ns`."""
        old, env = self._alarm, self.fleet.env
        if old is None or not self._is_asleep:
            return
        self._leap(now_ns)
        self._alarm = env.timeout(0)
        self._alarm.callbacks, old.callbacks = old.callbacks, []  # who waited for the old one waits for this

    def is_over(self) -> bool:
        """Whether no arrival will come unless some engine answers something."""
        return self.slot.state == DRAINING or not self.fleet.is_streaming

    def drains(self) -> bool:
        """Whether no arrival will come until this engine acts."""
        self.asked_to_drain = self.fleet.drain(self)
        return self.asked_to_drain

    def tell(self, events: Iterable[EngineEvent], now_ns: int) -> None:
        """Passes the events of this engine to router and clients."""
        self.fleet.tell(self, events, now_ns)

    def process(self) -> Steps:
        """Waits for what the loop names, in the phases of the instant, until the replica is gone.

        `now_ns`, the engine's own time, may run ahead of SimPy's while no other event is due, and is behind it where a
        request arrived as the engine slept: its steps up to then have no observable events.
        """
        env, peek, runs_ahead = self.fleet.env, self.fleet.env.peek, self.fleet.plans
        leaps = self.leaps
        loop = crank(self.core, self, drains=self.drains, settles=True)
        wait, now_ns = next(loop), int(env.now)
        while True:
            phase: int | None = None
            if isinstance(wait, Busy):
                now_ns, phase = wait.until_ns, END if wait.work == "process" else None
            elif wait is ENTER:
                if leaps.precede_calls:
                    self._reached_ns = now_ns
                    now_ns = leaps.leap_calls(now_ns, self._horizon_ns())
                phase = ENTER_PHASE
            elif wait is SETTLE:
                phase = SCHEDULE
            elif wait is LAND:
                now_ns, phase = self.core.in_flight.landing_ns(now_ns), END
            elif isinstance(wait, Launch):
                now_ns = wait.until_ns
                if now_ns > env.now and not (runs_ahead and peek() > now_ns):
                    yield env.timeout(now_ns - int(env.now))
                    if not self.alive:
                        return
                if wait.batch is not None:
                    self._execute(wait.batch, now_ns)
                    self._reached_ns = now_ns
                    if leaps.follow_steps:
                        yield from self._go_on()
                        now_ns = self._reached_ns
            elif isinstance(wait, Batch):
                self._reached_ns = self._execute(wait, now_ns)
                if leaps.follow_steps:
                    yield from self._go_on()
                now_ns, phase = self._reached_ns, END
            else:
                if now_ns > env.now:
                    yield env.timeout(now_ns - int(env.now))
                if not isinstance(wait, Idle):
                    self._through()
                if self.alive:
                    yield from self._rest(wait if isinstance(wait, Idle) else None, now_ns)
                    now_ns = max(now_ns, int(env.now))
            # While no other process acts up to then, or the engine is behind, no event need be waited for.
            if now_ns >= env.now and not (runs_ahead and peek() > now_ns):
                if now_ns > env.now:
                    yield env.timeout(now_ns - int(env.now))
                if phase is not None and peek() <= now_ns:
                    yield Phase(env, phase + self.slot.number)
            if not self.alive:
                return
            wait = loop.send(now_ns)

    def _execute(self, batch: Batch, now_ns: int) -> int:
        return self.core.execute(batch, now_ns) if self.gpu is None else self.gpu.execute(self.core, batch, now_ns)

    def _go_on(self) -> Steps:
        """Simulates steps like the latest, just executed, up to the next event; sleeps while they have no observable
        events."""
        has_leapt = False
        while True:
            if (alarm_ns := self._alarm_ns()) is not None:
                self._is_asleep, self._alarm = True, self.fleet.env.timeout(alarm_ns - int(self.fleet.env.now))
                yield self._alarm
                if not self.alive:
                    return
                if self._is_asleep:  # no request arrived
                    self._leap(self._horizon_ns())
            elif has_leapt:
                return
            else:
                self._leap(self._horizon_ns())
            has_leapt = True

    def _alarm_ns(self) -> int | None:
        """The time in ns until which the engine may sleep, unless a request arrives; None where it is to go on, since
        it may have an observable event before the next one elsewhere, or is behind."""
        fleet, core, due_ns = self.fleet, self.core, self._reached_ns
        if not fleet.plans or core.has_arrivals:
            return None
        if self._is_ahead:
            due_ns = core.in_flight.landing_ns(due_ns)
        if due_ns <= fleet.env.now:
            return None
        until_ns = self.leaps.quiet_until_ns(self._reached_ns)
        return None if until_ns is None or until_ns <= fleet.horizon_ns() else until_ns

    def _leap(self, horizon_ns: float) -> None:
        """Simulates steps like the latest that come before `horizon_ns`."""
        self._is_asleep = False
        # Without `tell`: answers go out when it is time, since other engines and routers are not ahead of it.
        self._reached_ns = self.leaps.leap(self._reached_ns, lambda: horizon_ns)

    def _horizon_ns(self) -> float:
        """When something next happens besides what this engine does, in ns; the present if the engine is behind."""
        env, timer_ns, horizon_ns = self.fleet.env, self.core.next_timer_ns, self.fleet.horizon_ns()
        if self._reached_ns < env.now:
            horizon_ns = env.now
        return horizon_ns if timer_ns is None else min(horizon_ns, timer_ns)

    def _through(self) -> None:
        """Retires the replica if it drains, and ends the run if all is done: this engine has nothing left to do."""
        if self.slot.state == DRAINING:
            self.fleet.retire(self.slot)
        self.fleet.check_done()

    def _rest(self, idle: Idle | None, now_ns: int) -> Steps:
        """Waits until the next arrival, or the time of `idle`."""
        self.wake = self.fleet.env.event()
        self.fleet.rouse_undrained()
        if self.wake is None:
            return
        if idle is None or idle.until_ns is None:
            yield self.wake
        else:
            yield self.wake | self.fleet.env.timeout(idle.until_ns - now_ns)
            self.wake = None
