"""The plan of a fleet: how many replicas there are, when which fails, when an autoscaler adds or removes one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from batchsim.base.ranges import Config, NonNegative, Range, check_ranges
from batchsim.base.units import Duration, PositiveDuration, Share

STARTING, UP, DRAINING, FAILED = "starting", "up", "draining", "failed"
HELD = (STARTING, UP, DRAINING, FAILED)
"""The states in which a replica has its GPUs, and costs."""

Replicas = Annotated[int, Range(1, 10_000)]
"""A number of replicas, each an engine with a KV pool of its own."""

Lost = Literal["retry", "fail"]
"""What becomes of requests in flight on a replica that fails: sent anew to another, from the start; or unfinished."""


@dataclass(frozen=True)
class Failure(Config):
    """`replica` loses all it holds at `at` and takes requests again, with an empty cache, after `down_for`."""

    replica: Annotated[int, Range(0, 9_999)]
    at: Duration
    down_for: PositiveDuration


@dataclass(frozen=True, kw_only=True)
class _Scaler(Config):
    """An autoscaler. It looks at its signal every `every` ns: above `above` it adds a replica, which takes requests
    after `cold_start`; when every look for `scale_down_delay` has found the signal below `below`, it removes one. One
    at a time, and always from `min` to `max` of them.

    A removed replica takes no new requests and goes when it is empty.
    """

    every: PositiveDuration
    min: Replicas
    max: Replicas
    cold_start: Duration
    scale_down_delay: Duration

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.min > self.max:
            raise ValueError(f"autoscaler: min {self.min} and max {self.max}: needs min <= max")


@dataclass(frozen=True, kw_only=True)
class QueueScaler(_Scaler):
    """An autoscaler by the requests that wait, in engines and at the router, for each replica up or starting."""

    above: NonNegative
    below: NonNegative
    kind: Literal["queue_per_replica"] = "queue_per_replica"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.below < self.above:
            raise ValueError(f"autoscaler: below {self.below:g} and above {self.above:g}: needs below < above")


@dataclass(frozen=True, kw_only=True)
class KvScaler(_Scaler):
    """An autoscaler by the share of KV blocks in use at the look, as a mean over the replicas that take requests.

    Blocks that only a prefix cache still holds are free. (The share of time spent in steps says nothing: an engine that
    batches is as busy with one request.)
    """

    above: Share
    below: Share
    kind: Literal["kv_utilisation"] = "kv_utilisation"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.below < self.above:
            raise ValueError(f"autoscaler: below {self.below:.4g} and above {self.above:.4g}: needs below < above")


Scaler = QueueScaler | KvScaler


@dataclass(frozen=True)
class FleetPlan:
    """`count` replicas at the start, and what happens to them."""

    count: int
    failures: tuple[Failure, ...] = ()
    lost: Lost | None = None
    scaler: Scaler | None = None

    @property
    def most(self) -> int:
        """The largest number of replicas that there can be at once."""
        return self.count if self.scaler is None else self.scaler.max


@dataclass(frozen=True)
class ReplicaSpan:
    """A replica was in a `state`, `starting`, `up`, `draining` or `failed`, from `start_ns` to `end_ns`."""

    replica: int
    state: str
    start_ns: int
    end_ns: int
