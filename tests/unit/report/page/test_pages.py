"""The pages: what stands in them, and that their charts are drawn, by a browser without a network, at any width."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchsim.report.page.capacity_page import capacity_sections, write_capacity_page
from batchsim.report.page.run_decision import decision
from batchsim.report.page.run_page import run_sections, write_run_page
from batchsim.report.sheet import Cell, Chart, ChartAxis, Sentence, Series, Table, folded
from batchsim.report.text.capacity_text import capacity_table
from batchsim.results.read import Results
from tests.support.browser import browser
from tests.support.report_samples import SEVEN, sample_results
from tests.unit.report.text.test_report_capacity import DOUBTFUL, FAILS, PASSES, study

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HTTP = re.compile(r"""(?:src|href)=["']?(?!data:)|url\((?!data:)|@import|fetch\(|XMLHttpRequest""")


def words(sentence: Sentence) -> str:
    return "".join(part if isinstance(part, str) else part.text for part in sentence)


def test_a_runs_page_opens_with_who_sustains_the_most() -> None:
    """The policy and its load, what requests get there, why not more, what is sure of each, and what that rests on;
    whatever the load that tables show."""
    (first, second, more, judged, third), results = run_sections(sample_results(), 12.0)[0].sentences, sample_results()
    assert words(first).startswith("preemptive sustains the most within ttft<1s & tpot<50ms @ 99%: up to 16 req/s")
    assert "; next is continuous, up to 12 req/s." in words(first)
    assert "; dynamic: sure at 4 req/s; continuous: sure at 12 req/s" in words(judged)
    assert words(second).startswith("At 16 req/s offered, preemptive has a TTFT p99 of ")
    assert words(second).endswith("99.4 % are within the SLO.") and "3 seeds" in words(third)
    for part in (*first, *second, *more):
        if isinstance(part, Cell):
            assert part.column in results.summary and 0 <= part.row < len(results.summary)


def test_why_a_policy_sustains_no_more_is_said() -> None:
    """What is missed at the next load that was tested, or that its queue grows there, or that seeds differ; nothing
    above the highest load."""

    def why(results: Results) -> list[str]:
        return [words(sentence) for sentence in decision(results)[0][2:]]

    results = sample_results()
    missed = "Why not more: at 20 req/s offered, the next load tested, 3.0 % are within the SLO;"
    missed += " P99 TTFT is 1.8 ± 0.8 s"
    assert why(results) == [f"{missed} (asked: 1 s)."]
    results.summary.loc[results.summary["load"] == 20.0, ["slo_margin", "slo_margin_ci"]] = -0.01, 0.02
    assert why(results) == [f"{missed} (asked: 1 s); other seeds may decide otherwise."]
    results = sample_results({"continuous": ("continuous", "continuous", 11.0)}, loads=(8.0, 9.0, 10.0, 12.0))
    results.summary.loc[results.summary["load"] == 9.0, ["slo_margin", "slo_margin_ci"]] = -0.01, 0.02
    opened, missed = why(results)
    assert opened.startswith("Why not more: at 9 req/s offered, ") and opened.endswith("seeds may decide otherwise.")
    surely = "At 10 req/s offered the SLO is surely missed: 3.0 % are within the SLO; P99 TTFT is "
    assert missed.startswith(surely) and missed.endswith("(asked: 1 s).")
    results.summary.loc[results.summary["load"] == 10.0, ["slo_margin", "slo_margin_ci"]] = -0.01, 0.02
    assert why(results)[1] == "At 12 req/s offered the SLO is surely missed: the queue grows as long as requests come."
    dynamic = {"dynamic": ("dynamic", "dynamic", 6.5)}
    grows = "Why not more: at 8 req/s offered, the next load tested, the queue grows as long as requests come."
    assert why(sample_results(dynamic)) == [grows] and why(sample_results(dynamic, loads=(1.0, 2.0))) == []


def test_a_run_s_page_says_what_its_charts_mark() -> None:
    """Only what is there: one seed has no interval, one policy lies under no other, and here no queue grows."""

    def said(results: Results) -> list[str]:
        (section,) = (each for each in run_sections(results, 1.0) if each.title == "Within the SLO against load")
        return [words(sentence) for sentence in section.sentences]

    (line,) = said(sample_results())
    assert [each.partition(":")[0] for each in line.split(". ")] == ["Shaded", "A cross", "A wide line"]
    assert said(sample_results({"dynamic": ("dynamic", "dynamic", 6.5)}, loads=(1.0, 2.0), seeds=1)) == []


