"""What an autoscaler is shown of a fleet at a look."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchsim.drive.fleet.fleet_plan import STARTING
from batchsim.drive.fleet.scaling.autoscaler import EngineLoad, EngineWork

if TYPE_CHECKING:
    from batchsim.drive.fleet.simulate_fleet import Fleet


class Look:
    """A fleet at one instant, as `FleetLoad` has it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        staying = fleet.staying()
        self.num_replicas = len(staying)
        self.num_starting = sum(slot.state == STARTING for slot in staying)
        self.num_held = fleet.clients.num_held
        self.num_waiting = fleet.num_waiting()
        self.loads: dict[int, EngineLoad] = fleet.loads()

    def demands(self) -> dict[int, float]:
        """Of each engine that takes requests its KV in use, and the tokens of prompts that wait there, over its KV."""
        return {engine.slot.number: engine.demand() for engine in self._fleet.engines()}

    def work(self) -> dict[int, EngineWork]:
        """What each engine that takes requests did since the look before, or since it started."""
        now_ns = int(self._fleet.env.now)
        return {engine.slot.number: engine.work(now_ns) for engine in self._fleet.engines()}
