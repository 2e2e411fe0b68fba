"""The SimPy driver: predicted step durations, one process for the engine and one a stream of arrivals.

Where other processes can act at the engine's instant, it yields one event of lower priority before it lets arrivals
in, so that it sees all of them whatever the number of hops. Between events it may leap over identical steps.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import simpy
from simpy.events import EventPriority

from sim.core import EngineCore, SimExecutor
from sim.types import Arrival, Idle, Workload

_AFTER_ALL_OTHERS = 2  # SimPy's own are 0 (urgent) and 1 (normal)


class Phase(simpy.Event):
    """Fires at this instant, after every event of a lower priority, however many hops they take."""

    def __init__(self, env: simpy.Environment, priority: int = _AFTER_ALL_OTHERS) -> None:
        super().__init__(env)
        self._ok, self._value = True, None  # triggered at once, as SimPy's Timeout does it
        env.schedule(self, EventPriority(priority))


def simulate(core: EngineCore, workload: Workload, *, leap: bool = True) -> int:
    """Runs `workload` through `core`, whose executor is a SimExecutor, to its end; returns the end in ns.

    `leap=False` makes every step a SimPy event of its own; the records are the same.
    """
    env = simpy.Environment()
    run = _Run(env, core, workload, leap)
    run.send(workload.arrivals())
    env.run(until=env.process(run.engine()))
    return run.end_ns


class _Run:
    """The processes of one simulation and what they share."""

    def __init__(self, env: simpy.Environment, core: EngineCore, workload: Workload, leap: bool) -> None:
        if not isinstance(core.executor, SimExecutor):
            raise TypeError(f"simulate needs a SimExecutor, not {type(core.executor).__name__}")
        self.env = env
        self.core = core
        self.workload = workload
        self.cost = core.executor.cost if leap else None
        self.streams = 0  # arrival streams not at their end
        self.wake: simpy.Event | None = None
        self.end_ns = 0

    def send(self, arrivals: Iterator[Arrival]) -> None:
        """Starts a process that submits `arrivals` at their times."""
        self.streams += 1
        self.env.process(self._stream(arrivals))

    def _stream(self, arrivals: Iterator[Arrival]) -> Generator[simpy.Event, Any, None]:
        env = self.env
        for arrival in arrivals:
            delay_ns = arrival.request.arrival_ns - env.now
            if delay_ns > 0:
                yield env.timeout(delay_ns)
            self.core.submit(arrival)
            self._wake()
        self.streams -= 1

    def _wake(self) -> None:
        if self.wake is not None:
            wake, self.wake = self.wake, None
            wake.succeed()

    def _tell_clients(self, now_ns: int) -> None:
        answered, self.core.responses = self.core.responses, []
        for request in answered:
            following = self.workload.responded(request, now_ns)
            if following is not None:
                self.send(iter((following,)))

    def engine(self) -> Generator[simpy.Event, Any, None]:
        """Schedules, sleeps for the step, completes. SimPy's `now` stays an integer because all delays are."""
        env, core = self.env, self.core
        now_ns = 0
        while True:
            if core.responses:
                self._tell_clients(now_ns)
            if env.peek() <= now_ns:
                yield Phase(env)
            if not self.streams and not core.has_work:
                self.end_ns = now_ns
                return
            core.enter_due(now_ns)
            if core.responses:
                continue
            work = core.schedule(now_ns, drain=not self.streams)
            if core.responses:
                self._tell_clients(now_ns)
            if isinstance(work, Idle):
                yield from self._sleep(work, now_ns)
                now_ns = int(env.now)
                continue
            end_ns = core.execute(work, now_ns)
            if self.cost is not None:
                timer_ns = core.next_timer_ns
                horizon_ns = env.peek() if timer_ns is None else min(env.peek(), timer_ns)
                end_ns = core.leap(work, end_ns, horizon_ns, self.cost)
            yield env.timeout(end_ns - now_ns)
            now_ns = end_ns
            core.complete(now_ns)

    def _sleep(self, idle: Idle, now_ns: int) -> Generator[simpy.Event, Any, None]:
        """Until the next arrival, the time the scheduler named, or the next deadline or cancel."""
        times = [ns for ns in (idle.until_ns, self.core.next_timer_ns) if ns is not None]
        if not self.streams and not times:
            return
        self.wake = self.env.event()
        if times:
            yield self.wake | self.env.timeout(min(times) - now_ns)
            self.wake = None
        else:
            yield self.wake
