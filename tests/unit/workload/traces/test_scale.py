"""Rescaling and tiling of traces, on hand-made rows and by their laws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from batchsim.base.errors import TraceError
from batchsim.workload.traces.arrival_stats import describe_arrivals
from batchsim.workload.traces.scale import rescale, spread
from batchsim.workload.traces.trace_config import RateScale
from batchsim.workload.traces.trace_rows import TraceRows


def trace(*arrivals: int) -> TraceRows:
    """Rows with prompts 1, 2, 3, ... and outputs ten times that."""
    prompts = np.arange(1, len(arrivals) + 1)
    return TraceRows(np.array(arrivals, dtype=np.int64), prompts, prompts * 10, "t.csv", "vidur")


def times(rows: TraceRows) -> list[int]:
    assert rows.arrival_ns is not None
    return rows.arrival_ns.tolist()


def test_compress_divides_every_gap() -> None:
    """Compression keeps the rows and divides their times; below 1 it stretches."""
    rows = rescale(trace(0, 30, 90), RateScale(3, "compress"), seed=0)
    assert times(rows) == [0, 10, 30]
    assert rows.prompt_tokens.tolist() == [1, 2, 3]
    assert rows.notes == ("rate × 3 by compress: every gap divided by 3",)
    assert times(rescale(trace(0, 30, 90), RateScale(0.5, "compress"), seed=0)) == [0, 60, 180]


def test_overlay_shifts_copies_around_the_period() -> None:
    """Two copies of 3 rows in a period of 90 + 45 ns: the second 67 ns later, wrapped around."""
    rows = rescale(trace(0, 30, 90), RateScale(2, "overlay"), seed=0)
    assert times(rows) == [0, 22, 30, 67, 90, 97]
    assert rows.prompt_tokens.tolist() == [1, 3, 2, 1, 3, 2]
    assert rows.output_tokens.tolist() == [10, 30, 20, 10, 30, 20]
    assert rows.notes[0].startswith("rate × 2 by overlay: 2 copies")


def test_overlay_by_one_changes_nothing() -> None:
    """One copy is the trace itself."""
    assert times(rescale(trace(0, 30, 90), RateScale(1, "overlay"), seed=0)) == [0, 30, 90]


def test_thin_keeps_a_random_share_and_nests() -> None:
    """Thinning keeps about its share, by seed, and what a lower factor keeps a higher one keeps too."""
    rows = trace(*range(0, 100_000, 10))
    third, half, other = (rescale(rows, RateScale(f, "thin"), seed=s) for f, s in ((0.3, 1), (0.5, 1), (0.3, 2)))
    assert len(third) == pytest.approx(3000, abs=4 * (10_000 * 0.3 * 0.7) ** 0.5)
    assert set(third.prompt_tokens) <= set(half.prompt_tokens)
    assert third.prompt_tokens.tolist() != other.prompt_tokens.tolist()
    assert times(third)[0] == 0
    assert third.notes[0] == f"rate × 0.3 by thin: {len(third):,} of 10,000 rows kept at random"


def test_ways_of_scaling_differ_in_burstiness() -> None:
    """On a bursty trace all ways triple the rate, compression keeps its CV, overlaying lowers it."""
    rng = np.random.default_rng(5)
    gaps = rng.gamma(0.2, 5e7, 20_000).astype(np.int64)
    rows = trace(*np.cumsum(gaps).tolist())
    rows = trace(*(np.array(times(rows)) - times(rows)[0]).tolist())
    base = describe_arrivals(np.array(times(rows)))
    by = {
        way: describe_arrivals(np.array(times(rescale(rows, RateScale(3, way), 0)))) for way in ("compress", "overlay")
    }
    assert base.rate_rps is not None and base.cv is not None
    assert by["compress"].rate_rps == pytest.approx(3 * base.rate_rps, rel=1e-6)
    assert by["overlay"].rate_rps == pytest.approx(3 * base.rate_rps, rel=1e-2)
    assert by["compress"].cv == pytest.approx(base.cv, rel=1e-3)
    assert by["overlay"].cv is not None and by["overlay"].cv < 0.95 * base.cv


def test_spread_stays_within_the_interval() -> None:
    """Each arrival moves by less than the jitter and ticks apart by more than it do not mix."""
    rows = spread(trace(*([0] * 500 + [1000] * 500)), 1000, seed=3)
    gaps = np.diff(times(rows))
    assert gaps.min() >= 0
    assert times(rows)[-1] < 2000
    assert np.mean(times(rows)[:500]) == pytest.approx(500, abs=60)


@pytest.mark.parametrize(
    ("arrivals", "scale", "expected"),
    [
        (None, RateScale(2, "compress"), "no arrival times for rate_scale"),
        ((0, 0), RateScale(2, "overlay"), "all 2 rows arrive at once"),
        ((0,), RateScale(2, "overlay"), "all 1 rows arrive at once"),
        ((0, 0), RateScale(2, "compress"), "all 2 rows arrive at once; they cannot be compressed. Drop rate_scale"),
        ((0, 5), RateScale(1e-9, "thin"), "none of 2 rows is left"),
        ((0, 10**15), RateScale(1e-9, "compress"), "years"),
        (tuple(range(200)), RateScale(1e6, "overlay"), "200,000,000 rows asked"),
    ],
)
def test_what_cannot_be_scaled(arrivals: Any, scale: RateScale, expected: str) -> None:
    """A trace without times, in one instant, or scaled out of all bounds is refused in one line."""
    rows = trace(*(arrivals or (0, 1)))
    if arrivals is None:
        rows = TraceRows(None, rows.prompt_tokens, rows.output_tokens, "t.csv", "vidur")
    with pytest.raises(TraceError, match=expected):
        rescale(rows, scale, seed=0)


def test_copies_move_by_their_own_time_in_every_seed() -> None:
    """Three copies have three times the rows, each within the shift of where it stood, elsewhere in another seed."""
    rows = trace(0, 1000, 5000, 9000)
    scale = RateScale(3, "copies", shift=200)
    one, again, other = (rescale(rows, scale, seed=s) for s in (1, 1, 2))
    assert times(one) == times(again) != times(other)
    assert sorted(one.prompt_tokens.tolist()) == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    second = np.array(times(one))[one.prompt_tokens == 2]
    third = np.array(times(one))[one.prompt_tokens == 3]
    assert np.ptp(second) <= 400 and np.array_equal(third - second, [4000, 4000, 4000])  # a copy moves as a whole
    assert one.notes == ("rate × 3 by copies: 3 copies, each moved by up to 200 ns either way",)


def test_copies_nest_and_the_last_is_a_share() -> None:
    """2.5 copies are the two of factor 2 and half the rows of a third."""
    rows = trace(*range(0, 1_000_000, 100))
    two, more = (rescale(rows, RateScale(f, "copies", shift=500), seed=3) for f in (2, 2.5))
    assert len(two) == 20_000 and len(more) == pytest.approx(25_000, abs=4 * 50)
    counts = np.unique(more.prompt_tokens, return_counts=True)[1]
    assert set(counts.tolist()) == {2, 3}


def test_copies_in_step_double_the_dispersion() -> None:
    """Pairs of copies that move together: every request comes twice at one instant, IDC as 2 X has against X."""
    rng = np.random.default_rng(5)
    rows = trace(*np.sort(rng.integers(0, 600 * 10**9, 6000)).tolist())
    alone = rescale(rows, RateScale(4, "copies", shift=60 * 10**9), seed=0)
    pairs = rescale(rows, RateScale(8, "copies", shift=60 * 10**9, together=2), seed=0)
    assert times(pairs)[::2] == times(pairs)[1::2] == times(alone)
    idc = [describe_arrivals(np.array(times(rows))).idc_1s for rows in (alone, pairs)]
    assert idc[1] == pytest.approx(2 * idc[0])


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"by": "copies"}, "needs shift"),
        ({"by": "overlay", "shift": 5}, "is for by: copies, not overlay"),
        ({"by": "overlay", "together": 2}, "only by copies"),
        ({"by": "copies", "shift": 5, "together": 0}, "from 1"),
    ],
)
def test_what_copies_need_is_said(fields: dict[str, Any], complaint: str) -> None:
    """A shift goes with copies and with nothing else."""
    with pytest.raises(ValueError, match=complaint):
        RateScale(2, **fields)
