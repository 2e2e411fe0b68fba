"""A plan's charts: the share within the SLO and latencies against load, the day. All values are cells of its tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from batchsim.base.errors import ScenarioError
from batchsim.base.units import counted
from batchsim.metrics.latencies import holds_queue
from batchsim.metrics.slo import parse_slo
from batchsim.report.page.plan_columns import Row, Tables, one_seed_alone, share
from batchsim.report.pictures.palette import OKABE_ITO
from batchsim.report.sheet import Chart, ChartAxis, Series
from batchsim.study.planning.probe_rows import asked_latencies

_UNCHANGED: dict[str, Any] = {"dispersion": 1, "prompts": 1.0, "classes": "", "cost_factor": 1.0}
_UNCHANGED |= {"slo_factor": 1.0, "window_share": 1.0}
_USUAL = {"ttft_p99_s": "TTFT p99", "tpot_p99_s": "TPOT p99"}
_LOAD = ChartAxis("requests/s offered")


def slo_charts(tables: Tables) -> list[Chart]:
    """The share of requests within the SLO against load, by number of replicas of the recommended configuration. Where
    every class has an objective of its own also the lower end of what the worst of them has beyond it."""
    groups = list(_groups(tables))
    if not groups:
        return []
    target = _target(tables)
    within = ChartAxis("within the SLO", "share", "nines")
    caption = "Share within the SLO against load"
    lines = _lines(groups, "attainment", interval=True)
    charts = [Chart(caption, _LOAD, within, lines, target, note="Shaded: the interval of sampling.")]
    if target is None:
        beyond = ChartAxis("points, lower end", "points", "signed")
        worst = "The least that the worst class has beyond its objective"
        left_out = any(row["margin_low"] is None for _, rows in groups for row in rows)
        note = "Where one seed alone was simulated there is no interval, and no mark." if left_out else ""
        charts.append(Chart(worst, _LOAD, beyond, _lines(groups, "margin_low"), 0.0, note=note))
    return [_noted(chart) for chart in charts]


def _noted(chart: Chart) -> Chart:
    """The chart with what its open marks mean, where it has some."""
    if not any(any(series.hollow) for series in chart.series):
        return chart
    note = "Open marks: one seed alone was simulated, and there is no interval."
    return replace(chart, note=" ".join(filter(None, (chart.note, note))))


def latency_charts(tables: Tables) -> list[Chart]:
    """Latencies against load, by number of replicas of the recommended configuration, beside what is asked of them: a
    chart for each class and bound of its objective; where there are no classes for each bound, TTFT and TPOT anyway."""
    groups = list(_groups(tables))
    seconds = ChartAxis("", "seconds", "log")
    charts = []
    for name, objective in _objectives(tables).items():
        asked = {each.column: each for each in asked_latencies(objective, name)}
        titles = ({} if name else _USUAL) | {column: each.title for column, each in asked.items()}
        for column, title in titles.items():
            caption = f"{title} of {name} against load" if name else f"{title} against load"
            # where there is a TPOT there is a TTFT: one that is missing is open
            known = [row for _, rows in groups for row in rows if row["tpot_p99_s"] is not None]
            left_out = holds_queue(column) and any(row[column] is None for row in known)
            note = "Within the cost's error of saturation there is no number, and no mark." if left_out else ""
            chart = Chart(caption, _LOAD, seconds, _lines(groups, column), note=note)
            if column in asked:
                said = f"asked of {share(asked[column].share)}"
                chart = replace(chart, target=asked[column].limit_s, asked=said)
            charts.append(chart)
    return [_noted(chart) for chart in charts if chart.series]


def _objectives(tables: Tables) -> dict[str, str]:
    """The objective of each class; where there is one for all requests, and no classes, under an empty name."""
    if "classes" in tables:
        return {row["class"]: row["slo"] for row in tables["classes"]}
    return {"": tables["recommendation"][0]["slo"]} if "recommendation" in tables else {}


def day_charts(tables: Tables) -> list[Chart]:
    """The traffic, the replicas that are enough for it, and the share within the SLO, over the parts of the day."""
    rows = tables.get("traffic", [])
    if len(rows) < 2:
        return []
    parts = ChartAxis("from", names=[str(row["part"]).partition("-")[0] for row in rows])
    drawn = {
        "rate_rps": ("Requests/s", ChartAxis("requests/s")),
        "replicas_enough": ("Replicas enough", ChartAxis("replicas")),
        "attainment": ("Requests within the SLO", ChartAxis("within the SLO", "share", "nines")),
    }
    x = list(range(len(rows)))
    return [
        Chart(
            caption,
            parts,
            axis,
            [Series(caption, OKABE_ITO[i], x, [row[column] for row in rows])],
            _target(tables) if column == "attainment" else None,
        )
        for i, (column, (caption, axis)) in enumerate(drawn.items())
    ]


def _target(tables: Tables) -> float | None:
    """The share of all requests that must meet the SLO; None where classes have objectives of their own, or none is a
    share of requests."""
    try:
        return parse_slo(tables["recommendation"][0]["slo"]).share
    except ScenarioError:  # words that say that each class has its own
        return None


def _groups(tables: Tables) -> Iterator[tuple[int, list[Row]]]:
    """The probes of the recommended configuration whose traffic alone was changed, by number of replicas: of those
    beside the recommended number, and of others that were tried at several loads."""
    chosen = tables.get("recommendation", [])
    wanted = _UNCHANGED | {name: chosen[0][name] for name in ("gpu", "policy")} if chosen else {}
    rows = [row for row in tables["probes"] if chosen and all(row[name] == value for name, value in wanted.items())]
    near = {chosen[0]["replicas"] + off for off in (-1, 0, 1)} if chosen else set()
    for replicas in sorted({row["replicas"] for row in rows}):
        group_rows = [row for row in rows if row["replicas"] == replicas and row["offered_rps"] is not None]
        if group_rows and (replicas in near or len(group_rows) > 1):
            yield replicas, sorted(group_rows, key=lambda row: row["offered_rps"])


def _lines(groups: list[tuple[int, list[Row]]], column: str, *, interval: bool = False) -> list[Series]:
    """A line for each number of replicas, of the probes that have a value of `column`."""
    series = []
    for i, (replicas, rows) in enumerate(groups):
        known = [row for row in rows if row[column] is not None]
        if not known:
            continue
        name = counted(replicas, "replica")
        # A line joins means over the same seeds: what one seed alone gave lies beside it.
        for alone in (False, True):
            rows_ = [row for row in known if one_seed_alone(row) == alone]
            if not rows_:
                continue
            low, high = ([row[f"{column}_{end}"] for row in rows_] if interval else [] for end in ("low", "high"))
            x, y = ([row[key] for row in rows_] for key in ("offered_rps", column))
            label, color = name + ", one seed" * alone, OKABE_ITO[i % len(OKABE_ITO)]
            hollow = [alone] * len(rows_)
            series.append(Series(label, color, x, y, low, high, joined=not alone, hollow=hollow))
    return series
