"""`batchsim capacity`: every policy's highest load within the SLO, what breaks first, and what would change it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor
from typing import Any

from batchsim.base.errors import ScenarioError
from batchsim.base.units import format_duration
from batchsim.cost import CostError, Unknown
from batchsim.metrics.intervals import Difference, paired
from batchsim.metrics.slo import NOT_ALL, parse_slo
from batchsim.results.keep import objective_text
from batchsim.scenario import Scenario
from batchsim.scenario.point import Setup
from batchsim.scenario.reach import check_reach
from batchsim.study.capacity.search import Capacity, Effort, Probe, capacity, jackknife, probes
from batchsim.study.capacity.study import (
    AT_SHARE,
    QUICK,
    PolicySearch,
    is_burstier_than_poisson,
    means,
    misses,
    new_cases,
    only,
    rate_of,
    ratio,
    run_searches,
    run_trials,
    variant,
    with_load,
)
from batchsim.study.curves.lines import ANY_LOAD
from batchsim.study.sweep.points import Sweep
from batchsim.study.sweep.size import largest_load

HELPS = 1.05  # of the capacity: what a change must win to be told
RELAXED_SHARE = 0.95
USE = ("engine_busy_share", "kv_utilisation_p99")


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
            f"{its.name} {'–' if its.found.load is None else f'{its.found.load:.3g}'}" for its in self.policies
        )
        return (
            f"<CapacityStudy {self.scenario.name}: {loads}; policies, differences, changes; capacity_text() tells it>"
        )

    @property
    def best(self) -> PolicyCapacity | None:
        """The policy with the highest capacity, the first of equals."""
        known = [policy for policy in self.policies if policy.found.load is not None]
        return max(known, key=lambda policy: policy.found.load or 0.0, default=None)


def find_capacities(
    scenario: Scenario, sweep: Sweep, *, policies: Sequence[str] = (), effort: Effort | None = None, extras: bool = True
) -> CapacityStudy:
    """The capacities of all policies, or of those named. Without `extras` nothing else but what breaks above them."""
    effort = effort or Effort()
    scenario = with_load(scenario)
    labels = _chosen(scenario, policies)
    _check_objectives(scenario)
    setup = Setup.of(scenario)
    chosen = [spec for spec in scenario.specs if spec.label in labels]
    with scenario.at("cost"):
        check_reach(setup, chosen, max(scenario.loads, default=ANY_LOAD), range(effort.pilot))
    searched = sum(spec.label in labels for spec in scenario.specs)
    points = searched * effort.max_probes * effort.most
    sweep.check_size(points, [(setup, largest_load(setup))], scenario.source)
    sweep.hold()
    found = [PolicyCapacity(case, _found(case)) for case in _search(setup, labels, sweep, effort)]
    differences = [
        (one.label, other.label, _difference(one, other))
        for one, other in itertools.combinations([p for p in found if p.found.load is not None], 2)
    ]
    objective, error = objective_text(scenario), setup.cost_error
    study = CapacityStudy(
        scenario, setup, objective, rate_of(setup), effort, found, differences, error, poisson=None, changes=[]
    )
    _explain(study, sweep)
    if extras:
        _vary(study, sweep)
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


def _found(case: PolicySearch) -> Capacity:
    """What the search found; where loads are whole numbers, the highest that still passes, ends rounded outwards."""
    found = capacity(case.book)
    if not case.axis.whole or found.load is None:
        return found
    low, high = found.low and float(floor(found.low)), found.high and float(ceil(found.high))
    return replace(found, load=float(floor(found.load)), low=low, high=high)


def _merit(case: PolicySearch) -> tuple[float, float]:
    """A sort key of variants, the best last: the capacity; where no load meets the SLO, how close one came."""
    if not case.book:
        return 0.0, 0.0
    found = capacity(case.book)
    return found.load or (0.0 if found.never else found.highest), max(probe.margin for probe in probes(case.book))


def _difference(one: PolicyCapacity, other: PolicyCapacity) -> Difference:
    """The capacity of `one` minus that of `other`, with an interval from the seeds that both had."""
    num_seeds, mean = min(one.found.num_seeds, other.found.num_seeds), None
    if one.found.load is not None and other.found.load is not None:
        mean = one.found.load - other.found.load
    if num_seeds < 2:
        return Difference(mean, None, num_seeds, "one seed has no interval")
    found = paired(jackknife(one.case.book, num_seeds), jackknife(other.case.book, num_seeds))
    return found if found.mean is None or mean is None else replace(found, mean=mean)


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
        policy.found = _found(case)  # what was tried below it decides more than the search had
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


# ---- what if


def _vary(study: CapacityStudy, sweep: Sweep) -> None:
    """Searches the scenario with other step times, other arrivals and single changes, all beside the capacities."""
    best = study.best
    cost = [(policy, _cost_cases(study, policy)) for policy in study.policies if policy.found.load is not None]
    poisson = _poisson(study, best) if best is not None else None
    changes = _changes(best) if best is not None else []
    firsts = [(case, [(case.axis.load(case.start), s) for s in range(case.effort.pilot)]) for _, case in changes]
    run_trials(firsts, sweep, tolerant=True)
    helping = [case for _, case in changes if not case.failed and probes(case.book)[0].passes]
    _other_ends(study, sweep)
    tried = [case for _, cases in cost for case in cases] + helping + ([poisson] if poisson else [])
    run_searches(tried, sweep, tolerant=True)
    for policy, cases in cost:
        if cases:
            shares = [None if (r := ratio(case, policy.case)) is None else r - 1 for case in cases]
            policy.cost = shares[0], shares[1]
    if best is None or best.found.load is None:
        return
    if poisson is not None:
        study.poisson = _change("as Poisson arrivals", poisson, best)
    study.changes = [_change(what, case, best) for what, case in changes]
    study.changes.sort(key=lambda change: -(change.load or 0.0))


def _change(what: str, case: PolicySearch, base: PolicyCapacity) -> ChangedCapacity:
    """The change `what` with the capacity of its quick search, on the scale of the capacity it is compared with."""
    if case.failed:
        return ChangedCapacity(what, None, case.failed)
    if not probes(case.book)[0].passes and len(case.book) == 1:
        return ChangedCapacity(what, None, f"wins less than {HELPS - 1:.0%}")
    share = ratio(case, base.case)
    if share is None or base.found.load is None:
        return ChangedCapacity(what, None, "no crossing was found")
    return ChangedCapacity(what, share * base.found.load)


def _cost_cases(study: CapacityStudy, policy: PolicyCapacity) -> list[PolicySearch]:
    """The policy where steps take as long as the cost's error allows, at both ends; [] where that is unknown."""
    error, load = study.error, policy.found.load
    if isinstance(error, Unknown) or load is None:
        return []
    return [_stretched(policy, factor, load / factor) for factor in error.factors]


