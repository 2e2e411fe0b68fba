"""The `plan:` block of a scenario: for which traffic GPUs are to be bought, of which kinds, at which prices."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Annotated, Any

from batchsim.base.plain import LEFT_OUT
from batchsim.base.ranges import MAX_CHOICES, Config, PositiveInt, Range, check_ranges
from batchsim.base.units import (
    NS_PER_S,
    YEAR_NS,
    Duration,
    PricePerGbMonth,
    PricePerHour,
    PricePerKwh,
    Rate,
    Share,
    time_text,
)
from batchsim.drive.fleet.routing import RouterConfig
from batchsim.drive.fleet.scaling.autoscaler import Replicas
from batchsim.drive.fleet.transfer import TransferConfig
from batchsim.scenario.scenario_cost import ScenarioCost
from batchsim.workload.rollout_config import Rollout
from batchsim.workload.tagged import ByKind
from batchsim.workload.workload_config import AllAtOnce, ClosedLoop, TraceArrivals, WorkloadConfig

HOURS = 24
DEFAULT_WINDOW_NS = 20 * 60 * NS_PER_S


@dataclass(frozen=True)
class TraceTraffic(Config):
    """The workload's trace, several times over, as copies."""

    factor: Annotated[float, Range(0, 10_000, above=True)]  # times the trace's own traffic
    """How many times the trace's own traffic."""
    shift: Duration
    """How far each copy is moved at most, by a random time either way."""


@dataclass(frozen=True)
class DiurnalTraffic(Config):
    """A day of drawn arrivals."""

    peak: Rate
    """The rate of the busiest hour."""
    hours: tuple[Share, ...]
    """The shares of the peak rate in the 24 hours from midnight on."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if len(self.hours) != HOURS:
            raise ValueError(f"hours has {len(self.hours)} shares. A day has {HOURS}, from midnight on.")
        if max(self.hours) != 1:
            raise ValueError(
                f"hours: the largest share is {100 * max(self.hours):g}%. They are shares of the peak: the busiest hour"
                " has 100%."
            )


@dataclass(frozen=True)
class Target(Config):
    """The traffic to serve: one of the three."""

    rate: Rate | None = None
    """The same rate at all hours."""
    trace: TraceTraffic | None = None
    """The workload's trace."""
    diurnal: DiurnalTraffic | None = None
    """A day with hours of more and of less."""

    def __post_init__(self) -> None:
        check_ranges(self)
        given = [name for name in ("rate", "trace", "diurnal") if getattr(self, name) is not None]
        if len(given) != 1:
            fault = f"{' and '.join(given)} are given" if given else "nothing is given"
            raise ValueError(f"target: {fault}. Write one of rate: 60/s, diurnal: {{...}} and trace: {{...}}.")


@dataclass(frozen=True)
class Growth(Config):
    """Traffic grows by a share a month, compounded; the plan is for its end."""

    per_month: Share
    """Part by which traffic grows each month, compounded."""
    months: Annotated[int, Range(0, 120)]
    """Months of growth."""

    @property
    def factor(self) -> float:
        """The traffic at the end over that of today."""
        return (1 + self.per_month) ** self.months


@dataclass(frozen=True)
class GpuOffer(Config):
    """A kind of GPU to choose from."""

    cost: Annotated[ScenarioCost, ByKind()]
    """What steps cost on this GPU, as the scenario's `cost`."""
    price: PricePerHour
    """Price of one GPU, like 2.50/h."""
    kv_tokens: PositiveInt | None = None
    """KV memory of a replica in tokens, where the engine's log says it; else the scenario's `kv` derives it."""

    @property
    def gpus(self) -> int:
        """GPUs in a replica."""
        return self.cost.num_gpus


@dataclass(frozen=True)
class PlanConfig(Config):
    """The whole block."""

    target: Target
    """The traffic that the group must hold."""
    gpus: dict[str, GpuOffer]
    """What can be bought, by name: a cost and a price."""
    currency: str
    """What prices are in."""
    router: Annotated[RouterConfig, ByKind()]
    """Which replica a request is sent to, as in `replicas`."""
    max_replicas: Replicas
    """The largest group that is tried."""
    window: Annotated[Duration, Range(NS_PER_S, YEAR_NS, show=time_text)] = DEFAULT_WINDOW_NS
    """The length of the busiest stretch of the traffic, which all replicas are simulated on together."""
    energy_price: PricePerKwh | None = None
    """Price of electricity, on top of the prices of GPUs, where these do not hold the energy; null: no such column."""
    host_memory_price: PricePerGbMonth | None = None
    """Price of the memory of hosts that `kv.tiers` take, on top of the prices of GPUs; null: these hold it."""
    growth: Growth = field(default_factory=lambda: Growth(0.0, 0))
    """Growth of the traffic until the plan's end."""
    free: dict[str, list[Any]] | None = None
    """The values that a search may choose from, by name: `gpu`, `policy`, `router`, keys of the GPUs' deployments such
    as `tp`, keys of `kv.tiers` such as `kv.tiers.0.size`, knobs of the policies, and `pools`, how many engines prefill
    to how many decode; null: every GPU and policy as written, no search."""

    transfer: TransferConfig | None = field(default=None, metadata=LEFT_OUT)
    """How KV gets from prefill to decode engines, where `free.pools` has them apart, as in `pools`."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.transfer is not None and "pools" not in (self.free or {}):
            raise ValueError(
                "transfer is given, and no prefill and decode engines are apart. Drop it, or write free: {pools:"
                " [mixed, {prefill: 3, decode: 1}]}."
            )
        if (count := prod(len(values) for values in (self.free or {}).values())) > MAX_CHOICES:
            raise ValueError(f"free spans {count:,} configurations. List values for at most {MAX_CHOICES:,}.")
        for name, values in (self.free or {}).items():
            if not values:
                raise ValueError(f"free.{name} is empty. List the values to choose from, or leave it out.")
            if twice := next((value for i, value in enumerate(values) if value in values[:i]), None):
                raise ValueError(f"free.{name} has {twice} twice. Keep one.")
        if not self.gpus:
            raise ValueError("gpus is empty. Name at least one kind with its cost and price.")
        if not self.currency.strip() or len(self.currency) > 8:
            raise ValueError(f"currency is {self.currency!r}. Write what the prices are in: $, EUR or the like.")

    def check(self, workload: WorkloadConfig) -> None:
        """ValueError where the traffic is not of the workload's kind."""
        kind = workload.arrivals.kind
        if isinstance(workload.arrivals, ClosedLoop | AllAtOnce | Rollout):
            raise ValueError(
                f"plan needs requests that come whatever the answers do, and arrivals are {kind}. Write poisson, say,"
                " or replay a trace."
            )
        if workload.max_concurrency is not None:
            raise ValueError(
                f"plan needs requests that come whatever the answers do, and the client of workload.max_concurrency"
                f" {workload.max_concurrency} keeps them back. Drop that."
            )
        if name := workload.offline_class:
            raise ValueError(
                f"plan needs requests that come whatever the answers do, and the offline job classes.{name} waits for"
                " room. Drop that class."
            )
        replays = isinstance(workload.arrivals, TraceArrivals)
        if replays != (self.target.trace is not None):
            raise ValueError(
                "the workload replays a trace and plan.target is none. Write target: {trace: {factor: 8, shift: 2min}}."
                if replays
                else f"plan.target.trace needs arrivals of kind trace, not {kind}. Write target: {{rate: 60/s}}, say."
            )
        if workload.trace is not None and replays and workload.trace.rows is not None:
            raise ValueError("plan cuts a window out of the trace by time. Slice the trace by time too, not by rows.")