def test_no_policy_within_the_slo_is_said_first() -> None:
    """In place of a recommendation."""
    results = sample_results({"static": ("static", "static", 3.4)})
    assert words(run_sections(results, 4.0)[0].sentences[0]).startswith("No policy surely meets ttft<1s")


def test_cells_of_a_runs_page_stand_where_they_say() -> None:
    """The row of summary.csv that a cell names is of its policy and load; a queue that grows has no percentiles."""
    results = sample_results(SEVEN)
    (every,) = next(section for section in run_sections(results, 4.0) if section.title == "Every load").views
    assert len(every.rows) == len(results.summary)
    for label, load, *_ in every.rows:
        row = results.summary.iloc[label.row]
        assert (label.text, load.text) == (row["label"], f"{row['load']:g}")
    grows = results.summary["unstable"].to_numpy()
    texts = [row[every.headings.index("ttft p99")].text for row in every.rows]
    assert [text == "unstable" for text in texts] == [bool(grows[row[0].row]) for row in every.rows]


def test_the_charts_of_a_run_leave_out_growing_queues_but_not_their_shares() -> None:
    """A latency has no value there and a cross; the share within the SLO is one of all requests."""
    found = {section.title: section.charts for section in run_sections(sample_results(), 4.0)}
    (share,) = found["Within the SLO against load"]
    static = next(line for line in share.series if line.label == "static (bs 16)")
    assert share.target == 0.99 and None not in static.y and list(static.crosses) == [False, False, *[True] * 5]
    ttft = found["Latency against load"][0]
    static = next(line for line in ttft.series if line.label == "static (bs 16)")
    assert [value is None for value in static.y] == list(static.crosses) and ttft.target == 1.0
    assert all(low is None or low > 0 for line in ttft.series for low in line.low)


def test_the_page_of_a_capacity_shades_where_the_verdict_is_open() -> None:
    """The chart's band is the interval; its shares are margins and what is asked."""
    found = study({8.0: PASSES, 10.0: DOUBTFUL, 14.0: FAILS})
    sections = {section.title: section for section in capacity_sections(found)}
    (chart,) = sections["Within the SLO against load"].charts
    capacity = found.policies[0].found
    assert [band[:2] for band in chart.bands] == [(capacity.low, capacity.high)]
    assert "where the verdict is open. Shaded along a line: 95 % intervals" in chart.note
    assert "sustains the most" in words(sections["Decision"].sentences[0])
    judged = words(sections["Decision"].sentences[2])
    assert judged.endswith("budget 512: sure at 8 req/s; open at 10 req/s (73 to 100 %).")
    (table,) = sections["Policies"].views
    assert table.headings[1:3] == ("capacity (95 %), req/s", "probes") and table.rows[0][1].column == "capacity_rps"


def test_that_steps_run_all_the_time_is_not_said_as_if_an_engine_were_full() -> None:
    """Just below its capacity: in a sentence, and in the table under a name that says what it is a share of."""
    found = study({8.0: PASSES, 10.0: DOUBTFUL, 14.0: FAILS})
    found.policies[0].at = {"engine_busy_share": 0.998, "kv_utilisation_p99": 0.4}
    said = words(capacity_sections(found)[0].sentences[1])
    used = "; just below it, steps run 100 % of the time; 40 % of the KV blocks are in use at the 99th percentile."
    assert said.endswith(used) and "busy" not in said
    assert capacity_table(found).rows[0][-1].text == "in steps 100 %, KV p99 40 %"


def test_rows_that_say_the_same_are_one() -> None:
    """Only neighbours, and only where all but the first column agree; the first and last are told."""
    rows = [("a", "1"), ("b", "1"), ("c", "2"), ("d", "1")]
    cells = [tuple(Cell("t", i, str(k), text) for k, text in enumerate(row)) for i, row in enumerate(rows)]
    shown = folded(Table("t", ("when", "what"), tuple(cells)))
    assert [row[0].shown for row in shown.rows] == ["a to b", "c", "d"]


def test_a_name_cannot_leave_the_data_of_a_chart() -> None:
    """A label with a tag in it is text inside the page's script."""
    axis = ChartAxis("x")
    chart = Chart("c", axis, axis, [Series("</script><b>&", "#000000", [1.0], [2.0])])
    assert "<" not in chart.data and json.loads(chart.data)["series"][0]["label"] == "</script><b>&"


# ---- in a browser

