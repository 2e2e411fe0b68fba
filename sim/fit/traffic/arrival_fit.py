"""Arrival processes fitted to recorded times by maximum likelihood, the one kept that has the lowest BIC.

Each law is judged by its density of all gaps, given the first arrival, so that laws of gaps, of states and of a rate
over time can be compared. The Bayesian information criterion is num_parameters ln(gaps) - 2 ln(likelihood).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize_scalar
from scipy.special import digamma, gammaln

from batchsim.base.errors import TraceError
from batchsim.base.units import NS_PER_S
from batchsim.fit.traffic.mmpp_fit import fit_mmpp
from batchsim.workload.clocks import profile_of
from batchsim.workload.processes import (
    DiurnalArrivals,
    GammaArrivals,
    PoissonArrivals,
    Process,
    Profiled,
    RampArrivals,
    StepsArrivals,
    WeibullArrivals,
)
from batchsim.workload.traces.trace_rows import Ints

Floats = NDArray[np.float64]

FEWEST_ARRIVALS = 100
"""Arrivals below which no law is fitted: the rate alone is then uncertain by a tenth."""
MOST_TIES = 0.05
"""Share of gaps of 0 from which on a clock's tick, not the traffic, would be fitted."""
STEPS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of steps tried for a rate that changes, as long as a step has ARRIVALS_A_STEP on average."""
ARRIVALS_A_STEP = 20
HOURS = 24
_SHAPES = (1e-3, 1e4)  # of gamma gaps in the time of the rate, as `Cv` bounds them


@dataclass(frozen=True)
class ArrivalFit:
    """A law at its likeliest: `log_likelihood` of `gaps` gaps in s, and how many numbers were chosen to fit them."""

    process: Process
    log_likelihood: float
    num_parameters: int
    gaps: int

    @property
    def bic(self) -> float:
        return self.num_parameters * math.log(self.gaps) - 2 * self.log_likelihood

    @property
    def name(self) -> str:
        """The law in words, such as `MMPP of 3 states`."""
        return law_name(self.process)


def law_name(process: Process) -> str:
    """The law of a process in words, without its numbers."""
    from batchsim.workload.processes import MmppArrivals, process_name

    if isinstance(process, MmppArrivals):
        return f"MMPP of {len(process.states)} states"
    if not isinstance(process, StepsArrivals | DiurnalArrivals | RampArrivals):
        return process_name(process.kind)
    parts = "trend"
    if isinstance(process, StepsArrivals):
        parts = f"{len(process.rates)} steps"
    elif isinstance(process, DiurnalArrivals):
        parts = f"profile of {len(process.profile)} parts of a day"
    if process.states is not None:
        return f"{parts}, MMPP of {len(process.states)} states"
    return f"{parts}, {'Poisson' if process.cv == 1 else 'gamma'} gaps"


def positive_gaps_s(arrival_ns: Ints) -> tuple[Floats, list[str]]:
    """(gaps in s, notes): gaps of 0 count as half the smallest positive one, which a note says.

    TraceError for too few arrivals, or for ties so frequent that the fit would be of a clock's tick.
    """
    gaps_ns = np.diff(arrival_ns)
    if len(arrival_ns) > 1 and arrival_ns[0] == arrival_ns[-1]:
        raise TraceError(f"all {len(arrival_ns):,} rows arrive at once: no law to fit. Replay them: {{kind: trace}}.")
    if len(gaps_ns) < FEWEST_ARRIVALS:
        raise TraceError(
            f"{len(arrival_ns):,} arrivals are too few to fit a law to. Give {FEWEST_ARRIVALS + 1} or more."
        )
    ties = int(np.count_nonzero(gaps_ns == 0))
    tick_ns = int(np.quantile(gaps_ns[gaps_ns > 0], 0.01))
    if ties > MOST_TIES * len(gaps_ns):
        raise TraceError(
            f"{100 * ties / len(gaps_ns):.3g} % of the gaps are 0: the clock ticks every {tick_ns / NS_PER_S:.3g} s,"
            f" and that would be fitted. Write --jitter {tick_ns / NS_PER_S:.3g}s, which spreads arrivals over a tick."
        )
    gaps_s = gaps_ns / NS_PER_S
    if not ties:
        return gaps_s, []
    smallest_s = float(gaps_s[gaps_s > 0].min())
    return np.where(gaps_ns == 0, smallest_s / 2, gaps_s), [f"{ties:,} gaps of 0 counted as {smallest_s / 2:.3g} s"]


def fit_arrivals(arrival_ns: Ints, tell: Callable[[str], None] | None = None) -> tuple[list[ArrivalFit], list[str]]:
    """Every law at its likeliest, the lowest BIC first; and notes. `tell` is called with each law before it is fitted.

    `arrival_ns` is sorted and begins at 0. TraceError where no law can be fitted.
    """
    gaps_s, notes = positive_gaps_s(arrival_ns)
    times_s = np.cumsum(gaps_s)
    fits: list[ArrivalFit] = []
    say = tell or (lambda what: None)
    say("independent gaps")
    fits += _renewals(gaps_s)
    say("a rate that changes")
    changing = [*_profiles(times_s)]
    fits += changing
    fits += (ArrivalFit(*each, len(gaps_s)) for each in fit_mmpp(gaps_s, say))
    if changing:
        fits += _states_within(min(changing, key=lambda fit: fit.bic), times_s, say)
    return sorted(fits, key=lambda fit: fit.bic), notes


# ---- independent gaps


def _renewals(gaps_s: Floats) -> Iterator[ArrivalFit]:
    rate, count = 1 / float(gaps_s.mean()), len(gaps_s)
    yield ArrivalFit(PoissonArrivals(rate), count * (math.log(rate) - 1), 1, count)
    shape = gamma_shape(gaps_s)
    yield ArrivalFit(
        GammaArrivals(rate, shape**-0.5), gamma_log_density(gaps_s * rate, shape) + count * math.log(rate), 2, count
    )
    shape, likelihood = _weibull(gaps_s)
    yield ArrivalFit(WeibullArrivals(rate, shape), likelihood, 2, count)


def gamma_shape(gaps: Floats) -> float:
    """The likeliest shape of gamma gaps with the mean that `gaps` have."""
    excess = math.log(gaps.mean()) - float(np.log(gaps).mean())
    low, high = (math.log(shape) - digamma(shape) - excess for shape in _SHAPES)
    if low * high > 0:
        return _SHAPES[1] if high > 0 else _SHAPES[0]
    root: Any = brentq(lambda shape: math.log(shape) - digamma(shape) - excess, *_SHAPES)
    return float(root)


def gamma_log_density(unit_gaps: Floats, shape: float) -> float:
    """The log density, summed, of gaps that are gamma of mean 1."""
    logs = shape * math.log(shape) - gammaln(shape) + (shape - 1) * np.log(unit_gaps) - shape * unit_gaps
    return float(logs.sum())


def _weibull(gaps: Floats) -> tuple[float, float]:
    """The shape and the log density, summed, of the likeliest Weibull law with the mean that `gaps` have.

    The mean is kept, since the simulator takes the rate as given: the likeliest law of all may have another.
    """
    logs = np.log(gaps)

    def minus_log_density(shape: float) -> float:
        scale = gaps.mean() / math.gamma(1 + 1 / shape)
        reduced = shape * (logs - math.log(scale))
        return -float((math.log(shape) + reduced - logs - np.exp(reduced)).sum())

    best: Any = minimize_scalar(minus_log_density, bounds=(0.1, 10), method="bounded", options={"xatol": 1e-6})
    return float(best.x), -float(best.fun)


# ---- rates that change


def _profiles(times_s: Floats) -> Iterator[ArrivalFit]:
    """A trend, steps, and the hours of a day, each with gamma gaps and with Poisson ones."""
    span_ns = round(times_s[-1] * NS_PER_S)
    count = len(times_s)

    def trend(log_growth: float) -> RampArrivals:
        return RampArrivals(count / float(times_s[-1]), growth=math.exp(log_growth), over=span_ns)

    def minus_poisson(log_growth: float) -> float:
        return -_changed(trend(log_growth), times_s, 1)[0].log_likelihood

    best: Any = minimize_scalar(minus_poisson, bounds=(-5, 5), method="bounded")
    yield from _changed(trend(float(best.x)), times_s, 2)
    for parts in STEPS:
        if count >= parts * ARRIVALS_A_STEP:
            every = -(-span_ns // parts)
            counts = np.bincount((times_s * NS_PER_S / every).astype(np.int64).clip(0, parts - 1), minlength=parts)
            process = StepsArrivals(float(counts.mean()) * NS_PER_S / every, rates=tuple(counts.tolist()), every=every)
            if counts[-1]:
                yield from _changed(process, times_s, parts)
    if span_ns >= 2 * HOURS * 3600 * NS_PER_S:
        at = (times_s / 3600).astype(np.int64)
        visits = np.bincount(np.arange(math.ceil(times_s[-1] / 3600)) % HOURS, minlength=HOURS)
        profile = np.bincount(at % HOURS, minlength=HOURS) / visits
        if profile.any():
            mean_rate = float(profile.mean()) / 3600
            yield from _changed(DiurnalArrivals(mean_rate, profile=tuple(profile.tolist())), times_s, HOURS)


def _changed(process: Profiled, times_s: Floats, num_parameters: int) -> list[ArrivalFit]:
    """`process` as it is and with gamma gaps, judged in the time in which its rate is 1; [] where an arrival falls into
    a time without any."""
    unit_gaps, rates_per_s = _evened(process, times_s)
    if not (unit_gaps > 0).all() or not (rates_per_s > 0).all():
        return []
    logs, count = float(np.log(rates_per_s).sum()), len(times_s)
    poisson = ArrivalFit(process, logs - float(unit_gaps.sum()), num_parameters, count)
    shape = gamma_shape(unit_gaps / unit_gaps.mean())
    density = gamma_log_density(unit_gaps, shape)
    return [poisson, ArrivalFit(replace(process, cv=shape**-0.5), logs + density, num_parameters + 1, count)]


def _evened(process: Profiled, times_s: Floats) -> tuple[Floats, Floats]:
    """The gaps in the time in which the rate of `process` is 1, and the rate in 1/s at each arrival."""
    clock = profile_of(process)
    times_ns = np.concatenate(([0.0], times_s)) * NS_PER_S
    return np.diff(clock.arrivals_by(times_ns)), clock.rates_per_ns(times_ns[1:]) * NS_PER_S


def _states_within(fit: ArrivalFit, times_s: Floats, say: Callable[[str], None]) -> Iterator[ArrivalFit]:
    """The rate over time of `fit` with states in the place of gamma gaps."""
    profile = fit.process
    assert isinstance(profile, RampArrivals | StepsArrivals | DiurnalArrivals), "a rate that changes"
    unit_gaps, rates_per_s = _evened(profile, times_s)
    logs = float(np.log(rates_per_s / profile.mean_rate).sum())
    of_rate = fit.num_parameters - (profile.cv != 1)
    for process, likelihood, parameters in fit_mmpp(
        unit_gaps / profile.mean_rate, lambda what: say(f"{what} beside a rate that changes")
    ):
        within = replace(profile, cv=1.0, states=process.states)
        yield ArrivalFit(within, logs + likelihood, of_rate + parameters, len(times_s))
