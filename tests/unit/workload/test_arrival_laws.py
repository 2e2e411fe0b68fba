"""Laws of the arrival processes whose rate changes, against closed forms and by tests of their time change."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import linalg, special

from batchsim.base.units import NS_PER_S
from batchsim.workload.arrivals import arrival_times_ns
from batchsim.workload.processes import (
    DiurnalArrivals,
    GammaArrivals,
    MmppArrivals,
    MmppState,
    OnOffArrivals,
    PoissonArrivals,
    Process,
    Profiled,
    RampArrivals,
    StepsArrivals,
    WeibullArrivals,
)
from batchsim.workload.traces.arrival_stats import index_of_dispersion
from tests.support.random_cases import random_cases

HOUR_NS = 3600 * NS_PER_S
RAMP = RampArrivals(8.0, growth=4.0, over=HOUR_NS)
STEPS = StepsArrivals(8.0, rates=(1, 3, 0, 2), every=HOUR_NS // 4)
DAY = DiurnalArrivals(8.0, profile=(1.0, 4.0, 0.0, 3.0), period=HOUR_NS, start=HOUR_NS // 10)
THREE = MmppArrivals(
    8.0,
    (MmppState(0.2, 3 * NS_PER_S), MmppState(1, 10 * NS_PER_S, weight=3), MmppState(9, 2 * NS_PER_S, weight=0.5)),
)
CHANGING = [RAMP, STEPS, DAY]
ALL = [WeibullArrivals(8.0, 0.6), THREE, *CHANGING, replace(RAMP, cv=2.0), replace(DAY, cv=0.5)]


def expected_arrivals(process: Process, time_s: np.ndarray) -> np.ndarray:
    """The integral of the rate from 0 to each time, summed over steps of 10 ms of the law as its docstring has it."""
    step = 0.01
    middles = np.arange(step / 2, time_s.max() + 1, step)
    if isinstance(process, RampArrivals):
        over = process.over / NS_PER_S
        rates = 2 / (1 + process.growth) * (1 + (process.growth - 1) * np.minimum(middles / over, 1))
    elif isinstance(process, StepsArrivals):
        at = np.minimum(middles // (process.every / NS_PER_S), len(process.rates) - 1).astype(int)
        rates = np.array(process.rates)[at] / np.mean(process.rates)
    else:
        assert isinstance(process, DiurnalArrivals)
        profile, period = process.profile, process.period / NS_PER_S
        places = (np.arange(len(profile)) + 0.5) * period / len(profile)
        rates = np.interp(middles + process.start / NS_PER_S, places, profile, period=period) / np.mean(profile)
    sums = np.concatenate(([0.0], np.cumsum(rates * step)))
    return process.mean_rate * np.interp(time_s, np.arange(len(sums)) * step, sums)


def likelihood(shares: np.ndarray) -> float:
    """How likely it is, by Kolmogorov and Smirnov, that the law by which each value has one of `shares` of all below it
    leaves some so far from evenly spread."""
    ordered, places = np.sort(shares), np.arange(len(shares) + 1) / len(shares)
    farthest = max((places[1:] - ordered).max(), (ordered - places[:-1]).max())
    return float(special.kolmogorov(farthest * math.sqrt(len(shares))))


@pytest.mark.parametrize("process", CHANGING, ids=lambda p: p.kind)
def test_in_the_time_of_its_rate_a_changing_process_is_poisson(process: Profiled) -> None:
    """Gaps in expected arrivals are exponential of mean 1, and neighbours know nothing of each other."""
    times = arrival_times_ns(process, 3, HOUR_NS, None) / NS_PER_S
    gaps = np.diff(expected_arrivals(process, times))
    assert len(gaps) == pytest.approx(expected_arrivals(process, np.array([3600.0]))[0], rel=0.02)
    assert likelihood(-np.expm1(-gaps)) > 0.01
    assert abs(np.corrcoef(gaps[:-1].argsort().argsort(), gaps[1:].argsort().argsort())[0, 1]) < 0.03


@pytest.mark.parametrize("process", CHANGING, ids=lambda p: p.kind)
def test_the_mean_rate_of_a_profile_is_that_of_its_own_span(process: Profiled) -> None:
    """A ramp's over its length, steps' over all of them, a day's over its period."""
    counts = [len(arrival_times_ns(process, seed, HOUR_NS, None)) for seed in range(10)]
    assert np.mean(counts) == pytest.approx(8 * 3600, rel=4 / math.sqrt(10 * 8 * 3600))


