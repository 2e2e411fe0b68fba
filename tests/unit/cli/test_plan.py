"""`batchsim plan`: the report and its tables, and what keeps a plan from being made."""

from __future__ import annotations

import csv
import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from batchsim.cli.common import line_now_and_then
from batchsim.report.markdown import escaped
from batchsim.report.page.plan_columns import margin
from batchsim.report.page.plan_sections import sections
from batchsim.report.page.plan_text import plan_text
from batchsim.report.sheet import Sheet
from tests.support.browser import CHROMIUM, browser
from tests.support.tiny_scenario import batchsim

TRACES = os.environ.get("BATCHSIM_TRACES")

TINY = """\
model: llama-3.1-8b
cost: {kind: linear, base: 5ms, per_sequence: 1ms}
workload:
  arrivals: {kind: poisson, mean_rate: 20/s}
  classes:
    chat: {share: 50%, slo: ttft<300ms @ 95%}
    rest: {share: 50%, priority: 1, slo: e2e<2s @ 90%}
  lengths: {prompt: {kind: fixed, tokens: 100}, output: {kind: uniform, min: 2, max: 12}}
  output_cap: 16
  duration: 10s
  warmup: 500ms
  drain: 5s
policies:
  continuous: {max_num_seqs: 4, max_num_batched_tokens: 256}
  slow: {kind: static, batch_size: 64, max_wait: 3s}
slo: ttft<300ms @ 95%
seeds: 2
plan:
  target: {diurnal: {peak: 150/s, hours: [HOURS]}}
  growth: {per_month: 10%, months: 2}
  window: 2s
  currency: EUR
  gpus:
    small: {cost: {kind: linear, base: 10ms, per_sequence: 2ms}, price: 1.00/h, kv_tokens: 16000}
    big: {cost: {kind: linear, base: 5ms, per_sequence: 1ms}, price: 2.50/h, kv_tokens: 16000}
  router: least_tokens
  max_replicas: 12
""".replace("HOURS", ", ".join(["20%"] * 12 + ["60%"] * 11 + ["100%"]))


class Sources(HTMLParser):
    """Texts by the data-source they stand under, and those under none, styles and scripts aside."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[tuple[str, str | None]] = []
        self.cells: list[tuple[str, str]] = []
        self.loose: list[str] = []
        self.external: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.external += [v for k, v in attrs if k in ("src", "href") and v and not v.startswith("data:")]
        if tag not in ("meta", "img", "br"):
            self.stack.append((tag, found.get("data-source")))

    def handle_endtag(self, tag: str) -> None:
        self.stack.pop()

    def handle_data(self, data: str) -> None:
        if not data.strip() or any(tag in ("style", "title", "script") for tag, _ in self.stack):
            return
        source = self.stack[-1][1]
        if source is None:
            self.loose.append(data)
        else:
            self.cells.append((source, data))


def parsed(text: str) -> float:
    """A shown number as a plain one: `99.4 %`, `1,234`, `+10 %`, `−0.4 points`, `245 ms`."""
    match = re.fullmatch(r"[>]?([+−]?[\d,.]+(?:e-?\d+)?) ?(%|points|ns|us|ms|s)?", text)
    assert match, f"{text!r} is no number"
    value = float(match[1].replace(",", "").replace("−", "-"))
    return value * {"%": 1e-2, "points": 1e-2, "ns": 1e-9, "us": 1e-6, "ms": 1e-3}.get(match[2] or "", 1.0)


def same(shown: str, value: str) -> bool:
    """Whether a cell is shown as it is: a word as the word, a number to three digits or more, none far below zero."""
    if shown == "below −100 points":
        return float(value) < -1
    if shown == value or (shown == "–" and value == "") or (shown, value) in (("yes", "True"), ("no", "False")):
        return True
    return abs(parsed(shown) - float(value)) <= max(0.006 * abs(float(value)), 5e-7)


QUANTITIES = {"attainment", "step_time", "replicas", "cost_per_month"}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "tiny.yaml").write_text(TINY, encoding="utf-8")
    call = ("plan", folder / "tiny.yaml", "-o", folder / "report", "--out", folder / "results", "--jobs", 1)
    result = batchsim(*call, "--json")
    assert result.exit_code == 0, result.output
    return folder, json.loads(result.stdout)


def test_the_smallest_group_holds_and_one_less_does_not(planned: tuple[Path, Any]) -> None:
    """Of every configuration that holds: the lower end meets every class's objective, one replica less does not."""
    rows = planned[1]["tables"]["configurations"]
    held = [row for row in rows if row["holds"]]
    assert {row["gpu"] for row in held} == {"small", "big"} and {row["policy"] for row in held} == {"continuous"}
    for row in held:
        assert row["margin_low"] >= 0
        assert row["replicas"] == 1 or row["one_less_margin_low"] < 0
    assert all("hardly any traffic" in row["why_not"] for row in rows if not row["holds"])
    best = planned[1]["tables"]["recommendation"][0]
    assert best["cost_per_month"] == min(row["cost_per_month"] for row in held)
    prices = {"small": 1.0, "big": 2.5}
    assert all(row["cost_per_month"] == row["replicas"] * prices[row["gpu"]] * 730 for row in held)
    said = planned[1]["recommendation"]
    assert len(said) == 5 and said[3].startswith("With 30 % more traffic it would take ")
    each = best["cost_per_month"] / best["replicas"]
    assert f"run {best['replicas'] + 1} replicas, EUR {best['cost_per_month'] + each:,.0f} a month" in said[4]


