"""Kubernetes' autoscaler against the figures that its documentation and its own tests state, and through a fleet."""

from __future__ import annotations

from itertools import pairwise

import pytest

from batchsim.base.units import NS_PER_S
from batchsim.drive.fleet.fleet_plan import FleetPlan, ReplicaSpan
from batchsim.drive.fleet.scaling.hpa import (
    HpaConfig,
    HpaMetrics,
    Pace,
    ScalingPolicy,
    ScalingRules,
    wanted_replicas,
)
from tests.support.engine import arrival
from tests.unit.drive.fleet.test_fleet import run

MINUTE = 60 * NS_PER_S


def rules(*policies: tuple[str, int, int], window: int = 0, select: str = "max") -> ScalingRules:
    listed = tuple(ScalingPolicy(kind, value, period) for kind, value, period in policies)  # pyright: ignore
    return ScalingRules(stabilization_window=window, policies=listed, select=select)  # pyright: ignore


FREE = rules(("percent", 900, MINUTE))
ALL = rules(("percent", 100, MINUTE))

# Values of the replicas that report, replicas, target, replicas wanted.
DOCUMENTED = {
    "doubled": ([200.0], 1, 100, 2),
    "halved": ([50.0, 50.0], 2, 100, 1),
    "50 at 90 of 75": ([90.0] * 50, 50, 75, 60),
    "tolerated": ([105.0] * 4, 4, 100, 4),
    "scale up": ([20_000.0, 10_000.0, 30_000.0], 3, 15_000, 4),
    "hot": ([50_000.0, 10_000.0, 30_000.0], 3, 15_000, 6),
    "scale down": ([12_000.0] * 5, 5, 20_000, 3),
    "within a tenth": ([20_000.0, 21_000.0, 21_000.0], 3, 20_000, 3),
}


@pytest.mark.parametrize(("values", "current", "target", "wanted"), DOCUMENTED.values(), ids=DOCUMENTED)
def test_replicas_are_wanted_in_the_ratio_of_the_metric_to_its_target(
    values: list[float], current: int, target: float, wanted: int
) -> None:
    """The documentation's examples, and the cases of replica_calculator_test.go for metrics of pods."""
    assert wanted_replicas(values, current, target) == wanted


def test_replicas_that_do_not_report_slow_a_change_down_and_never_turn_it() -> None:
    """On the way up they count as 0, down as the target; nothing reported is no reason to change."""
    assert wanted_replicas([40.0, 40.0], 4, 10) == 8  # 80 / 4 = 2 times the target; 4 of 40 would want 16
    assert wanted_replicas([15.0], 3, 10) == 3  # 15 / 3 is below the target: up would become down
    assert wanted_replicas([2.0, 2.0], 4, 10) == 3  # (4 + 20) / 4 = 6; of two alone it would be 1
    assert wanted_replicas([], 3, 10) == 3


def test_policies_bound_a_change_by_what_was_changed_in_their_period() -> None:
    """80 replicas, 10 wanted, at most a tenth or 4 a minute, whichever is more: 8 go, then 72 becomes 64; below 40 it
    is 4 at a time; half a minute later nothing more may go."""
    down = rules(("pods", 4, MINUTE), ("percent", 10, MINUTE))
    pace, found = Pace(1, 100, FREE, down), [80]
    for half_minute in range(1, 40):
        found.append(pace.bounded(found[-1], 10, half_minute * MINUTE // 2))
    assert found[1:7] == [72, 72, 64, 64, 57, 57]
    assert {a - b for a, b in pairwise(found[::2]) if a < 40} == {4, 2, 0} and found[-1] == 10


def test_growth_by_percent_is_rounded_up() -> None:
    """Ten times as many a minute: 1, 10, 100, 1000."""
    pace, counts = Pace(1, 1000, FREE, ALL), [1]
    for minute in range(1, 4):
        counts.append(pace.bounded(counts[-1], 1000, minute * MINUTE))
    assert counts == [1, 10, 100, 1000]


def test_the_least_policy_or_none_may_be_selected() -> None:
    """Of doubling and two more, min lets 5 become 7; disabled lets nothing change."""
    both = (("percent", 100, MINUTE), ("pods", 2, MINUTE))
    counts = [Pace(1, 99, rules(*both, select=select), ALL).bounded(5, 50, MINUTE) for select in ("max", "min")]
    assert counts == [10, 7]
    assert Pace(1, 99, rules(*both, select="disabled"), ALL).bounded(5, 50, MINUTE) == 5


def test_the_window_keeps_the_most_wanted_down_and_the_least_wanted_up() -> None:
    """What was wanted at the very start of the window no longer counts."""
    window = rules(("percent", 100, 15 * NS_PER_S), window=300 * NS_PER_S)
    pace, found = Pace(1, 20, FREE, window), []
    for second, wanted in ((0, 10), (100, 6), (200, 3), (300, 2), (399, 2), (400, 2), (500, 2)):
        found.append(pace.bounded(found[-1] if found else 10, wanted, second * NS_PER_S))
    assert found == [10, 10, 10, 6, 6, 3, 2]
    pace, found = Pace(1, 20, rules(("pods", 20, 15 * NS_PER_S), window=60 * NS_PER_S), ALL), [2]
    for second, wanted in ((0, 2), (30, 8), (59, 9), (60, 9), (90, 12)):
        found.append(pace.bounded(found[-1], wanted, second * NS_PER_S))
    assert found[1:] == [2, 2, 2, 8, 9]


def hpa(**metrics: float) -> HpaConfig:
    up = rules(("pods", 4, NS_PER_S))
    return HpaConfig(every=100, min=1, max=4, cold_start=20, scale_up=up, scale_down=ALL, metrics=HpaMetrics(**metrics))


@pytest.mark.parametrize(
    ("metrics", "span"),
    [
        ({"waiting": 2}, ReplicaSpan(2, "starting", 100, 120)),  # 5 of 6 wait: 2.5 times the target
        ({"running": 0.3}, ReplicaSpan(3, "starting", 100, 120)),  # one runs
        ({"kv_utilisation": 0.02}, ReplicaSpan(1, "starting", 100, 120)),  # 3 of 100 blocks, at 9 tokens of 4 a block
        ({"tokens_per_s": 4e7}, ReplicaSpan(2, "starting", 100, 120)),  # a token in 10 ns: 2.5 times
        ({"busy_share": 0.5}, ReplicaSpan(1, "starting", 100, 120)),  # always busy: twice
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_each_metric_scales_a_fleet(metrics: dict[str, float], span: ReplicaSpan) -> None:
    """Requests of 300 ns on one slot, the look at 100 ns."""
    found = run(FleetPlan(1, scaler=hpa(**metrics)), *(arrival(i, 0, output=30) for i in range(6)), slots=1)
    starting = [each for each in found.spans if each.state == "starting" and each.start_ns == 100]
    assert max(starting, key=lambda each: each.replica) == span
