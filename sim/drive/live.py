"""The wall-clock driver: cranks an EngineCore in real time, or in virtual time where the clock says so.

With a virtual clock it is the plainest statement of what a run is, and `simulate` must equal it bit for bit. In real
time requests come from a thread of their own at their intended times, however late the engine is, and any failure ends
the run with every request accounted for.
"""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from typing import Any

from batchsim.base.errors import ExecutorError, PolicyError, SchedulerStalled
from batchsim.base.units import format_duration
from batchsim.drive.instant import ENTER, LAND, THROUGH, Busy, Launch, crank
from batchsim.drive.source import Clock, Cut, Inline, LoadThread, Source, Traffic, VirtualClock, WallClock
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import AnyWorkload
from batchsim.kernel.record import FINISHED, Records

__all__ = ["INTERRUPTED", "Clock", "LiveRun", "Traffic", "VirtualClock", "WallClock", "lag_verdict", "live"]
__all__ += ["sent_lags_ns", "tail_ns"]

INTERRUPTED = "interrupted"
"""The reason of a run that Ctrl-C has cut. A device's failure brings its own; the others are these."""
STALLED, POLICY_FAILED, STEP_FAILED, LOAD_SOURCE_FAILED = (
    "stalled",
    "policy_failed",
    "step_failed",
    "load_source_failed",
)

LAG_PERCENT = 99
MAX_LAG_SHARE = 0.05
"""Share of the mean TTFT: a load source whose 99th percentile of lag is beyond a step and this share would show in the
results."""


@dataclass(frozen=True)
class LiveRun:
    """How a run ended: when, in ns, and the `reason` why it was cut, "" if it was not. `error` is what was raised then,
    None for Ctrl-C and for a source's Cut.

    `rested` are the indices of the steps before which nothing was to be run: the time since the step before them is
    not the host's.
    """

    end_ns: int
    rested: tuple[int, ...]
    reason: str
    error: Exception | None = None


@dataclass
class _Progress:
    """Where the loop is: the steps so far that came after a rest, if these are noted, whether the next one will, and
    whether the device is at work."""

    rested: list[int] | None
    rests: bool = False
    executing: bool = False


class _CtrlC:
    """Holds Ctrl-C back until the loop stands between two steps or waits, where the books are whole.

    A second Ctrl-C is not held back, and none is where another thread than the main one runs the loop.
    """

    def __init__(self) -> None:
        self._asked = False
        self.may_raise = False

    def __enter__(self) -> _CtrlC:
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _ask(self, *_: object) -> None:
        if self._asked or self.may_raise:
            raise KeyboardInterrupt
        self._asked = True

    @property
    def asked(self) -> bool:
        """Whether a Ctrl-C was held back."""
        return self._asked


def live(core: EngineCore, workload: AnyWorkload, clock: Clock) -> LiveRun:
    """Runs `workload` to its end in the time of `clock`. With a WallClock a thread sends the requests.

    Where the device fails, or Ctrl-C comes, the run is cut: what has not ended, and what has not been sent, ends
    `unfinished` with the reason, and nothing is raised. In real time, which cannot be had again, that holds for every
    other error too. With any other clock they are raised, and all happens in this thread, in an order that depends on
    nothing but the clock.
    """
    source: Source = LoadThread(workload, clock) if isinstance(clock, WallClock) else Inline(workload, clock)
    return live_from(core, source, clock)


def live_from(core: EngineCore, source: Source, clock: Clock, *, notes_rests: bool = True) -> LiveRun:
    """Runs what `source` brings until it is over, as `live` does, or until it raises Cut.

    Without `notes_rests`, `rested` stays empty: a server that runs for days has no use for it.
    """
    progress = _Progress(rested=[] if notes_rests else None)
    if isinstance(clock, WallClock):
        core.in_flight.zero_ns = clock.start_ns
    try:
        with _CtrlC() as ctrl_c:
            end_ns = _run(core, source, clock, ctrl_c, progress)
        return LiveRun(end_ns, tuple(progress.rested or ()), "")
    except (Exception, KeyboardInterrupt) as cause:
        if not isinstance(clock, WallClock) and not isinstance(cause, ExecutorError | KeyboardInterrupt):
            raise
        error = cause if isinstance(cause, Exception) and not isinstance(cause, Cut) else None
        if isinstance(cause, Cut):
            reason = cause.reason
        else:
            reason = INTERRUPTED if error is None else _reason(error, source, progress)
    finally:
        source.stop()
    if error is not None:
        core.recorder.details.setdefault(reason, str(error) or type(error).__name__)
    core.in_flight.wait_for_all(core.journal)
    end_ns = clock.now_ns()
    source.submit_rest(core)
    core.close(end_ns, reason)
    return LiveRun(end_ns, tuple(progress.rested or ()), reason, error)