def test_every_number_of_the_page_is_a_cell_of_a_csv(planned: tuple[Path, Any]) -> None:
    """As those of its charts; text outside of cells has no digit, a cell shows what its file has at its place."""
    assert check_page(planned[0] / "report") > 150


@pytest.mark.slow
@pytest.mark.skipif(TRACES is None, reason="BATCHSIM_TRACES names no folder of traces")
def test_copies_of_the_azure_trace_are_planned_for(tmp_path: Path) -> None:
    """With less traffic and a shorter window than shipped: N holds, N - 1 does not, static says what keeps it."""
    fewer = ("plan.window=1min", "plan.target.trace.factor=3")
    overrides = [text for change in fewer for text in ("--set", change)]
    result = batchsim("plan", "plan-azure-conv", "-o", tmp_path / "r", "--out", tmp_path, *overrides, "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["tables"]["configurations"]
    for row in rows:
        if row["policy"] == "static":
            assert "p99 of ttft" in row["why_not"]
        else:
            assert row["margin_low"] >= 0 > row["one_less_margin_low"]
    assert check_page(tmp_path / "r") > 150


def check_page(folder: Path) -> int:
    """Fails where a text of the page is not a cell of a CSV, or has a digit that is in none; how many cells it has."""
    page = (folder / "report.html").read_text(encoding="utf-8")
    found = Sources()
    found.feed(page)
    scripts = re.compile(r"<script.*?</script>", re.DOTALL)
    assert found.external == [] and "http" not in re.sub(r"data:[^\"]*", "", scripts.sub("", page))
    names = {path.name for path in folder.glob("*.csv")}
    files = "|".join(map(re.escape, names))
    loose = [re.sub(f"{files}|(TTFT|TPOT|E2E) p[0-9]+", "", text) for text in found.loose]  # names, not numbers
    assert not [text for text in loose if re.search(r"\d", text)]
    tables = {}
    for name in names:
        with (folder / name).open(encoding="utf-8", newline="") as file:
            tables[name] = list(csv.DictReader(file))
    for source, shown in found.cells:
        file, _, place = source.partition("#")
        row, _, column = place.partition(",")
        value = tables[file][int(row) - 1][column]
        assert value in QUANTITIES or same(shown, value), f"{source}: {shown!r} is not {value!r}"
    charts = [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page)]
    known = {float(value) for rows in tables.values() for row in rows for value in row.values() if _is_number(value)}
    drawn = [value for c in charts for s in c["series"] for name in ("y", "low", "high") for value in s[name]]
    assert drawn and {value for value in drawn if value is not None} <= known
    return len(found.cells)


