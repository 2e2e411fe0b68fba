"""Whether draft tokens pay: each policy that verifies them beside the same policy without, over the tested loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from batchsim.report.numbers import percent_text
from batchsim.report.reading import (
    Floats,
    PolicyCurve,
    is_auto,
    load_name,
    load_text,
    short_load,
    sweeps,
)
from batchsim.results.knobs import knobs, speculation
from batchsim.results.read import Results


@dataclass(frozen=True)
class DraftCurve:
    """A policy that verifies drafts; `plain` is the same one without, None where the run has none.

    `speedup`, an element a load of `sweep`: the mean normalised latency of `plain` over that of the policy; 0 and
    infinity where the queue of one of them alone grows, NaN where both do, or `plain` was not run.
    """

    sweep: PolicyCurve
    plain: PolicyCurve | None
    speedup: Floats


def draft_curves(results: Results) -> list[DraftCurve]:
    """The DraftCurve of each policy that verifies drafts, in the scenario's order."""
    every = sweeps(results)
    return [_curve(results, sweep, every) for sweep in every if speculation(results, sweep.policy)]


def _curve(results: Results, sweep: PolicyCurve, every: list[PolicyCurve]) -> DraftCurve:
    alike = [
        other
        for other in every
        if (other.value, other.kind) == (sweep.value, sweep.kind)
        and _but_drafts(results, other) == _but_drafts(results, sweep)
        and not speculation(results, other.policy)
    ]
    plain = alike[0] if alike else None
    metric = "norm_latency_mean_s"
    theirs = np.full(len(sweep.loads), np.nan)
    if plain is not None:
        known = dict(zip(plain.loads.tolist(), np.where(plain.unstable, np.inf, plain.values(metric)), strict=True))
        theirs = np.array([known.get(load, np.nan) for load in sweep.loads.tolist()])
    with np.errstate(invalid="ignore"):
        speedup = theirs / np.where(sweep.unstable, np.inf, sweep.values(metric))
    return DraftCurve(sweep, plain, speedup)


def _but_drafts(results: Results, sweep: PolicyCurve) -> dict[str, Any]:
    """The knobs of a policy that are not of its drafts."""
    own = knobs(results, sweep.policy)
    return {name: own[name] for name in own if name not in ("kind", "acceptance") and "speculative" not in name}


def crossing_text(results: Results, curve: DraftCurve) -> str:
    """Up to which tested load the policy is faster than without drafts: `faster up to 256 users`, `never faster`."""
    known = ~np.isnan(curve.speedup)
    loads, pays = curve.sweep.loads[known], curve.speedup[known] > 1
    if not len(loads):
        return ""
    if pays.all():
        return "faster at every load tested"
    if not pays.any():
        return "never faster"
    last = int(np.flatnonzero(pays)[-1])
    name = load_name(results)
    if pays[: last + 1].all():
        return f"faster up to {load_text(name, float(loads[last]))}"
    return f"faster at {', '.join(short_load(name, float(load)) for load in loads[pays])} alone"


def draft_lines(results: Results, shown: list[tuple[PolicyCurve, int]]) -> list[str]:
    """A line for each of the (curve, index of a load) in `shown` that verifies drafts: what they bring and cost there,
    and up to which load they pay."""
    curves = {curve.sweep.policy: curve for curve in draft_curves(results)}
    lines = []
    for sweep, i in shown:
        curve = curves.get(sweep.policy)
        if curve is None or sweep.failed[i]:
            continue
        gained, rejected = (float(sweep.values(name)[i]) for name in ("acceptance_length", "rejected_share"))
        line = f"{sweep.labels[i]}:  {gained:.2f} tokens a decode and step, {percent_text(rejected)} of tokens rejected"
        if curve.plain is not None and np.isfinite(curve.speedup[i]):
            line += f"; {curve.speedup[i]:.2f} × as fast a token as {curve.plain.name}"
        crossing = "" if is_auto(results) else crossing_text(results, curve)
        lines.append(", ".join(filter(None, (line, crossing))))
    return lines
