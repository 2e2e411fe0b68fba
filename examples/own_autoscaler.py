"""An autoscaler of one's own: as many replicas as requests are in the group, over what one is to hold.

    replicas: {count: 2, router: least_tokens, autoscaler: {kind: "own_autoscaler:InFlightConfig", each: 32, every: 15s,
      min: 2, max: 8, cold_start: 90s}}

with this folder on PYTHONPATH and --allow-code.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from batchsim.base.ranges import PositiveInt
from batchsim.drive.fleet.scaling.autoscaler import AutoscalerConfig, FleetLoad


@dataclass(frozen=True, kw_only=True)
class InFlightConfig(AutoscalerConfig):
    each: PositiveInt

    def build(self) -> InFlight:
        return InFlight(self)


class InFlight:
    def __init__(self, config: InFlightConfig) -> None:
        self.config = config

    def desired(self, fleet: FleetLoad, now_ns: int) -> int:
        in_flight = fleet.num_waiting + sum(load.num_running for load in fleet.loads.values())
        return min(max(ceil(in_flight / self.config.each), self.config.min), self.config.max)
