"""A plan's report: what its charts, pictures and sentences say of tables written by hand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from batchsim.report.page.plan_charts import latency_charts, slo_charts
from batchsim.report.page.plan_pictures import draw_pictures
from batchsim.report.page.render import asset
from batchsim.study.planning.probe import Ask, GpuGroup, GroupProbe, Observed
from batchsim.study.planning.tables import Row, Tables, ends_of_one_seed
from tests.unit.report.page.test_pages import CHROMIUM, read_in_a_browser

UNCHANGED: Row = {"traffic": 1.0, "dispersion": 1, "prompts": 1.0, "classes": "", "cost_factor": 1.0}
UNCHANGED |= {"slo_factor": 1.0, "window_share": 1.0, "gpu": "one", "policy": "fcfs", "seeds": 3, "holds": True}


def probe(replicas: int, share: float, **other: Any) -> Row:
    """A row of the table of probes: so many replicas at 10 requests/s with this share within the SLO."""
    row: Row = UNCHANGED | {"replicas": replicas, "attainment": share, "cost_per_month": 100.0 * replicas}
    row |= {"attainment_low": share - 0.001, "attainment_high": min(share + 0.001, 1.0), "offered_rps": 10.0}
    row |= {"goodput_rps": 10 * share, "margin_low": share - 0.991, "ttft_p99_s": 0.2, "tpot_p99_s": 0.02}
    row |= {"energy_j_per_output_token": None}
    return row | other


def tables_of(probes: list[Row], **other: Any) -> Tables:
    names = dict.fromkeys((row["gpu"], row["policy"]) for row in probes)
    chosen = {"gpu": "one", "policy": "fcfs", "replicas": 2, "slo": "ttft<300ms & tpot<50ms @ 99%"}
    return {
        "recommendation": [chosen],
        "configurations": [{"gpu": gpu, "policy": policy} for gpu, policy in names],
        "probes": probes,
        **other,
    }


def test_one_number_stands_above_marks_of_one_cost() -> None:
    """Of one kind of GPU, where two configurations cost the same; above each of another kind its own."""
    rows = [probe(3, 1.0), probe(3, 0.999, policy="other"), probe(3, 0.5, gpu="two"), probe(2, 0.8)]
    picture = draw_pictures(tables_of(rows), "$")["pareto"][1]
    assert re.findall(r"<!-- (\d) -->", picture).count("3") == 2


def test_marks_have_the_energy_of_a_token_where_it_is_known() -> None:
    """Beside the replicas, and the legend says what it is; not where it is unknown."""
    rows = [probe(3, 1.0, energy_j_per_output_token=0.4213), probe(2, 0.8)]
    said = re.findall(r"<!-- (.*?) -->", draw_pictures(tables_of(rows), "$")["pareto"][1])
    assert {"3: 0.42 J", "2"} <= set(said)
    assert "J: an output token's, measured or estimated" in said


TWO_CLASSES = [
    {"class": "chat", "slo": "ttft<300ms & tpot<50ms @ 95%"},
    {"class": "rest", "slo": "e2e<2s @ 99.9%"},
]


def test_a_class_has_its_latencies_beside_what_it_asks() -> None:
    """A chart for each class and bound, of the percentile of the objective's share where there is one, with the limit
    as its line, called by that share."""
    of_classes = {"ttft_p95_s[chat]": 0.1, "tpot_p95_s[chat]": 0.01, "e2e_p99_s[rest]": 1.5}
    charts = latency_charts(tables_of([probe(2, 1.0, **of_classes)], classes=TWO_CLASSES))
    assert [(chart.caption, chart.target, chart.asked, chart.series[0].y) for chart in charts] == [
        ("TTFT p95 of chat against load", 0.3, "asked of 95 %", [0.1]),
        ("TPOT p95 of chat against load", 0.05, "asked of 95 %", [0.01]),
        ("E2E p99 of rest against load", 2.0, "asked of 99.9 %", [1.5]),
    ]


def test_without_classes_the_objective_is_the_line_of_its_latencies() -> None:
    """TTFT and TPOT are shown in any case, without a line where nothing is asked of them."""
    tables = tables_of([probe(2, 1.0)])
    assert [(chart.caption, chart.target) for chart in latency_charts(tables)] == [
        ("TTFT p99 against load", 0.3),
        ("TPOT p99 against load", 0.05),
    ]
    tables["recommendation"][0]["slo"] = "tpot<50ms @ 99%"
    assert [chart.target for chart in latency_charts(tables)] == [None, 0.05]


def test_marks_of_one_seed_alone_are_open_and_the_note_says_so() -> None:
    """And on no line. Not those of a recording, whose one run has an interval; without any of them there is no note."""
    alone = probe(3, 0.9, seeds=1, attainment_low=None, attainment_high=None, margin_low=None, holds=False)
    of_stretches = probe(2, 1.0, seeds=1)
    (chart,) = slo_charts(tables_of([of_stretches, alone]))
    assert [list(series.hollow) for series in chart.series] == [[False], [True]] and "one seed alone" in chart.note
    assert [series.joined for series in chart.series] == [True, False]
    assert all("one seed alone" in chart.note for chart in latency_charts(tables_of([alone, of_stretches])))
    (chart,) = slo_charts(tables_of([of_stretches]))
    assert chart.note == "Shaded: the interval of sampling."


def test_marks_of_one_seed_alone_are_small_in_pictures() -> None:
    """With a line of the legend, which is not there without them."""
    alone = probe(3, 0.9, seeds=1, attainment_low=None, attainment_high=None, holds=False)
    said = "<!-- small: one seed alone, no interval -->"
    for rows, is_said in (([probe(2, 1.0), alone], True), ([probe(2, 1.0), probe(3, 0.9)], False)):
        pictures = draw_pictures(tables_of(rows), "$")
        assert [said in pictures[name][1] for name in ("pareto", "replicas")] == [is_said] * 2


def test_margins_have_a_scale_on_which_a_hundred_points_leave_the_rest_legible() -> None:
    """None is left out but those that have no lower end, which the note says."""
    rows = [probe(1, 0.3, margin_low=-1.4), probe(2, 1.0), probe(3, 0.9, seeds=1, attainment_low=None, margin_low=None)]
    tables = tables_of(rows, classes=TWO_CLASSES)
    tables["recommendation"][0]["slo"] = "the SLO of their class"
    margins = slo_charts(tables)[1]
    assert (margins.y.kind, margins.y.scale, margins.target) == ("points", "signed", 0.0)
    assert [list(series.y) for series in margins.series] == [[-1.4], [1.0 - 0.991]]
    assert margins.note == "Where one seed alone was simulated there is no interval, and no mark."


def test_ends_of_the_cost_error_that_rest_on_one_seed_are_named() -> None:
    """In a note; one recording has one seed too, and stretches that make an interval."""
    ask, one = Ask(GpuGroup("one", "fcfs", 2)), Observed(0.9, -0.09, {})
    run = {"values": {"cohort": 100.0}}
    alone = GroupProbe(ask, (run,), (one,), complete=False)
    seeds = GroupProbe(ask, (run,) * 3, (one,) * 3, complete=True)
    stretches = GroupProbe(ask, (run,), (one,) * 10, complete=True)
    assert [probe.is_alone for probe in (alone, seeds, stretches)] == [True, False, False]
    assert ends_of_one_seed([seeds, alone]) == "longest steps: one seed alone"
    assert ends_of_one_seed([alone, alone]) == "shortest and longest steps: one seed alone"
    assert ends_of_one_seed([seeds, stretches]) is None


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_points_are_spread_around_zero_and_none_is_cut(tmp_path: Path) -> None:
    """A tenth of a point and a hundred are both seen on the scale, and both ways lead back; below that it is words."""
    script = """const { signed } = batchsim.scales, values = [-1.4, -1, -0.1, -0.001, 0, 0.001, 0.1];
    const seen = { to: values.map(signed.to), back: values.map((v) => signed.from(signed.to(v))),
                   said: values.map(batchsim.write.points) };
    document.body.textContent = "SEEN" + JSON.stringify(seen) + "NEES";"""
    page = f"<!doctype html><meta charset=utf-8><body><script>{asset('charts.js')}</script><script>{script}</script>"
    seen = read_in_a_browser(page, tmp_path)
    low, *_, high = seen["to"]
    assert seen["to"] == sorted(seen["to"]) and seen["to"][4] == 0
    assert -seen["to"][3] > 0.09 * -low and high > 0.6 * -seen["to"][1]
    assert seen["back"] == pytest.approx([-1.4, -1, -0.1, -0.001, 0, 0.001, 0.1])
    said = ["below −100", "−100", "−10", "−0.1", "0", "+0.1", "+10"]
    assert seen["said"] == [f"{each} points" for each in said]
