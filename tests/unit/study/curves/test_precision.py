"""When seeds are added and when not, and what stopping by the interval does to the interval."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from batchsim.base.errors import ScenarioError
from batchsim.metrics.intervals import half_width
from batchsim.metrics.measure import measure
from batchsim.results.failed import Failed
from batchsim.results.keep import metric_names, point_inputs
from batchsim.scenario import Point, load_scenario
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from batchsim.study.curves.precision import MIN_SEEDS, Precision, outcome

SHARE = 0.05


def result(policy: str, load: float, seed: int, value: float | None, **more: Any) -> dict[str, Any]:
    """What a point left, as far as precision reads it."""
    values = {"x": value, "slo_margin": 0.01, "in_slo": 1.0, "norm_latency_mean_s": value}
    row = {"policy": policy, "variant": "", "load": load, "seed": seed, "values": values, "unstable": False}
    return row | {"few": [], "reasons": {}, "bound_by": "load"} | more


def test_no_interval_is_trusted_before_the_least_number_of_seeds() -> None:
    """Equal values have an interval of no width, and still get MIN_SEEDS; then no more."""
    asked = Precision(SHARE)
    for have in range(1, MIN_SEEDS):
        assert not asked.reached([1.0] * have)
        assert asked.next_seeds([1.0] * have) == MIN_SEEDS
    assert asked.next_seeds([1.0] * MIN_SEEDS) == MIN_SEEDS


def test_as_many_seeds_are_added_as_the_spread_calls_for() -> None:
    """Of ± 2 % around 1, 5 seeds are enough; of ± 5 %, 7 would be; of ± 50 %, twice as many come, then the budget."""
    noise = np.array([-1.0, 1.0, -1.0, 1.0, 0.0])
    asked = Precision(SHARE, max_seeds=12)
    assert asked.next_seeds((1 + 0.02 * noise).tolist()) == 5
    assert asked.next_seeds((1 + 0.05 * noise).tolist()) == 7
    assert asked.next_seeds((1 + 0.5 * noise).tolist()) == 10
    assert asked.next_seeds((1 + 0.5 * np.tile(noise, 2)).tolist()) == 12
    assert asked.next_seeds((1 + 0.5 * np.tile(noise, 3)).tolist()[:12]) == 12


def test_a_negative_mean_is_as_good_as_a_positive_one() -> None:
    """A margin below 0 has a share too; a mean of 0 has none, and its interval is never narrow enough."""
    asked = Precision(SHARE)
    assert asked.reached([-1.0, -1.01, -1.0, -0.99, -1.0])
    assert not asked.reached([-1.0, 1.0, 0.0, 0.5, -0.5])


@pytest.mark.parametrize("mean_seeds", [6, 15])
def test_stopping_by_the_interval_costs_a_few_per_cent_of_coverage(mean_seeds: int) -> None:
    """Skewed values as of waits: the interval at the stop contains the truth in 88 to 96 % of 3,000 trials."""
    rng = np.random.default_rng(mean_seeds)
    spread = {6: 0.05, 15: 0.1}[mean_seeds]
    asked, hits, counts = Precision(SHARE, max_seeds=40), 0, []
    for _ in range(3_000):
        draws = 1 + spread * (rng.gamma(4.0, 1.0, 40) - 4) / 2  # of mean 1, standard deviation `spread`, skewness 1
        have = MIN_SEEDS
        while (target := asked.next_seeds(draws[:have].tolist())) > have:
            have = target
        values = draws[:have].tolist()
        hits += abs(np.mean(values) - 1) <= half_width(values)
        counts.append(have)
    assert np.mean(counts) == pytest.approx(mean_seeds, rel=0.3)
    assert 0.88 <= hits / 3_000 <= 0.96


def test_the_outcome_names_what_became_of_every_point() -> None:
    """Reached, budget spent, unstable, undefined or failed, with the seeds and the share where there is one."""
    noisy = [1.0, 2.0, 3.0, 2.0, 1.0, 2.0]
    results: list[Any] = [result("narrow", 4.0, seed, 1.0) for seed in range(5)]
    results += [result("noisy", 4.0, seed, value) for seed, value in enumerate(noisy)]
    results += [result("full", 4.0, seed, 1.0, unstable=seed > 0) for seed in range(3)]
    results += [result("whole", 4.0, seed, None) for seed in range(3)]
    results += [result("broken", 4.0, 0, 1.0), Failed("broken", "broken", 4.0, 1, "", "why")]
    found = outcome(results, Precision(SHARE, "x", 6))
    assert found["min_seeds"] == MIN_SEEDS
    assert [(each["policy"], each["num_seeds"], each["state"]) for each in found["points"]] == [
        ("narrow", 5, "reached"),
        ("noisy", 6, "budget"),
        ("full", 3, "unstable"),
        ("whole", 3, "undefined"),
        ("broken", 2, "failed"),
    ]
    shares = [each["half_width_share"] for each in found["points"]]
    assert shares == [0.0, pytest.approx(half_width(noisy) / np.mean(noisy)), None, None, None]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_must_be_one(share: float) -> None:
    """0 % is never reached, and 100 % says nothing."""
    with pytest.raises(ScenarioError, match="above 0% and below 100%"):
        Precision(share)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"share": "5%"}, "precision '5%' is not a number. Write a share below 1, like 0.05 for 5%"),
        ({"share": SHARE, "max_seeds": "20"}, "max_seeds '20' is not a whole number"),
        ({"share": SHARE, "metric": None}, "metric None is not a name"),
    ],
)
def test_what_python_may_give_wrong_is_refused(asked: dict[str, Any], said: str) -> None:
    """The command line gives numbers; a call from Python is told which ones to give."""
    with pytest.raises(ScenarioError, match=said):
        Precision(**asked)


@pytest.mark.parametrize("name", ["bursty", "mixed-priority", "replicas"])
def test_names_of_metrics_are_known_before_anything_is_simulated(name: str) -> None:
    """Those of classes and replicas too: they are just what a simulated point has."""
    setup = Setup.of(load_scenario(name))
    point = Point(setup.scenario.specs[0], setup.scenario.loads[0], 0)
    measured = measure(point_inputs(setup, simulate_point(setup, point)))
    assert metric_names(setup, point) == list(measured.values)


def test_a_budget_must_hold_the_least_number_of_seeds() -> None:
    """Fewer would stop by chance."""
    with pytest.raises(ScenarioError, match=r"--max-seeds 4: .* Give at least 5"):
        Precision(SHARE, max_seeds=4)
