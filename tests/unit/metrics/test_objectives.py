"""Metrics of classes and objectives, worked out by hand.

Of class `a` one request took 100 ms to its first of 11 tokens and 10 for each other, and one was rejected; of class `b`
one took 300 ms and 30 for each of 21. A fourth was offered and never let in.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from batchsim.kernel.record import REJECTED
from batchsim.metrics.gaps import token_gaps
from batchsim.metrics.measure import LATENCIES, PERCENTILES, Measured, measure
from batchsim.metrics.slo import parse_slo
from tests.support.metrics_helpers import MS, arrival, inputs_of, records_of, run
from tests.unit.metrics.test_metrics import _answer

TEXTS = ("", "a", "b", "queue_full")
REFUSED = {"sent_ns": 200 * MS, "ended_ns": 200 * MS, "outcome": REJECTED, "reason": 3, "request_class": 1}


def classes(**more: Any) -> Measured:
    """The run above, judged by what is given."""
    rows = [_answer(0, 100, 10, 11, request_class=1), _answer(100, 300, 30, 21, request_class=2), REFUSED]
    return measure(inputs_of(records_of(rows, texts=TEXTS), num_offered=4, **more))


def test_counts_and_rates_of_a_run_by_hand() -> None:
    """What was offered includes who was never let in; tokens are the completed ones', pace that of the median."""
    measured = classes()
    expected = {
        "submitted": 4, "finished": 2, "rejected": 1, "cancelled": 0, "unfinished": 1, "cohort": 4,
        "uncompleted_share": 0.5, "offered_rps": 4, "throughput_rps": 2, "output_tokens_per_s": 32,
        "output_tokens_per_s_per_gpu": 32, "total_tokens_per_s": 52, "makespan_throughput_rps": 2,
        "user_tokens_per_s_p50": 100, "too_short": 1,
    }  # fmt: skip
    assert {name: measured.values[name] for name in expected} == pytest.approx(expected)
    assert measured.reasons == {
        "rejected": {"queue_full": 1},
        "cancelled": {},
        "unfinished": {"never_let_in": 1},
    }


def test_each_class_has_latencies_of_its_own() -> None:
    """ttft, tpot and e2e, means and percentiles; a class without requests has none; all are few observations."""
    measured = classes(class_names=("a", "b", "c"))
    for name, of in (("a", (100, 10, 200)), ("b", (300, 30, 900)), ("c", (None, None, None))):
        for latency, value_ms in zip(("ttft", "tpot", "e2e"), of, strict=True):
            keys = [f"{latency}_mean_s[{name}]", *(f"{latency}_p{p}_s[{name}]" for p in PERCENTILES)]
            seconds = None if value_ms is None else pytest.approx(value_ms / 1000)
            assert [measured.values[key] for key in keys] == [seconds] * len(keys)
            assert (keys[-1] in measured.weak_percentiles) is (value_ms is not None)
    assert {key for key in measured.values if "[" in key and not key.startswith("in_slo")} == {
        f"{latency}_{what}_s[{name}]"
        for latency in ("ttft", "tpot", "e2e")
        for what in ("mean", *(f"p{p}" for p in PERCENTILES))
        for name in "abc"
    }
    assert {f"{latency}_mean_s" for latency in LATENCIES} < set(measured.values)


