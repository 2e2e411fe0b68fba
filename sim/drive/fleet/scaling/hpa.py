"""Kubernetes' HorizontalPodAutoscaler, with metrics of pods and an average value as target.

For each metric, replicas are wanted in the ratio of the mean over replicas to its target, rounded up, unless the ratio
is within the tolerance of 1; the largest of these counts is taken. Replicas that do not report, since they start or
have failed, count as 0 where there are too few, as the target where too many, and never turn the direction round. Then
the least of the counts in the window of scale-up and the most in that of scale-down bound the change, and the policies
how fast it comes.

Source: pkg/controller/podautoscaler/replica_calculator.go (`calcPlainMetricReplicas`) and horizontal.go
(`stabilizeRecommendationWithBehaviors`, `convertDesiredReplicasWithBehaviorRate`) of kubernetes/kubernetes 1.33;
defaults of `behavior` from pkg/apis/autoscaling/v2/defaults.go, of `every` and `tolerance` from
kube-controller-manager. Not as there: values are exact, not cut to thousandths; metrics are those of the look, not of
a scrape before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from math import ceil
from typing import Annotated, Literal

from batchsim.base.ranges import Config, PositiveInt, Range, check_ranges
from batchsim.base.units import NS_PER_S, Duration, PositiveDuration, Share, time_text
from batchsim.drive.fleet.scaling.autoscaler import AutoscalerConfig, FleetLoad

Target = Annotated[float, Range(0, 1e9, above=True)]


@dataclass(frozen=True)
class ScalingPolicy(Config):
    """How many replicas may be added or removed within a period."""

    type: Literal["pods", "percent"]
    """Whether `value` is a number of replicas (pods) or per cent of them."""
    value: PositiveInt
    """How many replicas, or per cent of them, at most."""
    period: Annotated[Duration, Range(NS_PER_S, 1800 * NS_PER_S, show=time_text)]
    """The time within which no more than `value` are."""


@dataclass(frozen=True, kw_only=True)
class ScalingRules(Config):
    """How fast the number of replicas may change in one direction."""

    stabilization_window: Annotated[Duration, Range(0, 3600 * NS_PER_S, show=time_text)]
    """The most (for removing) or least (for adding) of what was wanted within it counts."""
    policies: tuple[ScalingPolicy, ...]
    """How many replicas may be added or removed within a period."""
    select: Literal["max", "min", "disabled"] = "max"
    """Which policy counts: the one that allows the most or the least; disabled: no change in this direction."""
    tolerance: Share = 0.1
    """Part of the target by which a metric may be off without a change."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.policies:
            raise ValueError("policies is empty. Write one, like [{type: pods, value: 4, period: 15s}].")


def scale_up_rules() -> ScalingRules:
    """The defaults: doubled, or four more, within 15 s."""
    policies = ScalingPolicy("percent", 100, 15 * NS_PER_S), ScalingPolicy("pods", 4, 15 * NS_PER_S)
    return ScalingRules(stabilization_window=0, policies=policies)


def scale_down_rules() -> ScalingRules:
    """The defaults: down to the most wanted within five minutes, however many these are."""
    policies = (ScalingPolicy("percent", 100, 15 * NS_PER_S),)
    return ScalingRules(stabilization_window=300 * NS_PER_S, policies=policies)


@dataclass(frozen=True, kw_only=True)
class HpaMetrics(Config):
    """The average over replicas that each metric is to have; null: it is not asked."""

    waiting: Target | None = None
    """Requests that wait at the look."""
    running: Target | None = None
    """Requests that run at the look."""
    kv_utilisation: Annotated[Share, Range(0, 1, above=True)] | None = None
    """Part of the KV blocks in use at the look."""
    tokens_per_s: Target | None = None
    """Output tokens a second since the look before."""
    busy_share: Annotated[Share, Range(0, 1, above=True)] | None = None
    """Part of the time in steps since the look before, which is full at any load where an engine batches."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.targets:
            names = [each.name for each in fields(self)]
            raise ValueError(f"metrics is empty. Give a target for one of {', '.join(names)}, like {{waiting: 4}}.")

    @property
    def targets(self) -> dict[str, float]:
        """The targets given, by metric."""
        targets = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: target for name, target in targets.items() if target is not None}


@dataclass(frozen=True, kw_only=True)
class HpaConfig(AutoscalerConfig):
    """Kubernetes' HorizontalPodAutoscaler."""

    metrics: HpaMetrics
    """Targets for each replica, of which the one that wants most replicas counts."""
    every: PositiveDuration = 15 * NS_PER_S
    """How often the autoscaler looks."""
    scale_up: ScalingRules = field(default_factory=scale_up_rules)
    """Its `behavior` when replicas are added."""
    scale_down: ScalingRules = field(default_factory=scale_down_rules)
    """Its `behavior` when replicas are removed."""
    kind: Literal["hpa"] = "hpa"

    def build(self) -> Hpa:
        return Hpa(self)


