"""The coordinator of ranks in lockstep: it passes their loads to the clients, late, and wakes ranks for a wave.

Source: vllm/v1/engine/coordinator.py of the vLLM 0.33.0 wheel, `DPCoordinatorProc.process_input_socket`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from batchsim.drive.fleet.lockstep.agenda import COORDINATOR, TIMER, Agenda

MS = 10**6
SEND_EVERY_MS = 100
"""From one sending of the loads to the next, if they have changed."""
SEND_AT_LEAST_MS = 5000
"""The same if they have not."""
GATHER_MS = 50
"""For how long no message has come before loads are sent that may be of different passes."""


class RankLoad(NamedTuple):
    """What a rank says of itself: requests that wait and that run, and the share of its KV blocks in use."""

    waiting: int
    running: int
    kv_usage: float


NO_LOAD = RankLoad(0, 0, 0.0)


class Listeners(Protocol):
    """Clients and ranks, as the coordinator speaks to them. Its messages take their time to get there."""

    def published(self, loads: list[RankLoad] | None, wave: int, is_running: bool) -> None:
        """The clients are sent the loads of all ranks, None if there are no news of these, and the state of the
        wave."""
        ...

    def woken(self, wave: int, but: int) -> None:
        """All ranks are sent that `wave` begins, which rank `but` knows."""
        ...


class Coordinator:
    """Its state, and what it does with each message at the time `now_ns` at which that is there.

    Loads go out when no message has come for a while: those from before the first report of a newer pass, as all ranks
    may be through with the one before it, else the newest.
    """

    def __init__(self, agenda: Agenda, num_ranks: int, listeners: Listeners) -> None:
        self._agenda, self._listeners = agenda, listeners
        self._loads = [NO_LOAD] * num_ranks
        self._before: list[RankLoad] | None = None  # of all ranks, before the first report of a newer pass
        self._has_changed = False
        self._newest = (-1, -1)  # wave and pass
        self._sent_ms: int | None = None
        self._wave = 0
        self._is_running = False
        self._waits = 0  # how often a wait has begun
        self._wait(0)

    def reported(self, now_ns: int, rank: int, load: RankLoad, wave: int, counter: int) -> None:
        """Stores a rank's load, reported in the pass `counter` of `wave`."""
        if (wave, counter) > self._newest:
            if self._has_changed:
                self._before = list(self._loads)
            self._newest = wave, counter
        self._loads[rank] = load
        self._has_changed = True
        self._wait(now_ns)

    def started(self, now_ns: int, rank: int, wave: int) -> None:
        """A rank has said that it began `wave`."""
        if wave > self._wave or (wave == self._wave and not self._is_running):
            self._wave, self._is_running = wave, True
            self._listeners.woken(wave, rank)
            self._listeners.published(None, wave, True)
        self._wait(now_ns)

    def completed(self, now_ns: int, wave: int) -> None:
        """Rank 0 has said that `wave` is over."""
        if self._wave <= wave:
            self._wave, self._is_running = wave + 1, False
            self._listeners.published(None, self._wave, False)
        self._wait(now_ns)

    def _wait(self, now_ns: int) -> None:
        """Waits for the next message, as long as the loads need not be sent."""
        self._waits += 1
        wait, every_ms = self._waits, SEND_EVERY_MS if self._has_changed else SEND_AT_LEAST_MS
        left_ms = 0 if self._sent_ms is None else every_ms - (now_ns // MS - self._sent_ms)
        due_ns = now_ns + MS * max(GATHER_MS if self._before is None else 0, left_ms)

        def send() -> None:
            if wait == self._waits:
                self._send(due_ns)

        self._agenda.plan(due_ns, COORDINATOR, TIMER, send)

    def _send(self, now_ns: int) -> None:
        loads, self._before = self._before, None
        if loads is None:
            loads, self._has_changed = list(self._loads), False
        self._sent_ms = now_ns // MS
        self._listeners.published(loads, self._wave, self._is_running)
        self._wait(now_ns)
