"""Two thresholds and a delay: the plainest autoscalers, one replica at a time.

Above `above` a replica is added at every look; when every look for `scale_down_delay` has found the signal below
`below`, one is removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from batchsim.base.ranges import NonNegative
from batchsim.base.units import Duration, Share
from batchsim.drive.fleet.scaling.autoscaler import AutoscalerConfig, FleetLoad


@dataclass(frozen=True, kw_only=True)
class QueueScaler(AutoscalerConfig):
    """An autoscaler by the requests that wait, in engines and at the router, for each replica up or starting."""

    above: NonNegative
    """A replica is added while more requests wait for each replica."""
    below: NonNegative
    """A replica is removed where fewer wait for each."""
    scale_down_delay: Duration
    """How long it must have been below."""
    kind: Literal["queue_per_replica"] = "queue_per_replica"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.below < self.above:
            raise ValueError(f"autoscaler: below {self.below:g} and above {self.above:g}: needs below < above")

    def build(self) -> Thresholds:
        return Thresholds(self)


@dataclass(frozen=True, kw_only=True)
class KvScaler(AutoscalerConfig):
    """An autoscaler by the share of KV blocks in use at the look, as a mean over the replicas that take requests.

    Blocks that only a prefix cache still holds are free. (The share of time spent in steps says nothing: an engine that
    batches is as busy with one request.)
    """

    above: Share
    """A replica is added while a larger part of KV blocks is in use."""
    below: Share
    """A replica is removed where a smaller part is in use."""
    scale_down_delay: Duration
    """How long it must have been below."""
    kind: Literal["kv_utilisation"] = "kv_utilisation"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.below < self.above:
            raise ValueError(f"autoscaler: below {self.below:.4g} and above {self.above:.4g}: needs below < above")

    def build(self) -> Thresholds:
        return Thresholds(self)


class Thresholds:
    """See the module's text."""

    def __init__(self, config: QueueScaler | KvScaler) -> None:
        self._config = config
        self._below_ns: int | None = None  # since when too little has been found to do

    def desired(self, fleet: FleetLoad, now_ns: int) -> int:
        config, signal = self._config, self._signal(fleet)
        if signal > config.above:
            self._below_ns = None
            return min(fleet.num_replicas + 1, config.max)
        if signal >= config.below:
            self._below_ns = None
        elif self._below_ns is None:
            self._below_ns = now_ns
        rested = self._below_ns is not None and now_ns - self._below_ns >= config.scale_down_delay
        if rested and fleet.num_replicas > config.min:
            self._below_ns = now_ns
            return fleet.num_replicas - 1
        return fleet.num_replicas

    def _signal(self, fleet: FleetLoad) -> float:
        """Requests waiting for each replica, or the mean share of KV blocks in use.

        Where there is no such replica: infinite if anything waits, else 0.
        """
        if isinstance(self._config, QueueScaler):
            part, whole = float(fleet.num_waiting), len(fleet.loads) + fleet.num_starting
        else:
            part, whole = sum(load.kv_utilisation for load in fleet.loads.values()), len(fleet.loads)
        if not whole:
            return inf if fleet.num_waiting else 0.0
        return part / whole