@pytest.mark.parametrize("cv", [0.4, 1.5])
def test_residual_burstiness_is_that_of_the_gaps_in_the_time_of_the_rate(cv: float) -> None:
    """With the profile taken out the gaps are gamma of that coefficient of variation."""
    times = arrival_times_ns(replace(RAMP, cv=cv), 3, HOUR_NS, None) / NS_PER_S
    gaps = np.diff(expected_arrivals(RAMP, times))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.04)
    assert likelihood(special.gammainc(cv**-2, gaps / cv**2)) > 0.01


def test_weibull_gaps_have_the_weibull_law() -> None:
    """Of the shape asked for, with the mean gap of the rate, and the CV that the config says."""
    process = WeibullArrivals(8.0, 0.6)
    gaps = np.diff(arrival_times_ns(process, 1, HOUR_NS, None)) / NS_PER_S
    scale = 1 / 8.0 / math.gamma(1 + 1 / 0.6)
    assert likelihood(-np.expm1(-((gaps / scale) ** 0.6))) > 0.01
    assert process.cv == pytest.approx(math.sqrt(math.gamma(1 + 2 / 0.6) / math.gamma(1 + 1 / 0.6) ** 2 - 1))


def mmpp_dispersion(process: MmppArrivals, window_s: float) -> float:
    """Variance over mean of the counts in a window, from the covariance of the rate along the chain of states."""
    states = process.states
    weights = np.array([state.weight for state in states])
    jumps = np.tile(weights, (len(states), 1)) * (1 - np.eye(len(states)))
    stays = np.array([state.stay for state in states]) / NS_PER_S
    generator = (jumps / jumps.sum(axis=1, keepdims=True) - np.eye(len(states))) / stays[:, None]
    shares = linalg.null_space(generator.T)[:, 0]
    shares /= shares.sum()
    rates = np.array([state.rate for state in states])
    rates = rates / (shares @ rates) * process.mean_rate
    lags = np.linspace(0, window_s, 400)
    covariance = [shares * rates @ linalg.expm(generator * lag) @ rates - (shares @ rates) ** 2 for lag in lags]
    return float(1 + 2 / (window_s * process.mean_rate) * np.trapezoid((window_s - lags) * covariance, lags))


@pytest.mark.parametrize("window_s", [1, 10])
def test_mmpp_counts_are_dispersed_as_theory_says(window_s: int) -> None:
    """Variance over mean of counts in windows equals that from the generator of the states."""
    times = [arrival_times_ns(THREE, seed, 5 * HOUR_NS, None) for seed in range(3)]
    found = np.mean([index_of_dispersion(each, window_s * NS_PER_S) or 0 for each in times])
    assert found == pytest.approx(mmpp_dispersion(THREE, window_s), rel=0.05)


def test_two_states_of_which_one_is_silent_are_on_off_arrivals() -> None:
    """The law's dispersion is the closed form of on/off, and the drawn one agrees with it."""
    on_off = OnOffArrivals(8.0, on=4 * NS_PER_S, off=6 * NS_PER_S)
    mmpp = MmppArrivals(8.0, (MmppState(1, on_off.on), MmppState(0, on_off.off)))
    k, rate_on, off_share = 1 / 4 + 1 / 6, 20.0, 0.6
    closed = 1 + 2 * rate_on * off_share / k * (1 - (1 - np.exp(-k)) / k)
    assert mmpp_dispersion(mmpp, 1.0) == pytest.approx(closed, rel=1e-4)
    times = arrival_times_ns(mmpp, 3, 20 * HOUR_NS, None)
    assert index_of_dispersion(times, NS_PER_S) == pytest.approx(closed, rel=0.05)


def test_the_states_of_an_mmpp_last_the_shares_of_time_that_the_chain_says() -> None:
    """Against the stationary vector of the generator; hand-worked for two states: their stays."""
    two = MmppArrivals(1.0, (MmppState(1, 4 * NS_PER_S, weight=7), MmppState(2, 6 * NS_PER_S)))
    assert two.time_shares.tolist() == pytest.approx([0.4, 0.6])
    # 3 states, weights 1, 3, 0.5 and stays 3, 10, 2 s: entered in proportion to 1·3.5, 3·1.5 and 0.5·4
    assert THREE.time_shares.tolist() == pytest.approx(np.array([10.5, 45, 4]) / 59.5)


