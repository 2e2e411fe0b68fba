"""One engine under fitted traffic and under the trace itself: is the P99 of its time to first token the same?

The traffic stays as it is; the engine's steps are stretched until the trace is the wanted share of its capacity, which
is what it completes per second when all requests wait already. A trace is one draw of whatever made it, so the question
is whether its P99 lies among those of as many draws of the fit. Where it does not, two further runs tell why: the
trace's times with fitted lengths, and fitted times with lengths of its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import ScenarioError
from batchsim.base.units import NS_PER_S
from batchsim.cost.scaled import Scaled
from batchsim.drive.simulate import simulate
from batchsim.fit.traffic.traffic_fit import TrafficFit
from batchsim.kernel.record import FINISHED, Records
from batchsim.metrics.latencies import values_ns
from batchsim.metrics.measure import percentile
from batchsim.scenario.saturation import overloaded, saturation_rps
from batchsim.scenario.setup import Setup
from batchsim.workload.build import build_workload
from batchsim.workload.lengths import TraceLengths
from batchsim.workload.traces.trace_config import TraceConfig
from batchsim.workload.traces.trace_rows import TraceRows
from batchsim.workload.workload_config import TraceArrivals, TrafficClass, WorkloadConfig

LOADS = (0.6, 0.85)
"""Shares of the capacity at which the engine is compared."""
REPLICATIONS = 19
"""Draws of the fit: one more lies between the lowest and the highest of 19 in 90 of 100 cases."""
MOST_REQUESTS, FEWEST = 300_000, 3
"""Requests that are simulated at all loads together, where no number of draws is asked for, and the fewest draws."""
CURVE = np.concatenate((np.linspace(0, 0.95, 96), 1 - np.geomspace(0.05, 1e-4, 60)))
"""The shares of requests at which the distribution of TTFT is kept."""


@dataclass(frozen=True)
class Played:
    """What an engine did with one draw: P99 of TTFT and its distribution at CURVE in s, and requests not answered."""

    p99_s: float
    curve_s: NDArray[np.float64]
    unanswered: int


@dataclass(frozen=True)
class LoadCheck:
    """The engine at one share of its capacity: under the `trace`, draws of the `fit`, and of a part of it (`why`)."""

    share: float
    capacity_rps: float
    cost_factor: float
    trace: Played
    fit: tuple[Played, ...]
    why: dict[str, tuple[Played, ...]] = field(default_factory=dict[str, "tuple[Played, ...]"])

    @property
    def holds(self) -> bool:
        """Whether the trace's P99 lies among the fit's."""
        return holds(self.trace, self.fit)


def holds(trace: Played, draws: tuple[Played, ...]) -> bool:
    """Whether the P99 under the trace lies among those under `draws`."""
    every = [draw.p99_s for draw in draws]
    return min(every) <= trace.p99_s <= max(every)


@dataclass(frozen=True)
class EngineCheck:
    """Plays traffic against the engine of `setup`, its first policy, which has no replicas."""

    setup: Setup
    fit: TrafficFit
    trace: TraceConfig

    def all_loads(self, replications: int | None, tell: Callable[[str], None]) -> list[LoadCheck]:
        """The engine at each of LOADS with as many draws of the fit; none of 0. None: REPLICATIONS, or as many as make
        MOST_REQUESTS, each load's only until the trace lies among them, and what is to blame only if it fits in too."""
        if replications is not None:
            return [self.at(share, replications, tell) for share in LOADS if replications]
        left, checks = MOST_REQUESTS // len(self.rows), list[LoadCheck]()  # simulations
        for done, share in enumerate(LOADS):
            most = min(max(left // (len(LOADS) - done) - 1, FEWEST), REPLICATIONS)
            checks.append(self.at(share, most, tell, enough=True, blame=left >= 1 + 3 * most))
            left -= 1 + len(checks[-1].fit) + sum(map(len, checks[-1].why.values()))
        return checks

    def at(
        self,
        share: float,
        replications: int = REPLICATIONS,
        tell: Callable[[str], None] | None = None,
        *,
        enough: bool = False,
        blame: bool = True,
    ) -> LoadCheck:
        """The engine with the trace at `share` of its capacity. ScenarioError where it serves no request.

        With `enough` draws end where the trace's P99 lies among theirs, since more would not change that; without
        `blame` no part of the fit is tried alone.
        """
        rows = self.rows
        assert rows.arrival_ns is not None, "checked when fitted"
        capacity_rps = self._capacity_rps()
        factor = share * capacity_rps * float(rows.arrival_ns[-1]) / NS_PER_S / (len(rows) - 1)
        setup = replace(self.setup, cost=Scaled(self.setup.cost, factor))
        say = tell or (lambda what: None)
        say(f"{100 * share:g} % of capacity: the trace")
        played = _play(setup, self.replay(), rows, 0)

        def draws(config: WorkloadConfig, what: str) -> tuple[Played, ...]:
            runs: list[Played] = []
            for seed in range(replications):
                say(f"{100 * share:g} % of capacity: {what}, draw {seed + 1} of {replications}")
                runs.append(_play(setup, config, rows if config.trace is not None else None, seed))
                if enough and holds(played, tuple(runs)):
                    break
            return tuple(runs)

        fit = draws(self.fit.workload, "the fit")
        why: dict[str, tuple[Played, ...]] = {}
        if blame and not holds(played, fit) and self.fit.workload.sessions is None:
            why = {name: draws(config, name) for name, config in self._halves().items()}
        return LoadCheck(share, capacity_rps, factor, played, fit, why)

    @property
    def rows(self) -> TraceRows:
        """The trace without what its prompts share by hash ids, which no fit has."""
        return replace(self.fit.rows, hash_ids=None)

    def replay(self) -> WorkloadConfig:
        """The trace itself, as the workload of a scenario."""
        return WorkloadConfig(
            arrivals=TraceArrivals(),
            output_cap=self.fit.workload.output_cap,
            trace=self.trace,
            classes={name: TrafficClass(priority=one.priority) for name, one in self.fit.workload.classes.items()},
        )

    def _halves(self) -> dict[str, WorkloadConfig]:
        fitted = self.fit.workload
        own = {name: replace(traffic, share=None) for name, traffic in fitted.classes.items()}
        rows = {name: replace(traffic, share=None, lengths=None) for name, traffic in fitted.classes.items()}
        return {
            "the trace's times, fitted lengths": replace(self.replay(), lengths=fitted.lengths, classes=own),
            "fitted times, lengths of its rows": replace(
                fitted, trace=self.trace, lengths=TraceLengths(), classes=rows
            ),
        }

    def _capacity_rps(self) -> float:
        many = overloaded(replace(self.setup, traffic=self.replay()))
        return saturation_rps(_records(self.setup, many.traffic, self.rows, 0))


def _play(setup: Setup, config: WorkloadConfig, rows: TraceRows | None, seed: int) -> Played:
    requests = _records(setup, config, rows, seed).requests
    done = requests["outcome"] == FINISHED
    ttft_s = values_ns(requests)["ttft"][done] / NS_PER_S
    if not len(ttft_s):
        raise ScenarioError(
            f"{setup.scenario.source}: none of {len(requests):,} requests is answered. Use an engine"
            " with more KV memory, or a model with more positions."
        )
    return Played(percentile(ttft_s, 99)[0], np.quantile(ttft_s, CURVE), int((~done).sum()))


def _records(setup: Setup, config: WorkloadConfig, rows: TraceRows | None, seed: int) -> Records:
    workload = build_workload(config, load={}, seed=seed, max_model_len=setup.max_model_len, base=Path(), rows=rows)
    core = setup.engine(setup.scenario.specs[0], workload)
    simulate(core, workload)
    core.check_returned()
    return core.recorder.records()
