"""What load every policy of a scenario sustains, what limits it, what would help: the searches, run.

Every trial is a point of a `Sweep`, kept and reused like those of a run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from batchsim.base.errors import BatchsimError, ScenarioError
from batchsim.base.units import NS_PER_S
from batchsim.explain.causes import Objectives, slo_misses
from batchsim.explain.task_causes import TaskObjectives, task_misses
from batchsim.metrics.slo import parse_slo
from batchsim.results.failed import Failed, points_failed
from batchsim.results.frames import to_records
from batchsim.results.point_files import read_table
from batchsim.results.read import POINTS
from batchsim.scenario import Point, PolicySpec, Scenario, changed
from batchsim.scenario.setup import Setup
from batchsim.study.capacity.book import NO_TRIAL, Book, Trial, capacity, probes
from batchsim.study.capacity.search import Axis, Effort, search
from batchsim.study.curves.auto import saturations
from batchsim.study.curves.lines import ANY_LOAD, Line
from batchsim.study.sweep import overload
from batchsim.study.sweep.points import Sweep
from batchsim.study.sweep.search import side_by_side
from batchsim.workload.build import known_requests
from batchsim.workload.processes import (
    GammaArrivals,
    MmppArrivals,
    OnOffArrivals,
    ProfiledArrivals,
    WeibullArrivals,
)
from batchsim.workload.rollout_config import Rollout
from batchsim.workload.workload_config import AllAtOnce, ClosedLoop, TraceArrivals

START_SHARE = 0.8  # of saturation: the first load tried
FEWEST_REQUESTS = 50  # of a trial at the lowest load: with fewer there is no 99 % of them
QUICK = Effort(pilot=4, fewest=4, most=4, near=True, narrow=True)
"""For comparisons with a capacity that is known: the same four seeds on both sides, so that luck cancels."""

THINNED = 0.5  # of a trace: where it is looked whether seeds differ
REASON_SEEDS = 3  # whose misses are explained
AT_SHARE = 0.9  # of the capacity: where the engine's use is reported


@dataclass
class PolicySearch:
    """One policy whose capacity is looked for, and what was found so far. `failed` says why it ended early."""

    setup: Setup
    spec: PolicySpec
    axis: Axis
    start: float
    effort: Effort
    saturation: float | None = None
    book: Book = field(default_factory=dict)
    results: dict[tuple[float, int], dict[str, Any]] = field(default_factory=dict)
    failed: str = ""

    def points(self, wanted: Iterable[tuple[float, int]]) -> list[tuple[Setup, Point]]:
        return [(self.setup, Point(self.spec, load, seed)) for load, seed in wanted]

    def take(self, load: float, seed: int, result: dict[str, Any]) -> None:
        """Writes a trial into the book. ScenarioError where the SLO applies to no request."""
        values = result["values"]
        if values["slo_margin"] is None:
            raise ScenarioError(
                f"{self.setup.scenario.source}: {self.spec.name} at load {load:g}, seed {seed}: the SLO applies to no"
                " request. Lengthen the workload, or bound another latency."
            )
        self.results[load, seed] = result
        trial = Trial(values["slo_margin"], values["cohort"], result["unstable"], has_shares(self.setup.scenario))
        self.book.setdefault(load, {})[seed] = trial

    def measured(self, load: float) -> list[int]:
        """The seeds of a load with measured requests."""
        return [seed for seed in sorted(self.book[load]) if (load, seed) in self.results]


def run_searches(cases: Sequence[PolicySearch], sweep: Sweep, *, tolerant: bool = False) -> None:
    """Fills the books, all cases side by side. A point that fails ends its case if `tolerant`, else everything.

    ScenarioError where a case has measured requests at no load.
    """

    def until_it_fails(case: PolicySearch) -> Generator[list[tuple[float, int]], None, None]:
        for wanted in search(case.book, case.start, case.axis, case.effort):
            yield wanted
            if case.failed:
                return

    side_by_side(
        [until_it_fails(case) for case in cases],
        lambda wanted: run_trials([(cases[i], trials) for i, trials in wanted], sweep, tolerant=tolerant),
    )
    for case in cases:
        if not case.failed and not probes(case.book):
            raise ScenarioError(
                f"{case.setup.scenario.source}: {case.spec.name}: nobody sends after the warm-up at any of"
                f" {len(case.book)} loads from {min(case.book):g} to {max(case.book):g}. Lengthen the workload, or"
                " shorten its warm-up."
            )


def run_trials(
    wanted: Sequence[tuple[PolicySearch, Sequence[tuple[float, int]]]], sweep: Sweep, *, tolerant: bool = False
) -> None:
    """Runs trials and writes them into their books, the heaviest first so that parallel ones end together.

    A seed without measured requests is a trial of no requests; if `tolerant`, it ends its case like a point that fails.
    """
    trials = [(case, load, seed) for case, pairs in wanted for load, seed in pairs]
    trials.sort(key=lambda trial: -trial[1])
    points = [point for case, load, seed in trials for point in case.points([(load, seed)])]
    outcomes = sweep.attempt(points, may_be_empty=True)
    failed = [result for result in outcomes if isinstance(result, Failed) and not result.is_empty]
    if failed and not tolerant:
        raise points_failed(failed, len(outcomes))
    for (case, load, seed), result in zip(trials, outcomes, strict=True):
        if isinstance(result, Failed) and result.is_empty and not tolerant:
            case.book.setdefault(load, {})[seed] = NO_TRIAL
        elif isinstance(result, Failed):
            case.failed = result.reason
        else:
            case.take(load, seed, result)


# ---- where a search begins


def with_load(scenario: Scenario) -> Scenario:
    """`scenario` with a load axis that its arrivals have. ScenarioError where there is none to search."""
    arrivals = scenario.file.workload.arrivals
    if isinstance(arrivals, AllAtOnce | Rollout):
        when = "arrive at once" if isinstance(arrivals, AllAtOnce) else "come as a trainer asks for them"
        raise ScenarioError(
            f"{scenario.source}: all requests {when}, so that there is no rate to search. Write arrivals over"
            " time, like {kind: poisson, mean_rate: 1/s}."
        )
    if name := scenario.file.workload.offline_class:
        raise ScenarioError(
            f"{scenario.source}: the offline job classes.{name} fills what others leave, so that there is no capacity"
            " to search. Drop that class."
        )
    if scenario.vary_key:
        raise ScenarioError(
            f"{scenario.places.get('vary', scenario.source)}: vary is for batchsim run. Give --set vary=null, and one"
            f" value of {scenario.vary_key} at a time."
        )
    if scenario.load_name:
        return scenario
    if isinstance(arrivals, ClosedLoop):
        return changed(scenario, [f"load={{users: [{arrivals.users}]}}"])
    if isinstance(arrivals, TraceArrivals):
        trace = scenario.file.workload.trace
        if trace is None or trace.rate_scale is None:
            raise ScenarioError(
                f"{scenario.source}: does not say how the trace's rate may change. Add --set"
                " 'workload.trace.rate_scale={factor: 1, by: compress}', or overlay or thin."
            )
        return changed(scenario, ["load={rate_scale: [1.0]}"])
    return changed(scenario, [f"load={{mean_rate: [{arrivals.mean_rate:g}/s]}}"])


def new_cases(setup: Setup, specs: Sequence[PolicySpec], effort: Effort, sweep: Sweep) -> list[PolicySearch]:
    """A case for each of `specs`, with its axis and first load: a share of what the policy completes under overload."""
    scenario = setup.scenario
    axis, rate = _axis(setup)
    saturation: dict[str, float] = {}
    workload = scenario.file.workload
    if scenario.load_name != "users" and workload.sessions is None and workload.tasks is None:
        saturation = _saturations(setup, specs, sweep)
    if not _is_random(setup):
        effort = replace(effort, pilot=1, fewest=1, most=1, narrow=True)
    written = float(np.median(scenario.loads)) if scenario.loads else ANY_LOAD
    starts = {name: START_SHARE * rps / rate for name, rps in saturation.items()}
    return [
        PolicySearch(setup, spec, axis, starts.get(spec.name, written), effort, saturation.get(spec.name))
        for spec in specs
    ]


def _saturations(setup: Setup, specs: Sequence[PolicySpec], sweep: Sweep) -> dict[str, float]:
    """By policy, requests/s completed when all requests wait from the start. ScenarioError where too few complete."""
    if setup.scenario.load_name == "mean_rate":
        lines = [Line(spec.name, spec.label, setup, (spec,)) for spec in specs]
        return saturations(lines, sweep.home, jobs=sweep.jobs, force=sweep.force)
    rates: dict[str, float] = {}
    for i, rate in overload.saturations([(setup, spec) for spec in specs], sweep.jobs):
        if isinstance(rate, str):
            raise ScenarioError(f"{setup.scenario.source}: {specs[i].name} under overload: {rate}.")
        rates[specs[i].name] = rate
    return rates


def rate_of(setup: Setup) -> float:
    """Requests per second of a load of 1: the trace's own where loads are factors on it, else 1."""
    if setup.scenario.load_name != "rate_scale":
        return 1.0
    first = min(setup.scenario.loads, default=ANY_LOAD)
    rate = setup.workload(first, 0).describe["rate_rps"]
    if not rate:
        raise ScenarioError(f"{setup.scenario.source}: the trace has too few requests to have a rate.")
    return float(rate) / first


