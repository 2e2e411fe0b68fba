"""The engine behind an endpoint whose steps are real: a thread cranks it as `batchsim live` does, in real time.

The server's thread sends requests and receives tokens; the engine's takes requests in between two steps. Nothing else
of an engine is touched from both, but for counts that /metrics reads.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from traceback import clear_frames
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from batchsim.base.units import NS_PER_S
from batchsim.drive.fleet.fleet_plan import ReplicaSpan
from batchsim.drive.live import live_from
from batchsim.drive.source import SWITCH_S, Cut, WallClock
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import EngineEvent
from batchsim.kernel.record import FINISHED, Records
from batchsim.kernel.types import Arrival, Request
from batchsim.scenario import PolicySpec
from batchsim.scenario.setup import Setup
from batchsim.serve.answers import SPILL_BYTES, STOPPED, Answer, Answers, Asked, End, Update
from batchsim.serve.metrics import Metrics
from batchsim.serve.words import Texts

T = TypeVar("T")


class RealEngine(Protocol):
    """An engine on a model. `outputs` has the tokens of each open request by its id, growing, until it is taken out;
    `eos_token_ids` end an answer; `begin_thread` is called in the thread that runs the steps."""

    @property
    def core(self) -> EngineCore: ...

    @property
    def outputs(self) -> dict[int, list[int]]: ...

    @property
    def eos_token_ids(self) -> Sequence[int]: ...

    def begin_thread(self) -> None: ...


class SentPrompts:
    """The token ids that clients sent, by request, until an engine has taken them."""

    def __init__(self) -> None:
        self._ids: dict[int, NDArray[np.int64]] = {}

    def put(self, request_id: int, ids: Sequence[int]) -> None:
        self._ids[request_id] = np.array(ids, np.int64)

    def forget(self, request_id: int) -> None:
        """Drops the ids of one that no engine has taken."""
        self._ids.pop(request_id, None)

    def ids(self, request: Request, answers: Mapping[int, Sequence[int]]) -> NDArray[np.int64]:
        """The ids of a request that an engine begins."""
        return self._ids.pop(request.id)


class _Mailbox:
    """Messages of a server's thread to the engine's: requests, cancels and calls between two steps. `on_events` is
    called in the engine's thread with the events."""

    failure: Exception | None = None

    def __init__(self, clock: WallClock, on_events: Callable[[Iterable[EngineEvent], int], None]) -> None:
        self._on_events = on_events
        self._clock = clock
        self._changed = threading.Condition()
        self._sent: list[Arrival] = []
        self._cancelled: list[int] = []
        self._calls: list[Callable[[], None]] = []
        self._is_draining = self._is_closing = self.has_stopped = False
        self._knows_drain = False  # the engine was woken to drain

    # ---- the server's thread

    def send(self, arrival: Arrival) -> None:
        with self._changed:
            self._sent.append(replace(arrival, submitted_ns=self._clock.now_ns()))
            self._changed.notify_all()

    def cancel(self, request_id: int) -> None:
        with self._changed:
            self._cancelled.append(request_id)
            self._changed.notify_all()

    def drain(self) -> None:
        with self._changed:
            self._is_draining = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_draining = self._is_closing = True
            self._changed.notify_all()

    def call(self, act: Callable[[], T]) -> Future[T] | None:
        """Has `act` called between two steps; None where there are no steps any more."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(act())
            except Exception as error:
                clear_frames(error.__traceback__)  # records in them would keep the recorder from growing
                future.set_exception(error)

        with self._changed:
            if self.has_stopped:
                return None
            self._calls.append(run)
            self._changed.notify_all()
        return future

    # ---- the engine's thread

    def hand_over(self, core: EngineCore) -> int:
        """Submits what was sent and cancels what was given up; returns the time in ns. Raises Cut after `close`."""
        with self._changed:
            if self._is_closing:
                raise Cut(STOPPED)
            sent, self._sent = self._sent, []
            cancelled, self._cancelled = self._cancelled, []
            calls, self._calls = self._calls, []
        for call in calls:
            call()
        for arrival in sent:
            core.submit(arrival)
        now_ns = self._clock.now_ns()
        for request_id in cancelled:
            core.cancel(request_id, now_ns)
        return now_ns

    def is_over(self) -> bool:
        """Whether no request will come any more."""
        with self._changed:
            return self._is_draining and not self._sent

    def wait(self, until_ns: int | None) -> None:
        """Returns when there is something to hand over, or at `until_ns`."""
        with self._changed:
            while not self._has_something:
                left_s = None if until_ns is None else (until_ns - self._clock.now_ns()) / NS_PER_S
                if left_s is not None and left_s <= 0:
                    return
                self._changed.wait(left_s)
            self._knows_drain = self._is_draining

    @property
    def _has_something(self) -> bool:
        told_to_end = self._is_closing or self._is_draining != self._knows_drain
        return bool(self._sent or self._cancelled or self._calls or told_to_end)

    def tell(self, events: Iterable[EngineEvent], now_ns: int) -> None:
        """Passes on what the engine did to requests."""
        self._on_events(events, now_ns)

    def stop(self) -> None:
        """Takes no calls any more; those at hand are made."""
        with self._changed:
            self.has_stopped = True
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def submit_rest(self, core: EngineCore) -> None:
        """Submits what was sent and not handed over."""
        with self._changed:
            sent, self._sent = self._sent, []
        for arrival in sent:
            core.submit(arrival)


class LiveEngine(Answers):
    """The engine `real` under `spec`, whose model reads `prompts`; runs from `pacer` to `close`.

    `texts` is the model's tokenizer; None: it has none.
    """

    def __init__(
        self,
        setup: Setup,
        spec: PolicySpec,
        metrics: Metrics,
        real: RealEngine,
        prompts: SentPrompts,
        seed: int = 0,
        spill_bytes: int = SPILL_BYTES,
        texts: Texts | None = None,
    ) -> None:
        super().__init__(setup, spec, metrics, seed, spill_bytes)
        self.real = real
        self.texts = texts
        self.eos = frozenset(real.eos_token_ids)
        self._core = real.core
        self._core.tells_tokens = True
        self._prompts = prompts
        self._num_heard: dict[int, int] = {}  # tokens of each open request that were heard of
        self._started: Running | None = None

    def cores(self) -> dict[int, EngineCore]:
        return {0: self._core}

    def pacer(self, speed: float, failed: Callable[[Exception], None]) -> Running:
        """Starts the engine; `failed` is called with the engine's error, in the thread that calls this. `speed` must be
        1."""
        if speed != 1:
            raise ValueError(f"a model runs as fast as it does, not {speed:g} times as fast")
        self._started = Running(self, failed)
        return self._started

    @property
    def running(self) -> Running:
        """The engine's thread. After `pacer`."""
        assert self._started is not None, "started by its server"
        return self._started

    def between_steps(self, act: Callable[[], T]) -> T:
        """What `act` returns, which reads the records: called between two steps, for which this waits."""
        if self._started is None:
            return act()
        future = self._started.mail.call(act)
        if future is not None:
            return future.result()
        self._started.thread.join()  # it closes its records yet
        return act()

    def send(self, asked: Asked, now_ns: int, listener: Callable[[Answer], None], came_ns: int | None = None) -> Answer:
        """Sends a request at `now_ns`; `listener` is called in this thread after each delivery.

        `came_ns`: when its client sent it, if it has waited for the engine to wake.
        """
        sent_ns = now_ns if came_ns is None else min(came_ns, now_ns)
        answer = self.begin(asked, now_ns, sent_ns, listener)
        self._prompts.put(answer.number, asked.ids)
        self.running.mail.send(answer.arrival)
        return answer

    def cancel(self, answer: Answer, now_ns: int) -> None:
        """Gives up a request with the step that runs; one that has ended is left alone.

        Called for all open requests at the server's end, too, though their clients have not left.
        """
        if answer.outcome is None and not self.running.is_broken:
            self.running.mail.cancel(answer.number)

    def drain(self) -> None:
        """Closes the arrivals: the engine may drain."""
        self.running.mail.drain()

    def close(self, now_ns: int) -> tuple[Records, tuple[ReplicaSpan, ...]]:
        """Ends what is open as unfinished, once the step at hand is over; returns the records."""
        if self._started is not None:
            self._started.mail.close()
            self._started.thread.join()
            now_ns = max(now_ns, self._started.end_ns)
        self.now_ns = max(now_ns, self.now_ns)
        return self.records(), ()

    def records(self) -> Records:
        """What was recorded so far. Only `between_steps` and after `close`."""
        return self._core.recorder.records()

    # ---- the engine's thread

    def hear_tokens(self, events: Iterable[EngineEvent]) -> tuple[list[Update], list[End]]:
        """As `hear`, with the tokens that the model has made."""
        updates, ends = self.hear(self._core, events)
        for update in updates:
            known = self.real.outputs.get(update.number)
            if known is not None:
                before = self._num_heard.get(update.number, 0)
                update.ids = known[before : before + update.num_tokens] if update.num_tokens else ()
                self._num_heard[update.number] = before + len(update.ids)
            update.num_tokens = len(update.ids)  # output that a policy has dropped is not delivered again
            if update.outcome is not None:
                update.by_eos = update.outcome == FINISHED and bool(known) and known[-1] in self.eos
                self._num_heard.pop(update.number, None)
                self.real.outputs.pop(update.number, None)
                self._prompts.forget(update.number)
        return updates, ends


