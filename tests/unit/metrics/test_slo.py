"""Objectives: two forms, their grammar, and who meets them."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.base.errors import ScenarioError
from batchsim.metrics.slo import Bound, Sample, Slo, parse_slo, rank

MS = 1_000_000
POPULATION = "p99(ttft)<500ms, p99.9(tpot)<=50ms"
JOINT = "ttft<500ms & tpot<=50ms @ 99%"


def _sample(*values_ms: float) -> Sample:
    return Sample(np.array(values_ms) * MS)


def test_population_form():
    """Percentiles of single metrics, joined by commas; no request alone meets or misses them."""
    slo = parse_slo(POPULATION)
    assert slo.bounds == (
        Bound("ttft", 500 * MS, share=0.99),
        Bound("tpot", 50 * MS, inclusive=True, share=pytest.approx(0.999)),
    )
    assert not slo.per_request and str(slo) == POPULATION


def test_a_mean_may_include_its_limit():
    """`<=` is kept of a mean as of a percentile."""
    assert parse_slo("mean(e2e)<=4s").bounds == (Bound("e2e", 4000 * MS, inclusive=True, mean=True),)


def test_per_request_form():
    """Bounds joined by &, and the share of requests that must keep them all."""
    slo = parse_slo(JOINT)
    assert slo == Slo((Bound("ttft", 500 * MS), Bound("tpot", 50 * MS, inclusive=True)), 0.99)
    assert slo.per_request and str(slo) == JOINT


@pytest.mark.parametrize(
    "text", [POPULATION, JOINT, "e2e<2s @ 95%", "p50(itl)<20ms", "norm_latency<=30ms @ 100%", "mean(e2e)<4s"]
)
def test_text_survives_a_round_trip(text):
    """What an Slo prints is an Slo that means the same."""
    assert parse_slo(str(parse_slo(text))) == parse_slo(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("p99(ttft)<500ms & tpot<50ms", "'p99(ttft)<500ms, p99(tpot)<50ms' or 'ttft<500ms & tpot<50ms @ 99%'"),
        ("p95(ttft)<500ms, p95(itl)<50ms @ 90%", "'p95(ttft)<500ms, p95(itl)<50ms' or 'ttft<500ms & tpot<50ms @ 90%'"),
        ("ttft<500ms, tpot<50ms", "'p99(ttft)<500ms, p99(tpot)<50ms' or 'ttft<500ms & tpot<50ms @ 99%'"),
        ("ttft<500ms, tpot<50ms @ 95%", "'p95(ttft)<500ms, p95(tpot)<50ms' or 'ttft<500ms & tpot<50ms @ 95%'"),
        ("ttft<500ms & tpot<50ms", "Write 'ttft<500ms & tpot<50ms @ 99%'"),
        ("ttf<500ms @ 99%", "Did you mean ttft?"),
        ("p99(pace)<500ms", "Known: ttft, tpot, itl, e2e, queue_time, norm_latency"),
        ("ttft<500 @ 99%", "'500' has no known unit of a time"),
        ("ttft<0ms @ 99%", "no latency is below 0"),
        ("ttft<500ms @ 99", "'99' is not a share"),
        ("ttft<500ms, tpot<50ms @ 0.95", "'p95(ttft)<500ms, p95(tpot)<50ms' or 'ttft<500ms & tpot<50ms @ 95%'"),
        ("p0.99(ttft)<500ms", "p0.99 is no percentile. Write one from 1 to below 100, like p99."),
        ("ttft<500ms @ 0%", "asks for nothing"),
        ("itl<50ms @ 99%", "Bound tpot instead, or write 'p99(itl)<50ms'"),
        ("itl<=50ms", "Bound tpot instead, or write 'p99(itl)<=50ms'"),
        ("ttft<1", "Write 'ttft<1s @ 99%'"),
        ("ttft<1, tpot<2ms @ none", "'p99(ttft)<1s, p99(tpot)<2ms' or 'ttft<1s & tpot<2ms @ 99%'"),
        ("ttft<soon", "'soon' is not a time"),
        ("ttft<1e308h @ 99%", "too large"),
        ("p100(ttft)<1s & tpot<50ms", "p100 is no percentile"),
        ("p100(ttft)<500ms", "p100 is no percentile"),
        ("p9.9.9(ttft)<500ms", "p9.9.9 is no percentile"),
        ("ttft>500ms @ 99%", "'ttft>500ms' is not a bound"),
        ("ttft<1s & tpot>50ms @ 99%", "column 11: 'tpot>50ms' is not a bound"),
        ("p99(ttft)<1s, mean(wait)<1s", "column 20: wait is not a latency"),
        ("ttft<1s & tpot<50 @ 99%", "column 16: '50' has no known unit"),
        ("ttft<1s @  none", "column 12: 'none' is not a share"),
        ("mean(ttft)<1s & tpot<50ms @ 99%", "'mean(ttft)<1s, p99(tpot)<50ms' or 'ttft<1s & tpot<50ms @ 99%'"),
        ("mean(ttft)<1s & mean(tpot)<50ms", "column 15: mixes bounds"),
        ("ttft<1s, tpot<50ms", "column 8: mixes bounds"),
        ("ttft<1s & task_e2e<30s @ 99%", "column 11: mixes bounds on requests with one on tasks"),
        ("task_e2e<30s & e2e<9s & ttft<1s @ 99%", "column 16: mixes bounds on requests with one on tasks"),
        ("", "'' is not a bound"),
        ("ttft<1s &  @ 99%", "column 10: '' is not a bound"),
        ("p0(ttft)<1s", "p0 is no percentile"),
        ("p99(ttft)<0s & tpot<1s", "no latency is below 0"),
        ("ttft<1ns & tpot<1ms", "Write 'ttft<1ns & tpot<1ms @ 99%'"),
        ("ttft<1s, tpot<2ms @ 100%", "'p99(ttft)<1s, p99(tpot)<2ms' or 'ttft<1s & tpot<2ms @ 99%'"),
        ("ttft<soon, tpot<50ms", "column 6: 'soon' is not a time"),
        ("p99(e2e)<4s & tpot<50ms", "column 15: mixes bounds"),
        ("p99(ttft)<1s @ 95%", "column 14: mixes bounds"),
        ("p99(ttft)<500ms,", "'' is not a bound"),
    ],
)
def test_what_is_refused(text, says):
    """A wrong objective is one line that names it and says what to write."""
    with pytest.raises(ScenarioError) as error:
        parse_slo(text)
    assert says in str(error.value) and f"slo '{text}'" in str(error.value) and "\n" not in str(error.value)


_NUMBERS = st.sampled_from(["1", "50ms", "0", "0.5", "1e3", "-1s", "soon", "1e-12", "2 s", "1e308"])
_BOUNDS = st.builds(
    "{0}{1}{2}".format,
    st.sampled_from([f"{of}({m})" for of in ("p99", "p9.5", "p100", "p0", "mean") for m in ("ttft", "itl")])
    | st.sampled_from(["ttft", "tpot", "itl", "e2e", "ttf"]),
    st.sampled_from(["<", "<=", " < "]),
    _NUMBERS,
)
_ENDS = st.sampled_from(["", " @ 99%", " @ 99", "@", " @ none", " @ 0%", " @ 100%", " @ 101%", " @ 1e1%", " @ 5% @ 6%"])


@given(first=_BOUNDS, rest=st.lists(st.tuples(st.sampled_from([", ", " & "]), _BOUNDS), max_size=2), end=_ENDS)
def test_what_an_error_proposes_parses(first, rest, end):
    """Every text that the error of a wrong objective proposes in quotes, and each of the two forms it shows."""
    text = first + "".join(map("".join, rest)) + end
    try:
        parse_slo(text)
    except ScenarioError as error:
        said = str(error).removeprefix(f"slo '{text}'")
        for proposed in re.findall(r"(?:[Ww]rite|or) '([^']*)'", said):
            parse_slo(proposed)
        if shown := re.search(r"Write (p99\S+ \S+) \(each over all requests\) or (.*) \(every bound", said):
            parse_slo(shown[1]), parse_slo(shown[2])


def test_bounds_are_exact_at_the_limit():
    """`<` excludes the limit, `<=` includes it, to the nanosecond."""
    at_limit = np.array([50 * MS - 1, 50 * MS, 50 * MS + 1], dtype=float)
    assert Bound("ttft", 50 * MS).passes(at_limit).tolist() == [True, False, False]
    assert Bound("ttft", 50 * MS, inclusive=True).passes(at_limit).tolist() == [True, True, False]


def test_joint_means_the_same_request():
    """Two bounds that half of the requests keep each are kept jointly by none here."""
    slo = parse_slo("ttft<10ms & tpot<10ms @ 50%")
    samples = {"ttft": _sample(1, 1, 99, 99), "tpot": _sample(99, 99, 1, 1)}
    assert slo.met(samples) is False
    assert slo.met(samples | {"tpot": _sample(1, 1, 1, 1)}) is True


def test_what_does_not_apply_passes_and_what_never_came_misses():
    """NaN is a bound that does not apply; inf is a response without it."""
    slo = parse_slo("ttft<10ms & tpot<10ms @ 100%")
    values = {"ttft": np.array([1.0, 1.0, np.inf]), "tpot": np.array([np.nan, np.inf, np.inf])}
    assert slo.passes(values).tolist() == [True, False, False]


def test_population_counts_what_never_came():
    """99 good requests of 100 meet p99; a second one that never completes breaks it."""
    slo = parse_slo("p99(ttft)<10ms")
    assert slo.met({"ttft": _sample(*[1] * 99, np.inf)}) is True
    assert slo.met({"ttft": _sample(*[1] * 98, np.inf, np.inf)}) is False


def test_pooled_gaps_count_by_weight_and_lose_the_uncompleted_share():
    """Weighted observations are as many as they weigh; requests without any take their share of the quantile."""
    slo = parse_slo("p90(itl)<10ms")
    good_and_bad = np.array([1.0, 99.0]) * MS
    assert slo.met({"itl": Sample(good_and_bad, np.array([95, 5]))}) is True
    assert slo.met({"itl": Sample(good_and_bad, np.array([89, 11]))}) is False
    assert slo.met({"itl": Sample(good_and_bad, np.array([95, 5]), uncompleted_share=0.06)}) is False
    assert slo.met({"itl": Sample(np.empty(0), np.empty(0, dtype=int), uncompleted_share=1.0)}) is False


def test_no_requests_no_verdict():
    """Without anyone to judge the answer is unknown, not yes."""
    empty = {"ttft": Sample(np.empty(0)), "tpot": Sample(np.empty(0))}
    assert parse_slo(POPULATION).met(empty) is None
    assert parse_slo(JOINT).met(empty) is None


def test_population_bounds_do_not_judge_one_request():
    """Asking which requests meet a percentile is an error, not an answer."""
    with pytest.raises(ValueError, match="population"):
        parse_slo(POPULATION).passes({})


def test_rank_is_free_of_binary_rounding():
    """7 % of 100 observations are 7, although 0.07 × 100 is a little more than 7."""
    assert (rank(0.07, 100), rank(0.99, 100), rank(0.99, 101)) == (7, 99, 100)


def test_a_parse_error_shows_both_forms():
    """Whoever writes something else learns in one line how either form is written."""
    with pytest.raises(ScenarioError) as error:
        parse_slo("quick please")
    assert "p99(ttft)<500ms, mean(queue_time)<50ms" in str(error.value)
    assert "ttft<500ms & tpot<50ms @ 99%" in str(error.value)


@given(
    values=st.lists(st.sampled_from((1.0, 2.0, 3.0, float("inf"))), min_size=1, max_size=300),
    percent=st.integers(1, 999),
    limit=st.integers(1, 4),
)
def test_a_share_is_met_where_its_margin_is_not_negative(values, percent, limit):
    """In both forms the margin is the kept share less the asked one, and its sign the verdict by counting."""
    share, sample = percent / 1000, Sample(np.array(values))
    kept = sum(value < limit for value in values)
    for slo in (Slo((Bound("ttft", limit),), share), Slo((Bound("ttft", limit, share=share),))):
        margin = slo.margin({"ttft": sample})
        assert margin == pytest.approx(kept / len(values) - share, abs=1e-12)
        assert (margin >= 0) is (1000 * kept >= percent * len(values)) is slo.met({"ttft": sample})


@given(values=st.lists(st.integers(1, 50), min_size=1, max_size=50), limit=st.integers(1, 60), inclusive=st.booleans())
def test_a_mean_is_met_where_its_margin_is_not_negative(values, limit, inclusive):
    """A mean at its limit keeps `<=` and misses `<`; the margin tells how far it is off, as a share of the larger."""
    bound = Bound("queue_time", limit, inclusive, mean=True)
    mean, margin = sum(values) / len(values), bound.margin(Sample(np.array(values, dtype=float)))
    assert margin == pytest.approx((limit - mean) / max(limit, mean), abs=1e-12)
    assert (margin >= 0) is (mean <= limit if inclusive else mean < limit)


def test_one_uncompleted_request_breaks_a_mean():
    """The mean of what completed says nothing once somebody never did."""
    slo = parse_slo("mean(queue_time)<10ms")
    assert slo.margin({"queue_time": _sample(1, 1)}) == pytest.approx(0.9)
    assert slo.margin({"queue_time": _sample(*[1] * 1000, np.inf)}) == -1.0
    assert slo.margin({"queue_time": _sample()}) is None


def test_the_mean_of_gaps_counts_each_as_often_as_it_occurred():
    """99 gaps of 1 ms and one of 101 have a mean of 2 ms; where a request never completed it is as if infinite."""
    bound, gaps = Bound("itl", 10 * MS, mean=True), (np.array([1.0, 101.0]) * MS, np.array([99, 1]))
    assert bound.margin(Sample(*gaps)) == pytest.approx(0.8)
    assert bound.margin(Sample(*gaps, uncompleted_share=0.01)) == -1.0


def test_the_least_margin_decides():
    """Of two bounds on the population the worse one is the margin."""
    slo = parse_slo("p50(ttft)<10ms, mean(tpot)<10ms")
    assert slo.margin({"ttft": _sample(1, 1, 1, 1), "tpot": _sample(9, 9)}) == pytest.approx(0.1)
    assert slo.margin({"ttft": _sample(1, 99, 99, 99), "tpot": _sample(9, 9)}) == pytest.approx(-0.25)
