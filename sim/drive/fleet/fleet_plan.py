"""The plan of a fleet: how many replicas there are, when which fails, when an autoscaler adds or removes one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from batchsim.base.ranges import Config, Range
from batchsim.base.units import Duration, PositiveDuration
from batchsim.drive.fleet.admission import AdmissionConfig
from batchsim.drive.fleet.scaling.autoscaler import AutoscalerConfig

STARTING, UP, DRAINING, FAILED = "starting", "up", "draining", "failed"
HELD = (STARTING, UP, DRAINING, FAILED)
"""The states in which a replica has its GPUs, and costs."""

Lost = Literal["retry", "fail"]
"""What becomes of requests in flight on a replica that fails: sent anew to another, from the start; or unfinished."""


@dataclass(frozen=True)
class Failure(Config):
    """`replica` loses all it holds at `at` and takes requests again, with an empty cache, after `down_for`."""

    replica: Annotated[int, Range(0, 9_999)]
    at: Duration
    down_for: PositiveDuration


@dataclass(frozen=True)
class FleetPlan:
    """`count` replicas at the start, and what happens to them."""

    count: int
    failures: tuple[Failure, ...] = ()
    lost: Lost | None = None
    scaler: AutoscalerConfig | None = None
    admission: AdmissionConfig | None = None

    @property
    def most(self) -> int:
        """The largest number of replicas that there can be at once."""
        return self.count if self.scaler is None else self.scaler.max + self.scaler.surge


@dataclass(frozen=True)
class ReplicaSpan:
    """A replica was in a `state`, `starting`, `up`, `draining` or `failed`, from `start_ns` to `end_ns`."""

    replica: int
    state: str
    start_ns: int
    end_ns: int
