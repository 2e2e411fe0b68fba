"""The decisions that a run comes to, and how any decision is said: `sure at 6 req/s; open at 7 req/s (96 to 100 %)`."""

from __future__ import annotations

import math

import numpy as np

from batchsim.report.numbers import percent_text
from batchsim.report.reading import PolicyCurve, load_text, sweeps
from batchsim.report.slo_shares import slo_shares
from batchsim.results.decision import Decision, JudgedLoad
from batchsim.results.read import Results


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


def decision_text(decision: Decision, load_name: str) -> str:
    """What is sure, and what is open, with the interval of the share within the objective of each class."""
    sure = f"sure {_at(load_name, decision.sure)}" if decision.sure is not None else "sure at no load"
    if not decision.open:
        return sure
    said = [_at(load_name, each.load) + _why(each) for each in decision.open]
    return f"{sure}; open {', '.join(said)}"


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
