"""Simulates a fixed fleet (no failures, autoscaler or admission gate) one replica at a time.

For routers that see only requests and finished answers.
An engine's steps depend only on its arrivals, and routing only on answers. So an engine is simulated as far as its
arrivals are known, and only when the router may need its answers. Where the router looks at requests alone, the engines
take turns of thousands of arrivals, so that one's state stays in the processor's caches. The records are those of all
engines in one environment.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from heapq import heappop, heappush
from math import inf

from batchsim.drive.fleet.routers.router import Router, keeps_apart, routed
from batchsim.drive.simulate import Pulse
from batchsim.drive.stepping import Stepping
from batchsim.kernel.batch import Idle
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import AnyWorkload, Ended, EngineEvent, Finished
from batchsim.kernel.types import Arrival, Request

TURN = 4096
"""Arrivals of all replicas in a turn: what bounds how many are in memory."""


def simulate_fixed(
    cores: list[EngineCore], router: Router, workload: AnyWorkload, pulse: Pulse | None = None, turn: int = TURN
) -> int:
    """Runs `workload`, whose answers cause no arrivals, through `cores`, by the numbers of their replicas, to its end,
    behind a router that `hears_answers_only`; returns the time in ns at which the last engine was through. `turn`:
    arrivals in a turn, where the router looks at requests alone; `pulse` is called for the arrivals of the last one,
    since by then the others were as far."""
    answers = None if keeps_apart(router) else _Answers(router)
    replicas = [_Replica(number, core, answers) for number, core in enumerate(cores)]
    last_ns = 0
    if answers is None:
        for arrivals in _turns(workload.arrivals(), turn):
            _take_turns(replicas, router, arrivals, pulse)
            last_ns = arrivals[-1].request.arrival_ns
    else:
        for arrivals in _turns(workload.arrivals(), 1):
            last_ns = arrivals[-1].request.arrival_ns
            for replica in replicas:
                if replica.due_ns <= last_ns:
                    replica.advance(last_ns)
            answers.tell(last_ns)
            for arrival in arrivals:
                replicas[routed(router, arrival.request, "both", range(len(replicas)))].submit(arrival)
                if pulse is not None:
                    pulse(last_ns)
    for replica in replicas:
        replica.finish(last_ns)
    return max(replica.end_ns for replica in replicas)


def _take_turns(replicas: list[_Replica], router: Router, arrivals: list[Arrival], pulse: Pulse | None) -> None:
    by_replica: list[list[Arrival]] = [[] for _ in replicas]
    for arrival in arrivals:
        by_replica[routed(router, arrival.request, "both", range(len(replicas)))].append(arrival)
    until_ns = arrivals[-1].request.arrival_ns
    for replica, sent in zip(replicas, by_replica, strict=True):
        for arrival in sent:
            replica.advance(arrival.request.arrival_ns)
            replica.submit(arrival)
            if pulse is not None and replica is replicas[-1]:
                pulse(arrival.request.arrival_ns)
        replica.advance(until_ns)


def _turns(arrivals: Iterable[Arrival], size: int) -> Iterator[list[Arrival]]:
    """Batches of `arrivals` by time and id: at least `size` each, extended by all arrivals at the instant of its
    last."""
    turn: list[Arrival] = []
    for arrival in arrivals:
        if len(turn) >= size and arrival.request.arrival_ns > turn[-1].request.arrival_ns:
            yield sorted(turn, key=_by_time)
            turn = []
        turn.append(arrival)
    if turn:
        yield sorted(turn, key=_by_time)


def _by_time(arrival: Arrival) -> tuple[int, int]:
    return arrival.request.arrival_ns, arrival.request.id


class _Answers:
    """Answers of the replicas, held until the router may learn of them. Of one instant, answers whose step ended first
    come first, as with all replicas in one environment."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._untold: list[tuple[int, bool, int, int, Request]] = []
        self._count = 0  # so that those of an instant and replica stay in order

    def add(self, time_ns: int, replica: int, ended: Ended) -> None:
        self._count += 1
        heappush(self._untold, (time_ns, not isinstance(ended, Finished), replica, self._count, ended.request))

    def tell(self, until_ns: int) -> None:
        """Reports the answers up to `until_ns` to the router, by time and replica."""
        untold = self._untold
        while untold and untold[0][0] <= until_ns:
            _, _, replica, _, request = heappop(untold)
            self._router.answered(request, "both", replica)


