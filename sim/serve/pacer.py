"""Simulated engines kept at the pace of a clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from batchsim.base.units import NS_PER_S

if TYPE_CHECKING:
    from batchsim.serve.paced import Paced


_TURN_S = 0.002
"""Seconds that engines take at a time: where they cost more than the clock allows, clients are heard all the same."""


class Pacer:
    """Keeps `paced` at the pace of this machine's monotonic clock, `speed` simulated seconds to each of its own."""

    def __init__(self, paced: Paced, speed: float, failed: Callable[[Exception], None]) -> None:
        self.paced = paced
        self.speed = speed
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._start_ns = time.monotonic_ns()
        self.started_unix_ns = time.time_ns()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = self._due_ns = 0.0
        self.is_broken = False

    def now_ns(self) -> int:
        """The simulated time that it should be."""
        return self.at(time.monotonic_ns())

    def at(self, monotonic_ns: int) -> int:
        """The simulated time at a time of the clock."""
        return int((monotonic_ns - self._start_ns) * self.speed)

    def arm(self) -> None:
        """Has the engines run on when they next have something to do. After every change to them."""
        next_ns = self.paced.next_ns
        if self._timer is not None:
            if next_ns == self._timer_ns:
                return
            self._timer.cancel()
            self._timer = None
        if next_ns == float("inf") or self.is_broken:
            return
        self._timer_ns = next_ns
        now_ns = self.now_ns()
        # What an arrival starts stands at the instant handled last, long ago if engines were idle: it is due now.
        self._due_ns = max(next_ns, now_ns)
        left_s = (self._due_ns - now_ns) / self.speed / NS_PER_S
        self._timer = self._loop.call_later(left_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now_ns = self.now_ns()
        self.paced.metrics.late.observe((now_ns - self._due_ns) / self.speed / NS_PER_S)
        try:
            is_up_to_date = self.paced.run_to(now_ns, _TURN_S)
        except Exception as error:
            self.is_broken = True
            self._failed(error)
            return
        self.arm()
        if not is_up_to_date:
            self._due_ns = self._timer_ns
