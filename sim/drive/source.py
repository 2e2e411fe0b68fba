"""Where a driver's requests come from: clocks, a workload's traffic in time order, and two ways of sending it.

In virtual time the engine's own loop sends; in real time a thread of its own does, at the intended times however late
the engine is.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from heapq import heappop, heappush
from math import inf
from typing import Protocol

from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import AnyWorkload, Ended, EngineEvent, Reaction, at_start, called, reaction
from batchsim.kernel.types import Arrival

SWITCH_S = 1e-4
"""Seconds for which the load source's thread waits at most for the interpreter's lock while the engine's thread
computes; by Python's default of 5 ms requests would be sent that late."""


class Clock(Protocol):
    """Time in ns since the start of the run."""

    def now_ns(self) -> int: ...

    def sleep_until(self, ns: int) -> None:
        """Returns at `ns`, or at once if that has passed."""
        ...


class VirtualClock:
    """A clock whose `sleep` jumps to the time slept for."""

    def __init__(self) -> None:
        self._now_ns = 0

    def now_ns(self) -> int:
        return self._now_ns

    def sleep_until(self, ns: int) -> None:
        self._now_ns = max(self._now_ns, ns)


class WallClock:
    """The monotonic clock of this machine, from its construction on."""

    def __init__(self) -> None:
        self.start_ns = time.monotonic_ns()

    def now_ns(self) -> int:
        return time.monotonic_ns() - self.start_ns

    def sleep_until(self, ns: int) -> None:
        while (left_ns := ns - self.now_ns()) > 0:
            time.sleep(left_ns / 1e9)


class Cut(Exception):  # noqa: N818  a wish, no error
    """Raised by a source that wants the run cut; `reason` is that of the requests open then."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Source(Protocol):
    """Where an engine's requests come from, in the time of one clock: a workload, or the clients of an endpoint.

    `failure` is the error that broke the source; None while nothing has.
    """

    @property
    def failure(self) -> Exception | None: ...

    def hand_over(self, core: EngineCore) -> int:
        """Submits to `core` what has arrived, and returns the time in ns, which is no earlier. Raises `failure`, or
        Cut."""
        ...

    def is_over(self) -> bool:
        """Whether no arrival will come unless something is answered."""
        ...

    def tell(self, events: Iterable[EngineEvent], now_ns: int) -> None:
        """Passes on what the engine did to requests; clients may answer with arrivals."""
        ...

    def wait(self, until_ns: int | None) -> None:
        """Returns when something arrives, or at `until_ns`, if not None; at once where neither will be."""
        ...

    def stop(self) -> None:
        """Sends nothing more, and frees what the source holds."""
        ...

    def submit_rest(self, core: EngineCore) -> None:
        """Submits all that was not handed over or sent, so that it is accounted for. After `stop`."""
        ...


class Inbox(Protocol):
    """Where arrivals are submitted."""

    def submit(self, arrival: Arrival) -> None: ...


class Traffic:
    """A workload's arrivals in time order: arrivals known in advance and arrivals that responses cause.

    `failure`: the error that the workload raised, after which it is not used again; arrivals it had returned can still
    be submitted.
    """

    def __init__(self, workload: AnyWorkload) -> None:
        self._workload = workload
        self._known = workload.arrivals()
        self._ahead: list[tuple[int, int, Arrival]] = []
        self.failure: Exception | None = None
        self.pruned: list[int] = []  # ids of requests that clients have given up for others, to be pruned at the engine
        self._calls: list[int] = []  # when the workload wants to be called
        self._pause_ns: int | None = None  # until when the engine is to pause, which it does not know yet
        self._pull()
        self._react(at_start(workload))

    def _pull(self) -> None:
        """Keeps the next arrival known in advance among those ahead."""
        try:
            arrival = None if self.failure else next(self._known, None)
        except Exception as error:
            self.failure = error
            raise
        self._last_known = None if arrival is None else arrival.request.id
        if arrival is not None:
            self._push(arrival)

    def _push(self, arrival: Arrival) -> None:
        heappush(self._ahead, (arrival.request.arrival_ns, arrival.request.id, arrival))

    @property
    def next_ns(self) -> int | None:
        """The time in ns of the next arrival; None when no more will come unless something is answered."""
        times = [*(self._calls[:1]), *([self._ahead[0][0]] if self._ahead else [])]
        return min(times, default=None)

    def tell(self, events: Iterable[EngineEvent], now_ns: int) -> None:
        """Passes ended requests to the clients; their next requests join the arrivals ahead."""
        for event in events:
            if not isinstance(event, Ended):
                continue
            try:
                self._react(reaction(self._workload, event, now_ns))
            except Exception as error:
                self.failure = error
                raise

    def _react(self, reaction: Reaction) -> None:
        self.pruned += reaction.given_up
        for arrival in reaction.arrivals:
            self._push(arrival)
        if reaction.call_ns is not None:
            heappush(self._calls, reaction.call_ns)
        if reaction.pause_until_ns is not None:
            self._pause_ns = reaction.pause_until_ns

    def act(self, core: EngineCore, now_ns: int) -> None:
        """Makes the calls that the workload asked for by now; prunes at `core` the requests that clients have given up
        since others of their tasks succeeded, and pauses it."""
        while self._calls and self._calls[0] <= now_ns:
            self._react(called(self._workload, heappop(self._calls)))
        for request_id in self.pruned:
            core.prune(request_id, now_ns)
        self.pruned.clear()
        if self._pause_ns is not None:
            core.paused_until_ns = self._pause_ns
            self._pause_ns = None

    def submit_rest(self, inbox: Inbox) -> None:
        """Submits every arrival that can still be had."""
        try:
            self.submit_due(inbox, inf)
        except Exception:
            if self.failure is None:
                raise
            self.submit_due(inbox, inf)  # arrivals that responses have caused

    def submit_due(self, inbox: Inbox, now_ns: float) -> None:
        """Submits every arrival at or before `now_ns`."""
        while self._ahead and self._ahead[0][0] <= now_ns:
            arrival = heappop(self._ahead)[2]
            inbox.submit(arrival)
            if arrival.request.id == self._last_known:
                self._pull()


class Inline:
    """Arrivals submitted by the engine's own loop, at the very times that the clock shows: for virtual time."""

    def __init__(self, workload: AnyWorkload, clock: Clock) -> None:
        self._traffic = Traffic(workload)
        self._clock = clock
        self.tell = self._traffic.tell

    def hand_over(self, core: EngineCore) -> int:
        """Submits what is due and returns the time in ns."""
        now_ns = self._clock.now_ns()
        self._traffic.act(core, now_ns)
        self._traffic.submit_due(core, now_ns)
        return now_ns

    @property
    def failure(self) -> Exception | None:
        """What broke the load source."""
        return self._traffic.failure

    def is_over(self) -> bool:
        """Whether no arrival will come unless something is answered."""
        return self._traffic.next_ns is None

    def wait(self, until_ns: int | None) -> None:
        """Returns at `until_ns` or at the next arrival."""
        times = [ns for ns in (until_ns, self._traffic.next_ns) if ns is not None]
        if times:
            self._clock.sleep_until(min(times))

    def stop(self) -> None: ...

    def submit_rest(self, core: EngineCore) -> None:
        """Submits all that has not been sent."""
        self._traffic.submit_rest(core)


