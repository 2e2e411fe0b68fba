"""One engine among others behind a router: its process, in the phases of an instant that all of them share."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from math import inf
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
END, CONTROL, ROUTE, ENTER_PHASE, SCHEDULE, PULL = (k << 32 for k in range(1, 7))
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
    engine may sleep beyond the next arrival; `tells_ahead`: it may tell of answers ahead of SimPy's time, before which
    no process acts."""

    env: simpy.Environment
    leap: bool
    plans: bool
    tells_ahead: bool

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


class Nap:
    """Calls of a scheduler that have nothing to run: the next one at `call_ns`, and each is followed by a nap of
    `nap_ns`. Of each, `launch_ns` pass up to the look at transfers, and `process_ns` then. The engine sleeps over those
    before `until_ns`."""

    def __init__(self, call_ns: int, nap_ns: int, launch_ns: int, process_ns: int) -> None:
        self.until_ns: float = inf
        self._call_ns, self._launch_ns = call_ns, launch_ns
        self._period_ns = nap_ns + launch_ns + process_ns

    def first_call_ns(self, now_ns: int) -> int:
        """When the first call from `now_ns` on is, ns."""
        return self._call_ns + max(-(-(now_ns - self._call_ns) // self._period_ns), 0) * self._period_ns

    def first_look_ns(self, over_ns: int) -> int:
        """When the first call is whose look notices what is over at `over_ns`, ns."""
        return self.first_call_ns(over_ns - self._launch_ns)


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
        self._roused_ns = 0  # when it was last to wake
        self._nap: Nap | None = None  # over which it sleeps

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

    def rouse(self, now_ns: int = 0) -> None:
        """Wakes the engine if it rests, at `now_ns` if that is ahead of SimPy's time."""
        self._roused_ns = now_ns
        if self.wake is not None:
            wake, self.wake = self.wake, None
            wake.succeed()

    def cut(self, now_ns: int) -> None:
        """Wakes the engine if it sleeps, for a request or a reader of its load: simulates steps up to `now_ns`."""
        if self._nap is not None:
            self._call_at(self._nap.first_call_ns(now_ns))
        elif self._alarm is not None and self._is_asleep:
            self._leap(now_ns)
            self._set_alarm(int(self.fleet.env.now))

    def sent(self, told_ns: int) -> None:
        """Takes note, if the engine sleeps over naps, that it will notice the end of a transfer from `told_ns` on."""
        if self._nap is not None:
            self._call_at(self._nap.first_look_ns(told_ns))

    def _call_at(self, call_ns: int) -> None:
        """Has the engine sleep over naps up to `call_ns` at most."""
        nap = self._nap
        if nap is not None and call_ns < nap.until_ns:
            nap.until_ns = call_ns
            self._set_alarm(call_ns)

    def _set_alarm(self, at_ns: int) -> None:
        old, env = self._alarm, self.fleet.env
        assert old is not None, "it sleeps"
        self._alarm = env.timeout(at_ns - int(env.now))
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
        leaps, connected = self.leaps, self.core.connected
        connector = None if connected is None else connected.connector
        loop = crank(self.core, self, drains=self.drains, settles=True)
        wait, now_ns = next(loop), int(env.now)
        while True:
            phase: int | None = None
            if isinstance(wait, Busy):
                now_ns, phase = wait.until_ns, END if wait.work == "process" else None
                if wait.unchanged and leaps.over_naps:
                    now_ns = yield from self._doze(now_ns)
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
                if connector is not None and connector.pulling and peek() <= now_ns:
                    yield Phase(env, PULL + self.slot.number)  # engines share links
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
                    now_ns = max(now_ns, int(env.now), self._roused_ns)
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
                    self._leap_on()
            elif has_leapt:
                return
            else:
                self._leap_on()
            has_leapt = True

    def _doze(self, call_ns: int) -> Generator[simpy.Event, Any, int]:
        """Sleeps over calls that have nothing to run, of which `call_ns` is the next; returns when the first other one
        is, in ns."""
        fleet, env, due_ns = self.fleet, self.fleet.env, self.leaps.naps_until_ns()
        if due_ns is None:
            return call_ns
        core = self.core
        self._nap = nap = Nap(call_ns, core.loop.nap_ns, *core.executor.host_ns(None))
        if due_ns < inf:
            nap.until_ns = nap.first_look_ns(int(due_ns))
        if not (fleet.plans and env.peek() > nap.until_ns):
            self._alarm = env.event()
            if nap.until_ns < inf:
                self._alarm = env.timeout(int(nap.until_ns) - int(env.now))
            yield self._alarm
        self._nap = None
        return int(nap.until_ns)

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

    def _leap_on(self) -> None:
        """Simulates steps like the latest up to the next event."""
        if self.fleet.tells_ahead and self._reached_ns >= self.fleet.env.now:
            self._is_asleep = False
            self._reached_ns = self.leaps.leap(self._reached_ns, self._horizon_ns, self.tell)
        else:
            self._leap(self._horizon_ns())

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
