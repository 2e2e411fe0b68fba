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

from batchsim.drive.stepping import Stepping
from batchsim.kernel.batch import Idle
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import AnyWorkload, Ended, EngineEvent, Reaction, at_start, called, reaction
from batchsim.kernel.types import Arrival

_AFTER_ALL_OTHERS = 2  # SimPy's own are 0 (urgent) and 1 (normal)


class Phase(simpy.Event):
    """Fires `delay` from now, after every event of that instant of a lower priority, however many hops they take."""

    def __init__(self, env: simpy.Environment, priority: int = _AFTER_ALL_OTHERS, delay: float = 0) -> None:
        super().__init__(env)
        self._ok, self._value = True, None  # triggered at once, as SimPy's Timeout does it
        env.schedule(self, EventPriority(priority), delay)


Pulse = Callable[[int], None]
"""Called with the time in ns of every arrival, to report a simulation's progress."""


def simulate(core: EngineCore, workload: AnyWorkload, *, leap: bool = True, pulse: Pulse | None = None) -> int:
    """Runs `workload` through `core`, whose executor is a SimExecutor, to its end; returns that time in ns.

    `leap=False` makes every step a SimPy event of its own; the records are the same.
    """
    env = simpy.Environment()
    run = _EngineRun(env, core, workload, leap, pulse)
    run.send(workload.arrivals())
    run.react(at_start(workload), 0)
    env.run(until=env.process(run.process()))
    return run.end_ns


class _EngineRun(Stepping):
    """The processes of one engine's simulation and what they share."""

    def __init__(
        self, env: simpy.Environment, core: EngineCore, workload: AnyWorkload, leaps: bool, pulse: Pulse | None
    ) -> None:
        super().__init__(core, leaps)
        self.env = env
        self.workload = workload
        self.pulse = pulse
        self.streams = 0  # arrival streams not at their end
        self.wake: simpy.Event | None = None

    def send(self, arrivals: Iterable[Arrival]) -> None:
        """Starts a process that submits `arrivals` at their times."""
        self.streams += 1
        self.env.process(self._stream(arrivals))

    def _stream(self, arrivals: Iterable[Arrival]) -> Generator[simpy.Event, Any, None]:
        env = self.env
        for arrival in arrivals:
            delay_ns = arrival.request.arrival_ns - env.now
            if delay_ns > 0:
                yield env.timeout(delay_ns)
            self.core.submit(arrival)
            if self.pulse is not None:
                self.pulse(arrival.request.arrival_ns)
            self._rouse()
        self.streams -= 1

    def _rouse(self) -> None:
        if self.wake is not None:
            wake, self.wake = self.wake, None
            wake.succeed()

    def _call(self, at_ns: int) -> Generator[simpy.Event, Any, None]:
        if at_ns > self.env.now:
            yield self.env.timeout(at_ns - self.env.now)
        self.react(called(self.workload, at_ns), at_ns)
        self._rouse()
        self.streams -= 1

    def react(self, reaction: Reaction, now_ns: int) -> None:
        """Does what the clients want done at `now_ns`."""
        for request_id in reaction.given_up:
            self.core.prune(request_id, now_ns)
        for following in reaction.arrivals:
            self.send((following,))
        if reaction.pause_until_ns is not None:
            self.core.paused_until_ns = reaction.pause_until_ns
        if reaction.call_ns is not None:
            self.streams += 1
            self.env.process(self._call(reaction.call_ns))

    def is_over(self) -> bool:
        """Whether no arrival will come unless something is answered."""
        return not self.streams

    def tell(self, events: Iterable[EngineEvent], now_ns: int) -> None:
        """Passes ended requests to the clients, which may answer with their next requests."""
        for event in events:
            if isinstance(event, Ended):
                self.react(reaction(self.workload, event, now_ns), now_ns)

    def alone_until_ns(self) -> float:
        """When something next happens besides what this engine does, in ns."""
        return self.env.peek()

    def wait_for(self, now_ns: int) -> Generator[simpy.Event, Any, None]:
        """Waits for all that happens up to `now_ns`. SimPy's `now` stays an integer because all delays are."""
        yield Phase(self.env, delay=now_ns - self.env.now)

    def rest(self, idle: Idle, now_ns: int) -> Generator[simpy.Event, Any, int]:
        """Waits until the next arrival or the time of `idle`."""
        if idle.until_ns is not None or self.streams:
            self.wake = self.env.event()
            if idle.until_ns is None:
                yield self.wake
            else:
                yield self.wake | self.env.timeout(idle.until_ns - self.env.now)
                self.wake = None
        return max(now_ns, int(self.env.now))

    def go_on(self) -> Iterable[simpy.Event]:
        """Simulates steps like the latest up to the next event."""
        self.leap()
        return ()
