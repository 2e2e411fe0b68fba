"""The bounds that a validation must meet, and its verdict on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from batchsim.check.validation.comparison import SPREADS, MetricError
from batchsim.check.validation.live_runs import SHIFTED, LivePoint
from batchsim.check.validation.step_error import ALL, RegionError, StepPairs
from batchsim.metrics.table import METRICS

NEAR_SATURATION = 0.9
"""Share of saturation from which on latencies are judged along the load axis: they are too steep in the load."""


@dataclass(frozen=True)
class Bounds:
    """The largest errors allowed on a device, as shares. `latency` holds for mean TPOT and mean E2E.

    `at_par`: step times are judged as on a machine that had not drifted, in calm runs alone: a shared CPU drifts by
    more than the bounds within minutes, and interruptions are no error of the cost model. A latency may be off by
    `spreads` times the spread of the live runs in any case. `shift` and `throughput` are judged near saturation, None:
    not at all.
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
    at_par: bool


BOUNDS = {
    "cpu": Bounds("cpu", 0.02, 0.05, None, 0.10, 0.15, SPREADS, None, None, at_par=True),
    "cuda": Bounds("cuda", 0.005, 0.02, 0.05, 0.03, 0.06, 0, 0.02, 0.015, at_par=False),
}


@dataclass(frozen=True)
class Verdict:
    """One bound with the value found for it, in words. `met` is None where nothing could be judged."""

    what: str
    bound: str
    found: str
    met: bool | None

    @property
    def word(self) -> str:
        return {True: "met", False: "NOT MET", None: "not judged"}[self.met]


def all_steps(points: Sequence[LivePoint], *, at_par: bool = False) -> list[RegionError]:
    """Step-time errors by region over all points; [] if no live run counts. `at_par`: of calm runs, drift taken out."""
    pairs = [pairs for point in points if (pairs := point.pairs_at_par if at_par else point.pairs) is not None]
    return StepPairs.join(pairs).errors() if pairs else []


def verdicts(points: Sequence[LivePoint], bounds: Bounds) -> list[Verdict]:
    """A verdict on each bound. Points on an unfit machine, or without a live run that counts, are not judged.

    A metric that only one side has misses its bound; one that neither has leaves the bound without a verdict, unless
    another point misses it.
    """
    fit = [point for point in points if point.counted and not point.unfit]
    judged = _step_verdicts(fit, bounds)
    near = [point for point in fit if point.share is not None and point.share >= NEAR_SATURATION]
    below = [point for point in fit if point.share is None or point.share < NEAR_SATURATION]
    where = f" below {NEAR_SATURATION:.0%} of saturation" if near else ""
    for name, bound in (("tpot_mean_s", bounds.latency), ("e2e_mean_s", bounds.latency), ("ttft_mean_s", bounds.ttft)):
        judged.append(_worst(below, name, bound, bounds.spreads, where))
    if near and bounds.shift is not None and bounds.throughput is not None:
        judged.append(_shift_verdict(near, bounds.shift))
        judged.append(_worst(near, "throughput_rps", bounds.throughput, 0, f" from {NEAR_SATURATION:.0%} on"))
    left_out = len(points) - len(fit)
    if left_out:
        judged = [
            replace(verdict, found=f"{verdict.found}; {left_out} of {len(points)} points not judged")
            for verdict in judged
        ]
    return judged


def _step_verdicts(points: Sequence[LivePoint], bounds: Bounds) -> list[Verdict]:
    """Verdicts on the times of all steps together; the bias must be within its bound under each policy as well."""
    whole = next((row for row in all_steps(points, at_par=bounds.at_par) if row.region == ALL), None)
    runs = [run for point in points for run in point.counted]
    asked = [
        ("signed bias of step time", "bias", bounds.bias, "within ±"),
        ("median error of step time", "p50", bounds.step_p50, "at most "),
        ("95th percentile of step-time error", "p95", bounds.step_p95, "at most "),
    ]
    judged = []
    for what, name, bound, words in asked:
        if bound is None:
            continue
        what, words = what + " at par" * bounds.at_par, words + _percent(bound)
        if not runs:
            judged.append(Verdict(what, words, "no live run counts", None))
            continue
        of = f"{sum(run.calm for run in runs)} calm of {len(runs)} live runs" if bounds.at_par else ""
        if whole is None:
            of += "" if any(run.drift is not None for run in runs) else ": the machine's drift is not known"
            judged.append(Verdict(what, words, of, None))
        elif name == "bias":
            judged.append(_bias_verdict(points, whole, bounds, what, words, of))
        else:
            value, steps = getattr(whole, name), f"{whole.n:,} steps" + (f" in {of}" if of else "")
            judged.append(Verdict(what, words, f"{value:.2%} of {steps}", value <= bound))
    return judged


