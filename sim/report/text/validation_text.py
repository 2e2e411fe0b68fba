"""A validation as text: what `batchsim validate` prints, of live runs and of measured files, and its Markdown page."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from batchsim.base.files import Kind
from batchsim.check.validation.against import PARTED
from batchsim.check.validation.comparison import SPREADS, Comparison, MetricError
from batchsim.check.validation.live_runs import CALM, LivePoint, LiveRun
from batchsim.check.validation.load_shift import REACH
from batchsim.check.validation.verdicts import all_steps
from batchsim.metrics.table import METRICS
from batchsim.report.cost_words import between
from batchsim.report.layout import Grid, aligned, fit
from batchsim.report.markdown import escaped, markdown_table
from batchsim.report.numbers import DASH
from batchsim.report.text.step_text import step_grid
from batchsim.report.validation_report import Validation

JSON = Kind("validation", rb'\{\n "name": "(?:against-|[^\n]*,\n "scenario": "[^\n]*,\n "heading": ")')
PAGE = Kind("page of a validation", b"# Simulated against (?:live|measured): ")
IMPOSSIBLE = "cannot be"
_ROWS = (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("E2E", "e2e"))
_OF = ("mean", "p50", "p90", "p99")
_RATES = (("requests/s", "throughput_rps"), ("tokens/s", "output_tokens_per_s"))
LEGEND = (
    "errors in %: simulated / measured − 1, ± half the range of the measured repeats"
    f" · = within {SPREADS}x that: agrees · ~ fewer than 20 observations beyond the percentile"
    " · shift: the load (of a closed loop its users) at which the simulation has the measured mean / that of the run"
    f" − 1; >{100 * REACH:.0f}: beyond ±"
)
MACHINE = (
    "drift: the mean of a step of the profile timed again / then − 1, in % · steps: bias of step times · at par: that"
    " bias had the machine not drifted, of the runs beside which all readings of that step agree to"
    f" {100 * CALM:.0f} %"
)
DRAFTS = "tokens a decode, with drafts: the simulation's are supposed by the scenario, no prediction"


def report(validation: Validation) -> str:
    """The validation in brief for a terminal: files, warnings, where they part, verdicts, the table of errors last."""
    lines = [validation.heading, *_saturation(validation), *_files(validation)]
    lines += [f"! {line}" for line in validation.warnings()]
    if parted := _parted(validation):
        lines += [f"{_parted_title(validation)}:", *parted]
    if drafts := _drafts(validation):
        lines += [DRAFTS, *drafts]
    text = [*map(fit, lines), ""]
    if steps := all_steps(validation.live):
        text += [*aligned(step_grid([("", steps)]), left=(0,), close=True), ""]
    if validation.live:
        verdicts = [f"{v.word}: {v.what} {v.bound}: {v.found}" for v in validation.verdicts]
        text += [*map(fit, verdicts), "", fit(MACHINE), *aligned(machine_grid(validation), left=(0, 1), close=True), ""]
    return "\n".join([*text, fit(LEGEND), *aligned(error_grid(validation), left=(0, 1, 2), close=True)])


def _saturation(validation: Validation) -> list[str]:
    """A line with the saturation of each policy; [] where none is known."""
    if validation.judged is None or not validation.judged.saturation_rps:
        return []
    rates = " · ".join(f"{name} {rate:.4g}/s" for name, rate in validation.judged.saturation_rps.items())
    return [f"saturation in simulation, all requests waiting from the start: {rates}"]


def _files(validation: Validation) -> list[str]:
    """A line for each measured file, and for each of its runs how its client sent and what is to be known of it."""
    lines: list[str] = []
    replayed = [point for point in validation.points if not isinstance(point, LivePoint)]
    for point in {tuple(map(id, point.runs)): point for point in replayed}.values():
        run = point.runs[0]
        files = ", ".join(each.source for each in point.runs)
        head = f"{files}: {run.form}{f' {run.version}' if run.version else ''}"
        lines += [] if head in lines else [head]
        count = "aggregates" if run.requests is None else f"{len(run.requests):,} requests"
        about = f"{run.part + ': ' if run.part else ''}{count}, {run.client}"
        lines.append("".join([f"- {about}", *(f" · ! {note}" for note in point.notes)]))
    return lines


def _parted_title(validation: Validation) -> str:
    if validation.live:
        return "first step that differs, in the first live run that counts"
    return f"first request whose TTFT or TPOT parts by {100 * PARTED:.0f} %"


def _parted(validation: Validation) -> list[str]:
    """Where each simulation parts from what was measured; [] where neither steps nor requests are known."""
    lines: list[str] = []
    for point in validation.points:
        if isinstance(point, LivePoint):
            lines += [f"- {validation.where(point)}: {_first_step(run)}" for run in point.counted[:1]]
        elif point.runs[0].requests is not None:
            lines.append(f"- {validation.where(point)}: {point.parting.text if point.parting else 'none'}")
    return lines


def _first_step(run: LiveRun) -> str:
    return f"none in {run.played.records.num_steps} steps" if run.divergence is None else run.divergence.text


def _drafts(validation: Validation) -> list[str]:
    """What the simulations supposed of draft tokens beside what was counted live; [] without draft tokens."""
    lines: list[str] = []
    for point in validation.live:
        if point.drafts is not None:
            length = point.error("acceptance_length").simulated
            supposed = DASH if length is None else f"{length:.3g}"
            lines.append(
                f"- {validation.where(point)}: {supposed} simulated, {point.drafts.tokens_per_decode:.3g} live; as"
                f" measured, {point.drafts.law}"
            )
    return lines


# ---- tables


def error_grid(validation: Validation) -> Grid:
    """Rows of each point: a latency each with its errors, then the rates."""
    rows: Grid = [["policy", "run", "", validation.beside, "simulated", "mean", "P50", "P90", "P99", "shift"]]
    for point in validation.points:
        first = [f"! {point.policy}" if point.unfit else point.policy, _run_cell(point)]
        own = [row for row in (*_latency_rows(point), *_rate_rows(point)) if row]
        own = own or [["nothing to compare", *[DASH] * 7]]
        rows += [[*(first if number == 0 else ["", ""]), *row] for number, row in enumerate(own)]
    return rows


def _run_cell(point: Comparison) -> str:
    if not isinstance(point, LivePoint):
        return point.part
    return f"{point.load:.3g}" + ("" if point.share is None else f" {point.share:.0%}")


def _latency_rows(point: Comparison) -> Grid:
    """A row for each latency that is known on a side."""
    names = {error.name for error in point.errors}
    rows: Grid = []
    for title, latency in _ROWS:
        if f"{latency}_mean_s" not in names:
            continue
        errors = [point.error(f"{latency}_{of}_s") for of in _OF]
        mean = errors[0]
        simulated = _value(mean.simulated, _ms) if mean.ends is None else between(*map(_ms, mean.ends))
        impossible = _impossible(point, mean.name)
        if impossible is not None:
            rows.append([title, _ms(impossible), simulated, IMPOSSIBLE, DASH, DASH, DASH, DASH])
        elif any(error.error is not None or error.ends is not None for error in errors):
            cells = [_cell(point, error) for error in errors]
            rows.append([title, _value(mean.live, _ms), simulated, *cells, _shift(point, mean.name)])
    return rows


def _rate_rows(point: Comparison) -> Grid:
    rows: Grid = []
    for title, name in _RATES:
        error, impossible = point.error(name), _impossible(point, name)
        if impossible is not None:
            rows.append([title, _number(impossible), _number(error.simulated or 0), IMPOSSIBLE, "", "", "", ""])
        elif error.error is not None:
            measured, simulated = _value(error.live, _number), _value(error.simulated, _number)
            rows.append([title, measured, simulated, _cell(point, error), "", "", "", ""])
    return rows


def _impossible(point: Comparison, name: str) -> float | None:
    """What was measured of a figure that is left out, since it cannot be."""
    return point.runs[0].impossible.get(name) if point.runs else None


def _cell(point: Comparison, error: MetricError) -> str:
    """An error and the spread of the measured runs in %, like `~-3.1±2.0=`: `~` few observations, `=` agrees."""
    if error.error_ends is not None:
        return "…".join(f"{100 * end:+.0f}" for end in error.error_ends)
    if error.error is None:
        return DASH
    spread = "" if error.spread is None else f"±{100 * error.spread:.1f}"
    return f"{'~' if error.few else ''}{100 * error.error:+.1f}{spread}{'=' if point.agrees(error) else ''}"


def _shift(point: Comparison, name: str) -> str:
    if name not in point.shifts:
        return DASH
    shift = point.shifts[name]
    return f">{100 * REACH:.0f}" if shift is None else f"{100 * shift:+.1f}"


def _value(value: float | None, text: Callable[[float], str]) -> str:
    return DASH if value is None else text(value)


def _ms(value: float) -> str:
    return f"{value:.4g} s" if value >= 1 else f"{1e3 * value:.4g} ms"


def _number(value: float) -> str:
    return f"{value:.4g}"


def machine_grid(validation: Validation) -> Grid:
    """A row for each point with live runs: drift of the machine, bias of step times as measured and at par, in %."""
    rows: Grid = [["policy", "run", "drift", "steps", "at par"]]
    for point in validation.live:
        shares = [DASH if x is None else f"{100 * x:+.1f}" for x in (point.drift, point.bias, point.bias_at_par)]
        rows.append([f"! {point.policy}" if point.unfit else point.policy, _run_cell(point), *shares])
    return rows


def metric_grid(point: Comparison) -> Grid:
    """Every figure of one point, a row each: measured, simulated, error, spread and load-equivalent error in %."""
    grid: Grid = [["", "measured", "simulated", "error", "shift"]]
    for error in point.errors:
        unit = METRICS[error.name].unit
        text = _ms if unit == "s" else lambda value, unit=unit: _number(value) + ("/s" if unit.endswith("/s") else "")
        simulated = _value(error.simulated, text) if error.ends is None else between(*map(text, error.ends))
        shift = _shift(point, error.name) if error.name in point.shifts else ""
        grid.append([METRICS[error.name].words, _value(error.live, text), simulated, _cell(point, error), shift])
    return grid


def _table(grid: Grid, words: int = 1) -> str:
    """A Markdown table whose first `words` columns are words."""
    return markdown_table(grid[0], [column >= words for column in range(len(grid[0]))], grid[1:])


# ---- the page


def markdown(validation: Validation, pictures: Sequence[str]) -> str:
    """The validation as a Markdown page: verdicts, errors, step times, every point, and what it was made with."""
    parts = [f"# Simulated against {validation.beside}: {escaped(validation.name)}", escaped(validation.heading)]
    parts += map(escaped, _saturation(validation))
    if files := _files(validation):
        parts.append("\n".join(escaped(line) if line.startswith("- ") else f"\n{escaped(line)}\n" for line in files))
    if warnings := validation.warnings():
        parts.append("\n".join(f"- **{escaped(line)}**" for line in warnings))
    if validation.live:
        verdicts = [[verdict.what, verdict.bound, verdict.found, verdict.word] for verdict in validation.verdicts]
        parts.append(_table([["bound", "asked", "found", ""], *verdicts]))
    parts += [_table(error_grid(validation), 3), LEGEND]
    if validation.live:
        parts += [_table(machine_grid(validation), 2), MACHINE]
    if steps := all_steps(validation.live):
        parts.append("## Step time\n\nPredicted against measured periods of all steps that ran live; errors in %.")
        parts.append(_table(step_grid([("", steps)])))
    parts += [f"![{picture}]({picture})" for picture in pictures]
    if drafts := _drafts(validation):
        parts += [DRAFTS, "\n".join(map(escaped, drafts))]
    if validation.live:
        parts += [part for point in validation.live for part in _page_of(validation, point)]
    elif parted := _parted(validation):
        parts.append("## Where they part\n\n" + "\n".join(map(escaped, parted)))
    made = json.dumps(validation.made, indent=1, ensure_ascii=False)
    parts.append(f"## How it was made\n\n```json\n{made}\n```")
    return "\n\n".join(parts) + "\n"


def _page_of(validation: Validation, point: LivePoint) -> list[str]:
    """A section on one point: its runs, all its figures, its steps."""
    simulated = point.simulation.records
    lines = [f"- simulated: {len(simulated.steps):,} steps, {len(simulated.requests):,} requests"]
    for run in point.lives:
        steps = run.played.records.num_steps
        text = f"void: {run.void}" if run.void else f"first step that differs: {_first_step(run)}"
        if run.drift is not None:
            text += f"; drift {100 * run.drift:+.1f} %" + ("" if run.calm else ", not calm")
        lines.append(f"- live, repeat {run.played.repeat}: {steps:,} steps; {text}")
    parts = [f"## {escaped(validation.where(point))}", "\n".join(lines)]
    if point.counted:
        parts += [_table(metric_grid(point)), _table(step_grid([("", point.steps)]))]
    return parts