def _axis(setup: Setup) -> tuple[Axis, float]:
    """The loads that can be tried, and the rate of a load of 1."""
    scenario, first = setup.scenario, min(setup.scenario.loads, default=ANY_LOAD)
    if scenario.load_name == "users":
        return Axis(1.0, whole=True), 1.0
    if scenario.load_name == "rate_scale":
        trace, rate = scenario.file.workload.trace, rate_of(setup)
        assert trace is not None and trace.rate_scale is not None, "checked by the load axis"
        count = (setup.workload(first, 0).num_offered or 0) / first
        by = trace.rate_scale.by
        if by == "overlay":
            return Axis(1.0, whole=True), rate
        return Axis(min(1.0, FEWEST_REQUESTS / count) if by == "thin" else 1e-4, 1.0 if by == "thin" else None), rate
    workload = scenario.file.workload
    if workload.duration is None:
        return Axis(1e-4), 1.0
    return Axis(FEWEST_REQUESTS * NS_PER_S / (workload.duration - workload.warmup)), 1.0


def _is_random(setup: Setup) -> bool:
    """Whether seeds differ at all: a replayed trace has one set of requests."""
    load, trace = min(setup.scenario.loads, default=ANY_LOAD), setup.scenario.file.workload.trace
    if trace is not None and trace.rate_scale is not None and trace.rate_scale.by == "thin":
        load *= THINNED  # all rows of a trace are the same for every seed, a part of them is not
    one, other = (known_requests(setup.workload(load, seed)) for seed in (0, 1))
    if one is None or other is None:
        return True
    ours, theirs = one.columns(), other.columns()
    return any(not np.array_equal(ours[name], theirs[name]) for name in ours)