def _is_number(text: str) -> bool:
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False


def test_the_bill_is_shared_whole(planned: tuple[Path, Any]) -> None:
    """Both ways of sharing the cost among the classes sum to the bill."""
    tables = planned[1]["tables"]
    bill = tables["recommendation"][0]["cost_per_month"]
    for column in ("cost_per_month_tiered", "cost_per_month_by_use"):
        assert sum(row[column] for row in tables["classes"]) == pytest.approx(bill)
    assert [row["class"] for row in tables["classes"]] == ["chat", "rest"]


def test_tables_are_there_as_csv_and_json_and_in_markdown(planned: tuple[Path, Any]) -> None:
    """Every table has both files; the Markdown twin has every section's heading, but for charts alone, and each row of
    a table on a line."""
    folder, printed = planned[0] / "report", planned[1]
    for name, rows in printed["tables"].items():
        assert json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) == rows
        assert (folder / f"{name}.csv").read_text(encoding="utf-8").count("\n") >= len(rows) + 1
    text = (folder / "report.md").read_text(encoding="utf-8")
    page = (folder / "report.html").read_text(encoding="utf-8")
    sections = re.findall(r"<h2>(.*)</h2>", page)
    sections.remove("Latency against load")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == sections
    assert (folder / "report.html").stat().st_size < 5_000_000
    traffic = [line.split(" | ")[0] for line in text.splitlines() if re.match(r"\| \d\d:00-", line)]
    assert traffic == ["| 00:00-01:00 to 11:00-12:00", "| 12:00-13:00 to 22:00-23:00", "| 23:00-00:00"], "alike in one"
    with (folder / "traffic.csv").open(encoding="utf-8", newline="") as file:
        assert len(list(csv.DictReader(file))) == 24


def test_an_interval_that_reaches_below_everything_is_said_in_words() -> None:
    """A margin cannot be below minus one: a number there would be read as one of requests."""
    assert [margin(value) for value in (-1.19, -1.0, -0.004, 0.01)] == [
        "below −100 points",
        "−100 points",
        "−0.4 points",
        "+1 points",
    ]


def test_how_sure_says_once_where_an_error_is_from(planned: tuple[Path, Any]) -> None:
    """A sentence for each source, a table for each error, whose ends are named by what they are of."""
    tables = json.loads(json.dumps(planned[1]["tables"]))
    sampled = tables["sureness"][0]
    known = {"error": "cost model", "low": -0.1, "planned": 0.0, "high": 0.1, "source": "a bench", "note": None}
    tables["sureness"] = [sampled, *(sampled | known | {"quantity": name} for name in ("step_time", "attainment"))]
    sure = next(section for section in sections(tables, "EUR", {}) if section.title == "How sure")
    sources = {row["source"] for row in tables["sureness"]}
    text = Sheet("Capacity plan", "tiny", [sure], []).markdown()
    assert sources and all(text.count(escaped(source)) == 1 for source in sources)
    heads = [view.headings for view in sure.views]
    assert "interval from" in heads[0] and "with the shortest steps" in heads[-1]
    assert [len(view.rows) for view in sure.views] == [1, 2]


def test_columns_are_explained_below_their_table(planned: tuple[Path, Any]) -> None:
    """Each table has the meanings of its own columns on the page, and as a list in Markdown."""
    folder = planned[0] / "report"
    page, text = ((folder / name).read_text(encoding="utf-8") for name in ("report.html", "report.md"))
    classes = page[page.index("<h2>What each class gets") :]
    assert classes.index("replicas, with classes above</th>") < classes.index("fewest replicas found to hold")
    assert classes.index("fewest replicas found to hold") < classes.index("<h2>What if")
    assert "- *replicas, with classes above*: fewest replicas found to hold" in text