class Running:
    """A `LiveEngine` that runs, with the interface of a `Pacer`."""

    def __init__(self, engine: LiveEngine, failed: Callable[[Exception], None]) -> None:
        self.is_broken = False
        self.end_ns = -1  # when the engine had closed its records, after its thread's end
        self._engine = engine
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._clock = WallClock()
        self.started_unix_ns = time.time_ns()
        self.mail = _Mailbox(self._clock, self._tell)
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    def now_ns(self) -> int:
        return self._clock.now_ns()

    def at(self, monotonic_ns: int) -> int:
        """The time in ns since the start at a time of the monotonic clock."""
        return max(monotonic_ns - self._clock.start_ns, 0)

    def arm(self) -> None:
        """Nothing: the engine's thread wakes by itself."""

    def _in_loop(self, act: Callable[..., Any], *values: Any) -> None:
        with suppress(RuntimeError):  # the server is gone, and its loop closed
            self._loop.call_soon_threadsafe(act, *values)

    def _run(self) -> None:
        before_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)  # who computes in Python lets the other thread go on
        try:
            self._engine.real.begin_thread()
            run = live_from(self._engine.real.core, self.mail, self._clock, notes_rests=False)
            self.end_ns, error = run.end_ns, run.error
        except Exception as failure:  # a bug, or the device: whoever asks is not to wait for ever
            self.mail.stop()
            error = failure
        finally:
            sys.setswitchinterval(before_s)
        if error is not None:
            self._in_loop(self._broke, error)

    def _broke(self, error: Exception) -> None:
        self.is_broken = True
        self._failed(error)

    def _tell(self, events: Iterable[EngineEvent], now_ns: int) -> None:
        updates, ends = self._engine.hear_tokens(events)
        self._in_loop(self._pass_on, updates, ends, now_ns)

    def _pass_on(self, updates: list[Update], ends: list[End], now_ns: int) -> None:
        engine = self._engine
        engine.now_ns = max(engine.now_ns, now_ns)
        engine.metrics.late.observe((self._clock.now_ns() - now_ns) / NS_PER_S)
        engine.deliver(engine.count(0, updates, ends, now_ns, engine.streams))
