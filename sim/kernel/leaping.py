"""The one door to leaps: whichever kind the engine's loop admits, behind `Leaps`. Drivers know no other.

A leap simulates many steps at once and writes the rows that stepping would have written. Which kinds there are:

1. `leaps.leap`: an engine that waits for each step repeats its decodes, verified drafts included; where they are
   foreseen (`Foreseeing` of `protocols`), behind prompts too, and through steps in which requests end.
2. `leaps_ahead.leap_ahead`: an engine a step ahead of results does, through steps in which requests end.
3. `pipeline_leaps.leap_calls`: groups of a pipeline decode in turns; such a leap begins before a call of the scheduler,
   the others behind a step that was just launched.
4. `queue_leaps.leap_queue`: an engine that offloads KV does while no transfer is under way.
5. `leaps.quiet_until_ns`: no leap yet, but the time up to which one is certain.

An engine that passes KV to others, or gets it, leaps up to the launch with which it notices the next transfer, and over
the naps in which it waits for one.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_transfer import Connected, ForeseenLink, foreseen_link
from batchsim.kernel.leaps import Tell, leap, quiet_until_ns
from batchsim.kernel.leaps_ahead import leap_ahead
from batchsim.kernel.pipeline_leaps import leap_calls
from batchsim.kernel.queue_leaps import leap_queue
from batchsim.kernel.sim_executor import SimExecutor


class Leaps:
    """Leaps of the engine `core`, whose executor is a SimExecutor. Times are in ns.

    `follow_steps`, `precede_calls` and `over_naps`: whether the engine's loop admits leaps behind a step, before a call
    of the scheduler, or over naps between calls that have nothing to run; none of them where `leaps` is false.
    """

    def __init__(self, core: EngineCore, *, leaps: bool) -> None:
        if not isinstance(core.executor, SimExecutor):
            raise TypeError(f"a simulation needs a SimExecutor, not {type(core.executor).__name__}")
        self._core, self._executor = core, core.executor
        self._is_ahead = core.loop.is_ahead
        # Steps in compiled shapes are padded one by one, which leaps ahead of results and over calls do not.
        padded = core.executor.pads is not None and core.loop.is_ahead
        # Steps with adapters or masks depend on who decodes.
        leaps = leaps and core.executor.adapters is None and core.executor.masks is None
        # Each launch of a step is a look at the transfers that are over, which finds none before they are due.
        connected, self._link = core.connected, foreseen_link(core.connected)
        can_leap = connected is None or self._link is not None or connected.connector.leaps != ""
        leaps = leaps and not padded and can_leap
        self.over_naps = leaps and self._link is not None
        self.follow_steps = leaps and core.loop.stages == 1
        self.precede_calls = leaps and core.loop.stages > 1

    def leap(
        self,
        now_ns: int,
        horizon: Callable[[], float],
        tell: Tell | None = None,
        drains: Callable[[], bool] | None = None,
    ) -> int:
        """Simulates steps like the latest, which was just executed, that begin before the `horizon`; returns the end of
        the last one, or of its launch where the engine is ahead of results. `now_ns`: the same of the latest.

        `tell` passes on what happened in a leap; None: nothing may happen in it. `drains`: whether the scheduler is to
        drain; None: it is not. If the latest step has been delivered, none is in flight afterwards.
        """
        core, batch, link = self._core, self._core.in_flight.steps[-1].batch, self._link
        if core.connected is not None and link is not None:
            return self._leap_connected(core.connected, link, now_ns, horizon, tell, drains)
        if core.connected is not None and core.connected.connector.leaps == "quiet":
            return leap_queue(core, self._executor, batch, now_ns, horizon)
        if self._is_ahead:
            return leap_ahead(core, self._executor, batch, now_ns, horizon, tell, drains)
        return leap(core, self._executor, batch, now_ns, horizon, tell, drains)

    def _leap_connected(
        self,
        connected: Connected,
        link: ForeseenLink,
        now_ns: int,
        horizon: Callable[[], float],
        tell: Tell | None,
        drains: Callable[[], bool] | None,
    ) -> int:
        """`leap` of an engine that passes KV: over launches before the next transfer is over, and if nothing else comes
        over the one that notices it and the one behind that, which is made before the scheduler hears of it."""
        core, connector = self._core, connected.connector
        if not connector.is_quiet:
            return now_ns
        steps, batch = core.in_flight.steps, core.in_flight.steps[-1].batch
        now_ns = leap_ahead(core, self._executor, batch, now_ns, lambda: min(horizon(), link.due_ns()), tell, drains)
        due_ns = link.due_ns()
        if due_ns == inf or len(steps) != 2 or core.has_arrivals or any(s.batch.chunks or s.finished for s in steps):
            return now_ns
        oldest, latest = steps
        launch_ns, _ = latest.batch.host_ns or self._executor.host_ns(latest.batch)
        first_ns = max(now_ns, oldest.end_ns) + oldest.process_ns + launch_ns
        second_ns = max(first_ns, latest.end_ns) + latest.process_ns + launch_ns
        if first_ns < due_ns or second_ns >= horizon() or self._executor.quiet_steps(latest.batch) < 2:
            return now_ns
        before = core.recorder.num_steps
        now_ns = leap_ahead(core, self._executor, latest.batch, now_ns, lambda: second_ns + 1)
        for launched_ns in (first_ns, second_ns)[: core.recorder.num_steps - before]:
            connector.relaunched(launched_ns)
        return now_ns

    def leap_calls(self, now_ns: int, horizon_ns: float) -> int:
        """Makes the calls of a pipeline's scheduler, the next one at `now_ns`, that are over before `horizon_ns` and
        repeat decodes; returns when the next one begins."""
        return leap_calls(self._core, self._executor, now_ns, horizon_ns)

    def quiet_until_ns(self, now_ns: int) -> int | None:
        """A time before which no request of the engine ends and none gets its first token, unless one arrives; None if
        that is not known. `now_ns` as in `leap`."""
        connected, link = self._core.connected, self._link
        if connected is not None and not connected.connector.is_quiet:
            return None
        until_ns = quiet_until_ns(self._core, self._executor, now_ns)
        return until_ns if until_ns is None or link is None else int(min(until_ns, link.due_ns()))

    def naps_until_ns(self) -> float | None:
        """The time in ns before which the calls of the scheduler, each behind a nap, have nothing to run unless a
        request arrives; None if that is not known. For an engine that takes a nap before which nothing changed."""
        core, link = self._core, self._link
        assert core.connected is not None and link is not None, "it leaps over naps"
        if core.in_flight.steps or core.has_arrivals or not core.has_entered or not core.connected.connector.is_quiet:
            return None
        timers = [ns for ns in (core.next_timer_ns, core.stop_ns) if ns is not None]
        return min([*timers, link.due_ns()])
