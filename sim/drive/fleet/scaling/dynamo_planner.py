"""Dynamo's planner, its load-based scaling of engines that do prompts and decodes, for throughput or for latency.

An engine's demand is its KV in use and the tokens of the prompts that wait there, over the tokens its KV holds. If any
engine's is above the upper threshold a replica is added, if all are below the lower one, one is removed; while one
starts nothing changes. For `throughput` the thresholds are 100 and 60 %, for `latency` 40 and 10 %.

Source: ai-dynamo/dynamo, components/src/dynamo/planner/core/load_scaling.py (0c6da1ec), `_agg_easy_decision`; its
interval of 5 s. Not modelled: the target `sla`, which fits a regression to the engine's steps, and scaling by predicted
throughput.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from batchsim.base.units import NS_PER_S, PositiveDuration
from batchsim.drive.fleet.scaling.autoscaler import AutoscalerConfig, FleetLoad

_THRESHOLDS = {"throughput": (1.0, 0.6), "latency": (0.4, 0.1)}


@dataclass(frozen=True, kw_only=True)
class DynamoPlannerConfig(AutoscalerConfig):
    """Dynamo's planner by load."""

    optimization_target: Literal["throughput", "latency"] = "throughput"
    """What its thresholds of demand are for, as it is called there."""
    every: PositiveDuration = 5 * NS_PER_S
    """How often the autoscaler looks."""
    kind: Literal["dynamo_planner"] = "dynamo_planner"

    def build(self) -> DynamoPlanner:
        return DynamoPlanner(self)


class DynamoPlanner:
    """See the module's text."""

    def __init__(self, config: DynamoPlannerConfig) -> None:
        self._config = config

    def desired(self, fleet: FleetLoad, now_ns: int) -> int:
        current, (above, below) = fleet.num_replicas, _THRESHOLDS[self._config.optimization_target]
        demands = fleet.demands().values()
        if fleet.num_starting or not demands:
            return current
        if any(demand > above for demand in demands):
            return min(current + 1, self._config.max)
        return max(current - 1, self._config.min) if all(demand < below for demand in demands) else current
