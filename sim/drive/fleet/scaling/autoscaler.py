"""What an autoscaler is asked, what it sees, and what the configs of all kinds share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Protocol

from batchsim.base.ranges import Config, Range, check_ranges
from batchsim.base.units import Duration, PositiveDuration

Replicas = Annotated[int, Range(1, 10_000)]
"""A number of replicas, each an engine with a KV pool of its own."""


class EngineLoad(NamedTuple):
    """What an engine's metrics say at an instant: requests that wait and that run, the share of KV blocks in use.

    Blocks that only a prefix cache still holds are free, as engines report it.
    """

    num_waiting: int
    num_running: int
    kv_utilisation: float


class EngineWork(NamedTuple):
    """What an engine did since the autoscaler's last look, by the steps that ended: output tokens, time in steps."""

    output_tokens: int
    busy_ns: int


class FleetLoad(Protocol):
    """What an autoscaler may read at a look.

    `num_replicas` is the number that is to stay; `loads` has the load of each that takes requests, by its number; the
    others are starting or failed. `num_held` requests wait at the router while no replica is up; `num_waiting` wait
    there or in any engine, draining ones included.
    """

    num_replicas: int
    num_starting: int
    num_held: int
    num_waiting: int

    @property
    def loads(self) -> Mapping[int, EngineLoad]: ...

    def demands(self) -> Mapping[int, float]:
        """Of each engine of `loads` its KV in use, and the tokens of prompts that wait there, as a share of its KV."""
        ...

    def work(self) -> Mapping[int, EngineWork]:
        """What each engine of `loads` did since the look before, or since it started."""
        ...


class Autoscaler(Protocol):
    """Decides how many replicas there are to be. It has no clock and no chance."""

    def desired(self, fleet: FleetLoad, now_ns: int) -> int:
        """The desired number of replicas from `now_ns` on, starting ones included. Called every `every` ns of its
        config.

        As many are started as `max` and `surge` leave room for, beside draining ones.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class AutoscalerConfig(Config):
    """What every autoscaler has: it looks every `every`, and holds from `min` to `max` replicas. A removed one takes no
    new requests and goes when it is empty. Those with the highest numbers are removed first."""

    every: PositiveDuration
    """How often the autoscaler looks."""
    min: Replicas
    """The fewest replicas."""
    max: Replicas
    """The most replicas, draining ones aside."""
    cold_start: Duration
    """From the start of a replica until it takes requests."""
    surge: Annotated[int, Range(0, 10_000)] = 0
    """Replicas beyond `max` that may be held while others drain."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.min > self.max:
            raise ValueError(f"autoscaler: min {self.min} and max {self.max}: needs min <= max")

    def build(self) -> Autoscaler:
        """A new autoscaler, for one simulation."""
        raise NotImplementedError