def test_a_margin_below_all_is_left_out_of_sentences(planned: tuple[Path, Any]) -> None:
    """The class that is worst with one replica less stays; the tables keep the margin in words."""
    tables = json.loads(json.dumps(planned[1]["tables"]))
    for row in tables["configurations"]:
        row |= {"one_less": 0.4, "one_less_shown": "fails", "one_less_margin_low": -1.2, "one_less_class": "chat"}
    text = " ".join(plan_text(tables, "EUR").split())
    assert "points" not in text.partition("Run ")[0].partition("one less (lower")[2]
    assert "one replica less gives 40 % and fails (worst: chat)." in text
    assert "below −100 points" in Sheet("Capacity plan", "tiny", sections(tables, "EUR", {}), []).markdown()


def test_a_page_opens_with_the_decision_and_ends_with_closed_appendices(planned: tuple[Path, Any]) -> None:
    """The reasons come second, then the share within the SLO against load; what a decision does not need waits in
    folds."""
    page = (planned[0] / "report" / "report.html").read_text(encoding="utf-8")
    heads = re.findall(r"<h2>(.*)</h2>", page)
    assert heads[:3] == ["Recommendation", "Why", "Within the SLO against load"]
    folds = ["The rest of the traffic", "What if", "How sure", "Assumptions", "All configurations"]
    assert re.findall(r"<details><summary><h2>(.*)</h2>", page) == heads[-5:] == folds
    charts = [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page)]
    within = charts[0]
    replicas = planned[1]["tables"]["recommendation"][0]["replicas"]
    assert f"{replicas} replicas" in [series["label"] for series in within["series"]]
    assert within["target"] is None and charts[1]["target"] == 0.0, "each class has an objective of its own"


def test_a_second_plan_simulates_nothing_anew(planned: tuple[Path, Any]) -> None:
    """Other prices change no simulation; the table follows them, in at most 100 columns."""
    folder = planned[0]
    before = {path.name for path in (folder / "results" / "tiny" / "points").iterdir()}
    call = ("plan", folder / "tiny.yaml", "-o", folder / "again", "--out", folder / "results", "--jobs", 1)
    result = batchsim(*call, "--set", "plan.gpus.big.price=2.40/h")
    assert result.exit_code == 0, result.output
    assert {path.name for path in (folder / "results" / "tiny" / "points").iterdir()} == before
    assert max(map(len, result.stdout.splitlines()[:-4])) <= 100


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_a_phone_shows_what_survives_what_and_the_price(planned: tuple[Path, Any], tmp_path: Path) -> None:
    """Of the first table all columns but the last, which says the same in words, without scrolling; and the page is as
    wide as the screen, in light and dark."""
    with browser(tmp_path) as tab:
        for dark in (False, True):
            tab.open((planned[0] / "report" / "report.html").as_uri(), 390, dark=dark)
            ends = tab.run("[...document.querySelectorAll('.lead th')].map((e) => e.getBoundingClientRect().right)")
            heads = tab.run("[...document.querySelectorAll('.lead th')].map((e) => e.textContent)")
            assert heads[-2:] == ["cost a month (EUR)", "choice"] and ends[-2] <= 390
            assert tab.run("document.documentElement.scrollWidth") <= 390


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "peak_rps"), [("{rate: 30/s}", 30.0), ("{diurnal: {peak: 30/s, hours: [HOURS]}}", 30.0)]
)
def test_costs_are_of_the_stated_rate(tmp_path: Path, target: str, peak_rps: float) -> None:
    """Not of the requests that two seeds happened to draw; what they drew is kept beside it, and goodput is within."""
    (tmp_path / "tiny.yaml").write_text(TINY, encoding="utf-8")
    hours = ", ".join(["50%"] * 23 + ["100%"])
    changes = [f"plan.target={target.replace('HOURS', hours)}", "plan.growth={per_month: 0%, months: 0}", "seeds=2"]
    overrides = [text for change in changes for text in ("--set", change)]
    result = batchsim("plan", tmp_path / "tiny.yaml", "--out", tmp_path, "--jobs", 1, *overrides, "--json")
    assert result.exit_code == 0, result.output
    tables = json.loads(result.stdout)["tables"]
    chosen, parts = tables["recommendation"][0], tables["traffic"]
    assert chosen["peak_rps"] == peak_rps
    assert [part["rate_rps"] for part in parts] == [peak_rps * part["share_of_peak"] for part in parts]
    mean_rps = sum(part["rate_rps"] for part in parts) / len(parts)
    per_request = chosen["cost_per_month"] / (mean_rps * 730 * 3600)
    held = next(
        row for row in tables["configurations"] if (row["gpu"], row["policy"]) == (chosen["gpu"], chosen["policy"])
    )
    output_tokens = 1e6 * per_request / held["cost_per_1m_output_tokens"]
    assert output_tokens == pytest.approx(7, rel=0.1)  # uniform from 2 to 12
    busiest = max(parts, key=lambda part: part["rate_rps"])
    assert busiest["cost_per_1m_output_tokens"] == pytest.approx(
        busiest["cost_per_hour"] / (peak_rps * output_tokens * 3600) * 1e6
    )
    probes = [row for row in tables["probes"] if row["traffic"] == 1 and row["classes"] == "" and not row["failed"]]
    assert all(row["offered_rps"] == peak_rps and row["goodput_rps"] <= peak_rps for row in probes)
    assert any(row["drawn_rps"] != peak_rps for row in probes)


