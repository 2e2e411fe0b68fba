"""A validation as text: what `batchsim validate` prints, and the Markdown page it writes."""

from __future__ import annotations

import json
from collections.abc import Sequence

from batchsim.base.files import Kind
from batchsim.check.validation.compare_runs import CALM, SHIFTED, SPREADS, ComparedRun, PointReport
from batchsim.check.validation.load_shift import REACH
from batchsim.check.validation.step_error import RegionError
from batchsim.check.validation.verdicts import all_steps
from batchsim.metrics.table import METRICS
from batchsim.report.cost_words import between
from batchsim.report.layout import aligned, fit
from batchsim.report.markdown import escaped, markdown_table
from batchsim.report.validation_report import Validation

JSON = Kind("validation", rb'\{\n "name": "[^\n]*,\n "scenario": "[^\n]*,\n "heading": "')
PAGE = Kind("page of a validation", b"# Simulated against live: ")
DASH = "–"
_SHOWN = ("ttft_mean_s", "tpot_mean_s", "e2e_mean_s", "e2e_p99_s", "throughput_rps")
LEGEND = (
    "errors in %: simulated / live − 1, ± half the range of the live repeats"
    f" · = within {SPREADS}x that: agrees · ~ fewer than 20 observations beyond the percentile"
    " · drift: the mean of a step of the profile timed again / then − 1 · steps: bias of step times · at par: that bias"
    f" had the machine not drifted, of the runs beside which all readings of that step agree to {100 * CALM:.0f} %"
    f" · shift: load at which the simulation has the live mean E2E / the load − 1; >{100 * REACH:.0f}: beyond ±"
)
DRAFTS = "tokens a decode, with drafts: the simulation's are supposed by the scenario, no prediction"

Grid = list[list[str]]


def report(found: Validation) -> str:
    """The validation in brief for a terminal: warnings, first differing steps, verdicts, the table of errors last."""
    lines = [found.heading]
    if found.saturation_rps:
        lines.append(_saturation(found))
    lines += [f"! {line}" for line in found.warnings()]
    lines.append("first step that differs, in the first live run that counts:")
    for point in found.points:
        lines += [f"- {found.where(point)}: {_parts(run)}" for run in point.counted[:1]]
    if drafts := _drafts(found):
        lines += [DRAFTS, *(f"- {line}" for line in drafts)]
    grid = step_grid(all_steps(found.points))
    verdicts = [f"{v.word}: {v.what} {v.bound}: {v.found}" for v in found.verdicts]
    text = [*lines, "", *aligned(grid, left=(0,), close=True), "", *verdicts, "", LEGEND]
    lines = "\n".join(map(fit, text)).split("\n")
    return "\n".join([*map(fit, lines), *aligned(error_grid(found), left=(0,), close=True)])


def _saturation(found: Validation) -> str:
    rates = " · ".join(f"{name} {rate:.4g}/s" for name, rate in found.saturation_rps.items())
    return f"saturation in simulation, all requests waiting from the start: {rates}"


def _drafts(found: Validation) -> list[str]:
    """What the simulations supposed of draft tokens beside what was counted live; [] without draft tokens."""
    lines: list[str] = []
    for point in found.points:
        if point.drafts is not None:
            length = point.metric("acceptance_length").simulated
            supposed = DASH if length is None else f"{length:.3g}"
            lines.append(
                f"{found.where(point)}: {supposed} simulated, {point.drafts.tokens_per_decode:.3g} live; as measured,"
                f" {point.drafts.law}"
            )
    return lines


def _parts(run: ComparedRun) -> str:
    steps = run.played.records.num_steps
    return f"none in {steps} steps" if run.divergence is None else run.divergence.text


# ---- tables


def error_grid(found: Validation) -> Grid:
    """A row for each point: machine drift, bias of step times as measured and at par, the errors of the main metrics
    with the spread of the live runs, the load-equivalent error.
    """
    grid = [["policy", "load", "drift", "steps", "at par", *(METRICS[name].heading for name in _SHOWN), "shift"]]
    for point in found.points:
        share = "" if point.share is None else f" {point.share:.0%}"
        grid.append(
            [
                f"! {point.policy.name}" if point.unfit else point.policy.name,
                f"{point.load:.3g}{share}",
                *(DASH if x is None else _short(x) for x in (point.drift, point.bias, point.bias_at_par)),
                *(_cell(point, name) for name in _SHOWN),
                _shift(point, "e2e_mean_s"),
            ]
        )
    return grid


def _cell(point: PointReport, name: str) -> str:
    """A metric's error and live spread in %, like `~-3.1±2.0=`: `~` few observations, `=` within the spread."""
    metric = point.metric(name)
    if metric.error_ends is not None:
        return "…".join(map(_short, metric.error_ends))
    if metric.error is None:
        return DASH
    spread = "" if metric.spread is None else f"±{_short(metric.spread).removeprefix('+')}"
    return f"{'~' if metric.few else ''}{_short(metric.error)}{spread}{'=' if point.agrees(metric) else ''}"


