"""The decisions that a run comes to, and how any decision is said: `sure at 6 req/s; open at 7 req/s (96 to 100 %)`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from batchsim.report.numbers import percent_text
from batchsim.report.reading import PolicyCurve, load_name, load_text, num_seeds, sweeps
from batchsim.report.slo_shares import slo_shares
from batchsim.results.decision import Decision, JudgedLoad
from batchsim.results.read import Results

_LONGEST_OBJECTIVE, _MOST_NAMES = 45, 3
"""Letters of an objective, and names of policies, that a line over a picture has room for."""


def decided(results: Results, curve: PolicyCurve) -> Decision:
    """The decision on a policy of a run, judged by the intervals over its seeds."""
    margins, halves = curve.values("slo_margin"), curve.half_width("slo_margin")
    shares = {each.request_class: each.metric for each in slo_shares(results)}
    loads = []
    for i, load in enumerate(curve.loads.tolist()):
        ends = (margins[i] - halves[i], margins[i] + halves[i]) if np.isfinite(halves[i]) else (None, None)
        loads.append(
            JudgedLoad(
                load,
                float(margins[i]),
                *ends,
                grows=bool(curve.unstable[i]),
                failed=bool(curve.failed[i]),
                by_cost=bool(curve.untold[i]),
                shares={name: _ends(curve, i, metric) for name, metric in shares.items()},
            )
        )
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
        return f"{_names(best)} {verb} {asked}"
    said = f"{_names(best)} {verb} {asked} up to {load_text(name, most)}"
    if others:
        return f"{said}; next {_names(others[0][1])}, up to {load_text(name, others[0][0])}"
    return f"{said}; no other policy does" if len(best) < len(every) else said


def _names(names: list[str]) -> str:
    if len(names) > _MOST_NAMES:
        return f"each of {len(names)} policies"
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def decision_text(decision: Decision, load_name: str) -> str:
    """What is sure, and what is open, with the interval of the share within the objective of each class."""
    sure = f"sure {_at(load_name, decision.sure)}" if decision.sure is not None else "sure at no load"
    if not decision.open:
        return sure
    said = [_at(load_name, each.load) + _why(each) for each in decision.open]
    return f"{sure}; open {', '.join(said)}"


def open_text(loads: Sequence[JudgedLoad]) -> str:
    """Loads with an open verdict, each with the interval of the share within the objective: `7, 96 to 100 %`."""
    each = [(f"{judged.load:g}", _why(judged).strip(" ()")) for judged in loads]
    return "; ".join(", ".join(filter(None, parts)) for parts in each)


def _at(name: str, load: float) -> str:
    return f"{'with' if name == 'users' else 'at'} {load_text(name, load)}"


def _why(judged: JudgedLoad) -> str:
    if judged.by_cost:
        return " (the error of the step costs decides)"
    shares = [f"{name} {share_ends(*ends)}".strip() for name, ends in judged.shares.items() if not math.isnan(ends[0])]
    return f" ({', '.join(shares)})" if shares else ""


def share_ends(low: float, high: float) -> str:
    """`96 to 100 %`: the ends of an interval of a share."""
    least, most = percent_text(max(low, 0.0)), percent_text(min(high, 1.0))
    return most if least == most else f"{least.removesuffix(' %')} to {most}"


def _ends(curve: PolicyCurve, i: int, metric: str) -> tuple[float, float]:
    value, half = float(curve.values(metric)[i]), float(np.nan_to_num(curve.half_width(metric)[i]))
    return value - half, value + half