def _bias_verdict(
    points: Sequence[LivePoint], whole: RegionError, bounds: Bounds, what: str, words: str, of: str
) -> Verdict:
    """The verdict on the bias of all steps together and of each policy: biases of two policies may cancel in the pool.

    A policy without a calm run leaves the verdict open, unless another misses.
    """
    by_policy: dict[str, list[LivePoint]] = {}
    for point in points:
        by_policy.setdefault(point.policy, []).append(point)
    rows = {name: all_steps(of_policy, at_par=bounds.at_par) for name, of_policy in by_policy.items()}
    biases = {name: regions[-1].bias for name, regions in rows.items() if regions}
    worst = max(biases, key=lambda name: abs(biases[name]))
    finding = f"{whole.bias:+.2%} of {whole.n:,} steps" + (f" in {of}" if of else "")
    if len(by_policy) > 1:
        words += " under every policy"
        finding += f" (largest: {worst} {biases[worst]:+.2%})"
    finding += "".join(f", none of {name}" for name, regions in rows.items() if not regions)
    missed = any(abs(bias) > bounds.bias for bias in (whole.bias, *biases.values()))
    return Verdict(what, words, finding, _met(missed, judged=len(biases) == len(rows)))


def _worst(points: Sequence[LivePoint], name: str, bound: float, spreads: int, where: str) -> Verdict:
    """The verdict on a metric: whether its error is within `bound`, or `spreads` live spreads, at every point."""
    label = METRICS[name].words
    words = f"within ±{_percent(bound)}" + (f" or {spreads}x the live spread" if spreads else "") + where
    figures = [(point, point.error(name)) for point in points]
    if not figures:
        return Verdict(label, words, "no point to judge", None)
    known = [(point, metric, abs(metric.error)) for point, metric in figures if metric.error is not None]
    good = sum(off <= max(bound, spreads * (metric.spread or 0.0)) for _, metric, off in known)
    finding = [f"{good} of {len(figures)} points"]
    if known:
        point, worst, _ = max(known, key=lambda one: one[2])
        spread = "not known: one live run" if worst.spread is None else f"±{worst.spread:.1%}"
        finding.append(f"the largest error {worst.error:+.1%} (spread {spread}) at {_at(point)}")
    finding += [
        f"not defined at {_at(point)}"
        if metric.ends is None
        else f"within the cost's error of saturation at {_at(point)}, where it cannot be told without calibration"
        for point, metric in figures
        if metric.error is None
    ]
    missed = good < len(known) or any(_one_sided(metric) for _, metric in figures)
    return Verdict(label, words, ", ".join(finding), _met(missed, judged=len(known) == len(figures)))


def _shift_verdict(points: Sequence[LivePoint], bound: float) -> Verdict:
    """The verdict on load-equivalent errors near saturation. An error that no shift within REACH explains is a miss."""
    words = f"within ±{_percent(bound)} from {NEAR_SATURATION:.0%} of saturation on"
    figures = [(point, point.error(name), point.shifts.get(name)) for point in points for name in SHIFTED]
    known = [(point, metric, shift) for point, metric, shift in figures if shift is not None]
    good = sum(abs(shift) <= bound for _, _, shift in known)
    absent = sum(metric.simulated is None and metric.live is None for _, metric, _ in figures)
    finding = f"{good} of {len(figures)} figures"
    if known:
        point, metric, shift = max(known, key=lambda one: abs(one[2]))
        few = "~ " if metric.few else ""
        finding += f", the largest {shift:+.1%} ({few}{METRICS[metric.name].words}, {_at(point)})"
    finding += f", {beyond} beyond reach" if (beyond := len(figures) - len(known) - absent) else ""
    finding += f", {absent} not defined" if absent else ""
    return Verdict("load-equivalent error", words, finding, _met(good + absent < len(figures), judged=not absent))


def _one_sided(metric: MetricError) -> bool:
    """Whether the error is undefined because one side lacks the metric, or is 0 where the other is not."""
    return metric.error is None and metric.ends is None and (metric.simulated is not None or metric.live is not None)


def _met(missed: bool, *, judged: bool) -> bool | None:
    """False if anything missed; else True, or None where something could not be judged."""
    return False if missed else True if judged else None


def _at(point: LivePoint) -> str:
    return f"{point.policy}, load {point.load:.4g}"


def _percent(share: float) -> str:
    return f"{100 * share:g} %"
