"""The page of a capacity search: the policy that sustains the most within the SLO, what breaks first, every load that
was tried."""

from __future__ import annotations

from pathlib import Path

from batchsim.base.files import write_text
from batchsim.report.cost_words import CANNOT_TELL
from batchsim.report.decisions import decision_text
from batchsim.report.page.render import HTML, render
from batchsim.report.pictures.palette import kind_styles
from batchsim.report.reading import AXIS_LABELS
from batchsim.report.sheet import Cell, Chart, ChartAxis, Section, Sentence, Series, Sheet, Table
from batchsim.report.text.capacity_text import (
    asked_share,
    by_cost,
    capacity_cell,
    capacity_table,
    decided,
    first_to_break,
    load_edges,
    number,
    remarks,
    share_or_margin,
    unit,
)
from batchsim.results.heading import heading
from batchsim.study.capacity.book import probes
from batchsim.study.capacity.capacities import CapacityStudy, PolicyCapacity, found_points

_PROBES = ("label", "load", "margin", "margin_low", "margin_high", "verdict", "num_seeds", "requests")


def write_capacity_page(study: CapacityStudy, folder: Path) -> Path:
    """Writes the page of a capacity search into the folder that keeps it and returns its path."""
    said = "Simulated by batchsim. Every number of the tables is a cell of a file beside this page."
    files = ["Beside this page: capacity.csv", "probes.csv", "capacity.json", "scenario.yaml"]
    path = folder / HTML
    write_text(path, render(Sheet("Capacity", study.scenario.name, capacity_sections(study), files), said))
    return path


def capacity_sections(study: CapacityStudy) -> list[Section]:
    """The sections of the page in their order."""
    page = [Section("Decision", decision(study)), Section("Within the SLO against load", charts=[share_chart(study)])]
    page.append(Section("Policies", views=[capacity_table(study)]))
    page.append(Section("Sensitivity and what is not known", [[line] for line in remarks(study)]))
    page.append(Section("Assumptions", [[heading(study.setup)], [f"objective: {study.objective}"]]))
    page.append(Section("Every load tried", views=[_probes(study)], folded=True))
    return page


def decision(study: CapacityStudy) -> list[Sentence]:
    """Sentences: the policy that sustains the most; what breaks first above it; how sure that is."""
    best = study.best
    sure: Sentence = ["The interval is that of the loads at which other seeds might decide otherwise; the error of the"]
    sure += [" step costs is not in it, and moves all of these: see below."]
    if best is None:
        return [[f"Of no policy a highest load within {study.objective} was found: the table says why."], sure]
    first: Sentence = [f"{best.name} sustains the most within {study.objective}: ", capacity_cell(study, best)]
    first += [f" {unit(study)}"]
    others = [p for p in study.policies if p.found.load is not None and p is not best]
    if others:
        after = max(others, key=lambda policy: policy.found.load or 0.0)
        first += [f"; next is {after.name} with ", capacity_cell(study, after)]
    if best.cost is not None:
        first += [
            f". With the longest and the shortest steps that the cost's error allows it is {by_cost(best)}; which"
        ]
        first += [f" {CANNOT_TELL}"]
    second: Sentence = [f"Just above that, what breaks first is {first_to_break(best)}{_use(best)}"]
    name = study.scenario.load_name
    each = "; ".join(f"{p.name}: {decision_text(decided(study, p), name)}" for p in study.policies if p.case.book)
    judged: Sentence = [f"Of the loads tried, at the lower end of the interval, {each}."]
    return [[*first, "."], [*second, "."], judged, sure]


def _use(best: PolicyCapacity) -> str:
    """How the engine is used just below the capacity, which a share of the time alone would not say: it may run steps
    all the time and still have room."""
    steps, kv = (best.at.get(name) for name in ("engine_busy_share", "kv_utilisation_p99"))
    said = "" if steps is None else f"; just below it, steps run {steps:.0%} of the time"
    said += "" if kv is None else f"; {kv:.0%} of the KV blocks are in use at the 99th percentile"
    return said.replace("%", " %")


def share_chart(study: CapacityStudy) -> Chart:
    """The share of requests within the SLO at every load tried, or the margin where the SLO is not one share; the
    capacities' intervals are shaded."""
    policies = [policy for policy in study.policies if policy.case.book]
    colors = [style.color for style in kind_styles([policy.case.spec.kind for policy in policies])]
    asked = asked_share(study)
    loads = [load for policy in policies for load in policy.case.book]
    edges = load_edges(min(loads), max(loads))
    bands = []
    for policy, color in zip(policies, colors, strict=True):
        if policy.found.load is not None:
            low, high = policy.found.low, policy.found.high
            bands.append((edges[0] if low is None else low, edges[1] if high is None else high, color))
    name = study.scenario.load_name
    x = ChartAxis(AXIS_LABELS[name], scale="log" if max(loads) > 8 * min(loads) else "linear")
    y = ChartAxis("margin of the SLO", "share")
    if asked is not None:
        y = ChartAxis("requests within the SLO", "share", "nines")
    lines = [_line(policy, color, asked) for policy, color in zip(policies, colors, strict=True)]
    note = "Shaded from bottom to top: where the verdict is open. Shaded along a line: 95 % intervals over seeds."
    return Chart(study.objective, x, y, lines, asked or 0.0, bands, note=note)


def _line(policy: PolicyCapacity, color: str, asked: float | None) -> Series:
    tried = probes(policy.case.book)
    base = asked or 0.0
    low = [None if p.low is None else base + p.low for p in tried]
    high = [None if p.high is None else base + p.high for p in tried]
    shares = [base + p.margin for p in tried]
    return Series(policy.name, color, [p.load for p in tried], shares, low, high, [p.grows for p in tried])


def _probes(study: CapacityStudy) -> Table:
    """Every load tried; shares where one share is asked for, else margins."""
    asked = asked_share(study)
    shown = {
        "load": number,
        "margin": lambda margin: share_or_margin(margin, asked),
        "margin_low": lambda margin: "–" if margin is None else share_or_margin(margin, asked),
        "margin_high": lambda margin: "–" if margin is None else share_or_margin(margin, asked),
    }
    rows = [
        tuple(Cell("probes", i, c, shown.get(c, str)(row[c]), c not in ("label", "verdict")) for c in _PROBES)
        for i, row in enumerate(found_points(study))
    ]
    what = "margin" if asked is None else "within SLO"
    heads = ("policy", f"load, {unit(study)}", what, "from", "to", "verdict", "seeds", "requests")
    return Table("probes", heads, tuple(rows))