def _stretched(policy: PolicyCapacity, factor: float, start: float) -> PolicySearch:
    """The policy where steps take `factor` times as long, first tried at `start`."""
    scenario = policy.case.setup.scenario
    overrides = [only(policy.case.spec, scenario), f"cost_factor={scenario.file.cost_factor * factor!r}"]
    case = variant(policy.case, overrides, start, _quick(policy.case))
    assert case is not None, "only the time of steps is another"
    return case


def _other_ends(study: CapacityStudy, sweep: Sweep) -> None:
    """Tries, where the SLO is met at no load tried, the shortest steps that the cost's error allows at the load that
    comes closest; where it is met at every load, the longest at the highest."""
    if isinstance(study.error, Unknown):
        return
    (short, long), tried = study.error.factors, []
    for policy in study.policies:
        found = policy.found
        if found.load is None and found.never and policy.breaks_at is not None:
            tried.append((policy, policy.breaks_at, _stretched(policy, short, policy.breaks_at)))
        elif found.load is None and found.low == found.highest:
            tried.append((policy, found.highest, _stretched(policy, long, found.highest)))
    trials = [(case, [(load, seed) for seed in range(case.effort.fewest)]) for _, load, case in tried]
    run_trials(trials, sweep, tolerant=True)
    for policy, load, case in tried:
        if not case.failed and probes(case.book)[0].passes == policy.found.never:
            policy.untold = load


def _poisson(study: CapacityStudy, best: PolicyCapacity) -> PolicySearch | None:
    """The best policy under independent arrivals; None where they are no burstier."""
    if not is_burstier_than_poisson(study.scenario) or best.found.load is None:
        return None
    arrivals = json.dumps({"kind": "poisson", "mean_rate": "1/s"})
    overrides = [only(best.case.spec, study.scenario), f"workload.arrivals={arrivals}"]
    return variant(best.case, overrides, 1.5 * best.found.load, _quick(best.case))


def _quick(case: PolicySearch) -> Effort:
    """The quick effort; of one seed where seeds are all the same."""
    return QUICK if case.effort.most > 1 else replace(QUICK, pilot=1, fewest=1, most=1)


def _changes(best: PolicyCapacity) -> list[tuple[str, PolicySearch]]:
    """Single changes that could help, in words, each with its case: first tried just above the capacity."""
    case, scenario, load = best.case, best.case.setup.scenario, best.found.load
    assert load is not None, "the best policy has a capacity"
    found = [(f"{knob} {shown}", only(case.spec, scenario, **{knob: text})) for knob, text, shown in _knobs(case)]
    if not any(traffic.slo for traffic in scenario.file.workload.classes.values()):
        found += [(what, f"slo={json.dumps(text)}") for what, text in _relaxed(scenario.file.slo)]
    wanted = []
    for what, override in found:
        overrides = [override] if override.startswith("policies=") else [only(case.spec, scenario), override]
        changed_case = variant(case, overrides, HELPS * load, _quick(case))
        if changed_case is not None:
            wanted.append((what, changed_case))
    return wanted


def _knobs(case: PolicySearch) -> list[tuple[str, Any, str]]:
    """(knob, its value in a scenario, in words) of the policy's `knobs` that are set to numbers, doubled and halved."""
    found = []
    for knob in case.spec.config.traits.knobs:
        value, written = getattr(case.spec.config, knob), case.spec.knobs.get(knob)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            continue
        is_time = isinstance(written, str) and re.search(r"[a-z]", written) is not None
        for changed_value in (2 * value, value / 2):
            number = round(changed_value) if isinstance(value, int) else changed_value
            if number > 0:
                text = f"{number}ns" if is_time else number
                found.append((knob, text, format_duration(number).replace(" ", "") if is_time else f"{number:g}"))
    return found


def _relaxed(text: str) -> list[tuple[str, str]]:
    """(in words, the SLO) with each bound in turn twice as long, and with 95 % for a higher share."""
    slo = parse_slo(text)
    found = []
    for i, bound in enumerate(slo.bounds):
        looser = replace(bound, limit_ns=2 * bound.limit_ns)
        found.append((str(looser), str(replace(slo, bounds=(*slo.bounds[:i], looser, *slo.bounds[i + 1 :])))))
    if slo.share is not None and slo.share > RELAXED_SHARE:
        found.append((f"attainment {RELAXED_SHARE:.0%}".replace("%", " %"), str(replace(slo, share=RELAXED_SHARE))))
    return found


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
