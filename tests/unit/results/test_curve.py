"""Knee, SLO crossing and instability, read off curves whose formulas are known."""

from __future__ import annotations

import math
from typing import Any

import pytest

from batchsim.metrics.slo import parse_slo
from batchsim.results.landmarks import Crossing, Knee, crossing, curve, knee, unstable_from

SERVICE_RPS = 10.0
SLO = parse_slo("e2e<1s @ 99%")


def mm1(loads: list[float], requests: int = 1_000_000) -> list[dict[str, Any]]:
    """Rows of a summary as an M/M/1 queue has them in the long run."""
    rows = []
    for load in loads:
        spare = SERVICE_RPS - load
        grows = spare <= 0
        in_slo = 0.0 if grows else 1 - math.exp(-spare)
        rows.append(
            {
                "load": load,
                "unstable": grows,
                "in_slo": in_slo,
                "slo_margin": in_slo - 0.99,
                "cohort": float(requests),
                "num_seeds": 1,
                "throughput_rps": min(load, SERVICE_RPS),
                "e2e_mean_s": math.nan if grows else 1 / spare,
            }
        )
    return rows


def test_the_knee_of_an_mm1_queue_is_half_its_rate() -> None:
    """Power λ(µ - λ) is greatest at µ/2, and the knee names the tested loads on either side."""
    assert knee(curve(mm1([1, 3, 5, 7, 9, 11]), SLO)) == Knee(5, 3, 7)


def test_a_knee_at_an_end_of_the_tested_loads_may_lie_beyond() -> None:
    """The first or the last load as the knee has nothing on its other side; the growing queue is a side."""
    assert knee(curve(mm1([6, 7]), SLO)) == Knee(6, None, 7)
    assert knee(curve(mm1([1, 2]), SLO)) == Knee(2, 1, None)
    assert knee(curve(mm1([2, 11]), SLO)) == Knee(2, None, 11)
    assert knee(curve(mm1([11, 12]), SLO)) is None


def test_the_crossing_of_an_mm1_queue_is_exact_between_any_two_loads() -> None:
    """Misses are exp(-(µ - λ)t), whose logarithm is linear in λ, so that interpolation finds µ - ln(100)/t."""
    found = crossing(curve(mm1([1, 4, 7, 9.5]), SLO))
    assert (found.low, found.high) == (4, 7)
    assert found.load == pytest.approx(SERVICE_RPS - math.log(100), rel=1e-9)


def test_a_crossing_outside_the_tested_loads_says_on_which_side() -> None:
    """Met everywhere: above the highest; met nowhere: below the lowest."""
    assert crossing(curve(mm1([1, 2]), SLO)) == Crossing(None, 2, None)
    assert crossing(curve(mm1([8, 9]), SLO)) == Crossing(None, None, 8)


def test_without_a_share_the_margin_is_interpolated_and_without_that_no_load_meets_it() -> None:
    """Of an objective of means, or of classes of their own, the margin is taken to be linear."""
    rows = [
        {"load": load, "unstable": False, "slo_margin": margin, "throughput_rps": 1.0}
        for load, margin in ((1.0, 0.3), (2.0, -0.1))
    ]
    assert crossing(curve(rows, None)).load == pytest.approx(1.75)
    assert crossing(curve([row | {"slo_margin": math.nan} for row in rows], None)) == Crossing(None, None, 1.0)


def test_the_queue_grows_from_the_lowest_such_load() -> None:
    """A load beyond saturation is named; none is where there is none."""
    assert unstable_from(curve(mm1([12, 5, 11]), SLO)) == 11
    assert unstable_from(curve(mm1([5]), SLO)) is None
