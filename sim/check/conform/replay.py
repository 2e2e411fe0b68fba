"""Runs batchsim's scheduler on a recording's requests, each step in its recorded time, and gives each step's facts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from batchsim.base.errors import PolicyError, ScenarioError, SchedulerStalled
from batchsim.check.conform.observer import Observer, Step
from batchsim.check.conform.recorded_drafts import RecordedDrafts
from batchsim.check.conform.recording import BadRecording, Recording, has_adapters
from batchsim.check.conform.times import RecordedTimes
from batchsim.drive.instant import ENTER, LAND, THROUGH, Busy, Launch, crank
from batchsim.drive.source import Traffic, VirtualClock
from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import AnyWorkload, EngineEvent, Finished, Rejected
from batchsim.kernel.kv_blocks import TableKV
from batchsim.kernel.kv_transfer import KvConnector
from batchsim.kernel.protocols import CostModel, PolicyContext
from batchsim.kernel.record import Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival, Request
from batchsim.kv.choice import TailFirstKV, new_kv
from batchsim.policies.registry import POLICIES
from batchsim.policies.systems.vllm.vllm_connector import VllmConnector
from batchsim.policies.systems.vllm.vllm_offload import VllmOffload


class WatchedCore(EngineCore):
    """An engine core that reports calls and answers of its scheduler to its `observer`.

    `completed`: whether a step was completed since this was last set to False.
    """

    observer: Observer
    completed = False

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        self.observer.asking()
        work = super().schedule(now_ns, drain)
        self.observer.asked(now_ns, work)
        return work

    def complete(self, now_ns: int) -> list[EngineEvent]:
        self.completed = True
        return super().complete(now_ns)


class RecordedArrivals:
    """The recorded requests as a workload."""

    def __init__(self, arrivals: list[Arrival]) -> None:
        self._arrivals = arrivals

    def arrivals(self) -> Iterator[Arrival]:
        return iter(self._arrivals)

    def responded(self, request: Request, now_ns: int) -> Arrival | None:
        return None


@dataclass
class Replay:
    """One replay. `steps()` may be iterated once; `observer` and `rejected` are as of the last step it gave.

    `engine`: what is watched, unless given one with the recorded policy and times; `workload`: where its requests come
    from, unless given those recorded.
    """

    recording: Recording
    engine: tuple[WatchedCore, SimExecutor] | None = None
    workload: AnyWorkload | None = None
    observer: Observer = field(init=False)
    rejected: list[int] = field(default_factory=list[int])
    _finished: list[int] = field(default_factory=list[int])  # ids of the requests that ended since last asked for

    def __post_init__(self) -> None:
        self._core, self._executor = self.engine or new_engine(self.recording)
        self.observer = self._core.observer = Observer(self._core, len(self.recording.arrivals))
        if self.recording.drafts is not None:
            drafter = self.recording.config.speculative_config
            most = None if drafter.method == "ngram" else drafter.num_speculative_tokens
            drafts = RecordedDrafts(self.recording.drafts, most, lambda: self.observer.totals.steps)
            self._executor.luck = self.observer.drafts = drafts
            self.observer.skips = drafter.lookahead > 0
        self.observer.has_adapters = has_adapters(self.recording.config)
        self.observer.item_names = self.recording.item_names
        self._clock = VirtualClock()
        self._traffic = Traffic(self.workload or RecordedArrivals(self.recording.arrivals))

    def steps(self) -> Iterator[Step]:
        """Runs the replay, giving each step once it is processed.

        Where the policy fails, the steps in flight come before the error, with what is known of them.
        """
        clock, core, observer = self._clock, self._core, self.observer
        loop = crank(core, self)
        wait = next(loop)
        while wait is not THROUGH:
            core.completed = False
            if wait is ENTER:
                self._traffic.submit_due(core, clock.now_ns())
            elif wait is LAND:
                clock.sleep_until(core.in_flight.landing_ns(clock.now_ns()))
            elif isinstance(wait, Batch):
                clock.sleep_until(self._launch(wait))
            elif isinstance(wait, Launch):
                clock.sleep_until(wait.until_ns)
                if wait.batch is not None or core.loop.kind == "batch_queue":
                    self._launch(wait.batch)
            elif isinstance(wait, Busy):
                self._work(wait)
            elif isinstance(wait, Idle) and not self._flush():
                self._rest(wait)
            try:
                wait = loop.send(clock.now_ns())
            except (PolicyError, SchedulerStalled):
                yield from observer.in_flight
                raise
            if core.completed:
                self._processed()
            while observer.done:
                yield observer.done.popleft()
        if not self.recording.flushes:
            return
        observer.asking()
        observer.asked(clock.now_ns(), IDLE)
        if self._flush():
            yield observer.done.popleft()

    def _work(self, busy: Busy) -> None:
        """Lets the host work until that is done."""
        self._clock.sleep_until(busy.until_ns)
        if busy.work == "launch":
            self.observer.scheduled(busy.until_ns)
        elif busy.work == "nap":
            self.observer.totals.naps += 1
        else:
            self._processed()

    def _launch(self, batch: Batch | None) -> int:
        """Launches the step, which may be none; returns its end in ns."""
        now_ns = self._clock.now_ns()
        end_ns = None if batch is None else self._core.execute(batch, now_ns)
        self.observer.launched(now_ns, end_ns)
        return now_ns if end_ns is None else end_ns

    def _flush(self) -> bool:
        """Runs the empty step of the scheduler's last call, if there was one after the last requests ended; returns
        whether there was."""
        recording, clock, observer = self.recording, self._clock, self.observer
        if not (recording.flushes and observer.has_ended):
            return False
        observer.scheduled(clock.now_ns())
        observer.launched(clock.now_ns(), None)
        assert recording.law is not None  # such a recording states it
        clock.sleep_until(clock.now_ns() + recording.law.step_ns(0))
        self._processed()
        return True

    def _rest(self, idle: Idle) -> None:
        wakes = [ns for ns in (idle.until_ns, self._traffic.next_ns) if ns is not None]
        if wakes:
            self._clock.sleep_until(min(wakes))

    def _processed(self) -> None:
        finished, self._finished = self._finished, []
        self.observer.processed(self._clock.now_ns(), finished)

    def is_over(self) -> bool:
        """Whether all of the recording's requests have arrived."""
        return self._traffic.next_ns is None

    def tell(self, events: Iterable[EngineEvent], now_ns: int) -> None:
        """Notes which requests were rejected or finished; clients answer where there is a workload."""
        events = list(events)
        if self.workload is not None:
            self._traffic.tell(events, now_ns)
        for event in events:
            if isinstance(event, Rejected):
                transfers = self.observer.transfers
                if transfers is not None and transfers.has_failed(event.request.id):
                    transfers.errors.append(event.request.id)
                else:
                    self.rejected.append(event.request.id)
            elif isinstance(event, Finished):
                self._finished.append(event.request.id)

    def why_rejected(self) -> str:
        """The numbers of the first rejection for each reason."""
        return "; ".join(self._core.recorder.details.values())