def test_what_is_not_shown_to_hold_is_not_said_to_fail(planned: tuple[Path, Any]) -> None:
    """In the terminal's table, in the second sentence and in Markdown, the lower margin and the class beside it."""
    tables = json.loads(json.dumps(planned[1]["tables"])) | {"glossary": []}
    best = tables["recommendation"][0]
    key = (best["gpu"], best["policy"])
    row = next(row for row in tables["configurations"] if (row["gpu"], row["policy"]) == key)
    assert row["one_less_shown"] == ("fails" if row["one_less_margin"] < 0 else "not shown to hold")
    assert row["one_less_class"] in ("chat", "rest")
    row |= {"one_less": 0.962, "one_less_margin": 0.012, "one_less_margin_low": -0.0041, "one_less_class": "chat"}
    for shown, verb in (("not shown to hold", "is not shown to hold"), ("fails", "fails")):
        row["one_less_shown"] = shown
        text = plan_text(tables, "EUR")
        assert f"96.2 % {shown} (−0.41 points)" in text
        sentence = f"one replica less gives 96.2 % and {verb} (lower end of its margin: −0.41 points, of chat)."
        assert sentence in " ".join(text.split())
        twin = Sheet("Capacity plan", "tiny", sections(tables, "EUR", {}), []).markdown()
        assert sentence in twin and f"| 96.2 % | {shown} | −0.41 points | chat |" in twin


def test_what_rests_on_one_seed_is_said(planned: tuple[Path, Any]) -> None:
    """In the terminal's lines of what fails, in the column of seeds, and of what no number of replicas holds."""
    tables = planned[1]["tables"]
    failing = [row for row in tables["what_if"] if row["holds"] is False]
    alone = [row for row in failing if row["seeds"] == 1]
    assert alone and len(alone) < len(failing) and all(row["attainment_low"] is None for row in alone)
    lines = [line for line in plan_text(tables, "EUR").splitlines() if line.startswith("! ")]
    assert ["within the SLO in one seed" in line for line in lines] == [row in alone for row in failing]
    shown = sections(tables | {"glossary": []}, "EUR", {})
    twin = Sheet("Capacity plan", "tiny", shown, []).markdown()
    assert "| within SLO | seeds |" in twin


def test_one_replica_is_no_plural(planned: tuple[Path, Any]) -> None:
    """And an interval whose ends are shown alike is not told as if it went from one to the other."""
    tables = json.loads(json.dumps(planned[1]["tables"]))
    best = tables["recommendation"][0]
    for row in tables["configurations"]:
        row |= {"replicas": 1, "headroom": 0.1, "one_less": None, "one_less_shown": None}
    for row in tables["sureness"]:
        if (row["gpu"], row["policy"], row["error"]) == (best["gpu"], best["policy"], "sampling"):
            row |= {"low": 0.999999, "high": 0.999998}
    text = " ".join(plan_text(tables, "EUR").split())
    assert "Run 1 replica on" in text and "the same replica holds" in text
    assert "Sampling leaves >99.99 % within the SLO at both ends of the interval" in text