_PROBE = """
<script>
addEventListener("load", async () => {
  const wait = () => new Promise((done) => setTimeout(done, 200)), frame = document.querySelector("iframe");
  await wait();
  const page = frame.contentDocument, root = page.documentElement, seen = {};
  const plots = () => [...page.querySelectorAll("figure.chart canvas")];
  seen.charts = page.querySelectorAll("figure.chart").length;
  seen.drawn = plots().length;
  seen.wide = root.scrollWidth;
  seen.requests = frame.contentWindow.performance.getEntriesByType("resource").length;
  const figure = page.querySelector("figure.chart"), button = figure.querySelector(".scales button");
  seen.before = button.textContent; button.click(); seen.after = button.textContent;
  const row = figure.querySelectorAll(".u-series")[1], label = row.querySelector("th");
  label.click(); seen.off = row.classList.contains("u-off");
  const over = figure.querySelector(".u-over"), box = over.getBoundingClientRect();
  const at = { clientX: box.left + box.width / 2, clientY: box.top + 20, bubbles: true };
  over.dispatchEvent(new frame.contentWindow.MouseEvent("mousemove", at));
  await wait();
  seen.hover = [...figure.querySelectorAll(".u-series:not(.end) .u-value")].map((v) => v.textContent);
  frame.contentWindow.dispatchEvent(new frame.contentWindow.Event("beforeprint"));
  await wait();
  seen.unfolded = [...page.querySelectorAll("details")].every((fold) => fold.open);
  seen.printed = plots().length;
  document.body.textContent = "SEEN" + JSON.stringify(seen) + "NEES";
});
</script>
"""


def seen_in_a_browser(page: Path, width: int, folder: Path) -> dict[str, Any]:
    """What a browser without a network makes of a page in a frame of this width."""
    text = html.escape(page.read_text(encoding="utf-8"))
    frame = f'<iframe style="border:0;width:{width}px;height:4000px" srcdoc="{text}"></iframe>'
    return read_in_a_browser(f"<!doctype html><meta charset=utf-8><body>{frame}{_PROBE}", folder)


def read_in_a_browser(text: str, folder: Path) -> dict[str, Any]:
    """What a page, opened by a browser without a network, writes of itself between SEEN and NEES."""
    assert CHROMIUM is not None
    (folder / "frame.html").write_text(text, encoding="utf-8")
    call = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    call += ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=5000", "--window-size=1400,1000"]
    done = subprocess.run([*call, "--dump-dom", f"file://{folder / 'frame.html'}"], capture_output=True, timeout=120)
    found = re.search(r"SEEN(\{.*\})NEES", done.stdout.decode())
    assert found, done.stderr.decode()[-2000:]
    return json.loads(html.unescape(found[1]))


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("kind", ["run", "capacity"])
def test_a_page_answers_to_the_pointer_at_any_width(kind: str, width: int, tmp_path: Path) -> None:
    """Its charts are drawn and no wider than the page; a button changes the scale, a click hides a line, hover tells
    values; in print all folds are open and hold their charts; nothing is fetched."""
    if kind == "run":
        page = write_run_page(replace(sample_results(SEVEN), path=tmp_path), [], 4.0)
    else:
        page = write_capacity_page(study({8.0: PASSES, 10.0: DOUBTFUL, 14.0: FAILS}), tmp_path)
    scripts = re.compile(r"<script.*?</script>", re.DOTALL)
    assert not HTTP.search(scripts.sub("", page.read_text(encoding="utf-8")))
    seen = seen_in_a_browser(page, width, tmp_path)
    assert seen["charts"] == seen["drawn"] > 0 and seen["wide"] <= width and seen["requests"] == 0
    assert (seen["before"], seen["after"]) == ("y scale: nines ▾", "y scale: linear ▾") and seen["off"]
    assert any("%" in value for value in seen["hover"][2:]) or kind == "capacity"
    assert seen["unfolded"] and seen["printed"] == seen["charts"]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_page_is_dark_where_the_screen_is_and_tables_stay_tables(tmp_path: Path) -> None:
    """On a phone too; a line is lighter where it could not be seen; and no name of a legend waits for a value."""
    page = write_run_page(replace(sample_results(SEVEN), path=tmp_path), [], 4.0)
    found = {}
    with browser(tmp_path / "profile") as tab:
        for dark in (False, True):
            tab.open(page.as_uri(), 390, dark=dark)
            tab.until("document.querySelector('.u-legend')")

            def each(selector: str, value: str) -> list[str]:
                return tab.run(f"[...document.querySelectorAll('{selector}')].map((each) => {value})")

            assert set(each(".scroll td", "getComputedStyle(each).display")) == {"table-cell"}
            assert set(each(".u-legend th", "getComputedStyle(each, '::after').content")) == {'""'}
            colors = (each("body", f"getComputedStyle(each).{name}") for name in ("color", "backgroundColor"))
            found[dark] = (*colors, each(".u-legend .u-marker", "each.style.background"))
    assert all(light != dark for light, dark in zip(found[False], found[True], strict=True))
