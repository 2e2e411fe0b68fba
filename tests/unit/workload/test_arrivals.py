"""Arrival processes and their statistics."""

import csv
import os
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.base.errors import ScenarioError
from batchsim.base.units import NS_PER_S
from batchsim.workload.arrivals import arrival_times_ns
from batchsim.workload.processes import ConstantArrivals, GammaArrivals, OnOffArrivals, PoissonArrivals
from batchsim.workload.traces.arrival_stats import describe_arrivals, rate_change
from tests.support.random_cases import random_cases

HOUR_NS = 3600 * NS_PER_S
BURSTS = OnOffArrivals(8.0, on=4 * NS_PER_S, off=6 * NS_PER_S)


@pytest.mark.parametrize(
    "process", [PoissonArrivals(8.0), GammaArrivals(8.0, 2.5), GammaArrivals(8.0, 0.3), ConstantArrivals(8.0), BURSTS]
)
def test_the_long_run_rate_is_the_mean_rate(process):
    """Over ten hours every process has its mean rate, on_off over on and off times together."""
    times = arrival_times_ns(process, 1, 10 * HOUR_NS, None)
    assert len(times) / 36_000 == pytest.approx(8.0, rel=0.03)
    assert times[0] >= 0
    assert times[-1] < 10 * HOUR_NS
    assert (np.diff(times) >= 0).all()


@pytest.mark.parametrize(
    ("process", "cv"), [(PoissonArrivals(8.0), 1.0), (GammaArrivals(8.0, 2.5), 2.5), (ConstantArrivals(8.0), 0.0)]
)
def test_gaps_have_the_coefficient_of_variation_asked_for(process, cv):
    """The measured CV of the gaps is the process's."""
    stats = describe_arrivals(arrival_times_ns(process, 1, 10 * HOUR_NS, None))
    assert stats.cv == pytest.approx(cv, abs=0.03 * max(cv, 0.01))


def test_on_off_counts_are_dispersed_as_theory_says():
    """IDC(1 s) is that of an interrupted Poisson process, and 1 for Poisson."""
    # Source: variance of counts of an interrupted Poisson process, from the covariance p q e^(-kt) of the on state,
    # k = 1/on + 1/off: IDC(w) = 1 + 2 rate_on q / k * (1 - (1 - e^(-k w)) / (k w)), q the share of time off.
    k, rate_on, off_share, w = 1 / 4 + 1 / 6, 20.0, 0.6, 1.0
    expected = 1 + 2 * rate_on * off_share / k * (1 - (1 - np.exp(-k * w)) / (k * w))
    assert describe_arrivals(arrival_times_ns(BURSTS, 3, 20 * HOUR_NS, None)).idc_1s == pytest.approx(
        expected, rel=0.05
    )
    poisson = describe_arrivals(arrival_times_ns(PoissonArrivals(8.0), 3, 20 * HOUR_NS, None))
    assert poisson.idc_1s == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("make", [PoissonArrivals, lambda rate: GammaArrivals(rate, 2.0), ConstantArrivals])