class Hpa:
    """See the module's text."""

    def __init__(self, config: HpaConfig) -> None:
        self._config = config
        self._pace = Pace(config.min, config.max, config.scale_up, config.scale_down)
        self._last_ns = 0

    def desired(self, fleet: FleetLoad, now_ns: int) -> int:
        config, current, span_ns = self._config, fleet.num_replicas, now_ns - self._last_ns
        self._last_ns = now_ns
        targets = config.metrics.targets
        values: dict[str, list[float]] = {
            "waiting": [load.num_waiting for load in fleet.loads.values()],
            "running": [load.num_running for load in fleet.loads.values()],
            "kv_utilisation": [load.kv_utilisation for load in fleet.loads.values()],
        }
        if targets.keys() & {"tokens_per_s", "busy_share"}:
            work = fleet.work().values()
            values["tokens_per_s"] = [done.output_tokens * NS_PER_S / span_ns for done in work]
            values["busy_share"] = [done.busy_ns / span_ns for done in work]
        if not config.min <= current <= config.max:
            wanted = min(max(current, config.min), config.max)
            return self._pace.note(current, wanted, now_ns)
        tolerance = config.scale_down.tolerance, config.scale_up.tolerance
        wanted = max(wanted_replicas(values[name], current, target, tolerance) for name, target in targets.items())
        return self._pace.bounded(current, wanted, now_ns)


def wanted_replicas(
    values: Sequence[float], current: int, target: float, tolerance: tuple[float, float] = (0.1, 0.1)
) -> int:
    """How many replicas one metric asks for: `values` are those of the replicas that report, of `current` ones."""
    down, up = tolerance
    if not values:
        return current  # nothing is known
    num_missing = max(current - len(values), 0)
    ratio = sum(values) / len(values) / target
    if num_missing:
        fill = target if ratio < 1 else 0.0
        filled = (sum(values) + fill * num_missing) / current / target
        if (ratio < 1 < filled) or (filled < 1 < ratio):
            return current
        ratio = filled
    if 1 - down <= ratio <= 1 + up:
        return current
    wanted = ceil(round(ratio * (len(values) + num_missing), 9))
    turned = (ratio < 1 and wanted > current) or (ratio > 1 and wanted < current)
    return current if turned else wanted


class Pace:
    """How fast the number of replicas follows what is wanted: windows of stabilization, policies, ends."""

    def __init__(self, least: int, most: int, up: ScalingRules, down: ScalingRules) -> None:
        self._least, self._most = least, most
        self._up, self._down = up, down
        self._wanted: list[tuple[int, int]] = []  # (time in ns, replicas wanted then)
        self._changes: list[tuple[int, int]] = []  # (time in ns, replicas added then)

    def bounded(self, current: int, wanted: int, now_ns: int) -> int:
        """The number of replicas from `now_ns` on, where `wanted` are asked for."""
        up_ns, down_ns = self._up.stabilization_window, self._down.stabilization_window
        least = min([wanted, *(count for time_ns, count in self._wanted if time_ns > now_ns - up_ns)])
        most = max([wanted, *(count for time_ns, count in self._wanted if time_ns > now_ns - down_ns)])
        self._wanted = [each for each in self._wanted if each[0] > now_ns - max(up_ns, down_ns)]
        self._wanted.append((now_ns, wanted))
        stable = min(max(current, least), most)
        if stable > current:
            stable = min(stable, self._most, max(self._limit(self._up, current, now_ns, 1), current))
        elif stable < current:
            stable = max(stable, self._least, min(self._limit(self._down, current, now_ns, -1), current))
        return self.note(current, stable, now_ns)

    def note(self, current: int, chosen: int, now_ns: int) -> int:
        """Returns `chosen`; its difference from `current` counts against the policies' periods."""
        longest_ns = max(policy.period for rules in (self._up, self._down) for policy in rules.policies)
        self._changes = [each for each in self._changes if each[0] > now_ns - longest_ns]
        if chosen != current:
            self._changes.append((now_ns, chosen - current))
        return chosen

    def _limit(self, rules: ScalingRules, current: int, now_ns: int, sign: int) -> int:
        """How far the policies of one direction, 1 up and -1 down, let the number go at `now_ns`."""
        if rules.select == "disabled":
            return current
        limits = []
        for policy in rules.policies:
            start = current - sum(change for time_ns, change in self._changes if time_ns > now_ns - policy.period)
            if policy.type == "pods":
                limits.append(start + sign * policy.value)
            else:
                share = round(start * (100 + sign * policy.value) / 100, 9)
                limits.append(ceil(share) if sign > 0 else int(share))
        farthest = (rules.select == "max") == (sign > 0)
        return max(limits) if farthest else min(limits)
