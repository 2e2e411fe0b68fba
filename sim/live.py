"""The wall-clock driver: cranks an EngineCore in real time, or in virtual time where the clock says so.

With a virtual clock it is the plainest statement of what a run is, and `simulate` must equal it bit for bit. In real
time requests come from a thread of their own at their intended times, however late the engine is, and a failing
device or Ctrl-C ends the run with every request accounted for.
"""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from typing import Any

from sim.core import EngineCore
from sim.errors import ExecutorError
from sim.load import Clock, Inline, LoadThread, Traffic, VirtualClock, WallClock
from sim.record import FINISHED, Records
from sim.types import Idle, Workload
from sim.units import format_duration

__all__ = ["INTERRUPTED", "Clock", "LiveRun", "Traffic", "VirtualClock", "WallClock", "lag_verdict", "live"]

INTERRUPTED = "interrupted"
"""The reason of a run that Ctrl-C has cut; of others it is that of their ExecutorError."""

LAG_PERCENT = 99
MAX_LAG_SHARE = 0.05
"""Of the mean TTFT: a 99th percentile of the lag beyond a step and this share of it would show in the results."""


@dataclass(frozen=True)
class LiveRun:
    """How a run ended: when, in ns, and why it was cut ("" if it was not).

    `rested` are the indices of the steps before which nothing was to be run: the time since the step before them is
    not the host's.
    """

    end_ns: int
    rested: tuple[int, ...]
    reason: str


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

    def check(self) -> None:
        """Raises KeyboardInterrupt if Ctrl-C came since."""
        if self._asked:
            raise KeyboardInterrupt


def live(core: EngineCore, workload: Workload, clock: Clock) -> LiveRun:
    """Runs `workload` to its end in the time of `clock`. With a WallClock a thread sends the requests.

    Where the device fails, or Ctrl-C comes, the run is cut: what has not ended, and what has not been sent, ends
    `unfinished` with the reason, and nothing is raised. With any other clock all happens in this thread, in an order
    that depends on nothing but the clock.
    """
    source = LoadThread(workload, clock) if isinstance(clock, WallClock) else Inline(workload, clock)
    rested: list[int] = []
    try:
        with _CtrlC() as ctrl_c:
            end_ns = _run(core, source, clock, ctrl_c, rested)
        return LiveRun(end_ns, tuple(rested), "")
    except (ExecutorError, KeyboardInterrupt) as error:
        reason = error.reason if isinstance(error, ExecutorError) else INTERRUPTED
        if str(error):
            core.recorder.details.setdefault(reason, str(error))
    finally:
        source.stop()
    end_ns = clock.now_ns()
    source.submit_rest(core)
    core.close(end_ns, reason)
    return LiveRun(end_ns, tuple(rested), reason)


def _run(core: EngineCore, source: Inline | LoadThread, clock: Clock, ctrl_c: _CtrlC, rested: list[int]) -> int:
    """The loop itself; appends to `rested` as it goes and returns the end."""
    rests = False
    while True:
        ctrl_c.check()
        now_ns = source.hand_over(core)
        if source.is_over and not core.has_work:
            return now_ns
        core.enter_due(now_ns)
        if core.responses:
            source.tell(core, now_ns)
            continue
        work = core.schedule(now_ns, drain=source.is_over)
        source.tell(core, now_ns)
        if isinstance(work, Idle):
            rests = True
            times = [ns for ns in (work.until_ns, core.next_timer_ns) if ns is not None]
            ctrl_c.may_raise = True
            source.wait(min(times, default=None))
            ctrl_c.may_raise = False
            continue
        end_ns = core.execute(work, clock.now_ns())
        if rests:
            rested.append(core.recorder.num_steps - 1)
            rests = False
        clock.sleep_until(end_ns)  # an executor that only predicts has not taken the time
        core.complete(end_ns)
        source.tell(core, end_ns)


def lag_verdict(records: Records) -> str:
    """Why the load source was too late for the run to count; "" if it was in time, or if nothing was answered.

    Void: the 99th percentile of the lag is above a mean step and 5 % of the mean TTFT together.
    """
    requests, steps = records.requests, records.steps
    done = requests[requests["outcome"] == FINISHED]
    if not len(done):
        return ""
    sent = requests[requests["ended_ns"] >= requests["arrival_ns"]]
    lags_ns = sorted(sent["lag_ns"].tolist())
    lag_ns = lags_ns[-(-len(lags_ns) * LAG_PERCENT // 100) - 1]
    ttft_ns = float((done["first_delivery_ns"] - done["sent_ns"]).mean())
    step_ns = float(steps["duration_ns"].mean())
    if lag_ns <= step_ns + MAX_LAG_SHARE * ttft_ns:
        return ""
    return (
        f"the load source was late: p{LAG_PERCENT} of its lag is {format_duration(lag_ns)}, above a mean step of"
        f" {format_duration(step_ns)} and {MAX_LAG_SHARE:.0%} of the mean TTFT {format_duration(ttft_ns)} together."
        " The run is void: free a core of the machine, or lower the load."
    )
