"""An engine in simulated time that stops where its policy is to decide: the loop of `drive/instant.py` for an engine
that waits for each step, without processes, so that it can be left and taken up, copied and kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from batchsim.kernel.batch import Batch
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import EngineEvent
from batchsim.kernel.leaping import Leaps
from batchsim.kernel.protocols import Scheduler
from batchsim.kernel.record import REQUEST_COLUMNS, STEP_DTYPE, Recorder
from batchsim.kernel.types import Arrival

_NAMES = [name for name, _ in REQUEST_COLUMNS]
_STEP_BYTES = STEP_DTYPE.itemsize


class Deciding(Scheduler, Protocol):
    """A scheduler that says when it asks its agent."""

    def is_due(self, now_ns: int) -> bool:
        """Whether its agent is asked in a call of `schedule` at `now_ns`."""
        ...


class Ends(Recorder):
    """A recorder that keeps what matters of requests that have ended, until it is taken; and no row of a request."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[dict[str, int]] = []

    def request(self, *row: int) -> None:
        self.ended.append(dict(zip(_NAMES, row, strict=True)))

    def take(self) -> list[dict[str, int]]:
        """The rows of requests that ended since they were last taken."""
        ended, self.ended = self.ended, []
        return ended


class Episode:
    """One run of `core`, whose recorder is an `Ends`, over `arrivals`, by time, up to `horizon_ns`. Times in ns."""

    def __init__(self, core: EngineCore, scheduler: Deciding, arrivals: Iterable[Arrival], horizon_ns: int) -> None:
        self.core, self.scheduler, self.horizon_ns = core, scheduler, horizon_ns
        self.now_ns = 0
        self.steps = 0  # that were run, leaps counted as the steps they stand for
        self._arrivals = [one for one in arrivals if one.request.arrival_ns < horizon_ns]
        self._sent = 0

    @property
    def is_over(self) -> bool:
        """Whether the horizon is reached."""
        return self.now_ns >= self.horizon_ns

    def go_on(self, *, decided: bool) -> None:
        """Runs up to the next decision, or past the horizon to the end of a step; `decided`: the agent has an answer
        to the one that is due now."""
        core, leaps = self.core, Leaps(self.core, leaps=True)
        while not self.is_over:
            now_ns = self.now_ns
            self._submit(now_ns)
            if core.enter_due(now_ns):
                continue
            if not decided and self.scheduler.is_due(now_ns):
                return
            decided = False
            work = core.schedule(now_ns, False)
            core.take_events()
            if isinstance(work, Batch):
                self._run(leaps, work, now_ns)
            else:
                until = [self._next_ns(), core.next_timer_ns, work.until_ns, self.horizon_ns]
                self.now_ns = min(at_ns for at_ns in until if at_ns is not None)

    def _run(self, leaps: Leaps, batch: Batch, now_ns: int) -> None:
        core = self.core
        before = len(core.recorder.step_rows)
        end_ns = core.execute(batch, now_ns)
        self.now_ns = leaps.leap(end_ns, self._quiet_until_ns, _pass_on)
        if core.in_flight.steps:
            core.complete(self.now_ns)
        self.steps += (len(core.recorder.step_rows) - before) // _STEP_BYTES
        core.recorder.step_rows.clear()

    def _submit(self, now_ns: int) -> None:
        arrivals = self._arrivals
        while self._sent < len(arrivals) and arrivals[self._sent].request.arrival_ns <= now_ns:
            self.core.submit(arrivals[self._sent])
            self._sent += 1

    def _next_ns(self) -> int | None:
        return self._arrivals[self._sent].request.arrival_ns if self._sent < len(self._arrivals) else None

    def _quiet_until_ns(self) -> float:
        until = [self._next_ns(), self.core.next_timer_ns, self.horizon_ns]
        return min(at_ns for at_ns in until if at_ns is not None)


def _pass_on(events: list[EngineEvent], now_ns: int) -> None:
    """The clients' answer to `events`: none, since all arrivals are known."""
