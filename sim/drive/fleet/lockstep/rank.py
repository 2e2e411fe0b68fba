"""One rank of several in lockstep: vLLM's engine loop, in which a rank without a batch of its own runs a dummy.

1. A rank takes in requests between two passes. One that is in no wave begins one with its first request.
2. It reports its load to the coordinator before and behind the step, if other numbers wait or run than in the last
   report.
3. A call of the scheduler that had nothing to run is followed by a dummy, as is no call at all.
4. A pass begins as the last rank has launched it. The host waits for that in the launch; behind a dummy it goes on.
5. After the first pass of a wave, and after each N-th (`sync_interval`), all ranks learn whether any of them has
   unfinished requests. With none the wave is over; until then ranks run dummies.
Source: vllm/v1/engine/core.py of the vLLM 0.33.0 wheel, `DPEngineCoreProc.run_busy_loop`, `add_request`,
`_handle_client_request` and `_has_global_unfinished_reqs`; `EngineCoreProc._process_engine_step`.
"""

from __future__ import annotations

from collections.abc import Generator
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol

from batchsim.drive.fleet.lockstep.agenda import FIRST_RANK
from batchsim.drive.fleet.lockstep.coordinator import RankLoad
from batchsim.drive.fleet.lockstep.passes import Launched, Met, Pass
from batchsim.drive.instant import has_left
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import EngineEvent
from batchsim.kernel.types import Arrival
from batchsim.policies.systems.vllm.vllm import Vllm


class ToRank(NamedTuple):
    """A message to a rank: a request, with the wave that its client knows; or None: `wave` begins, which rank `but`
    knows."""

    arrival: Arrival | None
    wave: int
    but: int = -1


class Others(Protocol):
    """What a rank has around it. Its messages take their time to get there."""

    sync_interval: int

    def reported(self, rank: Rank, load: RankLoad, now_ns: int) -> None:
        """The coordinator is sent the load of `rank`."""
        ...

    def started(self, rank: Rank, now_ns: int) -> None:
        """The coordinator is sent that `rank` is in a wave that has begun."""
        ...

    def completed(self, wave: int, now_ns: int) -> None:
        """The coordinator is sent that `wave` is over."""
        ...

    def ended(self, rank: Rank, events: list[EngineEvent], now_ns: int) -> None:
        """The clients are sent what happened to requests."""
        ...

    def drains(self, rank: Rank) -> bool:
        """Whether no request will come until `rank` acts."""
        ...


Turn = int | Launched | Met | None
"""What a rank waits for: the time in ns when its host is free, a pass, an all-reduce, or None: a message."""