class _Replica(Stepping):
    """One engine, simulated up to the next arrival announced to it. `due_ns`: lower bound on its next answer, assuming
    no arrival."""

    def __init__(self, number: int, core: EngineCore, answers: _Answers | None) -> None:
        super().__init__(core, leaps=True)
        self.number = number
        self.due_ns: float = 0
        self._answers = answers
        self._next_ns: float = 0  # no request arrives before
        self._is_over = False
        self._is_asleep = False  # after the latest step, over steps like it
        self._came_ns: int | None = None  # when a request arrived, or it was certain that none will, as it rested
        self._going = self.process()

    def advance(self, next_ns: float) -> None:
        """Simulates up to `next_ns`, the next arrival, as far as the router may need its answers."""
        self._next_ns = next_ns
        next(self._going)

    def submit(self, arrival: Arrival) -> None:
        """Takes a request that arrives now, after which it is to be advanced."""
        self._interrupt(arrival.request.arrival_ns)
        self.core.submit(arrival)

    def finish(self, now_ns: int) -> None:
        """Simulates the rest: from `now_ns` on no request will arrive."""
        self.advance(now_ns)
        self._interrupt(now_ns)
        self._is_over, self._next_ns = True, inf
        for _ in self._going:
            pass

    def _interrupt(self, now_ns: int) -> None:
        """Simulates what it sleeps over, up to the present."""
        self.due_ns = self._came_ns = now_ns
        if self._is_asleep:
            self._next_ns, self._is_asleep = now_ns, False
            self.leap()

    # ---- what Stepping asks

    def is_over(self) -> bool:
        """Whether no request will arrive any more."""
        return self._is_over

    def tell(self, events: Iterable[EngineEvent], now_ns: int) -> None:
        """Stores the ends of requests for the router."""
        if self._answers is not None:
            for event in events:
                if isinstance(event, Ended):
                    self._answers.add(now_ns, self.number, event)

    def alone_until_ns(self) -> float:
        """The time in ns before which no request arrives."""
        return self._next_ns

    def wait_for(self, now_ns: int) -> Generator[None]:
        """Waits until all arrivals up to `now_ns` are known."""
        self.due_ns = now_ns + 1
        while self._next_ns <= now_ns:
            yield

    def rest(self, idle: Idle, now_ns: int) -> Generator[None, None, int]:
        """Waits until a request arrives, or the time of `idle`, or it is certain that none will arrive; returns that
        time in ns."""
        if idle.until_ns is None and self._is_over:
            return now_ns
        self._came_ns, self.due_ns = None, inf if idle.until_ns is None else idle.until_ns + 1
        while self._came_ns is None:
            if idle.until_ns is not None and idle.until_ns < self._next_ns:
                return max(now_ns, idle.until_ns)
            yield
        return max(now_ns, self._came_ns)

    def go_on(self) -> Generator[None]:
        """Simulates steps like the latest, and sleeps over steps without events for the router."""
        has_leapt = False
        while True:
            quiet_ns = self._quiet_ns()
            if quiet_ns > self._next_ns:
                self.due_ns, self._is_asleep = quiet_ns, True
                while self._is_asleep and quiet_ns > self._next_ns:
                    yield
                if not self._is_asleep:  # a request arrived
                    return
                self._is_asleep = False
            elif has_leapt:
                return
            self.leap()
            if not self.is_ahead and self.reached_ns < self._next_ns:
                return  # another step comes before the next arrival
            has_leapt = True

    def _quiet_ns(self) -> int:
        """Lower bound in ns on the next answer; 0 where it is unknown, or the router needs no answers."""
        if self._answers is None:
            return 0
        return self.leaps.quiet_until_ns(self.reached_ns) or 0
