"""What a validation must reach, and whether it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sim.step_error import ALL, RegionError, StepPairs
from sim.validation import SPREADS, PointReport, label_of

NEAR_SATURATION = 0.9
"""From this share of saturation on, latencies are judged along the load axis: they are too steep in the load."""


@dataclass(frozen=True)
class Bounds:
    """The largest errors allowed, as shares. `latency` is for the means of TPOT and E2E.

    `spreads`: how many live spreads a latency may be off in any case. `shift` and `throughput` are asked near
    saturation; None: nothing is.
    """

    device: str
    bias: float
    step_p50: float
    step_p95: float | None
    latency: float
    ttft: float
    spreads: int
    shift: float | None
    throughput: float | None


BOUNDS = {
    "cpu": Bounds("cpu", 0.02, 0.05, None, 0.10, 0.15, SPREADS, None, None),
    "cuda": Bounds("cuda", 0.005, 0.02, 0.05, 0.03, 0.06, 0, 0.02, 0.015),
}


@dataclass(frozen=True)
class Verdict:
    """One bound and what was found. `met` is None where nothing can be said."""

    what: str
    bound: str
    found: str
    met: bool | None

    @property
    def word(self) -> str:
        return {True: "met", False: "NOT MET", None: "not judged"}[self.met]


def all_steps(points: Sequence[PointReport]) -> list[RegionError]:
    """Step-time errors by region over all points; none where no live run counts."""
    pairs = [point.pairs for point in points if point.pairs is not None]
    return StepPairs.join(pairs).errors() if pairs else []


def verdicts(points: Sequence[PointReport], bounds: Bounds) -> list[Verdict]:
    """A verdict a bound. Points on which the machine is unfit, or without a live run that counts, are not judged."""
    fit = [point for point in points if point.counted and not point.unfit]
    found = _step_verdicts(fit, bounds)
    below = [point for point in fit if point.share is None or point.share < NEAR_SATURATION]
    for name, bound in (("tpot_mean_s", bounds.latency), ("e2e_mean_s", bounds.latency), ("ttft_mean_s", bounds.ttft)):
        found.append(_worst(below, name, bound, bounds.spreads))
    near = [point for point in fit if point not in below]
    if near and bounds.shift is not None and bounds.throughput is not None:
        found.append(_shift_verdict(near, bounds.shift))
        found.append(_worst(near, "throughput_rps", bounds.throughput, 0))
    left_out = len(points) - len(fit)
    if left_out:
        found = [
            replace(verdict, found=f"{verdict.found}; {left_out} of {len(points)} points not judged")
            for verdict in found
        ]
    return found


def _step_verdicts(points: Sequence[PointReport], bounds: Bounds) -> list[Verdict]:
    """On the times of all steps together."""
    whole = next((row for row in all_steps(points) if row.region == ALL), None)
    asked = [
        ("signed bias of step time", "bias", bounds.bias, "within ±"),
        ("median error of step time", "p50", bounds.step_p50, "at most "),
        ("95th percentile of step-time error", "p95", bounds.step_p95, "at most "),
    ]
    found = []
    for what, name, bound, words in asked:
        if bound is None:
            continue
        if whole is None:
            found.append(Verdict(what, f"{words}{_percent(bound)}", "no live run counts", None))
            continue
        value = getattr(whole, name)
        shown = f"{value:+.2%}{_worst_bias(points)}" if name == "bias" else f"{value:.2%}"
        found.append(Verdict(what, f"{words}{_percent(bound)}", f"{shown} of {whole.n:,} steps", abs(value) <= bound))
    return found


def _worst_bias(points: Sequence[PointReport]) -> str:
    """The policy with the largest bias, where there are several."""
    by_policy: dict[str, list[PointReport]] = {}
    for point in points:
        by_policy.setdefault(point.policy.name, []).append(point)
    if len(by_policy) == 1:
        return ""
    biases = {name: all_steps(mine)[-1].bias for name, mine in by_policy.items()}
    worst = max(biases, key=lambda name: abs(biases[name]))
    return f" (largest: {worst} {biases[worst]:+.2%})"


def _worst(points: Sequence[PointReport], name: str, bound: float, spreads: int) -> Verdict:
    """Whether the figure is within the bound, or so many spreads, at every point; the worst point is named."""
    label = label_of(name)
    words = f"within ±{_percent(bound)}" + (f" or {spreads}x the live spread" if spreads else "")
    errors = [(point, metric) for point in points if (metric := point.metric(name)).error is not None]
    if not errors:
        return Verdict(label, words, "no point to judge", None)
    good = [abs(m.error or 0.0) <= max(bound, spreads * (m.spread or 0.0)) for _, m in errors]
    point, worst = max(errors, key=lambda found: abs(found[1].error or 0.0))
    found = f"{sum(good)} of {len(good)} points, the largest error {worst.error:+.1%}"
    found += f" (spread ±{worst.spread:.1%})" if worst.spread is not None else " (spread not known: one live run)"
    return Verdict(label, words, f"{found} at {point.policy.name}, load {point.load:.4g}", all(good))


def _shift_verdict(points: Sequence[PointReport], bound: float) -> Verdict:
    """Whether the load-equivalent errors of the means are within the bound at every point near saturation."""
    words = f"within ±{_percent(bound)} from {NEAR_SATURATION:.0%} of saturation on"
    found = [(point, name, point.shifts.get(name)) for point in points for name in ("ttft_mean_s", "e2e_mean_s")]
    known = [(point, name, shift) for point, name, shift in found if shift is not None]
    good = sum(abs(shift) <= bound for _, _, shift in known)
    text = f"{good} of {len(found)} figures"
    if known:
        point, name, shift = max(known, key=lambda one: abs(one[2]))
        text += f", the largest {shift:+.1%} ({label_of(name)}, {point.policy.name}, load {point.load:.4g})"
    return Verdict("load-equivalent error", words, text, good == len(found))


def _percent(share: float) -> str:
    return f"{100 * share:g} %"
