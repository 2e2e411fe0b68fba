"""A simulated engine between external events: runs its loop, waits as the driver decides, skips repeated steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from typing import Any

from batchsim.drive.instant import ENTER, LAND, THROUGH, Busy, Launch, crank
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import EngineEvent
from batchsim.kernel.leaping import Leaps


class Stepping(ABC):
    """Base class of simulated engines: runs the engine loop on `core`, with a SimExecutor, skipping repeated steps
    until the next external event. Its time runs ahead of other processes up to the next possible arrival; `end_ns` is
    when it was through. How to wait is the subclass's: the methods without a body."""

    def __init__(self, core: EngineCore, leaps: bool) -> None:
        self.core = core
        self.leaps = Leaps(core, leaps=leaps)
        self.is_ahead = core.loop.is_ahead
        self.reached_ns = 0  # the end of the latest step, or where the engine is ahead of its launch
        self.end_ns = 0

    @abstractmethod
    def is_over(self) -> bool:
        """Whether no arrival will come unless something is answered."""

    @abstractmethod
    def tell(self, events: Iterable[EngineEvent], now_ns: int) -> None:
        """Passes on the events of `now_ns`, which may be ahead of other processes' time."""

    @abstractmethod
    def alone_until_ns(self) -> float:
        """The time in ns before which no request arrives."""

    @abstractmethod
    def wait_for(self, now_ns: int) -> Iterable[Any]:
        """Waits until all arrivals up to `now_ns` are known."""

    @abstractmethod
    def rest(self, idle: Idle, now_ns: int) -> Generator[Any, Any, int]:
        """Waits until a request arrives, or the time of `idle`; returns when that was, in ns."""

    @abstractmethod
    def go_on(self) -> Iterable[Any]:
        """Leaps, and waits where the driver does not want to know yet."""

    def process(self) -> Generator[Any, Any, None]:
        """Runs the engine to its end."""
        core, leaps = self.core, self.leaps
        loop = crank(core, self)
        wait, now_ns = next(loop), 0
        while wait is not THROUGH:
            if wait is ENTER:
                if leaps.precede_calls:
                    now_ns = leaps.leap_calls(now_ns, self.horizon_ns())
                if self.alone_until_ns() <= now_ns:
                    yield from self.wait_for(now_ns)
            elif type(wait) is Batch:
                self.reached_ns = core.execute(wait, now_ns)
                if leaps.follow_steps:
                    yield from self.go_on()
                now_ns = self.reached_ns
            elif type(wait) is Launch:
                self.reached_ns = wait.until_ns
                if wait.batch is not None:
                    core.execute(wait.batch, wait.until_ns)
                    if leaps.follow_steps:
                        yield from self.go_on()
                now_ns = self.reached_ns
            elif type(wait) is Busy:
                now_ns = wait.until_ns
            elif wait is LAND:
                now_ns = core.in_flight.landing_ns(now_ns)
            else:
                assert isinstance(wait, Idle)
                now_ns = yield from self.rest(wait, now_ns)
            wait = loop.send(now_ns)
        self.end_ns = now_ns

    def leap(self) -> None:
        """Simulates steps like the latest, just executed, up to the next possible arrival."""
        self.reached_ns = self.leaps.leap(self.reached_ns, self.horizon_ns, self.tell, self.is_over)

    def horizon_ns(self) -> float:
        """The time in ns before which no request arrives and no timer of the engine is due."""
        timer_ns, next_ns = self.core.next_timer_ns, self.alone_until_ns()
        return next_ns if timer_ns is None else min(next_ns, timer_ns)