def new_engine(recording: Recording, cost: CostModel | None = None) -> tuple[WatchedCore, SimExecutor]:
    """An engine with the recorded policy, knobs and KV blocks, whose steps take their recorded times, or those of
    `cost`. BadRecording where the policy refuses its memory."""
    loop = recording.loop
    try:
        offloads = recording.new_offload is not None
        kv = new_kv(recording.config, recording.num_blocks, recording.block_size, ids=offloads)
        if isinstance(kv, TableKV) and offloads:
            kv = TailFirstKV(recording.num_blocks, recording.block_size)
        connector = None if recording.new_link is None else KvConnector(recording.new_link())
        if recording.new_offload is not None:
            connector = recording.new_offload()
        context = PolicyContext(kv, recording.max_model_len, loop=loop, items=recording.items, connector=connector)
        new_policy = POLICIES[recording.policy][1]
        if connector is not None:
            new_policy = VllmOffload if offloads else VllmConnector
        scheduler = new_policy(recording.config, context)
    except ScenarioError as error:
        raise BadRecording(str(error)) from None
    except ValueError as error:
        raise BadRecording(f"{error}.") from None
    times = RecordedTimes(recording.law, recording.durations_ns, recording.host_ns, recording.each_host_ns)
    executor = SimExecutor(cost or times, recording.max_model_len, loop)
    core = WatchedCore(scheduler, executor, Recorder(), max_model_len=recording.max_model_len, loop=loop)
    return core, executor