class Rank:
    """A rank by its number. `wave` and `counter` are the wave that it is in, or would begin, and its passes in it."""

    def __init__(self, number: int, core: EngineCore, others: Others) -> None:
        self.number = number
        self.actor = FIRST_RANK + number
        self.core = core
        self.others = others
        self.wave = self.counter = 0
        self.is_running = False  # a wave is going on
        self.free_ns = 0  # when its host was through with what it did last
        self.inbox: list[tuple[int, int, ToRank]] = []
        self._count = 0
        self._reported = (0, 0)
        assert isinstance(core.scheduler, Vllm), "the engines of this loop are vLLM's"
        self._scheduler = core.scheduler

    def post(self, due_ns: int, message: ToRank) -> None:
        """Puts a message into the rank's inbox, which is there at `due_ns`."""
        self._count += 1
        heappush(self.inbox, (due_ns, self._count, message))

    def process(self) -> Generator[Turn, Any, None]:
        """Runs the rank for ever. Yields its turns; receives, by `send`, the time in ns at which that is over, and of
        an all-reduce whether any rank has unfinished requests. Its messages are of times that may be to come."""
        core, others, depth, nap_ns = self.core, self.others, self.core.loop.depth, self.core.loop.nap_ns
        executor, queue = core.executor, core.in_flight.calls
        untold = False  # whether a request has ended since the scheduler was last asked, which asks it once more
        now_ns = 0
        while True:
            is_idle = not (self.is_running or core.has_entered or untold or queue)
            self.free_ns = now_ns
            now_ns = yield None if is_idle else now_ns
            self._take_in(now_ns)
            events = core.enter_due(now_ns)
            if events:
                untold = untold or has_left(events)
                others.ended(self, events, now_ns)
                continue
            if not (self.is_running or core.has_entered or untold or queue):
                continue
            self._report(now_ns)
            ran = False
            if core.has_entered or untold:
                batch, launch_ns = self._ask(now_ns)
                untold = False
                ran = batch is not None
                if ran:
                    now_ns = yield Launched(batch, launch_ns)
                else:
                    now_ns = launch_ns
                    self.launched_nothing(now_ns)
                queue.append(ran)
            if queue and (len(queue) >= depth or not (ran or core.has_entered)):
                if queue.popleft():
                    now_ns = core.in_flight.landing_ns(now_ns)
                    events = core.complete(now_ns)
                    untold = untold or has_left(events)
                    self.processed(events, now_ns)
                    if events:
                        others.ended(self, events, now_ns)
                else:
                    now_ns += executor.host_ns(None)[1]
                    self.processed([], now_ns)
            if not ran and nap_ns and (core.has_entered or untold):
                now_ns += nap_ns
                self.napped()
            self._report(now_ns)
            has_unfinished = core.has_entered
            if not ran:
                if not (has_unfinished or self.is_running):
                    continue
                now_ns = yield Launched(None, now_ns)
            self.counter += 1
            if self.counter == 1 or self.counter % others.sync_interval == 0:
                now_ns, self.is_running = yield Met(has_unfinished, now_ns)
                self._synced(now_ns)

    def _take_in(self, now_ns: int) -> None:
        """Takes in the messages that are there."""
        inbox = self.inbox
        while inbox and inbox[0][0] <= now_ns:
            arrival, wave, but = heappop(inbox)[2]
            if arrival is not None:
                self.core.submit(arrival)
                self.took(arrival, now_ns)
                self.wave = max(self.wave, wave)
                if not self.is_running:
                    self.is_running = True
                    self.others.started(self, now_ns)
            elif but != self.number and wave >= self.wave:
                self.wave, self.is_running = wave, True

    def _ask(self, now_ns: int) -> tuple[Batch | None, int]:
        """The scheduler's step, None if there is nothing to run, and when the host is through with its launch."""
        core = self.core
        self._scheduler.begin_pass(self.counter)
        work: Batch | Idle = core.schedule(now_ns, self.others.drains(self))
        if core.events:
            self.others.ended(self, core.take_events(), now_ns)
        batch = work if type(work) is Batch and (work.chunks or work.num_decode) else None
        host_ns = core.executor.host_ns(batch)
        if batch is not None:
            batch.host_ns = host_ns
        return batch, now_ns + host_ns[0]

    def launch(self, batch: Batch, launch_ns: int, made: Pass) -> int:
        """Launches the rank's part of the pass `made`; returns its end in ns."""
        self.core.in_flight.occupy(made.start_ns)
        return self.core.execute(batch, launch_ns)

    def _report(self, now_ns: int) -> None:
        """Reports the load to the coordinator, if other numbers wait or run than in the last report."""
        scheduler, kv = self._scheduler, self._scheduler.kv
        counts = scheduler.num_waiting, scheduler.num_running
        if counts != self._reported:
            self._reported = counts
            self.others.reported(self, RankLoad(*counts, 1.0 - kv.num_free / kv.num_blocks), now_ns)

    def _synced(self, now_ns: int) -> None:
        """All ranks have met: the wave goes on, or is over."""
        if self.is_running:
            if self.counter == 1 and self.number == 0:
                self.others.started(self, now_ns)
            return
        if self.number == 0:
            self.others.completed(self.wave, now_ns)
        self.wave += 1
        self.counter = 0

    # ---- for a rank that is watched

    def took(self, arrival: Arrival, now_ns: int) -> None:
        """A request has come in."""

    def launched_nothing(self, now_ns: int) -> None:
        """A call of the scheduler had nothing to run, and takes a place among the batches in flight."""

    def processed(self, events: list[EngineEvent], now_ns: int) -> None:
        """The results of the oldest call in flight are processed."""

    def napped(self) -> None:
        """The engine has slept after a call that had nothing to run."""
