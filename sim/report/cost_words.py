"""What is said of numbers that the error of step times makes, the same words in every command."""

from __future__ import annotations

import math
from collections.abc import Callable

from batchsim.cost.cost_error import CostError, Unknown
from batchsim.report.numbers import DASH, per_token_text, percent_text, time_text
from batchsim.report.reading import Floats, PolicyCurve, is_auto, load_name, load_text, sweeps
from batchsim.results.read import Results

CANNOT_TELL = "cannot be told without calibration"
HOW = (
    f"{CANNOT_TELL}: batchsim calibrate --bench FILES, --steps LOGS, or --url of a running server, with --scenario and"
    " -o mine.json, then cost: mine.json"
)


def off_by(error: CostError | Unknown) -> str:
    """`step times ±20 %: kernels differ so`, or that their error is unknown, and why."""
    return f"step times {error}: {error.source}" if isinstance(error, CostError) else f"unknown: {error.source}"


def ends_text(ends: tuple[float, float], shown: Callable[[float], str]) -> str:
    """Both ends of a value as `shown` writes them; `∞` where the queue grows, `–` where it is not defined."""
    if any(math.isnan(end) for end in ends):
        return DASH
    return between(*("∞" if math.isinf(end) else shown(end) for end in ends))


def between(fast: str, slow: str) -> str:
    """`31…480 ms`, `31 ms…4.1 s`: both ends as texts, with their unit once where it is the same."""
    if fast == slow or DASH in (fast, slow):
        return fast if fast == slow else f"{fast}…{slow}"
    (number, _, unit), (_, _, other) = fast.partition(" "), slow.partition(" ")
    return f"{number}…{slow}" if unit == other else f"{fast}…{slow}"


def at_ends(sweep: PolicyCurve, i: int, metric: str) -> str:
    """A metric of a policy at its `i`-th load at both ends of the cost's error."""
    fast, slow = sweep.ends(metric)
    ends = float(fast[i]), float(slow[i])
    if metric.startswith(("in_slo", "slo_margin")):
        return ends_text(ends, percent_text)
    return ends_text(ends, per_token_text if metric == "norm_latency_mean_s" else lambda end: time_text(end, math.nan))


def cost_lines(results: Results) -> list[str]:
    """Lines on the loads that the cost's error leaves open: within it of saturation, or of the objective; and that the
    error is unknown where a queue grows at some load, and not at a lower one. The last says how to find out."""
    said: dict[str, list[str]] = {}
    name, known = load_name(results), results.manifest.get("cost_error", {})
    for sweep in sweeps(results):
        if sweep.policy in known:
            stored = known[sweep.policy]
            error = CostError(**stored) if "low" in stored else Unknown(stored["source"])
            for line in _of_curve(sweep, name, error, every=is_auto(results)):
                said.setdefault(line, []).append(sweep.name)
    lines = [f"! {', '.join(names)}: {line}" for line, names in said.items()]
    failed = [
        f"! {one['policy']}: {load_text(name, one['load'])} could not be simulated at the ends of the cost's error:"
        f" {one['reason']}"
        for one in results.manifest.get("cost_ends_failed", [])
    ]
    return [*lines, *([f"! which it is {HOW}"] if lines else []), *failed]


def _of_curve(sweep: PolicyCurve, name: str, error: CostError | Unknown, *, every: bool) -> list[str]:
    """With `every`, also at which loads near saturation the SLO is open, where no other line of the run says so."""

    def at_loads(loads: Floats) -> str:
        return ", ".join([*(f"{load:g}" for load in loads[:-1]), load_text(name, loads[-1])])

    lines: list[str] = []
    if (near := sweep.loads[sweep.within_error]).size:
        lines.append(
            f"{at_loads(near)} within the cost's error of saturation ({off_by(error)}): what waits in the queue has no"
            " number there, but that of the shortest and of the longest steps"
        )
    if (others := sweep.loads[sweep.untold & (every | ~sweep.within_error)]).size:
        lines.append(f"whether the SLO is met at {at_loads(others)} the cost's error decides ({off_by(error)})")
    grows = sweep.unstable_from
    if isinstance(error, Unknown) and grows is not None and (below := sweep.loads[sweep.loads < grows]).size:
        lines.append(
            f"saturation lies between {below[-1]:g} and {load_text(name, grows)} if steps take what they are said to;"
            f" how far they are off is {off_by(error)}. Latencies near it may be anything"
        )
    return lines
