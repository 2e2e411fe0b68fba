"""KEDA: a HorizontalPodAutoscaler over totals of the group, and between no replica and one a switch of its own.

Each trigger wants its total over the group, divided by its threshold, rounded up, unless that is within the tolerance
of what there is; the largest counts, at the pace of Kubernetes' rules, down to one. Every `polling_interval` the switch
asks whether any total is above `activation`: with no replica then the first is started; where none was for `cooldown`,
and `min` is 0, the last ones go.

Source: KEDA's documentation of ScaledObject (defaults: pollingInterval 30 s, cooldownPeriod 300 s, activation 0), and
`GetExternalPerPodMetricReplicas` of pkg/controller/podautoscaler/replica_calculator.go in kubernetes/kubernetes 1.33.
Not as there: the switch looks no sooner than the autoscaler's own next look.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import ceil
from typing import Annotated, Literal

from batchsim.base.ranges import Config, NonNegative, Range, check_ranges
from batchsim.base.units import NS_PER_S, Duration, PositiveDuration
from batchsim.drive.fleet.scaling.autoscaler import AutoscalerConfig, FleetLoad
from batchsim.drive.fleet.scaling.hpa import Pace, ScalingRules, Target, scale_down_rules, scale_up_rules


@dataclass(frozen=True, kw_only=True)
class KedaTriggers(Config):
    """How much of each total one replica is for; null: it is not asked."""

    waiting: Target | None = None
    """Requests that wait in engines and at the router."""
    running: Target | None = None
    """Requests that run."""
    tokens_per_s: Target | None = None
    """Output tokens a second since the look before."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.thresholds:
            names = [each.name for each in fields(self)]
            raise ValueError(f"triggers is empty. Give a threshold for one of {', '.join(names)}, like {{waiting: 8}}.")

    @property
    def thresholds(self) -> dict[str, float]:
        """The thresholds given, by total."""
        thresholds = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: threshold for name, threshold in thresholds.items() if threshold is not None}


@dataclass(frozen=True, kw_only=True)
class KedaConfig(AutoscalerConfig):
    """KEDA's ScaledObject."""

    triggers: KedaTriggers
    """How much of each total one replica is for."""
    min: Annotated[int, Range(0, 10_000)]
    """The fewest replicas; 0: none while nothing happens."""
    every: PositiveDuration = 15 * NS_PER_S
    """How often the autoscaler looks."""
    polling_interval: PositiveDuration = 30 * NS_PER_S
    """How often it is asked whether any trigger is active."""
    cooldown: Duration = 300 * NS_PER_S
    """How long no trigger was active before the last replicas go."""
    activation: NonNegative = 0.0
    """A trigger is active above it."""
    scale_up: ScalingRules = field(default_factory=scale_up_rules)
    """The `behavior` of its HorizontalPodAutoscaler when replicas are added."""
    scale_down: ScalingRules = field(default_factory=scale_down_rules)
    """The `behavior` of its HorizontalPodAutoscaler when replicas are removed."""
    kind: Literal["keda"] = "keda"

    def build(self) -> Keda:
        return Keda(self)


class Keda:
    """See the module's text."""

    def __init__(self, config: KedaConfig) -> None:
        self._config = config
        self._pace = Pace(max(config.min, 1), config.max, config.scale_up, config.scale_down)
        self._last_ns = self._polled_ns = self._active_ns = 0

    def desired(self, fleet: FleetLoad, now_ns: int) -> int:
        config, current = self._config, fleet.num_replicas
        totals = self._totals(fleet, now_ns)
        if now_ns - self._polled_ns >= config.polling_interval:
            self._polled_ns = now_ns
            if any(total > config.activation for total in totals.values()):
                self._active_ns = now_ns
                if not current:
                    return self._pace.note(current, max(config.min, 1), now_ns)
            elif not config.min and now_ns - self._active_ns >= config.cooldown:
                return self._pace.note(current, 0, now_ns)
        if not current:
            return 0
        wanted = max(self._wanted(totals[name], limit, current) for name, limit in config.triggers.thresholds.items())
        return self._pace.bounded(current, wanted, now_ns)

    def _totals(self, fleet: FleetLoad, now_ns: int) -> dict[str, float]:
        span_ns, self._last_ns = now_ns - self._last_ns, now_ns
        totals: dict[str, float] = {}
        for name in self._config.triggers.thresholds:
            if name == "waiting":
                totals[name] = fleet.num_waiting
            elif name == "running":
                totals[name] = sum(load.num_running for load in fleet.loads.values())
            else:
                totals[name] = sum(done.output_tokens for done in fleet.work().values()) * NS_PER_S / span_ns
        return totals

    def _wanted(self, total: float, threshold: float, current: int) -> int:
        ratio = total / (threshold * current)
        if 1 - self._config.scale_down.tolerance <= ratio <= 1 + self._config.scale_up.tolerance:
            return current
        return ceil(round(total / threshold, 9))
