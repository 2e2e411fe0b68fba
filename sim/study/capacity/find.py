"""`batchsim capacity`: every policy's highest load within the SLO, what breaks first, and what would change it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from math import ceil, floor

from batchsim.base.errors import ScenarioError
from batchsim.metrics.intervals import Difference, paired
from batchsim.metrics.slo import NOT_ALL, parse_slo
from batchsim.results.keep import objective_text
from batchsim.results.known_gaps import check_gaps
from batchsim.scenario import Scenario
from batchsim.scenario.longest_prompt import check_reach
from batchsim.scenario.setup import Setup
from batchsim.study.capacity.book import Capacity, capacity, jackknife, probes
from batchsim.study.capacity.capacities import CapacityStudy, PolicyCapacity
from batchsim.study.capacity.search import Effort
from batchsim.study.capacity.study import (
    AT_SHARE,
    QUICK,
    PolicySearch,
    means,
    misses,
    new_cases,
    rate_of,
    run_searches,
    run_trials,
    with_load,
)
from batchsim.study.capacity.what_if import vary
from batchsim.study.curves.lines import ANY_LOAD
from batchsim.study.sweep.points import Sweep
from batchsim.study.sweep.size import largest_load

USE = ("engine_busy_share", "kv_utilisation_p99")


def find_capacities(
    scenario: Scenario, sweep: Sweep, *, policies: Sequence[str] = (), effort: Effort | None = None, extras: bool = True
) -> CapacityStudy:
    """The capacities of all policies, or of those named. Without `extras` nothing else but what breaks above them.

    >>> sweep = batchsim.Sweep(Path("results/tiny"))
    >>> batchsim.find_capacities(scenario, sweep, policies=["vllm"], extras=False).policies[0].found.load > 80
    True
    """
    effort = effort or Effort()
    scenario = with_load(scenario)
    labels = _chosen(scenario, policies)
    _check_objectives(scenario)
    setup = Setup.of(scenario)
    check_gaps(setup)
    chosen = [spec for spec in scenario.specs if spec.label in labels]
    with scenario.at("cost"):
        check_reach(setup, chosen, max(scenario.loads, default=ANY_LOAD), range(effort.pilot))
    searched = sum(spec.label in labels for spec in scenario.specs)
    points = searched * effort.max_probes * effort.most
    sweep.check_size(points, [(setup, largest_load(setup))], scenario.source)
    sweep.hold()
    capacities = [PolicyCapacity(case, _capacity_of(case)) for case in _search(setup, labels, sweep, effort)]
    differences = [
        (one.label, other.label, _difference(one, other))
        for one, other in itertools.combinations([p for p in capacities if p.found.load is not None], 2)
    ]
    objective, error = objective_text(scenario), setup.cost_error
    study = CapacityStudy(
        scenario, setup, objective, rate_of(setup), effort, capacities, differences, error, poisson=None, changes=[]
    )
    _explain(study, sweep)
    if extras:
        vary(study, sweep)
    return study


def _check_objectives(scenario: Scenario) -> None:
    """ScenarioError where the objective, or that of a class, cannot be shown to hold."""
    classes = scenario.file.workload.classes.items()
    own = {f"workload.classes.{name}.slo": traffic.slo for name, traffic in classes if traffic.slo is not None}
    for name, text in {"slo": scenario.file.slo, **own}.items():
        with scenario.at(name.partition(".")[0]):
            if parse_slo(text).share == 1:
                raise ScenarioError(f"{name} '{text}': {NOT_ALL}")


def _chosen(scenario: Scenario, policies: Sequence[str]) -> list[str]:
    labels = list(scenario.file.policies)
    for name in policies:
        if name not in labels:
            raise ScenarioError(f"--policy {name}: is none of {scenario.source}. Write one of {', '.join(labels)}.")
    return [label for label in labels if not policies or label in policies]


def _search(setup: Setup, labels: Sequence[str], sweep: Sweep, effort: Effort) -> list[PolicySearch]:
    """The searched case of every label: of several variants the one that a quick search puts first."""
    chosen = [spec for spec in setup.scenario.specs if spec.label in labels]
    every = new_cases(setup, chosen, effort, sweep)
    cases = {label: [case for case in every if case.spec.label == label] for label in labels}
    several = [case for variants in cases.values() if len(variants) > 1 for case in variants]
    for case in several:
        case.effort = replace(case.effort, narrow=True, fewest=min(QUICK.fewest, case.effort.fewest))
    run_searches(several, sweep)
    best = [max(variants, key=_merit) for variants in cases.values()]
    for case in best:
        case.effort = effort if case.effort.most > 1 else case.effort
    run_searches(best, sweep)
    return best


def _capacity_of(case: PolicySearch) -> Capacity:
    """What the search found; where loads are whole numbers, the highest that still passes, ends rounded outwards."""
    estimate = capacity(case.book)
    if not case.axis.whole or estimate.load is None:
        return estimate
    low, high = estimate.low and float(floor(estimate.low)), estimate.high and float(ceil(estimate.high))
    return replace(estimate, load=float(floor(estimate.load)), low=low, high=high)


def _merit(case: PolicySearch) -> tuple[float, float]:
    """A sort key of variants, the best last: the capacity; where no load meets the SLO, how close one came."""
    if not case.book:
        return 0.0, 0.0
    estimate = capacity(case.book)
    highest = estimate.load or (0.0 if estimate.never else estimate.highest)
    return highest, max(probe.margin for probe in probes(case.book))


def _difference(one: PolicyCapacity, other: PolicyCapacity) -> Difference:
    """The capacity of `one` minus that of `other`, with an interval from the seeds that both had."""
    num_seeds, mean = min(one.found.num_seeds, other.found.num_seeds), None
    if one.found.load is not None and other.found.load is not None:
        mean = one.found.load - other.found.load
    if num_seeds < 2:
        return Difference(mean, None, num_seeds, "one seed has no interval")
    difference = paired(jackknife(one.case.book, num_seeds), jackknife(other.case.book, num_seeds))
    return difference if difference.mean is None or mean is None else replace(difference, mean=mean)


# ---- reasons


def _explain(study: CapacityStudy, sweep: Sweep) -> None:
    """Fills in, for every policy, what breaks just above its capacity, and how the engine is used below it."""
    below = []
    for policy in study.policies:
        load = policy.found.load
        if load is not None:
            case = policy.case
            below.append((case, case.axis.load(AT_SHARE * load)))
    trials = []
    for case, load in below:
        num_seeds = min(QUICK.fewest, case.effort.most)
        trials.append((case, [(load, seed) for seed in range(num_seeds) if seed not in case.book.get(load, {})]))
    run_trials(trials, sweep)
    for case, load in below:
        policy = next(p for p in study.policies if p.case is case)
        policy.at = means(case, load, USE)
        policy.found = _capacity_of(case)  # what was tried below it decides more than the search had
    for policy in study.policies:
        failing = [p for p in probes(policy.case.book) if not p.passes]
        above = [p for p in failing if policy.found.load is None or p.load > policy.found.load]
        if not above:
            continue
        first = above[0] if policy.found.load is not None else max(above, key=lambda p: (p.margin, -p.load))
        policy.breaks_at, policy.grows = first.load, first.grows
        counted = misses(policy.case, first.load, sweep.home)
        policy.breaks = [(metric, cause, count) for (metric, cause), count in counted.most_common()]
        if policy.found.never:
            metrics = dict.fromkeys(bound.metric for bound in parse_slo(study.scenario.file.slo).bounds)
            names = [f"{metric}_{of}_s" for metric in metrics for of in ("p50", "p99")]
            policy.floor = means(policy.case, first.load, names)
