"""What would change the capacities that were found: other step times, other arrivals, one changed knob or bound."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from batchsim.base.units import format_duration
from batchsim.cost.cost_error import Unknown
from batchsim.metrics.slo import parse_slo
from batchsim.study.capacity.book import probes
from batchsim.study.capacity.capacities import CapacityStudy, ChangedCapacity, PolicyCapacity
from batchsim.study.capacity.search import Effort
from batchsim.study.capacity.study import (
    QUICK,
    PolicySearch,
    is_burstier_than_poisson,
    only,
    ratio,
    run_searches,
    run_trials,
    variant,
)
from batchsim.study.sweep.points import Sweep

HELPS = 1.05  # of the capacity: what a change must win to be shown
RELAXED_SHARE = 0.95


def vary(study: CapacityStudy, sweep: Sweep) -> None:
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
        capacity = policy.found
        if capacity.load is None and capacity.never and policy.breaks_at is not None:
            tried.append((policy, policy.breaks_at, _stretched(policy, short, policy.breaks_at)))
        elif capacity.load is None and capacity.low == capacity.highest:
            tried.append((policy, capacity.highest, _stretched(policy, long, capacity.highest)))
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
    single = [(f"{knob} {shown}", only(case.spec, scenario, **{knob: text})) for knob, text, shown in _knobs(case)]
    if not any(traffic.slo for traffic in scenario.file.workload.classes.values()):
        single += [(what, f"slo={json.dumps(text)}") for what, text in _relaxed(scenario.file.slo)]
    wanted = []
    for what, override in single:
        overrides = [override] if override.startswith("policies=") else [only(case.spec, scenario), override]
        changed_case = variant(case, overrides, HELPS * load, _quick(case))
        if changed_case is not None:
            wanted.append((what, changed_case))
    return wanted


def _knobs(case: PolicySearch) -> list[tuple[str, Any, str]]:
    """(knob, its value in a scenario, in words) of the policy's `knobs` that are set to numbers, doubled and halved."""
    changes = []
    for knob in case.spec.config.traits.knobs:
        value, written = getattr(case.spec.config, knob), case.spec.knobs.get(knob)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            continue
        is_time = isinstance(written, str) and re.search(r"[a-z]", written) is not None
        for changed_value in (2 * value, value / 2):
            number = round(changed_value) if isinstance(value, int) else changed_value
            if number > 0:
                text = f"{number}ns" if is_time else number
                changes.append((knob, text, format_duration(number).replace(" ", "") if is_time else f"{number:g}"))
    return changes


def _relaxed(text: str) -> list[tuple[str, str]]:
    """(in words, the SLO) with each bound in turn twice as long, and with 95 % for a higher share."""
    slo = parse_slo(text)
    slos = []
    for i, bound in enumerate(slo.bounds):
        looser = replace(bound, limit_ns=2 * bound.limit_ns)
        slos.append((str(looser), str(replace(slo, bounds=(*slo.bounds[:i], looser, *slo.bounds[i + 1 :])))))
    if slo.share is not None and slo.share > RELAXED_SHARE:
        slos.append((f"attainment {RELAXED_SHARE:.0%}".replace("%", " %"), str(replace(slo, share=RELAXED_SHARE))))
    return slos
