"""The decisions that a run comes to, and how any decision is said: `sure at 6 req/s; open at 7 req/s (96 to 100 %)`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from batchsim.report.numbers import percent_text
from batchsim.report.reading import PolicyCurve, load_name, load_text, num_seeds, short_load, sweeps
from batchsim.report.slo_shares import slo_shares
from batchsim.results.decision import Decision, JudgedLoad
from batchsim.results.read import Results

_LONGEST_OBJECTIVE, _MOST_NAMES = 45, 3
"""Letters of an objective, and names of policies, that a line over a picture has room for."""

BY_COST = "the error of the step costs decides"


def decided(results: Results, curve: PolicyCurve) -> Decision:
    """The decision on a policy of a run, judged by the intervals over its seeds."""
    metrics = {each.request_class: each.metric for each in slo_shares(results)}
    loads = [
        replace(judged, shares={name: _ends(curve, i, metric) for name, metric in metrics.items()})
        for i, judged in enumerate(curve.judged)
    ]
    return Decision(curve.name, tuple(loads))


def decisions(results: Results) -> list[Decision]:
    """The decision on each policy, in the scenario's order."""
    return [decided(results, curve) for curve in sweeps(results)]


def headline(results: Results) -> str:
    """The policy that surely meets the objective at the highest load, and the next one, in a line over a picture."""
    every, name, objective = decisions(results), load_name(results), results.manifest["objective"]
    asked = objective if len(objective) <= _LONGEST_OBJECTIVE else "the SLO"
    surely = "surely meets" if num_seeds(results) > 1 else "meets"
    held: dict[float, list[str]] = {}
    for decision in sorted((each for each in every if each.sure is not None), key=lambda each: -(each.sure or 0.0)):
        held.setdefault(decision.sure or 0.0, []).append(decision.name)
    if not held:
        return f"No policy {surely} {asked}" + (" at any load tested" if name else "")
    (most, best), *others = held.items()
    verb = surely if len(best) == 1 else surely.removesuffix("s")
    if not name:
        return f"{names_text(best)} {verb} {asked}"
    said = f"{names_text(best)} {verb} {asked} up to {load_text(name, most)}"
    if others:
        return f"{said}; next {names_text(others[0][1])}, up to {load_text(name, others[0][0])}"
    return f"{said}; no other policy does" if len(best) < len(every) else said


def names_text(names: Sequence[str]) -> str:
    """`a, b and c`, or how many policies they are where a line has no room for all."""
    if len(names) > _MOST_NAMES:
        return f"{len(names)} policies"
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def decision_text(decision: Decision, load_name: str) -> str:
    """What is sure, and what is open, with each class's interval of the share within the objective."""
    sure = f"sure {at_loads(load_name, decision.sure)}" if decision.sure is not None else "sure at no load"
    said = [at_loads(load_name, *(each.load for each in alike)) + why for why, alike in groupby(decision.open, _why)]
    return f"{sure}; open {', '.join(said)}" if said else sure


def open_text(loads: Sequence[JudgedLoad]) -> str:
    """Loads with an open verdict, each with the interval of the share within the objective: `7, 96 to 100 %`."""
    each = [(f"{judged.load:g}", _why(judged).strip(" ()")) for judged in loads]
    return "; ".join(", ".join(filter(None, parts)) for parts in each)


def at_loads(name: str, *loads: float) -> str:
    """One or several loads as an adverbial: `at 4, 5 req/s`, `with 64 users`."""
    numbers = [*(short_load(name, load) for load in loads[:-1]), load_text(name, loads[-1])]
    return f"{'with' if name == 'users' else 'at'} {', '.join(numbers)}"


def _why(judged: JudgedLoad) -> str:
    if judged.by_cost:
        return f" ({BY_COST})"
    shares = [f"{name} {share_ends(*ends)}".strip() for name, ends in judged.shares.items() if not math.isnan(ends[0])]
    return f" ({', '.join(shares)})" if shares else ""


def share_ends(low: float, high: float) -> str:
    """`96 to 100 %`: the ends of an interval of a share."""
    least, most = percent_text(max(low, 0.0)), percent_text(min(high, 1.0))
    return most if least == most else f"{least.removesuffix(' %')} to {most}"


def _ends(curve: PolicyCurve, i: int, metric: str) -> tuple[float, float]:
    value, half = float(curve.values(metric)[i]), float(np.nan_to_num(curve.half_width(metric)[i]))
    return value - half, value + half
