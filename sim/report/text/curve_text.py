"""The table of a run that found its loads: each policy's saturation, knee, SLO crossing, and where the queue grows."""

from __future__ import annotations

from batchsim.report.layout import aligned, fit
from batchsim.report.numbers import DASH
from batchsim.report.reading import load_name, sweeps
from batchsim.results.landmarks import Crossing, Knee, Landmarks
from batchsim.results.read import Results, curve_marks


def vary_line(results: Results) -> str:
    """One line: the varied key, its values, and whether the requests change with them."""
    vary = results.manifest["vary"]
    same = "the same requests" if vary["same_requests"] else "the requests change with it"
    return f"varied: {vary['key']} = {', '.join(map(str, vary['values']))} · {same}"


def curve_table(results: Results) -> list[str]:
    """The table's lines: each policy's saturation rate, knee, SLO crossing, and load from which the queue grows."""
    name, found = load_name(results), curve_marks(results)
    grid = [["", "saturation", "knee", "SLO crossed at", "queue grows"]]
    for sweep in sweeps(results):
        its = found[sweep.policy]
        rate = f"{results.manifest['saturation_rps'][sweep.policy]:.3g} req/s"
        grid.append([sweep.name, rate, _knee(its.knee), _crossed(its.crossing), _grows(its, name)])
    unit = {"mean_rate": "req/s", "users": "users", "rate_scale": "times the trace's rate"}[name]
    legend = (
        f"loads in {unit} · saturation: completions under overload · knee: greatest power, throughput / mean e2e ·"
        f" crossed: {results.manifest['objective']}, interpolated between the tested loads in brackets"
    )
    return [*aligned(grid, left=(0,)), fit(legend)]


def _knee(knee: Knee | None) -> str:
    if knee is None:
        return DASH
    return f"{knee.load:g} ({_between(knee.low, knee.high)})"


def _crossed(crossing: Crossing) -> str:
    """The load at which the SLO is crossed: `7.4 (7.2–7.8)`, or on which side of all tested loads it lies."""
    if crossing.low is None:
        return "never" if crossing.high is None else f"never, from {crossing.high:g} on"
    if crossing.high is None:
        return f"above {crossing.low:g}"
    at = "" if crossing.load is None else f"{crossing.load:.3g} "
    return f"{at}({_between(crossing.low, crossing.high)})"


def _between(low: float | None, high: float | None) -> str:
    if low is None:
        return DASH if high is None else f"below {high:g}"
    return f"above {low:g}" if high is None else f"{low:g}–{high:g}"


def _grows(its: Landmarks, name: str) -> str:
    if its.unstable_from is None:
        return "not judged" if name == "users" else "at none tested"
    return f"from {its.unstable_from:g}"
