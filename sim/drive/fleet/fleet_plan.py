"""The plan of a fleet: how many replicas there are, when which fails, when an autoscaler adds or removes one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from batchsim.base.ranges import Config, Range, check_ranges
from batchsim.base.units import Duration, PositiveDuration, format_duration
from batchsim.drive.fleet.admission import AdmissionConfig
from batchsim.drive.fleet.scaling.autoscaler import AutoscalerConfig

STARTING, UP, DRAINING, FAILED, LOST = "starting", "up", "draining", "failed", "lost"
OFFLOADING = "offloading"
"""The state of a model that goes to sleep, its weights on their way to the host's memory. One that sleeps has none; one
that wakes up is starting."""
HELD = (STARTING, UP, DRAINING, FAILED, OFFLOADING)
"""The states in which a replica has its GPUs, and costs."""

Lost = Literal["retry", "fail"]
"""Outcome of requests in flight on a replica that fails: sent anew to another, from the start; or unfinished."""


@dataclass(frozen=True)
class Failure(Config):
    """A replica loses all it holds, and is back later with an empty cache.

    With a `notice` it is taken away, as spot capacity is: it drains from before on, and from `at`, or as soon as it is
    empty, until another takes its place it costs nothing.
    """

    replica: Annotated[int, Range(0, 9_999)]
    """The replica's number."""
    at: Duration
    """When it fails."""
    down_for: PositiveDuration
    """How long it takes no requests."""
    notice: Duration = 0
    """How long before it drains, as spot capacity does; 0: it fails unannounced."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.notice > self.at:
            raise ValueError(
                f"failures: a notice of {format_duration(self.notice)} before {format_duration(self.at)} is before the"
                " start. Shorten it, or let the replica go later."
            )


@dataclass(frozen=True)
class FleetPlan:
    """`count` replicas at the start, and what happens to them."""

    count: int
    failures: tuple[Failure, ...] = ()
    lost: Lost | None = None
    scaler: AutoscalerConfig | None = None
    admission: AdmissionConfig | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether the fleet is fixed: no failures, no autoscaler, no admission gate."""
        return not self.failures and self.scaler is None and self.admission is None

    @property
    def most(self) -> int:
        """The largest number of replicas that there can be at once."""
        return self.count if self.scaler is None else self.scaler.max + self.scaler.surge


@dataclass(frozen=True)
class ReplicaSpan:
    """A replica was in a `state`, `starting`, `up`, `draining`, `failed`, `lost` or `offloading`, from `start_ns` to
    `end_ns`."""

    replica: int
    state: str
    start_ns: int
    end_ns: int