def _reason(error: Exception, source: Source, progress: _Progress) -> str:
    """Reason of the failure for the records: by the error's kind, else by the part that was running."""
    if error is source.failure:
        return LOAD_SOURCE_FAILED
    if isinstance(error, ExecutorError):
        return error.reason
    if isinstance(error, SchedulerStalled):
        return STALLED
    return STEP_FAILED if progress.executing and not isinstance(error, PolicyError) else POLICY_FAILED


def _run(core: EngineCore, source: Source, clock: Clock, ctrl_c: _CtrlC, progress: _Progress) -> int:
    """Waits for what the loop names until all is done; notes the `progress` and returns the end in ns."""
    loop, now_ns = crank(core, source), 0
    wait = next(loop)
    while wait is not THROUGH:
        if wait is ENTER:
            if ctrl_c.asked:
                while core.in_flight.steps:
                    now_ns = _land(core, clock, progress)
                    source.tell(core.complete(now_ns), now_ns)
                raise KeyboardInterrupt
            now_ns = source.hand_over(core)
        elif isinstance(wait, Idle):
            progress.rests = True
            ctrl_c.may_raise = True
            source.wait(wait.until_ns)
            ctrl_c.may_raise = False
        elif isinstance(wait, Batch):
            now_ns = _execute(core, wait, clock, progress)
            clock.sleep_until(now_ns)  # an executor that only predicts has not taken the time
        elif isinstance(wait, Launch):
            clock.sleep_until(wait.until_ns)
            if wait.batch is not None:
                _execute(core, wait.batch, clock, progress)
            else:
                progress.rests = True
            now_ns = clock.now_ns()
        elif wait is LAND:
            now_ns = _land(core, clock, progress)
        else:
            assert isinstance(wait, Busy)
            clock.sleep_until(wait.until_ns)
            now_ns = clock.now_ns()
        wait = loop.send(now_ns)
    return now_ns


def _execute(core: EngineCore, batch: Batch, clock: Clock, progress: _Progress) -> int:
    """Launches one step; returns its end in ns, where that is known."""
    progress.executing = True
    end_ns = core.execute(batch, clock.now_ns())
    progress.executing = False
    if progress.rests and progress.rested is not None:
        progress.rested.append(core.recorder.num_steps - 1)
    progress.rests = False
    return end_ns


def _land(core: EngineCore, clock: Clock, progress: _Progress) -> int:
    """Waits for the end of the oldest step in flight and for the host; returns the time in ns."""
    progress.executing = True
    end_ns = core.in_flight.wait_for(0, core.journal)
    progress.executing = False
    clock.sleep_until(max(clock.now_ns(), end_ns) + core.in_flight.steps[0].process_ns)
    return clock.now_ns()


def sent_lags_ns(records: Records) -> list[int]:
    """By how many ns the load source was late with each request that it sent, ascending."""
    requests = records.requests
    return sorted(requests["lag_ns"][requests["ended_ns"] >= requests["arrival_ns"]].tolist())


def tail_ns(lags_ns: list[int]) -> int:
    """The LAG_PERCENT-th percentile of ascending lags, an observed one."""
    return lags_ns[-(-len(lags_ns) * LAG_PERCENT // 100) - 1]


def lag_verdict(records: Records) -> str:
    """Why the load source was too late for the run to count; "" if it was in time, or if nothing ran.

    Void: the 99th percentile of the lag is above a mean step and 5 % of the mean TTFT together; without finished
    requests, above a mean step.
    """
    requests, steps = records.requests, records.steps
    lags_ns = sent_lags_ns(records)
    if not lags_ns or not len(steps):
        return ""
    lag_ns = tail_ns(lags_ns)
    limit_ns = float(steps["duration_ns"].mean())
    made_of = f"a mean step of {format_duration(limit_ns)}"
    done = requests[requests["outcome"] == FINISHED]
    if len(done):
        ttft_ns = float((done["first_delivery_ns"] - done["sent_ns"]).mean())
        limit_ns += MAX_LAG_SHARE * ttft_ns
        made_of += f" and {MAX_LAG_SHARE:.0%} of the mean TTFT {format_duration(ttft_ns)} together"
    if lag_ns <= limit_ns:
        return ""
    later = sum(ns > limit_ns for ns in lags_ns)
    return (
        f"the load source was late: p{LAG_PERCENT} of its lag is {format_duration(lag_ns)}, and {later} of"
        f" {len(lags_ns)} requests came later than {made_of}. The run is void: free a core of the machine, or lower the"
        " load."
    )
