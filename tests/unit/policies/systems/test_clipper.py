"""Clipper's batches, by hand: a step takes 10 us, arrivals and the SLO are in us."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from batchsim.policies.systems.clipper import BatchLatencies, Clipper, ClipperConfig
from tests.support.microseconds import busy, outcomes, records_of, starts_us, steps
from tests.support.random_cases import random_cases


def clipper(arrivals: str, **knobs: Any) -> Any:
    return records_of(Clipper, ClipperConfig(**knobs), arrivals)


def test_sizes_are_explored_from_two_on_five_batches_each_and_short_ones_are_filled_with_copies() -> None:
    """One was never timed, so that the first size is 2; behind five of 2 comes 3, for which two are left."""
    records = clipper("0:4->1 " * 12, slo_micros=1000)
    assert starts_us(records) == [0, 0, 10, 10, 20, 20, 30, 30, 40, 40, 50, 50]
    assert steps(records, "num_chunks", "pad_prefill_rows") == [(2, 0)] * 5 + [(2, 1)]


def test_a_free_replica_waits_for_no_other_request() -> None:
    """One alone starts at once, beside a copy that computes on with it and whose result is dropped."""
    records = clipper("0:4->2 1:4->1", slo_micros=1000)
    assert starts_us(records) == [0, 20]
    assert steps(records, "pad_prefill_rows", "pad_decode_rows") == [(1, 0), (0, 1), (1, 0)]


def test_where_the_budget_is_no_longer_than_the_longest_batch_the_size_is_estimated_without_copies() -> None:
    """At 10 of 21 us 10.12 are left of 92 %, at 11 of 21 us 9.2: the first explores, the second takes what is known."""
    explores = clipper("0:4->1 10:4->1", slo_micros=11)
    assert steps(explores, "num_chunks", "pad_prefill_rows") == [(1, 1), (1, 1)]
    estimates = clipper("0:4->1 10:4->1", slo_micros=10)
    assert steps(estimates, "num_chunks", "pad_prefill_rows") == [(1, 1), (1, 0)]


def test_the_expired_are_dropped_before_a_batch_is_formed() -> None:
    """Two by two: at 20 the fifth of five has waited for 20 us, its whole SLO, or has one left."""
    arrivals = "0:4->1 " * 5
    assert outcomes(clipper(arrivals, slo_micros=20)) == [("finished", "")] * 4 + [("rejected", "slo_expired")]
    assert starts_us(clipper(arrivals, slo_micros=21)) == [0, 0, 10, 10, 20]
    assert clipper(arrivals, slo_micros=20).details == {"slo_expired": "waited 20 us, slo_micros 20 us"}


def test_a_fixed_size_is_a_limit_that_nothing_is_measured_for() -> None:
    """Three of at most three at once, then one, without copies."""
    records = clipper("0:4->1 " * 4, slo_micros=1000, batch_size=3)
    assert steps(records, "num_chunks", "pad_prefill_rows") == [(3, 0), (1, 0)]


def test_the_line_of_size_over_latency_is_evaluated_at_the_budget_and_rounded_down() -> None:
    """Ten ms more a request: 35 ms are 3.5 requests. A single size says nothing of others; the least answer is 1."""
    latencies = BatchLatencies()
    latencies.add(1, 10.0)
    assert latencies.size_within(90.0) == 1
    latencies.add(2, 20.0)
    assert [latencies.size_within(ms) for ms in (35.0, 20.01, 19.9, 1.0)] == [3, 2, 1, 1]
    assert (latencies.count(1), latencies.count(3), latencies.longest_ms) == (1, 0, 20.0)


def test_upper_latencies_are_three_pooled_deviations_above_the_means() -> None:
    """Five of size 1 with squares of 2 pool, by 5 samples less 2 sizes, to sqrt(2/3); one of size 2 has no say."""
    latencies = BatchLatencies()
    for ms in (9.0, 10.0, 10.0, 10.0, 11.0):
        latencies.add(1, ms)
    latencies.add(2, 20.0)
    assert [latencies.size_within(ms) for ms in (22.46, 22.44)] == [2, 1]


@pytest.mark.parametrize("seed", [0, 1])
def test_sizes_of_ten_and_more_grow_by_a_drawn_share(seed: int) -> None:
    """From 100 on by 10 % on average; the same key draws the same."""
    sizes = []
    for _ in range(2):
        scheduler = _alone(seed)
        scheduler.largest = 100
        sizes.append([scheduler._next_size() for _ in range(20)])
    assert sizes[0] == sizes[1]
    assert 106 < sum(sizes[0]) / 20 < 114 and min(sizes[0]) >= 100


def _alone(seed: int) -> Clipper:
    from batchsim.kernel.kv_blocks import CountingKV
    from batchsim.kernel.protocols import PolicyContext

    return Clipper(ClipperConfig(slo_micros=1, seed=seed), PolicyContext(CountingKV(9, 4), 64))


def test_a_size_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch_size 0 serves no request. Write at least 1, or -1"):
        ClipperConfig(slo_micros=1, batch_size=0)


@random_cases(15)
@given(busy())
def test_every_driver_agrees(arrivals: Any) -> None:
    records_of(Clipper, ClipperConfig(slo_micros=60), arrivals, blocks=30)
