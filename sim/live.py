"""The wall-clock driver: cranks an EngineCore in real time, or in virtual time where the clock says so.

With a virtual clock it is the plainest statement of what a run is, and `simulate` must equal it bit for bit.
"""

from __future__ import annotations

import time
from heapq import heappop, heappush
from typing import Protocol

from sim.core import EngineCore
from sim.types import Arrival, Idle, Workload


class Clock(Protocol):
    """Time in ns since the start of the run."""

    def now_ns(self) -> int: ...

    def sleep_until(self, ns: int) -> None:
        """Returns at `ns`, or at once if that has passed."""
        ...


class VirtualClock:
    """A clock that jumps to where it is told to sleep."""

    def __init__(self) -> None:
        self._now_ns = 0

    def now_ns(self) -> int:
        return self._now_ns

    def sleep_until(self, ns: int) -> None:
        self._now_ns = max(self._now_ns, ns)


class WallClock:
    """The monotonic clock of this machine, from its construction on."""

    def __init__(self) -> None:
        self._start_ns = time.monotonic_ns()

    def now_ns(self) -> int:
        return time.monotonic_ns() - self._start_ns

    def sleep_until(self, ns: int) -> None:
        while (left_ns := ns - self.now_ns()) > 0:
            time.sleep(left_ns / 1e9)


class Traffic:
    """A workload's arrivals in time order: those known in advance and those that responses cause."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._known = workload.arrivals()
        self._ahead: list[tuple[int, int, Arrival]] = []
        self._pull()

    def _pull(self) -> None:
        """Keeps the next arrival known in advance among those ahead."""
        arrival = next(self._known, None)
        self._last_known = None if arrival is None else arrival.request.id
        if arrival is not None:
            self._push(arrival)

    def _push(self, arrival: Arrival) -> None:
        heappush(self._ahead, (arrival.request.arrival_ns, arrival.request.id, arrival))

    @property
    def next_ns(self) -> int | None:
        """The time of the next arrival; None when no more will come unless something is answered."""
        return self._ahead[0][0] if self._ahead else None

    def tell(self, core: EngineCore, now_ns: int) -> None:
        """Tells the clients what was answered; their next requests lie ahead."""
        answered, core.responses = core.responses, []
        for request in answered:
            following = self._workload.responded(request, now_ns)
            if following is not None:
                self._push(following)

    def submit_due(self, core: EngineCore, now_ns: int) -> None:
        """Submits every arrival at or before `now_ns`."""
        while self._ahead and self._ahead[0][0] <= now_ns:
            arrival = heappop(self._ahead)[2]
            if arrival.request.id == self._last_known:
                self._pull()
            core.submit(arrival)


def live(core: EngineCore, workload: Workload, clock: Clock) -> int:
    """Runs `workload` to its end in the time of `clock`; returns the end in ns."""
    traffic = Traffic(workload)
    while True:
        now_ns = clock.now_ns()
        traffic.submit_due(core, now_ns)
        if traffic.next_ns is None and not core.has_work:
            return now_ns
        core.enter_due(now_ns)
        if core.responses:
            traffic.tell(core, now_ns)
            continue
        work = core.schedule(now_ns, drain=traffic.next_ns is None)
        traffic.tell(core, now_ns)
        if isinstance(work, Idle):
            wakes = [ns for ns in (work.until_ns, core.next_timer_ns, traffic.next_ns) if ns is not None]
            if wakes:
                clock.sleep_until(min(wakes))
            continue
        end_ns = core.execute(work, now_ns)
        clock.sleep_until(end_ns)
        core.complete(end_ns)
        traffic.tell(core, end_ns)
