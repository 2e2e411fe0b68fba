"""Policies side by side, a row each: metrics at a load, or the marks of a curve; on the screen and on a page alike."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from batchsim.base.errors import ScenarioError
from batchsim.metrics.latencies import LATENCIES, holds_queue
from batchsim.metrics.table import METRICS
from batchsim.report.cost_words import at_ends
from batchsim.report.layout import aligned, fit
from batchsim.report.numbers import DASH, per_token_text, percent_text, rate_text, rounded, time_text
from batchsim.report.reading import PolicyCurve, load_name, short_load, sweeps, texts
from batchsim.report.sheet import Cell, Table
from batchsim.results.decision import Decision
from batchsim.results.knobs import asks_for_no_tokens
from batchsim.results.landmarks import Crossing, Knee
from batchsim.results.read import Results, curve_marks

BOUND_BY = "bound_by"
_CLASS = re.compile(r"(?P<metric>[^\[\]]+)(?P<of>\[[^\[\]]+\])?")
_HITS = "prefix_hit_rate"
_BRIEF = {"throughput_rps": rate_text, "norm_latency_mean_s": per_token_text}
"""How columns of the usual table are written, which has no room for their intervals."""
_UNITS = {"share": "", "s": "", "yes or no": "", "W": " W", "J": " J"}


def asked_columns(text: str, classes: Iterable[str]) -> list[str]:
    """The columns of summary.csv that `text` names, comma by comma: metrics by their name, without the unit `_s` too,
    or by what stands above them in tables, of one of `classes` with `[CLASS]`. ScenarioError, with the names near it,
    for one that there is not."""
    short = {metric.heading.replace(" ", "_"): name for name, metric in METRICS.items()}
    known = {**short, **{name.removesuffix("_s"): name for name in METRICS}, **{name: name for name in METRICS}}
    columns: list[str] = []
    for part in text.split(","):
        match = _CLASS.fullmatch(part.strip())
        name = match["metric"].strip().replace(" ", "_") if match else part.strip()
        of = (match["of"] if match else "") or ""
        if name == BOUND_BY and not of:
            columns.append(BOUND_BY)
            continue
        if match is None or name not in known:
            near = [each for each in known.values() if name and name in each]
            near += [known[each] for each in difflib.get_close_matches(name, known, n=3)]
            listed = ", ".join(dict.fromkeys(near[:6])) or "columns of summary.csv, like preemptions, makespan_s, hit"
            raise ScenarioError(f"--columns {text}: {part.strip() or 'nothing'} is no metric. Write one of {listed}.")
        if of and of[1:-1] not in (names := list(classes)):
            has = f"one of {', '.join(names)}" if names else "no class: the workload has none"
            raise ScenarioError(f"--columns {text}: {of[1:-1]} is no class. Write {has}.")
        columns.append(known[name] + of)
    return columns


def usual_columns(results: Results, shown: Sequence[tuple[PolicyCurve, int]]) -> list[str]:
    """The columns of the table of (curve, index of a load) where none are asked for. `ttft` and `tpot` are percentiles
    of completed requests, `s/token` the mean normalised latency, `in SLO` the share of offered requests that meets the
    SLO, `done/s` completions per second of the arrival window, `pad` the share of padding; `hit`, where a policy found
    something in a prefix cache, the share of the prompts' tokens found there."""
    columns = ["ttft_p50_s", "ttft_p99_s", "tpot_p99_s", "norm_latency_mean_s"]
    if asks_for_no_tokens(results.scenario):
        columns = ["e2e_p50_s", "e2e_p99_s", "queue_time_mean_s"]
    columns += ["task_e2e_p50_s", "task_e2e_p99_s"] if "task_e2e_p50_s" in results.summary else []
    columns += ["in_slo", "throughput_rps", "pad_share"]
    if _HITS in results.summary and any(not math.isnan(sweep.values(_HITS)[i]) for sweep, i in shown):
        columns.append(_HITS)
    return [*columns, BOUND_BY]


def policy_table(
    results: Results, shown: Sequence[tuple[PolicyCurve, int]], columns: Sequence[str], *, brief: bool = False
) -> Table:
    """A row for each policy and index of its loads: its label and `columns`, among which may be `load`; as the usual
    table writes them where it is `brief`."""
    rows = [
        tuple(metric_cell(results, sweep, i, column, brief=brief) for column in ("label", *columns))
        for sweep, i in shown
    ]
    heads = [METRICS[column].heading if brief and column in METRICS else heading_of(column) for column in columns]
    return Table("summary", ("policy", *heads), tuple(rows))


def said_once(table: Table, last: str) -> Table:
    """The table with `unstable` and `failed` in the column headed `last` alone; a dash in a row's other cells."""
    at = table.headings.index(last)
    rows = [
        tuple(
            replace(cell, text=DASH) if i != at and cell.is_number and cell.text in ("unstable", "failed") else cell
            for i, cell in enumerate(row)
        )
        for row in table.rows
    ]
    return replace(table, rows=tuple(rows))


def metric_cell(results: Results, sweep: PolicyCurve, i: int, column: str, *, brief: bool = False) -> Cell:
    """The cell of summary.csv of a policy at its `i`-th load: its label, the `load` or the metric `column`."""
    place = results.summary.index.get_loc(sweep.rows.index[i])
    assert isinstance(place, int), "one row a policy and load"
    if column == "label":
        return Cell("summary", place, column, sweep.labels[i])
    if column == "load":
        load = float(sweep.loads[i])
        return Cell("summary", place, column, short_load(texts(sweep.rows, "load_name")[i], load) or f"{load:g}", True)
    return Cell("summary", place, column, cell_of(sweep, i, column, brief=brief), column != BOUND_BY)


