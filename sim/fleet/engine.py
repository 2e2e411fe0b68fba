"""One engine among others behind a router: its process, in the phases of an instant that all of them share."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import simpy

from sim.core import EngineCore, SimExecutor
from sim.fleet.plan import DRAINING
from sim.simulate import Phase
from sim.types import Idle

if TYPE_CHECKING:
    from sim.fleet.drive import Fleet

# Phases of an instant, after all events of SimPy's own priorities; replicas follow each other inside one.
END, CONTROL, ROUTE, ENTER, SCHEDULE = (k << 32 for k in range(1, 6))
Steps = Generator[simpy.Event, Any, None]


class Slot:
    """A replica by its number: what it is doing since when; `state` is "" while it is not there."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.state = ""
        self.since_ns = 0
        self.engine: Engine | None = None


class Engine:
    """One engine from the start of its replica to its end or failure."""

    def __init__(self, fleet: Fleet, slot: Slot, core: EngineCore) -> None:
        if not isinstance(core.executor, SimExecutor):
            raise TypeError(f"simulate_fleet needs a SimExecutor, not {type(core.executor).__name__}")
        self.fleet = fleet
        self.slot = slot
        self.core = core
        self.alive = True
        self.wake: simpy.Event | None = None
        self.asked_to_drain = False
        self.lost: set[int] = set()

    def rouse(self) -> None:
        """Wakes the engine if it sleeps."""
        if self.wake is not None:
            wake, self.wake = self.wake, None
            wake.succeed()

    def process(self) -> Steps:
        """Schedules, sleeps for the step, completes, as in `simulate`; but in the phases of the instant."""
        fleet, core, number = self.fleet, self.core, self.slot.number
        env, clients = fleet.env, fleet.clients
        cost = core.executor.cost if fleet.leap else None  # type: ignore[attr-defined]
        now_ns = int(env.now)
        while True:
            if core.responses:
                clients.tell(self, now_ns)
            if env.peek() <= now_ns:
                yield Phase(env, ENTER + number)
                if not self.alive:
                    return
            if self._is_through():
                if self.slot.state == DRAINING:
                    fleet.retire(self.slot)
                fleet.check_done()
                if not self.alive:
                    return
                yield from self._sleep(None, now_ns)
                if not self.alive:
                    return
                now_ns = int(env.now)
                continue
            core.enter_due(now_ns)
            if core.responses:
                continue
            if env.peek() <= now_ns:
                yield Phase(env, SCHEDULE + number)
                if not self.alive:
                    return
                core.enter_due(now_ns)
                if core.responses:
                    continue
            self.asked_to_drain = fleet.drain(self)
            work = core.schedule(now_ns, self.asked_to_drain)
            if core.responses:
                clients.tell(self, now_ns)
            if isinstance(work, Idle):
                if self._is_through():  # it has just rejected its last request
                    continue
                yield from self._sleep(work, now_ns)
                if not self.alive:
                    return
                now_ns = int(env.now)
                continue
            end_ns = core.execute(work, now_ns)
            if cost is not None:
                timer_ns = core.next_timer_ns
                horizon_ns = fleet.horizon_ns()
                end_ns = core.leap(work, end_ns, horizon_ns if timer_ns is None else min(horizon_ns, timer_ns), cost)
            yield env.timeout(end_ns - now_ns)
            if env.peek() <= end_ns:
                yield Phase(env, END + number)
            if not self.alive:
                return
            now_ns = end_ns
            core.complete(now_ns)

    def _is_through(self) -> bool:
        """Whether it has nothing to do unless something still comes from elsewhere."""
        return not self.core.has_work and (self.slot.state == DRAINING or not self.fleet.clients.streams)

    def _sleep(self, idle: Idle | None, now_ns: int) -> Steps:
        """Until the next arrival, the time the scheduler named, or the next deadline or cancel."""
        times = [] if idle is None else [ns for ns in (idle.until_ns, self.core.next_timer_ns) if ns is not None]
        self.wake = self.fleet.env.event()
        self.fleet.rouse_undrained()
        if self.wake is None:
            return
        if times:
            yield self.wake | self.fleet.env.timeout(min(times) - now_ns)
            self.wake = None
        else:
            yield self.wake