@pytest.mark.parametrize("process", ALL, ids=lambda p: f"{p.kind}-{getattr(p, 'cv', '')}")
def test_a_changing_process_begins_alike_however_its_end_is_given(process: Process) -> None:
    """The first requests of a duration are those of a number of requests; times never decrease."""
    by_count = arrival_times_ns(process, 5, None, 500)
    by_time = arrival_times_ns(process, 5, int(by_count[-1]) + 1, None)
    assert by_time[:500].tolist() == by_count.tolist() and (np.diff(by_time) >= 0).all() and by_count[0] >= 0


@pytest.mark.parametrize("process", [THREE, STEPS], ids=lambda p: p.kind)
def test_changes_stay_where_they_are_when_the_mean_rate_changes(process: Process) -> None:
    """Minutes without arrivals at ten times the rate have none at the rate itself."""
    low = arrival_times_ns(process, 5, HOUR_NS, None)
    high = arrival_times_ns(replace(process, mean_rate=80.0), 5, HOUR_NS, None)
    busy_low, busy_high = (set((times // (NS_PER_S // 2)).tolist()) for times in (low, high))
    assert len(busy_low - busy_high) < 0.02 * len(busy_low)


def test_after_its_length_a_ramp_goes_on_at_its_last_rate() -> None:
    """A growth of 4 around 8/s ends with 12.8/s."""
    times = arrival_times_ns(RAMP, 1, 3 * HOUR_NS, None)
    assert np.count_nonzero(times >= HOUR_NS) / 7200 == pytest.approx(12.8, rel=0.02)


@random_cases(30)
@given(
    rates=st.lists(st.floats(0, 100), min_size=1, max_size=6).filter(lambda r: r[-1] > 0.01), seed=st.integers(0, 99)
)
def test_in_a_step_of_rate_0_nothing_arrives(rates: list[float], seed: int) -> None:
    """However steps follow each other."""
    process = StepsArrivals(20.0, tuple(rates), every=10 * NS_PER_S)
    times = arrival_times_ns(process, seed, None, 300)
    at = np.minimum(times // (10 * NS_PER_S), len(rates) - 1)
    inside = times % (10 * NS_PER_S) > 1  # rounded to whole ns
    assert all(rates[step] > 0 for step in at[inside].tolist())


WRONG = {
    "one state": (lambda: MmppArrivals(1.0, (MmppState(1, 1),)), r"states are 1\. Write from 2 to 8"),
    "silent": (lambda: MmppArrivals(1.0, (MmppState(0, 1), MmppState(0, 2))), "states: all rates are 0"),
    "no rates": (lambda: StepsArrivals(1.0, (), every=1), "rates has 0 rates"),
    "ends silent": (lambda: StepsArrivals(1.0, (1, 0), every=1), "rates end with 0"),
    "shape": (lambda: WeibullArrivals(1.0, 0.01), r"shape is 0\.01\. It must be from 0\.1 to 100"),
    "growth": (lambda: RampArrivals(1.0, growth=0, over=1), "growth is 0"),
    "profile": (lambda: DiurnalArrivals(1.0, profile=(0.0, 0.0)), "profile: all rates are 0"),
}


@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)
def test_a_process_that_cannot_be_is_refused(make, message: str) -> None:
    """With the field and what to write."""
    with pytest.raises(ValueError, match=message):
        make()


def test_a_gamma_profile_without_a_change_is_gamma() -> None:
    """A ramp that does not grow draws what gamma arrivals draw, and without cv what Poisson arrivals draw."""
    flat = RampArrivals(8.0, growth=1.0, over=HOUR_NS)
    for profile, plain in ((replace(flat, cv=2.0), GammaArrivals(8.0, 2.0)), (flat, PoissonArrivals(8.0))):
        ours, theirs = (arrival_times_ns(each, 1, HOUR_NS, None) for each in (profile, plain))
        assert np.abs(ours - theirs).max() <= 1