def heading_of(column: str) -> str:
    """What stands above a column: the metric's heading and its unit, where its values do not show it, and its class."""
    if column in (BOUND_BY, "load"):
        return column.replace("_", " ")
    name, bracket, of = column.partition("[")
    metric = METRICS[name]
    unit = "" if metric.unit in _UNITS or metric.unit in metric.heading else f" ({metric.unit})"
    return f"{metric.heading}{unit}{f' {bracket}{of}' if bracket else ''}"


def cell_of(curve: PolicyCurve, i: int, column: str, *, brief: bool = False) -> str:
    """The value of a column at the curve's `i`-th load, with half its 95 % interval. Where the queue grows a latency
    with time in it is `unstable`, and any other has a star: it is of the requests completed. Within the cost's error of
    saturation the value at both ends, a dash where there are none. `brief`: as the usual table writes it."""
    if column == BOUND_BY:
        return texts(curve.rows, BOUND_BY)[i]
    metric = METRICS[column.partition("[")[0]]
    if curve.failed[i]:
        return "failed"
    if column not in curve.rows:
        return DASH
    if curve.within_error[i] and f"{column}_fast" in curve.rows:
        return at_ends(curve, i, column)
    if metric.name == "slo_met" and curve.untold[i]:
        return DASH
    latency = metric.unit == "s" and metric.name.startswith((*LATENCIES, "task_e2e"))
    grows = bool(curve.unstable[i]) and latency
    if grows and holds_queue(column):
        return "unstable"
    value, half = float((curve.stable if latency and not grows else curve.values)(column)[i]), math.nan
    if f"{column}_ci" in curve.rows:
        half = float(curve.half_width(column)[i])
    if math.isnan(value):
        return DASH
    weak = "~" if curve.weak(column)[i] else ""
    if brief and column in _BRIEF:
        return weak + _BRIEF[column](value)
    if metric.unit == "s":
        return weak + time_text(value, half) + "*" * grows
    if metric.unit == "share":
        return percent_text(value)
    if metric.unit == "yes or no":
        return {0.0: "no", 1.0: "yes"}.get(value, percent_text(value))
    number = rounded(value, half, 1) if half > 0 else f"{value:,.0f}" if value.is_integer() else f"{value:,.4g}"
    return number + _UNITS.get(metric.unit, "")


def vary_line(results: Results) -> str:
    """One line: the varied key, its values, and whether the requests change with them."""
    vary = results.manifest["vary"]
    same = "the same requests" if vary["same_requests"] else "the requests change with it"
    return f"varied: {vary['key']} = {', '.join(map(str, vary['values']))} · {same}"


def curve_table(results: Results) -> list[str]:
    """The table's lines: each policy's saturation rate, knee, highest load that surely meets the SLO, SLO crossing, and
    load from which the queue grows."""
    name, marks = load_name(results), curve_marks(results)
    grid = [["", "saturation", "knee", "SLO sure", "crossed at", "queue grows"]]
    for sweep in sweeps(results):
        landmarks, sure = marks[sweep.policy], Decision(sweep.name, tuple(sweep.judged)).sure
        rate = f"{results.manifest['saturation_rps'][sweep.policy]:.3g} req/s"
        met, ends = DASH if sure is None else f"{sure:g}", (_crossed(landmarks.crossing), _grows(sweep, name))
        grid.append([sweep.name, rate, _knee(landmarks.knee), met, *ends])
    doubt = " · in doubt: within the cost's error of saturation" if any("in doubt" in row for row in grid) else ""
    unit = {"mean_rate": "req/s", "users": "users", "rate_scale": "times the trace's rate"}[name]
    legend = (
        f"loads in {unit} · saturation: completions under overload · knee: greatest power, throughput / mean e2e ·"
        f" SLO sure: highest tested that surely meets {results.manifest['objective']} · crossed: on average,"
        f" interpolated between the tested loads in brackets{doubt}"
    )
    return [*aligned(grid, left=(0,)), fit(legend)]


def _knee(knee: Knee | None) -> str:
    if knee is None:
        return DASH
    return f"{knee.load:g} ({_between(knee.low, knee.high)})"


def _crossed(crossing: Crossing) -> str:
    """The load at which the SLO is crossed: `7.4 (7.2–7.8)`, or on which side of all tested loads it lies."""
    if crossing.low is None:
        return "never" if crossing.high is None else f"never, from {crossing.high:g} on"
    if crossing.high is None:
        return f"above {crossing.low:g}"
    at = "" if crossing.load is None else f"{crossing.load:.3g} "
    return f"{at}({_between(crossing.low, crossing.high)})"


def _between(low: float | None, high: float | None) -> str:
    if low is None:
        return DASH if high is None else f"below {high:g}"
    return f"above {low:g}" if high is None else f"{low:g}–{high:g}"


def _grows(sweep: PolicyCurve, name: str) -> str:
    if sweep.unstable_from is not None:
        return f"from {sweep.unstable_from:g}"
    if sweep.unstable.any():
        return "in doubt"
    return "not judged" if name == "users" else "at none tested"