class LoadThread:
    """Sends arrivals at their intended times from a thread of its own and notes when it really did.

    One lock guards the workload and what was sent and is not yet handed over; a sending ends the engine's wait.
    """

    def __init__(self, workload: AnyWorkload, clock: Clock) -> None:
        self._traffic = Traffic(workload)
        self._clock = clock
        self._sent: list[Arrival] = []
        self._failure: Exception | None = None
        self._stopped = False
        self._changed = threading.Condition()
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self._thread = threading.Thread(target=self._send, name="load source", daemon=True)
        self._thread.start()

    def _send(self) -> None:
        with self._changed:
            try:
                while not self._stopped:
                    self._traffic.submit_due(self, self._clock.now_ns())
                    next_ns = self._traffic.next_ns
                    left_ns = None if next_ns is None else next_ns - self._clock.now_ns()
                    if left_ns is None or left_ns > 0:
                        self._changed.notify_all()
                        self._changed.wait(None if left_ns is None else left_ns / 1e9)
            except Exception as error:
                # Raised where the engine runs, which must not take what was sent before and see no failure yet: it
                # would be through.
                self._failure = error
                self._changed.notify_all()

    @property
    def failure(self) -> Exception | None:
        """What broke the load source, in either thread."""
        return self._failure or self._traffic.failure

    def submit(self, arrival: Arrival) -> None:
        """Notes that `arrival` is sent now."""
        self._sent.append(replace(arrival, submitted_ns=self._clock.now_ns()))

    def hand_over(self, core: EngineCore) -> int:
        """Submits what was sent and returns the time in ns, which is no earlier. Raises what broke the load source."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            sent, self._sent = self._sent, []
            self._traffic.act(core, self._clock.now_ns())
        for arrival in sent:
            core.submit(arrival)
        return self._clock.now_ns()

    def tell(self, events: Iterable[EngineEvent], now_ns: int) -> None:
        """Passes ended requests to the clients; the thread will send their next requests."""
        with self._changed:
            self._traffic.tell(events, now_ns)
            self._changed.notify_all()

    def is_over(self) -> bool:
        """Whether no arrival will come unless something is answered."""
        with self._changed:
            return not self._sent and self._traffic.next_ns is None

    def wait(self, until_ns: int | None) -> None:
        """Returns when something was sent, or at `until_ns`."""
        with self._changed:
            while not self._sent and self._failure is None:
                left_ns = None if until_ns is None else until_ns - self._clock.now_ns()
                if (left_ns is not None and left_ns <= 0) or (left_ns is None and self._traffic.next_ns is None):
                    return
                self._changed.wait(None if left_ns is None else left_ns / 1e9)

    def stop(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()
        sys.setswitchinterval(self._switch_s)

    def submit_rest(self, core: EngineCore) -> None:
        """Submits all that was not handed over or sent. After `stop`."""
        for arrival in self._sent:
            core.submit(arrival)
        self._traffic.submit_rest(core)
