"""The SimPy driver: predicted step durations, one process for the engine and one a stream of arrivals.

The engine's own time may run ahead of SimPy's while no other process has anything due. Where one has, the engine yields
one event of lower priority than theirs before it lets arrivals in, so that it sees all that acts at its instant, in
whatever number of hops. Between events it may leap over identical steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any

import simpy
from simpy.events import EventPriority

from batchsim.drive.instant import ENTER, LAND, THROUGH, Busy, Launch, crank
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import Ended, EngineEvent, each_arrival, pruned_by
from batchsim.kernel.leaps import leap
from batchsim.kernel.leaps_ahead import leap_ahead
from batchsim.kernel.pipeline_leaps import leap_calls
from batchsim.kernel.protocols import Workload
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival, Batch, Idle

_AFTER_ALL_OTHERS = 2  # SimPy's own are 0 (urgent) and 1 (normal)


class Phase(simpy.Event):
    """Fires `delay` from now, after every event of that instant of a lower priority, however many hops they take."""

    def __init__(self, env: simpy.Environment, priority: int = _AFTER_ALL_OTHERS, delay: float = 0) -> None:
        super().__init__(env)
        self._ok, self._value = True, None  # triggered at once, as SimPy's Timeout does it
        env.schedule(self, EventPriority(priority), delay)


Pulse = Callable[[int], None]
"""Called with the time in ns of every arrival, for those who want to know how far a simulation is."""


def simulate(core: EngineCore, workload: Workload, *, leap: bool = True, pulse: Pulse | None = None) -> int:
    """Runs `workload` through `core`, whose executor is a SimExecutor, to its end; returns that time in ns.

    `leap=False` makes every step a SimPy event of its own; the records are the same.
    """
    env = simpy.Environment()
    run = EngineRun(env, core, workload, leap, pulse)
    run.send(workload.arrivals())
    env.run(until=env.process(run.engine()))
    return run.end_ns


class EngineRun:
    """The processes of one engine's simulation and what they share; `end_ns` is when it ended."""

    def __init__(
        self, env: simpy.Environment, core: EngineCore, workload: Workload, leaps: bool, pulse: Pulse | None
    ) -> None:
        if not isinstance(core.executor, SimExecutor):
            raise TypeError(f"simulate needs a SimExecutor, not {type(core.executor).__name__}")
        self.env = env
        self.core = core
        self.workload = workload
        self.executor = core.executor
        self.leaps = leaps
        self.pulse = pulse
        self.streams = 0  # arrival streams not at their end
        self.wake: simpy.Event | None = None
        self.end_ns = 0

    def send(self, arrivals: Iterable[Arrival], until_ns: int | None = None) -> None:
        """Starts a process that submits `arrivals` at their times. That they were the last is known at `until_ns`, or
        as the last one is submitted."""
        self.streams += 1
        self.env.process(self._stream(arrivals, until_ns))

    def _stream(self, arrivals: Iterable[Arrival], until_ns: int | None) -> Generator[simpy.Event, Any, None]:
        env = self.env
        for arrival in arrivals:
            delay_ns = arrival.request.arrival_ns - env.now
            if delay_ns > 0:
                yield env.timeout(delay_ns)
            self.core.submit(arrival)
            if self.pulse is not None:
                self.pulse(arrival.request.arrival_ns)
            self._rouse()
        if until_ns is not None and until_ns > env.now:
            yield env.timeout(until_ns - env.now)
        self.streams -= 1
        if until_ns is not None:
            self._rouse()

    def _rouse(self) -> None:
        if self.wake is not None:
            wake, self.wake = self.wake, None
            wake.succeed()

    def is_over(self) -> bool:
        """Whether no arrival will come unless something is answered."""
        return not self.streams

    def tell(self, events: Iterable[EngineEvent], now_ns: int) -> None:
        """Tells the clients what ended; they may answer with their next requests."""
        for event in events:
            if not isinstance(event, Ended):
                continue
            for request_id in pruned_by(self.workload, event):
                self.core.prune(request_id, now_ns)
            for following in each_arrival(self.workload.responded(event.request, now_ns)):
                self.send((following,))

    def engine(self) -> Generator[simpy.Event, Any, None]:
        """Waits for what the loop names. SimPy's `now` stays an integer because all delays are."""
        env, pipelined = self.env, self.leaps and self.core.loop.stages > 1
        loop = crank(self.core, self)
        wait, now_ns = next(loop), 0
        while wait is not THROUGH:
            if wait is ENTER:
                if pipelined:
                    now_ns = leap_calls(self.core, self.executor, now_ns, self._horizon_ns())
                if env.peek() <= now_ns:
                    yield Phase(env, delay=now_ns - env.now)
            elif type(wait) is Batch:
                now_ns = self._execute(wait, now_ns)
            elif type(wait) is Launch:
                now_ns = wait.until_ns
                if wait.batch is not None:
                    now_ns = self._launch(wait.batch, now_ns)
            elif type(wait) is Busy:
                now_ns = wait.until_ns
            elif wait is LAND:
                oldest = self.core.in_flight.steps[0]
                now_ns = max(now_ns, oldest.end_ns) + oldest.process_ns
            else:
                assert isinstance(wait, Idle)
                yield from self._rest(wait)
                now_ns = max(now_ns, int(env.now))
            wait = loop.send(now_ns)
        self.end_ns = now_ns

    def _execute(self, batch: Batch, now_ns: int) -> int:
        """Runs the step, and after it identical ones up to the next event; returns the end of the last in ns."""
        core = self.core
        end_ns = core.execute(batch, now_ns)
        if not self.leaps:
            return end_ns
        return leap(core, self.executor, batch, end_ns, self._horizon_ns())

    def _launch(self, batch: Batch, now_ns: int) -> int:
        """Launches the step, and after it identical ones; returns the time at which the host is through with that."""
        core = self.core
        core.execute(batch, now_ns)
        if not self.leaps or core.loop.stages > 1:
            return now_ns
        return leap_ahead(core, self.executor, batch, now_ns, self._horizon_ns, self.tell, self.is_over)

    def _horizon_ns(self) -> float:
        """When something next happens besides what this engine does, in ns."""
        timer_ns, next_ns = self.core.next_timer_ns, self.env.peek()
        return next_ns if timer_ns is None else min(next_ns, timer_ns)

    def _rest(self, idle: Idle) -> Generator[simpy.Event, Any, None]:
        """Waits until the next arrival or the time of `idle`."""
        if idle.until_ns is None and not self.streams:
            return
        self.wake = self.env.event()
        if idle.until_ns is None:
            yield self.wake
        else:
            yield self.wake | self.env.timeout(idle.until_ns - self.env.now)
            self.wake = None
