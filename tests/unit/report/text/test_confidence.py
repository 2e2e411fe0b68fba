"""What a run says of how sure it is: differences between policies over the same seeds, and warm-ups too short."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from batchsim.base.errors import ScenarioError
from batchsim.metrics.intervals import Difference, Interval, paired
from batchsim.report.reading import seeds_text
from batchsim.report.text.confidence import difference_text
from batchsim.report.text.summary_text import report, warnings
from tests.support.report_samples import FOUR, SampleResults, sample_results


def by_seed(*values: float | None) -> dict[int, float | None]:
    return dict(enumerate(values))


def spread(results: SampleResults, policy: str, load: float, metric: str, by_seed: dict[int, float]) -> None:
    """Gives the seeds of a point their own values."""
    points: Any = results.points
    for seed, value in by_seed.items():
        mine = (points["policy"] == policy) & (points["load"] == load) & (points["seed"] == seed)
        points.loc[mine, metric] = value


def test_pairing_takes_the_luck_of_the_draw_away():
    """Two values that vary twofold over seeds and always differ by 1 have an interval of no width around 1."""
    found = paired(by_seed(2.0, 4.0, 3.0), by_seed(1.0, 3.0, 2.0))
    assert found == Difference(1.0, 0.0, 3)
    assert not found.is_none


def test_the_interval_is_that_of_student():
    """Differences 1, 2, 3: mean 2, standard error 1/√3, and t of two degrees of freedom 4.303."""
    found = paired(by_seed(2.0, 3.0, 4.0), by_seed(1.0, 1.0, 1.0))
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.302653 / np.sqrt(3), rel=1e-6)
    assert found.is_none  # 2 ± 2.48 contains 0


def test_only_seeds_of_both_count():
    """A seed that one of them did not run is left out; without any in common nothing is claimed."""
    assert paired({0: 1.0, 1: 2.0, 5: 99.0}, {0: 0.0, 1: 1.0, 7: -99.0}) == Difference(1.0, 0.0, 2)
    assert paired({0: 1.0}, {1: 1.0}) == Difference(None, None, 0, "no seed in common")


def test_what_is_not_defined_has_no_difference():
    """A value missing in one seed takes the whole difference away; one seed gives a mean without an interval."""
    found = paired(by_seed(1.0, None, 1.0), by_seed(1.0, 1.0, 1.0))
    assert found == Difference(None, None, 3, "not defined for one of them")
    assert not found.is_none
    single = paired(by_seed(3.0), by_seed(1.0))
    assert single == Difference(2.0, None, 1, "one seed has no interval")
    assert not single.is_none


@pytest.mark.parametrize(
    ("mean", "half", "text"),
    [
        (-0.412, 0.0313, "−410 ± 30 ms"),
        (0.4123, 0.0313, "+410 ± 30 ms"),
        (2.41, 0.33, "+2.4 ± 0.3 s"),
        (0.003, 0.008, "no difference (± 8 ms)"),
        (0.3, 1.27, "no difference (± 1.3 s)"),
        (0.0, 0.0, "the same"),
        (None, None, "–"),
    ],
)
def test_a_difference_is_told_with_its_interval(mean: float | None, half: float | None, text: str):
    """The sign is always there; an interval around 0 says that there is no difference, and how wide it is."""
    found = Difference(mean, half, 3)
    assert difference_text(found.mean, found.half_width, found.is_none) == text


def test_a_run_compares_with_the_best_policy():
    """Under the table each policy's P99 TTFT minus the best one's; unstable policies have none."""
    results = sample_results()
    assert results.best(8.0) == "preemptive"
    assert results.best(20.0) == "preemptive"
    spread(results, "continuous", 8.0, "ttft_p99_s", {0: 0.50, 1: 0.51, 2: 0.52})
    spread(results, "preemptive", 8.0, "ttft_p99_s", {0: 0.40, 1: 0.40, 2: 0.40})
    line = next(line for line in report(results, 8.0).splitlines() if "seed by seed" in line)
    assert line == "ttft p99 minus that of preemptive, seed by seed (95 %):  continuous +110 ± 20 ms"


def test_one_policy_or_one_seed_is_not_compared():
    """There is nothing to compare, or no interval to say it with."""
    assert "seed by seed" not in report(sample_results({"continuous": FOUR["continuous"]}), 8.0)
    assert "seed by seed" not in report(sample_results(seeds=1), 8.0)


def test_a_notebook_asks_for_any_two_policies():
    """By metric and load; unknown ones are refused by name; a queue that grows has no latency to compare."""
    results = sample_results()
    spread(results, "continuous", 8.0, "in_slo", {0: 0.9, 1: 0.8, 2: 0.7})
    spread(results, "preemptive", 8.0, "in_slo", {0: 0.95, 1: 0.85, 2: 0.75})
    found = results.paired("continuous", "preemptive", "in_slo", 8.0)
    assert found.mean == pytest.approx(-0.05) and not found.is_none
    assert results.paired("static", "preemptive", "ttft_p99_s", 8.0).why == "static is unstable"
    assert results.paired("static", "preemptive", "in_slo", 8.0).mean is not None
    with pytest.raises(ScenarioError, match="no metric 'ttft_p98_s'"):
        results.paired("static", "preemptive", "ttft_p98_s", 8.0)
    with pytest.raises(ScenarioError, match="no point nobody at load 8"):
        results.paired("nobody", "preemptive", "in_slo", 8.0)


def test_different_numbers_of_seeds_are_told_as_a_range():
    """Over all points and at one load; points that failed, of no seed, do not count."""
    results = sample_results()
    assert (seeds_text(results), seeds_text(sample_results(seeds=1))) == ("3 seeds", "1 seed")
    results.summary.loc[results.summary["load"] == 8.0, "num_seeds"] = 11
    results.summary.loc[results.summary["load"] == 1.0, "num_seeds"] = 0
    assert seeds_text(results) == "3–11 seeds"
    assert (seeds_text(results, 8.0), seeds_text(results, 1.0)) == ("11 seeds", "0 seeds")
    assert "(11 seeds, ± = 95 %)" in report(results, 8.0)


def test_a_warm_up_that_is_too_short_is_warned_of():
    """Points whose median seed needs more are named in one line, with a warm-up that would do; others are not."""
    results = sample_results()
    results.points["warmup_needed_s"] = 3.0
    assert not any("MSER" in line for line in warnings(results, 8.0))
    for policy, load, needed in (
        ("continuous", 12.0, {0: 155.0, 1: 2.0, 2: 86.0}),
        ("continuous", 16.0, {0: 40.0, 1: 41.0, 2: 43.0}),
        ("preemptive", 16.0, {0: 180.0, 1: 1.0, 2: 2.0}),  # one seed of three
        ("static", 8.0, {0: 180.0, 1: 180.0, 2: 180.0}),  # unstable: no steady state to come to
    ):
        spread(results, policy, load, "warmup_needed_s", needed)
    assert [line for line in warnings(results, 8.0) if "MSER" in line] == [
        "! the beginning differs from the rest beyond the warm-up of 10 s (MSER-5 of ttft, most seeds):"
        " continuous at 12, 16. Set workload.warmup: 90s, in a run that is as much longer"
    ]


def test_results_of_an_older_version_have_no_word_on_the_warm_up():
    """Without the metric there is no warning, and without steady runs there is none either."""
    results = sample_results()
    assert not any("MSER" in line for line in warnings(results, 8.0))
    results.points["warmup_needed_s"] = np.nan
    assert not any("MSER" in line for line in warnings(results, 8.0))


def test_an_interval_needs_two_values_and_a_mean_one() -> None:
    """Of none all is None, of one the mean alone."""
    assert Interval.of([]) == Interval(None, None, None)
    assert Interval.of([5.0]) == Interval(5.0, None, None)


def test_weights_draw_the_mean_and_the_spread() -> None:
    """1, and 3 with three times the weight: 2.5, and 0.75 times 12.7062 (t of one degree, by a table) to both sides."""
    found = Interval.of([1.0, 3.0], weights=[1.0, 3.0])
    assert found.mean == pytest.approx(2.5)
    assert (found.low, found.high) == pytest.approx((2.5 - 12.7062 * 0.75, 2.5 + 12.7062 * 0.75), rel=1e-5)


def test_values_all_alike_prove_no_more_than_their_requests() -> None:
    """Below, what 10 requests without a miss leave open, 1 − 0.025^(1/10) = 0.3085; above, no spread."""
    found = Interval.of([1.0, 1.0], num_requests=10)
    assert (found.mean, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(1 - 0.308497, abs=1e-6)
