"""Models awake side by side on a GPU: an engine for each, with its share of the memory, whose steps take turns.

1. A request goes to the engine of the model that its class names. Engines schedule as if each were alone.
2. The GPU runs one step at a time, whole, in the order in which they were launched: a step that is launched while
   another model's runs begins when that is over. An engine ahead of results may have as many launched as its loop
   allows, each in its turn.
3. Between steps the GPU changes the model in no time. Models with a GPU of their own wait for no other.

That is the GPU's time slicing between processes without MPS, with slices as long as a step: a short step behind a long
one waits longer than where slices end within steps, and all steps together take as long.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from batchsim.drive.fleet.engine import Engine, Slot
from batchsim.drive.fleet.fleet_plan import FleetPlan
from batchsim.drive.fleet.shared_gpu import ByModel
from batchsim.drive.fleet.simulate_fleet import Fleet, FleetRun, run_fleet
from batchsim.drive.simulate import Pulse
from batchsim.kernel.batch import Batch
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import AnyWorkload
from batchsim.kernel.record import GPU_WAITED, MISSING
from batchsim.kernel.sim_executor import SimExecutor


class Gpu:
    """A GPU that runs the steps of several engines one after another; `free_ns`: when all launched so far are over."""

    def __init__(self) -> None:
        self.free_ns = 0

    def execute(self, core: EngineCore, batch: Batch, now_ns: int) -> int:
        """Launches a step of `core` at `now_ns`; returns its end in ns. The wait for other engines' steps is a part of
        it."""
        executor = cast(SimExecutor, core.executor)
        start_ns = max(now_ns, core.in_flight.free_ns)
        executor.wait_ns = wait_ns = max(self.free_ns - start_ns, 0)
        if wait_ns:
            core.recorder.state(start_ns, MISSING, GPU_WAITED, "", wait_ns)
        end_ns = self.free_ns = core.execute(batch, now_ns)
        return end_ns


class SideBySide(Fleet):
    """The engines of models by number, of which `sharing` are on one GPU."""

    def __init__(
        self,
        env: Any,
        new_engine: Callable[[int], EngineCore],
        workload: AnyWorkload,
        homes: Mapping[str, int],
        sharing: Collection[int],
        stop_ns: int | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        self._gpu, self._sharing = Gpu(), sharing
        # Each launch may lengthen another engine's next step: none goes ahead of an event, nor leaps over steps.
        super().__init__(env, new_engine, ByModel(homes), FleetPlan(len(homes)), workload, True, stop_ns, False, pulse)

    def _new_engine(self, slot: Slot) -> Engine:
        return Engine(self, slot, self.new_engine(slot.number), self._gpu if slot.number in self._sharing else None)


def simulate_side_by_side(
    new_engine: Callable[[int], EngineCore],
    homes: Mapping[str, int],
    sharing: Collection[int],
    workload: AnyWorkload,
    *,
    stop_ns: int | None = None,
    until_ns: int = 0,
    join: bool = True,
    pulse: Pulse | None = None,
) -> FleetRun:
    """Runs `workload` through engines, each a `new_engine(number)`, to its end; as `simulate_fleet`. `homes`: the
    number of the model of each class of requests; `sharing`: those on one GPU."""

    def new_fleet(env: Any) -> Fleet:
        return SideBySide(env, new_engine, workload, homes, sharing, stop_ns, pulse)

    return run_fleet(new_fleet, until_ns, join=join)
