"""What happens next among the client, the coordinator and the ranks, in simulated time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

CLIENT, COORDINATOR, FIRST_RANK = range(3)
"""Who goes first at one time: the client, the coordinator, then the ranks by number."""

MESSAGE, OWN, TIMER = range(3)
"""What goes first at one time for one of them: a message to it, what it does itself, a wait of its that is over."""


class Agenda:
    """Acts in order of time; at one time by actor, by kind, then as they were planned."""

    def __init__(self) -> None:
        self._acts: list[tuple[int, int, int, int, Callable[[], None]]] = []
        self._count = 0
        self._lasting = 0  # acts that are no timers
        self.now_ns = 0

    def plan(self, time_ns: int, actor: int, kind: int, act: Callable[[], None]) -> None:
        """Has `act` called at `time_ns`."""
        self._count += 1
        self._lasting += kind != TIMER
        heappush(self._acts, (time_ns, actor, kind, self._count, act))

    def run(self) -> int:
        """Calls all acts until timers alone are left; returns the time of the last one in ns."""
        while self._lasting:
            self.now_ns, _, kind, _, act = heappop(self._acts)
            self._lasting -= kind != TIMER
            act()
        return self.now_ns
