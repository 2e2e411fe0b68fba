"""The one door to leaps: whichever kind the engine's loop admits, behind `Leaps`. Drivers know no other.

A leap simulates many steps at once and writes the rows that stepping would have written. Which kinds there are:

1. `leaps.leap`: an engine that waits for each step repeats its decodes, verified drafts included; where they are
   foreseen (`Foreseeing` of `protocols`), behind prompts too, and through steps in which requests end.
2. `leaps_ahead.leap_ahead`: an engine a step ahead of results does, through steps in which requests end.
3. `pipeline_leaps.leap_calls`: groups of a pipeline decode in turns; such a leap begins before a call of the scheduler,
   the others behind a step that was just launched.
4. `queue_leaps.leap_queue`: an engine that offloads KV does while no transfer is under way.
5. `leaps.quiet_until_ns`: no leap yet, but the time up to which one is certain.
"""

from __future__ import annotations

from collections.abc import Callable

from batchsim.kernel.core import EngineCore
from batchsim.kernel.leaps import Tell, leap, quiet_until_ns
from batchsim.kernel.leaps_ahead import leap_ahead
from batchsim.kernel.pipeline_leaps import leap_calls
from batchsim.kernel.queue_leaps import leap_queue
from batchsim.kernel.sim_executor import SimExecutor


class Leaps:
    """Leaps of the engine `core`, whose executor is a SimExecutor. Times are in ns.

    `follow_steps` and `precede_calls`: whether the engine's loop admits leaps behind a step, or before a call of the
    scheduler; neither where `leaps` is false.
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
        leaps = leaps and not padded and (core.connected is None or core.connected.connector.leaps != "")
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
        core, batch = self._core, self._core.in_flight.steps[-1].batch
        if core.connected is not None and core.connected.connector.leaps == "quiet":
            return leap_queue(core, self._executor, batch, now_ns, horizon)
        if self._is_ahead:
            return leap_ahead(core, self._executor, batch, now_ns, horizon, tell, drains)
        return leap(core, self._executor, batch, now_ns, horizon, tell, drains)

    def leap_calls(self, now_ns: int, horizon_ns: float) -> int:
        """Makes the calls of a pipeline's scheduler, the next one at `now_ns`, that are over before `horizon_ns` and
        repeat decodes; returns when the next one begins."""
        return leap_calls(self._core, self._executor, now_ns, horizon_ns)

    def quiet_until_ns(self, now_ns: int) -> int | None:
        """A time before which no request of the engine ends and none gets its first token, unless one arrives; None if
        that is not known. `now_ns` as in `leap`."""
        return quiet_until_ns(self._core, self._executor, now_ns)