@pytest.mark.parametrize(
    ("slo", "class_slos", "in_slo", "apart", "goodput", "margin"),
    [
        # a: 1 of its 2 and 1 lost pass; b by the general one: 1 of 1 and 1 lost. 2 of 4 offered.
        ("e2e<1s @ 20%", {"a": "ttft<150ms & tpot<15ms @ 30%"}, 0.5, (0.5, 1.0), 2.0, 1 / 3 - 0.3),
        ("e2e<1s @ 20%", {"a": "ttft<150ms & tpot<5ms @ 30%"}, 0.25, (0.0, 1.0), 1.0, 0 - 0.3),
        # b alone is judged: of 1 and 1 lost one passes; a has no objective.
        (None, {"b": "e2e<1s @ 40%"}, 0.5, (None, 1.0), 1.0, 0.5 - 0.4),
        # One form for the population: no single request can be said to meet it. Half of b and the lost one keep it.
        ("p50(e2e)<1s", {"a": "ttft<150ms @ 30%"}, None, (0.5, None), None, 0.0),
        ("p60(e2e)<1s", {"a": "ttft<150ms @ 30%"}, None, (0.5, None), None, 0.5 - 0.6),
        ("e2e<1s @ 20%", {"z": "p50(e2e)<1s"}, 0.5, (0.5, 1.0), 2.0, 0 - 0.5),
        # Where both have their own, the general one judges neither.
        ("e2e<1s @ 20%", {"a": "ttft<50ms @ 30%", "b": "e2e<1s @ 40%"}, 0.25, (0.0, 1.0), 1.0, 0 - 0.3),
        (None, {}, None, (None, None), None, None),
    ],
)
def test_each_class_is_judged_by_its_objective_and_all_by_the_worst(
    slo: str | None,
    class_slos: dict[str, str],
    in_slo: float | None,
    apart: tuple[float | None, float | None],
    goodput: float | None,
    margin: float | None,
) -> None:
    """Shares are of all offered that have an objective; who was never let in may have been of any class."""
    judged = {name: parse_slo(text) for name, text in class_slos.items()}
    general = None if slo is None else parse_slo(slo)
    values = classes(slo=general, class_slos=judged, class_names=("a", "b", "c")).values
    assert values["in_slo"] == in_slo
    assert (values["in_slo[a]"], values["in_slo[b]"], values["in_slo[c]"]) == (*apart, None)
    assert values["goodput_rps"] == goodput
    assert values["slo_margin"] == (None if margin is None else pytest.approx(margin))
    assert values["slo_met"] == (None if margin is None else float(margin >= 0))


def test_gaps_are_judged_by_their_own_times_and_by_who_did_not_complete() -> None:
    """Of the gaps between all tokens a share keeps the bound; requests that did not complete take theirs from it."""
    records = run([arrival(i, 500 * i, 6, 4 + i) for i in range(6)]).records
    gaps, counts = token_gaps(records, np.ones(6, dtype=bool))
    limit_ns = int(np.sort(np.repeat(gaps, counts))[counts.sum() // 2])
    kept = counts[gaps < limit_ns].sum() / counts.sum()
    assert 0 < kept < 1
    slo = parse_slo(f"p50(itl)<{limit_ns}ns")
    whole = measure(inputs_of(records, slo=slo)).values
    assert whole["slo_margin"] == pytest.approx(kept - 0.5)
    lost = measure(inputs_of(records, slo=slo, num_offered=8)).values
    assert lost["slo_margin"] == pytest.approx(kept * 6 / 8 - 0.5)
    whole_answers = measure(inputs_of(records, slo=slo, streams=False)).values
    assert whole_answers["slo_margin"] == pytest.approx(-0.5)


def test_the_gaps_of_a_class_are_its_own() -> None:
    """Those of other classes neither keep nor miss its bound, and who of it was never let in is lost to it."""
    records = run([arrival(i, 500 * i, 6, 4 + i) for i in range(6)]).records
    records = replace(records, texts=("", "a", "b"))
    records.requests["request_class"] = [1, 2] * 3
    gaps, counts = token_gaps(records, np.array([True, False] * 3))
    limit_ns = 1064  # all gaps of `b` are shorter, and all but one of `a`
    kept = counts[gaps < limit_ns].sum() / counts.sum()
    for num_offered, share in ((6, 1), (9, 3 / 6)):
        objective = {"a": parse_slo(f"p50(itl)<{limit_ns}ns")}
        values = measure(inputs_of(records, class_slos=objective, num_offered=num_offered)).values
        assert values["slo_margin"] == pytest.approx(kept * share - 0.5)


def test_gaps_that_records_do_not_tell_apart_are_not_judged() -> None:
    """Steps with draft tokens: neither met nor missed, though some requests did not complete."""
    records = run([arrival(i, 500 * i, 6, 4 + i) for i in range(6)]).records
    records.step_columns["num_decode_tokens"][records.step_columns["num_decode"] > 0] += 1
    assert not len(token_gaps(records, np.ones(6, dtype=bool))[0])
    for num_offered in (6, 8):
        values = measure(inputs_of(records, slo=parse_slo("p50(itl)<1h"), num_offered=num_offered)).values
        assert values["itl_p99_s"] is values["slo_margin"] is values["slo_met"] is None


def test_gaps_of_nobody_are_not_judged() -> None:
    """Without a request there is no margin, met or missed."""
    values = measure(inputs_of(records_of([]), slo=parse_slo("p50(itl)<1s"))).values
    assert values["slo_margin"] is values["slo_met"] is None
