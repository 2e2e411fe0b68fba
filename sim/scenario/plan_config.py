"""The `plan:` block of a scenario: for which traffic GPUs are to be bought, of which kinds, at which prices."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Annotated, Any

from batchsim.base.ranges import MAX_CHOICES, Config, PositiveInt, Range, check_ranges
from batchsim.base.units import NS_PER_S, YEAR_NS, Duration, PricePerHour, PricePerKwh, Rate, Share, time_text
from batchsim.drive.fleet.routing import RouterConfig
from batchsim.drive.fleet.scaling.autoscaler import Replicas
from batchsim.scenario.scenario_cost import ScenarioCost
from batchsim.workload.tagged import ByKind
from batchsim.workload.workload_config import AllAtOnce, ClosedLoop, TraceArrivals, WorkloadConfig

HOURS = 24
DEFAULT_WINDOW_NS = 20 * 60 * NS_PER_S


@dataclass(frozen=True)
class TraceTraffic(Config):
    """The workload's trace, `factor` times over: copies, each moved by a random time of at most `shift` either way."""

    factor: Annotated[float, Range(0, 10_000, above=True)]  # times the trace's own traffic
    shift: Duration


@dataclass(frozen=True)
class DiurnalTraffic(Config):
    """A day of drawn arrivals: `hours` are the shares of the `peak` rate in the 24 hours from midnight on."""

    peak: Rate
    hours: tuple[Share, ...]

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
    """The traffic to serve: the same `rate` at all hours, a `diurnal` day of it, or the workload's `trace`."""

    rate: Rate | None = None
    trace: TraceTraffic | None = None
    diurnal: DiurnalTraffic | None = None

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
    months: Annotated[int, Range(0, 120)]

    @property
    def factor(self) -> float:
        """The traffic at the end over that of today."""
        return (1 + self.per_month) ** self.months


@dataclass(frozen=True)
class GpuOffer(Config):
    """A kind of GPU to choose from: what a step costs on it, and the price of one GPU for an hour.

    `kv_tokens` is the KV memory of a replica where the engine's log says it; else the scenario's `kv` derives it.
    """

    cost: Annotated[ScenarioCost, ByKind()]
    price: PricePerHour
    kv_tokens: PositiveInt | None = None

    @property
    def gpus(self) -> int:
        """GPUs in a replica."""
        return self.cost.num_gpus


@dataclass(frozen=True)
class PlanConfig(Config):
    """The whole block. `currency` is what prices are in, `router` one of those of `replicas`.

    `window` is the length of the busiest stretch of the traffic, which all replicas are simulated on together.
    `energy_price` comes on top of the prices of GPUs, where these do not hold the energy; None: no such column.
    `free` lists, by name, the values that a search may choose from: `gpu`, `policy`, `router`, keys of the GPUs'
    deployments such as `tp`, and knobs of the policies. None: every GPU and policy as written, no search.
    """

    target: Target
    gpus: dict[str, GpuOffer]
    currency: str
    router: Annotated[RouterConfig, ByKind()]
    max_replicas: Replicas
    window: Annotated[Duration, Range(NS_PER_S, YEAR_NS, show=time_text)] = DEFAULT_WINDOW_NS
    energy_price: PricePerKwh | None = None
    growth: Growth = field(default_factory=lambda: Growth(0.0, 0))
    free: dict[str, list[Any]] | None = None

    def __post_init__(self) -> None:
        check_ranges(self)
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
        if isinstance(workload.arrivals, ClosedLoop | AllAtOnce):
            raise ValueError(
                f"plan needs requests that come whatever the answers do, and arrivals are {kind}. Write poisson, say,"
                " or replay a trace."
            )
        if workload.max_concurrency is not None:
            raise ValueError(
                f"plan needs requests that come whatever the answers do, and the client of workload.max_concurrency"
                f" {workload.max_concurrency} keeps them back. Drop that."
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
