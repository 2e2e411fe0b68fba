"""The order of one instant, for every driver: an engine's loop that says what to wait for, and never waits itself.

The step ends and its events are told; cancels and deadlines take effect; arrivals enter by (time, id); whoever was
answered may send at this instant; the scheduler is asked. Drivers differ in how they wait, not in what they do.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from enum import Enum
from typing import Protocol

from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import EngineEvent
from batchsim.kernel.types import Batch, Idle


class Wait(Enum):
    """What a driver is to do before it sends the loop the time, besides running a Batch or resting for an Idle.

    ENTER: submit every arrival that is due. SETTLE: have all other engines of this instant let theirs in, and submit
    what that brought. THROUGH: nothing is left to do and nothing will come; end, or wait for what comes nevertheless.
    """

    ENTER = 0
    SETTLE = 1
    THROUGH = 2


ENTER, SETTLE, THROUGH = Wait


class Driver(Protocol):
    """What the loop asks of whoever drives it."""

    def is_over(self) -> bool:
        """Whether no arrival will come unless this engine answers something."""
        ...

    def tell(self, events: Iterable[EngineEvent], now_ns: int) -> None:
        """Passes on what happened. Clients may answer with arrivals, at `now_ns` or later."""
        ...


def crank(
    core: EngineCore, driver: Driver, *, drains: Callable[[], bool] | None = None, settles: bool = False
) -> Generator[Wait | Idle | Batch, int, None]:
    """Runs `core` for ever. Yields what to wait for; is sent the time, in ns, at which that is over.

    For an Idle the driver waits until its `until_ns` or the next arrival, whichever is sooner; for a Batch it executes
    the step, waits for its end and sends that. `drains` says whether no arrival will come until this engine acts, which
    a scheduler is told; by default `driver.is_over`. `settles`: SETTLE is yielded. Both are for several engines.
    """
    drains = drains or driver.is_over
    while True:
        now_ns = yield ENTER
        if not core.has_work and driver.is_over():
            yield THROUGH
            continue
        events = core.enter_due(now_ns)
        if not events and settles:
            yield SETTLE
            events = core.enter_due(now_ns)
        if events:
            driver.tell(events, now_ns)
            continue
        work = core.schedule(now_ns, drains())
        if core.events:
            driver.tell(core.take_events(), now_ns)
        if type(work) is not Idle:
            end_ns = yield work
            events = core.complete(end_ns)
            if events:
                driver.tell(events, end_ns)
        elif core.has_work or not driver.is_over():
            yield _until_a_timer(work, core.next_timer_ns)


def _until_a_timer(idle: Idle, timer_ns: int | None) -> Idle:
    """`idle`, ending at `timer_ns`, the next deadline or cancel, where that is sooner."""
    if timer_ns is None or (idle.until_ns is not None and idle.until_ns <= timer_ns):
        return idle
    return Idle(timer_ns)