def has_shares(scenario: Scenario) -> bool:
    """Whether the margin of the scenario's objectives can be that of a share of the requests, not of means alone."""
    file = scenario.file
    texts = [file.slo, *(traffic.slo for traffic in file.workload.classes.values())]
    return any(not bound.mean for text in texts if text is not None for bound in parse_slo(text).bounds)


def is_burstier_than_poisson(scenario: Scenario) -> bool:
    """Whether the scenario's arrivals are drawn from a law with more variance than independent ones."""
    arrivals = scenario.file.workload.arrivals
    if isinstance(arrivals, GammaArrivals | WeibullArrivals):
        return arrivals.cv > 1
    return isinstance(arrivals, OnOffArrivals | MmppArrivals | ProfiledArrivals)


# ---- variants


def only(spec: PolicySpec, scenario: Scenario, **knobs: Any) -> str:
    """The override that leaves one policy, one variant of it, with some knobs changed."""
    plain = dict(scenario.plain["policies"][spec.label] or {}) | spec.knobs | knobs
    return f"policies={json.dumps({spec.label: plain})}"


def variant(case: PolicySearch, overrides: Sequence[str], start: float, effort: Effort = QUICK) -> PolicySearch | None:
    """A case like `case` in a changed scenario; None where the change makes no sense there."""
    try:
        setup = Setup.of(changed(case.setup.scenario, overrides))
    except BatchsimError:
        return None
    return PolicySearch(setup, setup.scenario.specs[0], case.axis, start, effort)


def ratio(varied: PolicySearch, base: PolicySearch) -> float | None:
    """The capacity of `varied` over that of `base`, both of the same few seeds; None where either has none."""
    num_seeds = min(QUICK.fewest, varied.effort.fewest, base.effort.fewest)
    load, base_load = (capacity(case.book, num_seeds).load for case in (varied, base))
    return None if load is None or base_load is None or varied.failed else load / base_load


# ---- reasons


def misses(case: PolicySearch, load: float, home: Any) -> Counter[tuple[str, str]]:
    """Misses by (metric of the bound, cause) over the first seeds of a load, of requests and tasks; empty where none
    misses by itself."""
    counted: Counter[tuple[str, str]] = Counter()
    scenario = case.setup.scenario.plain
    stated, of_tasks = Objectives.stated(scenario), TaskObjectives.of(scenario)
    if not stated.judges_requests and of_tasks is None:
        return counted  # gaps between tokens alone are bounded, or tasks of a log
    for seed in case.measured(load)[:REASON_SEEDS]:
        folder = home / POINTS / case.results[load, seed]["point"]
        tables = [read_table(folder, name) for name in ("requests", "steps", "states")]
        records = to_records(*tables)
        frames = [slo_misses(records, stated)] if stated.judges_requests else []
        frames += [] if of_tasks is None else [task_misses(records, of_tasks)[0]]
        for frame in frames:
            counted.update(zip(frame["metric"], frame["cause"], strict=True))
    return counted


def means(case: PolicySearch, load: float, names: Sequence[str]) -> dict[str, float | None]:
    """By metric, the means of `names` over the seeds of a load; None where no seed has a value."""
    trials = [case.results[load, seed]["values"] for seed in case.measured(load)]
    known = {name: [values[name] for values in trials if values[name] is not None] for name in names}
    return {name: float(np.mean(values)) if values else None for name, values in known.items()}
