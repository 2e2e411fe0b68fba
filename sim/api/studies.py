"""`run`, `capacity` and `plan` of the command line as functions, with the words of their options."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchsim.api.results import Results, with_plots
from batchsim.base.errors import ScenarioError
from batchsim.base.units import parse_share
from batchsim.scenario import Scenario, changed
from batchsim.scenario.constructor import scenario as scenario_of
from batchsim.study.capacity.capacities import CapacityStudy
from batchsim.study.capacity.find import find_capacities
from batchsim.study.capacity.search import Effort
from batchsim.study.curves.precision import MAX_SEEDS, METRIC, Precision
from batchsim.study.curves.run import run_scenario
from batchsim.study.planning.plan_tables import Tables, plan_tables
from batchsim.study.sweep.points import Progress, Sweep
from batchsim.study.sweep.size import Limits

AnyScenario = Scenario | str | Path | Mapping[str, Any]
"""A scenario, or what `batchsim.Scenario` makes one of: a file, a shipped name, a mapping."""


def run(
    scenario: AnyScenario,
    *,
    out: Path | str = "results",
    jobs: int = 1,
    force: bool = False,
    precision: str | None = None,
    metric: str | None = None,
    max_seeds: int | None = None,
    progress: Progress | None = None,
    limits: Limits | None = None,
) -> Results:
    """Simulates what is not in `out` yet, on `jobs` processes, and returns the results; `force` simulates all anew.

    With `precision`, like "5%", points get more seeds, at most `max_seeds`, until half the interval of `metric` is that
    share of its mean. The manifest's `failed` lists points that failed; PointsFailed if all did. ScenarioError, before
    the first simulation, for more than `limits` allows.

    >>> results = batchsim.run(scenario)
    >>> print(results.summary[["policy", "load", "ttft_p50_s"]].round(3))
       policy  load  ttft_p50_s
    0  static  10.0       0.161
    1  static  20.0       0.160
    2    vllm  10.0       0.019
    3    vllm  20.0       0.024
    """
    asked = None
    if precision is not None:
        share = _share("precision", precision)
        asked = Precision(share, METRIC if metric is None else metric, MAX_SEEDS if max_seeds is None else max_seeds)
    elif metric is not None or max_seeds is not None:
        name = "metric" if metric is not None else "max_seeds"
        raise ScenarioError(f"{name}: is of precision, which is not given. Add precision='5%'.")
    results = run_scenario(
        _of(scenario), out=out, jobs=jobs, force=force, progress=progress, precision=asked, limits=limits
    )
    return with_plots(results)


def capacity(
    scenario: AnyScenario,
    *,
    policies: Sequence[str] = (),
    slo: str | None = None,
    precision: str = "3%",
    max_seeds: int = 32,
    max_probes: int = 40,
    only_rates: bool = False,
    out: Path | str = "results",
    jobs: int = 1,
    progress: Progress | None = None,
    limits: Limits | None = None,
) -> CapacityStudy:
    """The highest load that each policy sustains within the SLO, what breaks first and, unless `only_rates`, what would
    help; `capacity_text` and `capacity_picture` show it.

    `slo` replaces the scenario's. Probes lie in `out` and are reused. ScenarioError where there is nothing to search.

    >>> study = batchsim.capacity(scenario, policies=["vllm"], precision="20%", max_seeds=3, only_rates=True)
    >>> found = study.policies[0].found
    >>> 80 < found.low <= found.load <= found.high < 130  # requests/s
    True
    """
    asked = _single(_of(scenario), "capacity")
    labels = list(asked.file.policies)
    if isinstance(policies, str):
        raise ScenarioError(f"policies: is the text {policies!r}. Write a list: policies=[{policies!r}].")
    if unknown := [name for name in policies if name not in labels]:
        raise ScenarioError(f"policies: {unknown[0]!r} is none of {asked.name}. Write one of {', '.join(labels)}.")
    if slo is not None:
        asked = changed(asked, [f"slo={json.dumps(slo)}"])
    effort = capacity_effort(precision, max_seeds, max_probes)
    sweep = Sweep(Path(out) / asked.name, jobs=jobs, progress=progress, limits=limits)
    return find_capacities(asked, sweep, policies=list(policies), effort=effort, extras=not only_rates)


def capacity_effort(precision: str, max_seeds: int, max_probes: int, flag: str = "precision") -> Effort:
    """How much a search for capacities tries; `precision` is written like "3%". ScenarioError for what is no such
    number; of the precision it begins with `flag`."""
    for name, value, low, high in (("max_seeds", max_seeds, 3, 10_000), ("max_probes", max_probes, 5, 1_000)):
        if not isinstance(value, int) or not low <= value <= high:
            raise ScenarioError(f"{name}: {value!r} is no whole number from {low} to {high:,}. Write one.")
    share = _share(flag, precision)
    if not 0.002 <= share <= 0.5:
        raise ScenarioError(f"{flag}: {precision} is not from 0.2% to 50%. Write for example 3%.")
    return Effort(precision=share, most=max_seeds, max_probes=max_probes, fewest=min(Effort.fewest, max_seeds))


def plan(
    scenario: AnyScenario,
    *,
    out: Path | str = "results",
    jobs: int = 1,
    progress: Progress | None = None,
    limits: Limits | None = None,
) -> Tables:
    """The tables of the cheapest group of replicas that holds the traffic of the scenario's `plan`, by name.

    Rows are mappings; without a table `recommendation` no configuration holds it, and `configurations` says why not.

    >>> gpu = {"cost": {"kind": "constant", "step": "10ms"}, "price": "2.50/h", "kv_tokens": 16_000}
    >>> demand = {"target": {"rate": "150/s"}, "window": "5s", "growth": {"per_month": "0%", "months": 0}}
    >>> planned = batchsim.Scenario(
    ...     model="llama-3.1-8b",
    ...     cost={"kind": "constant", "step": "10ms"},
    ...     workload=scenario.file.workload,
    ...     policies={"vllm": {"max_num_seqs": 8}},
    ...     slo="ttft<500ms @ 90%",
    ...     seeds=3,
    ...     plan=demand | {"gpus": {"small": gpu}, "currency": "EUR", "router": "least_tokens", "max_replicas": 8},
    ... )
    >>> tables = batchsim.plan(planned)
    >>> [(row["gpu"], row["replicas"], row["cost_per_month"]) for row in tables["recommendation"]]
    [('small', 2, 3650.0)]
    """
    asked = _single(_of(scenario), "plan")
    return plan_tables(asked, out=out, jobs=jobs, progress=progress, limits=limits)


def _of(scenario: AnyScenario) -> Scenario:
    return scenario if isinstance(scenario, Scenario) else scenario_of(scenario)


def _single(scenario: Scenario, what: str) -> Scenario:
    """`scenario`, which varies no key: ScenarioError otherwise."""
    if scenario.vary_key:
        where = scenario.places.get("vary", scenario.source)
        raise ScenarioError(f"{where}: {scenario.vary_key} is varied, and {what} takes one value. Drop vary.")
    return scenario


def _share(name: str, text: str) -> float:
    try:
        return parse_share(text)
    except ValueError as error:
        raise ScenarioError(f"{name}: {error}") from None