@pytest.mark.slow
def test_a_long_window_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On stderr and before anything is simulated: requests, seeds and replicas, of the window that is asked for."""
    (tmp_path / "tiny.yaml").write_text(TINY, encoding="utf-8")
    monkeypatch.setattr("batchsim.study.planning.make.LONG", 1000)
    result = batchsim("plan", tmp_path / "tiny.yaml", "--out", tmp_path, "--jobs", 1, "--set", "plan.max_replicas=1")
    printed = " ".join(result.stderr.split())
    assert "about 454 requests (2 s and 500 ms of warm-up at 181.5 requests/s)" in printed
    assert "in each of 2 seeds, first on 1 replica, for each of 4 configurations" in printed


def test_a_line_now_and_then_says_how_far_it_is() -> None:
    """None before the first half minute is over, then at most one for each; what was said before does not count."""
    said: list[str] = []
    now_s = [100.0]
    progress = line_now_and_then(said.append, lambda: now_s[0])
    for at_s in (100.0, 129.0, 130.0, 140.0, 159.9, 161.0, 3830.0):
        now_s[0] = at_s
        progress(int(at_s), 5000, "fcfs")
    assert said == [
        "after 0:00:30: 130 of the 5,000 points now asked for, fcfs",
        "after 0:01:01: 161 of the 5,000 points now asked for, fcfs",
        "after 1:02:10: 3,830 of the 5,000 points now asked for, fcfs",
    ]


@pytest.mark.slow
def test_where_stderr_is_no_terminal_progress_is_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On stderr alone, so that stdout is what it is without."""
    (tmp_path / "tiny.yaml").write_text(TINY, encoding="utf-8")
    monkeypatch.setattr("batchsim.cli.common.EVERY_S", 0.0)
    few = ("plan.max_replicas=1", "plan.target={rate: 10/s}", "plan.window=1s", "seeds=2")
    few += ("policies={continuous: {max_num_seqs: 4, max_num_batched_tokens: 256}}", "slo=ttft<300ms @ 50%")
    overrides = [text for change in few for text in ("--set", change)]
    result = batchsim("plan", tmp_path / "tiny.yaml", "--out", tmp_path, "--jobs", 1, *overrides)
    lines = [line for line in result.stderr.splitlines() if line.startswith("after 0:")]
    assert len(lines) >= 2 and all(" points now asked for, " in line for line in lines)
    assert "now asked for" not in result.stdout


def test_a_target_that_nothing_holds_says_what_bounds_it(planned: tuple[Path, Any]) -> None:
    """One line with a reason for each configuration, exit code 2; the tables are there all the same."""
    folder = planned[0]
    call = ("plan", folder / "tiny.yaml", "-o", folder / "none", "--out", folder / "results", "--jobs", 1)
    result = batchsim(*call, "--set", "plan.max_replicas=1")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "no configuration holds the traffic" in result.stderr
    assert "max_replicas 1" in result.stderr and "hardly any traffic" in result.stderr
    assert (folder / "none" / "configurations.csv").is_file()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("plan=null", "batchsim init --plan writes a scenario with one"),
        ("slo=p99(ttft)<1s", "bounds percentiles, and a plan counts who meets it"),
        ("seeds=1", "seeds is 1, and one has no interval"),
        ("replicas={count: 2, router: random}", "replicas and plan are given"),
        ("plan.router=nowhere", "nowhere"),
        ("workload.arrivals.mean_rate=9/s", "a plan reads plan.target in its place"),
        ("cost.base=9ms", "a plan reads plan.gpus in its place"),
    ],
)
def test_what_no_plan_can_be_made_of_is_one_line(tmp_path: Path, change: str, complaint: str) -> None:
    """Nothing is simulated before the inputs are checked."""
    (tmp_path / "tiny.yaml").write_text(TINY, encoding="utf-8")
    result = batchsim("plan", tmp_path / "tiny.yaml", "--out", tmp_path / "results", "--set", change, "--jobs", 1)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output
    assert complaint in result.stderr
    assert not (tmp_path / "results").exists()