def _short(share: float) -> str:
    """A signed share in %, with one decimal below 10 %."""
    return f"{100 * share:+.1f}" if abs(share) < 0.0995 else f"{100 * share:+.0f}"


def _shift(point: PointReport, name: str) -> str:
    if name not in point.shifts:
        return DASH
    shift = point.shifts[name]
    return f">{100 * REACH:.0f}" if shift is None else _short(shift)


def step_grid(rows: Sequence[RegionError]) -> Grid:
    """Step-time errors in %, a row for each region of steps."""
    grid = [["live steps", "n", "of the time", "median", "p95", "bias", "kernels' bias", "host's bias"]]
    for row in rows:
        parts = [DASH if bias is None else f"{100 * bias:+.2f}" for bias in (row.kernel_bias, row.host_bias)]
        numbers = [f"{100 * row.p50:.2f}", f"{100 * row.p95:.2f}", f"{100 * row.bias:+.2f}", *parts]
        grid.append([row.region, f"{row.n:,}", f"{row.share:.0%}", *numbers])
    return grid


def metric_grid(point: PointReport) -> Grid:
    """Every metric of one point, a row each: simulated, live, error and spread."""
    grid = [["", "simulated", "live", "error", "live spread", "", "load-equivalent"]]
    for metric in point.metrics:
        name = metric.name
        percentages = [DASH if x is None else f"{100 * x:+.1f} %" for x in (metric.error, metric.spread)]
        shown = _value(name, metric.simulated)
        if metric.ends is not None:
            shown = between(*(_value(name, end) for end in metric.ends))
            percentages[0] = f"{'…'.join(map(_short, metric.error_ends or ()))} %"
        shift = _shift(point, name) + (" %" if point.shifts.get(name) is not None else "") if name in SHIFTED else ""
        grid.append(
            [
                ("~ " if metric.few else "") + METRICS[name].words,
                shown,
                _value(name, metric.live),
                percentages[0],
                percentages[1].replace("+", "± "),
                "agrees" if point.agrees(metric) else "",
                shift,
            ]
        )
    return grid


def _value(name: str, value: float | None) -> str:
    if value is None:
        return DASH
    unit = METRICS[name].unit
    return f"{1e3 * value:.4g} ms" if unit == "s" else f"{value:.4g}{'/s' if unit.endswith('/s') else ''}"


def _markdown_table(grid: Grid) -> str:
    return markdown_table(grid[0], [False, *([True] * (len(grid[0]) - 1))], grid[1:])


# ---- the page


def markdown(found: Validation, pictures: Sequence[str]) -> str:
    """The validation as a Markdown page: verdicts, errors, step times, every point, and what it was made with."""
    parts = [f"# Simulated against live: {escaped(found.name)}", escaped(found.heading)]
    if found.warnings():
        parts.append("\n".join(f"- **{escaped(line)}**" for line in found.warnings()))
    parts.append(
        _markdown_table(
            [["bound", "asked", "found", ""], *([v.what, v.bound, v.found, v.word] for v in found.verdicts)]
        )
    )
    parts += [_markdown_table(error_grid(found)), LEGEND]
    parts.append("## Step time\n\nPredicted against measured periods of all steps that ran live; errors in %.")
    parts.append(_markdown_table(step_grid(all_steps(found.points))))
    if found.saturation_rps:
        parts.append(_saturation(found))
    parts += [f"![{picture}]({picture})" for picture in pictures]
    if drafts := _drafts(found):
        parts += [DRAFTS, "\n".join(f"- {escaped(line)}" for line in drafts)]
    for point in found.points:
        parts += _page_of(found, point)
    parts.append("## How it was made\n\n```json\n" + json.dumps(found.made, indent=1, ensure_ascii=False) + "\n```")
    return "\n\n".join(parts) + "\n"


def _page_of(found: Validation, point: PointReport) -> list[str]:
    simulated = point.simulated.records
    lines = [f"- simulated: {len(simulated.steps):,} steps, {len(simulated.requests):,} requests"]
    for run in point.runs:
        steps = run.played.records.num_steps
        text = f"void: {run.void}" if run.void else f"first step that differs: {_parts(run)}"
        if run.drift is not None:
            text += f"; drift {100 * run.drift:+.1f} %" + ("" if run.calm else ", not calm")
        lines.append(f"- live, repeat {run.played.repeat}: {steps:,} steps; {text}")
    parts = [f"## {escaped(found.where(point))}", "\n".join(lines)]
    if point.counted:
        parts += [_markdown_table(metric_grid(point)), _markdown_table(step_grid(point.steps))]
    return parts
