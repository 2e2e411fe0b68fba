"""The metrics that a user asks onto the screen, by name, in the place of the table's own."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable

from batchsim.base.errors import ScenarioError
from batchsim.metrics.latencies import LATENCIES
from batchsim.metrics.table import METRICS
from batchsim.report.numbers import DASH, percent_text, rounded, time_text
from batchsim.report.reading import PolicyCurve, texts
from batchsim.report.text.cost_lines import at_ends

BOUND_BY = "bound_by"
_CLASS = re.compile(r"(?P<metric>[^\[\]]+)(?P<of>\[[^\[\]]+\])?")
_UNITS = {"share": "", "s": "", "yes or no": "", "W": " W", "J": " J"}


def asked_columns(text: str, classes: Iterable[str]) -> list[str]:
    """The columns of summary.csv that `text` names, comma by comma: metrics by their name, without the unit `_s` too,
    or by what stands above them in tables, of one of `classes` with `[CLASS]`. ScenarioError, with the names near it,
    for one that there is not."""
    short = {metric.heading.replace(" ", "_"): name for name, metric in METRICS.items()}
    known = {**short, **{name.removesuffix("_s"): name for name in METRICS}, **{name: name for name in METRICS}}
    found: list[str] = []
    for part in text.split(","):
        match = _CLASS.fullmatch(part.strip())
        name = match["metric"].strip().replace(" ", "_") if match else part.strip()
        of = (match["of"] if match else "") or ""
        if name == BOUND_BY and not of:
            found.append(BOUND_BY)
            continue
        if match is None or name not in known:
            near = [each for each in known.values() if name and name in each]
            near += [known[each] for each in difflib.get_close_matches(name, known, n=3)]
            listed = ", ".join(dict.fromkeys(near[:6])) or "columns of summary.csv, like preemptions, makespan_s, hit"
            raise ScenarioError(f"--columns {text}: {part.strip() or 'nothing'} is no metric. Write one of {listed}.")
        if of and of[1:-1] not in (names := list(classes)):
            has = f"one of {', '.join(names)}" if names else "no class: the workload has none"
            raise ScenarioError(f"--columns {text}: {of[1:-1]} is no class. Write {has}.")
        found.append(known[name] + of)
    return found


def heading_of(column: str) -> str:
    """What stands above a column: the metric's heading and its unit, where its values do not show it, and its class."""
    if column == BOUND_BY:
        return "bound by"
    name, bracket, of = column.partition("[")
    metric = METRICS[name]
    unit = "" if metric.unit in _UNITS or metric.unit in metric.heading else f" ({metric.unit})"
    return f"{metric.heading}{unit}{f' {bracket}{of}' if bracket else ''}"


def cell_of(curve: PolicyCurve, i: int, column: str) -> str:
    """The value of a column at the curve's `i`-th load, with half its 95 % interval; of a latency where the queue grows
    `unstable`. Within the cost's error of saturation its value at both ends, a dash where there are none."""
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
    if curve.unstable[i] and latency:
        return "unstable"
    value, half = float((curve.stable if latency else curve.values)(column)[i]), math.nan
    if f"{column}_ci" in curve.rows:
        half = float(curve.half_width(column)[i])
    if math.isnan(value):
        return DASH
    weak = "~" if curve.weak(column)[i] else ""
    if metric.unit == "s":
        return weak + time_text(value, half)
    if metric.unit == "share":
        return percent_text(value)
    if metric.unit == "yes or no":
        return {0.0: "no", 1.0: "yes"}.get(value, percent_text(value))
    number = rounded(value, half, 1) if half > 0 else f"{value:,.0f}" if value.is_integer() else f"{value:,.4g}"
    return number + _UNITS.get(metric.unit, "")