def test_a_higher_rate_is_the_same_process_in_faster_time(make):
    """At twice the rate request i comes in half the time."""
    slow = arrival_times_ns(make(2.0), 5, HOUR_NS, None)
    fast = arrival_times_ns(make(4.0), 5, HOUR_NS // 2, None)
    assert len(slow) == len(fast)
    assert np.abs(slow - 2 * fast).max() <= 2


def test_bursts_stay_where_they_are_when_the_rate_changes():
    """On/off sojourns keep their seconds: the seconds with arrivals at a low rate have arrivals at a high one too."""
    low = arrival_times_ns(BURSTS, 5, HOUR_NS, None)
    high = arrival_times_ns(OnOffArrivals(80.0, BURSTS.on, BURSTS.off), 5, HOUR_NS, None)
    tenth = NS_PER_S // 10
    busy_low, busy_high = set((low // tenth).tolist()), set((high // tenth).tolist())
    assert len(busy_low - busy_high) < 0.01 * len(busy_low)
    assert len(busy_high) < 0.6 * 36_000


@random_cases(30)
@given(
    process=st.sampled_from([PoissonArrivals(5.0), GammaArrivals(5.0, 4.0), ConstantArrivals(5.0), BURSTS]),
    seed=st.integers(0, 2**32),
    requests=st.integers(1, 500),
)
def test_a_number_of_requests_is_the_head_of_a_duration(process, seed, requests):
    """However the end is given, the arrivals before it are the same."""
    by_count = arrival_times_ns(process, seed, None, requests)
    assert len(by_count) == requests
    by_time = arrival_times_ns(process, seed, int(by_count[-1]) + 1, None)
    assert by_time[:requests].tolist() == by_count.tolist()


def test_constant_arrivals_fill_the_duration_exactly():
    """8/s for 10 s are 80 requests, the first at 0."""
    times = arrival_times_ns(ConstantArrivals(8.0), 1, 10 * NS_PER_S, None)
    assert times.tolist() == [i * NS_PER_S // 8 for i in range(80)]


@pytest.mark.parametrize(
    ("process", "duration_ns", "requests", "message"),
    [
        (PoissonArrivals(1e6), 1000 * HOUR_NS, None, "at most 20,000,000 are possible"),
        (PoissonArrivals(1.0), None, 10**9, "at most 20,000,000 are possible"),
        (PoissonArrivals(1e-6), NS_PER_S, None, "no request arrives in 1 s at 1e-06/s"),
        (OnOffArrivals(1.0, 1, 1), HOUR_NS, None, "on and off change"),
        (PoissonArrivals(1e-6), None, 10**4, "requests take"),
    ],
)
def test_impossible_ends_are_refused_in_one_line(process, duration_ns, requests, message):
    """No arrivals, too many arrivals, and times beyond 64 bits are errors of the scenario."""
    with pytest.raises(ScenarioError, match=message) as caught:
        arrival_times_ns(process, 1, duration_ns, requests)
    assert "\n" not in str(caught.value)


def test_statistics_of_a_hand_made_series():
    """Rate, CV, zero gaps and dispersion of counts, by hand."""
    seconds = [0.0, 0.0, 0.5, 1.0, 2.0, 2.0, 2.5, 2.75, 4.0]
    stats = describe_arrivals((np.array(seconds) * NS_PER_S).astype(np.int64))
    gaps = np.diff(seconds)
    counts = np.array([3, 1, 4, 0])  # the arrival at 4.0 opens a window that is not whole
    assert (stats.requests, stats.span_s, stats.rate_rps) == (9, 4.0, 2.0)
    assert stats.cv == pytest.approx(gaps.std() / gaps.mean())
    assert stats.zero_gap_share == 2 / 8
    assert stats.idc_1s == pytest.approx(counts.var() / counts.mean())
    assert stats.idc_60s is None


@pytest.mark.parametrize("times", [[], [7], [7, 7]])
def test_statistics_without_a_span_are_undefined(times):
    """No span: no rate, CV or dispersion, and no warning."""
    stats = describe_arrivals(np.array(times, dtype=np.int64))
    assert (stats.requests, stats.rate_rps, stats.cv, stats.idc_1s) == (len(times), None, None, None)


def _ramp(fold: float, count: int) -> np.ndarray:
    """Times over an hour whose rate grows `fold`-fold, exponentially, each where it is expected."""
    return (3600 * NS_PER_S * np.log1p((np.arange(count) + 0.5) / count * (fold - 1)) / np.log(fold)).astype(np.int64)


def test_a_rate_that_changes_is_told_by_its_ends() -> None:
    """A 92-fold ramp rises, backwards it falls, up and down it changes; the rates are the counts of equal parts."""
    up = _ramp(92, 1100)
    rises, falls = rate_change(up), rate_change(up[-1] - up[::-1])
    both = rate_change(np.concatenate((up, 2 * up[-1] - up[::-1])))
    assert rises is not None and falls is not None and both is not None
    assert (rises.way, falls.way, both.way, len(rises.rates_rps)) == ("rises", "falls", "changes", 16)
    assert rises.ends_rps[1] / rises.ends_rps[0] == pytest.approx(92 ** (15 / 16), rel=0.15)
    assert falls.ends_rps == (falls.rates_rps[0], falls.rates_rps[-1]) and falls.ends_rps[0] > falls.ends_rps[1]
    assert both.ends_rps == (min(both.rates_rps), max(both.rates_rps))
    assert sum(rises.rates_rps) * rises.every_s == pytest.approx(1099)


def test_bursts_and_chance_are_no_change_of_the_rate() -> None:
    """Of 100 steady Poisson, bursty gamma and on/off series each a few change at most; few arrivals cannot tell."""
    random = np.random.default_rng(5)
    found = [0, 0, 0]
    for seed in range(100):
        on_off = OnOffArrivals(8.0, on=NS_PER_S, off=4 * NS_PER_S)
        drawn = (random.exponential(1e9, 400).cumsum(), random.gamma(0.3, 3e9, 400).cumsum())
        series = (*drawn, arrival_times_ns(on_off, seed, 600 * NS_PER_S, None))
        for i, times in enumerate(series):
            found[i] += rate_change(np.asarray(times, np.int64)) is not None
    assert found[0] <= 2 and found[1] <= 4 and found[2] <= 6
    assert rate_change(_ramp(92, 39)) is None and rate_change(_ramp(92, 60)) is not None


@pytest.mark.parametrize(
    ("name", "expected"), [("conv", (5.5301, 1.094, 1.39, 16.13)), ("code", (2.5664, 13.151, 13.19, 163.96))]
)
def test_statistics_of_the_azure_traces(name, expected):
    """Rate, CV, IDC(1 s) and IDC(60 s) of the published files equal those computed elsewhere."""
    if "BATCHSIM_TRACES" not in os.environ:
        pytest.skip("BATCHSIM_TRACES is not set")
    path = Path(os.environ["BATCHSIM_TRACES"]) / "azure2023" / f"AzureLLMInferenceTrace_{name}.csv"
    with path.open() as file:
        stamps = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in csv.DictReader(file)]
    times = np.array([(t - stamps[0]) // (stamps[1].resolution) * 1000 for t in stamps])
    stats = describe_arrivals(times)
    assert (stats.rate_rps, stats.cv, stats.idc_1s, stats.idc_60s) == pytest.approx(expected, abs=0.005)
