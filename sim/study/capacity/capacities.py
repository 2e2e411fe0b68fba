"""What a capacity search found, by policy; its rows for people and files, and the folder that keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchsim.base.files import write_text
from batchsim.cost.cost_error import CostError, Unknown
from batchsim.metrics.intervals import Difference
from batchsim.results.provenance import as_json, identity, provenance, short_hash, write_csv
from batchsim.scenario import Scenario
from batchsim.scenario.setup import Setup
from batchsim.study.capacity.book import Capacity, Probe, probes
from batchsim.study.capacity.search import Effort
from batchsim.study.capacity.study import PolicySearch
from batchsim.study.sweep.points import Sweep, keeping

FOLDER = "capacity"
"""Of a capacity search, beside the runs of its scenario: results/<scenario>/capacity/<hash>."""


@dataclass
class PolicyCapacity:
    """The capacity of a policy, of its best variant. `breaks` counts misses by (bound, cause) at the load `breaks_at`,
    just above the capacity, or the tried load that comes closest where none meets the SLO; `floor` are that load's
    latencies in s, `grows` whether its queue grows. `at` is how the engine is used just below the capacity. `cost` is
    the share by which the capacity moves where steps are as short, and as long, as the cost's error allows. Where the
    SLO is met at no load tried, or at every one, `untold` is the load at which that error decides it, None if it does
    not.
    """

    case: PolicySearch
    found: Capacity
    breaks: list[tuple[str, str, int]] = field(default_factory=list)
    breaks_at: float | None = None
    grows: bool = False
    floor: dict[str, float | None] = field(default_factory=dict)
    at: dict[str, float | None] = field(default_factory=dict)
    cost: tuple[float | None, float | None] | None = None
    untold: float | None = None

    @property
    def label(self) -> str:
        return self.case.spec.label

    @property
    def name(self) -> str:
        return self.case.spec.name


@dataclass(frozen=True)
class ChangedCapacity:
    """One change of the scenario in words, and the capacity with it; None where it was not found, and `why`."""

    what: str
    load: float | None
    why: str = ""


@dataclass
class CapacityStudy:
    """What a capacity search found, by policy. `rate` is the requests/s of a load of 1; 1 where loads are rates."""

    scenario: Scenario
    setup: Setup
    objective: str
    rate: float
    effort: Effort
    policies: list[PolicyCapacity]
    differences: list[tuple[str, str, Difference]]
    error: CostError | Unknown
    poisson: ChangedCapacity | None
    changes: list[ChangedCapacity]

    def __repr__(self) -> str:
        loads = ", ".join(
            f"{policy.name} {'–' if policy.found.load is None else f'{policy.found.load:.3g}'}"
            for policy in self.policies
        )
        return (
            f"<CapacityStudy {self.scenario.name}: {loads}; policies, differences, changes; capacity_text() tells it>"
        )

    @property
    def best(self) -> PolicyCapacity | None:
        """The policy with the highest capacity, the first of equals."""
        known = [policy for policy in self.policies if policy.found.load is not None]
        return max(known, key=lambda policy: policy.found.load or 0.0, default=None)


def found_points(study: CapacityStudy) -> list[dict[str, Any]]:
    """A row a probe of every policy, for people and for the CSV; its trials are points below the scenario's folder."""
    rows = []
    for policy in study.policies:
        for probe in probes(policy.case.book):
            seeds = policy.case.measured(probe.load)
            rows.append(
                {
                    "policy": policy.label,
                    "label": policy.name,
                    "load": probe.load,
                    "rate_rps": probe.load * study.rate if study.scenario.load_name != "users" else None,
                    "margin": probe.margin,
                    "margin_low": probe.low,
                    "margin_high": probe.high,
                    "verdict": _verdict(probe),
                    "num_seeds": probe.num_seeds,
                    "requests": probe.num_requests,
                    "points": " ".join(policy.case.results[probe.load, seed]["point"] for seed in seeds),
                }
            )
    return rows


def _verdict(probe: Probe) -> str:
    if probe.grows:
        return "grows"
    return ("passes" if probe.passes else "fails") if probe.decided else "undecided"


def keep_capacity(study: CapacityStudy, sweep: Sweep, text: str, plain: dict[str, Any]) -> Path:
    """Writes capacity.csv (a row a policy), probes.csv (a row a probe, with its points), capacity.json and
    capacity.txt; returns their folder. ScenarioError where it cannot be written."""
    points = found_points(study)
    name = short_hash([identity(study.setup), [row["points"] for row in points], plain["changes"]])
    folder = sweep.home / FOLDER / name
    with keeping(sweep.home):
        folder.mkdir(parents=True, exist_ok=True)
        flat = [
            {key: value for key, value in row.items() if not isinstance(value, list | dict)}
            for row in plain["capacities"]
        ]
        write_csv(folder / "capacity.csv", flat)
        write_csv(folder / "probes.csv", points)
        write_text(folder / "capacity.json", as_json(plain | {"made": provenance()}, indent=1))
        write_text(folder / "capacity.txt", text + "\n")
        write_text(folder / "scenario.yaml", study.scenario.text)
    return folder
