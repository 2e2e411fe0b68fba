"""Recorded steps as text: a fit to them, and predictions beside them."""

from __future__ import annotations

from collections.abc import Sequence

from batchsim.base.units import two_digits
from batchsim.check.validation.recorded_steps import OPEN, StepsCompared
from batchsim.check.validation.step_error import RegionError
from batchsim.fit.step_fit import StepFit
from batchsim.report.layout import Grid, aligned, fit
from batchsim.report.numbers import DASH
from batchsim.report.text.fit_text import terms_lines

LEGEND = (
    "errors in % of a step's recorded time: median and 95th percentile of |predicted / recorded − 1| · bias: of the sum"
    " of all times"
)


def fit_report(step_fit: StepFit) -> str:
    """The terms with their intervals, the errors of steps given and held out by kind of step, what is claimed."""
    worst = max((abs(one.errors["step_time"] or 0.0) for one in step_fit.held_out), default=0.0)
    claim = step_fit.claims["step_time"]
    return "\n".join(
        [
            *terms_lines(step_fit, "a step"),
            "",
            fit(LEGEND),
            *aligned(step_grid(step_fit.regions), left=(0, 1), close=True),
            fit(
                f"claimed of the time of other steps: ±{two_digits(100 * claim)} %, of many together; held out, the"
                f" worst stretch is off by {100 * worst:.1f} %"
            ),
        ]
    )


def compared_report(heading: str, notes: Sequence[str], comparisons: Sequence[StepsCompared]) -> str:
    """The errors of predicted step times by policy and kind of step."""
    lines = [heading, *(f"! {note}" for note in notes)]
    lines += [
        f"! {one.name}: {one.recorded - one.compared:,} of {one.recorded:,} steps are not compared: what their log"
        f" leaves open moves their predicted time by more than {100 * OPEN:g} %"
        for one in comparisons
        if one.compared < one.recorded
    ]
    lines += [
        f"{one.name}: without the host's part the bias of all is {100 * one.device_bias:+.1f} %"
        for one in comparisons
        if one.device_bias is not None
    ]
    grid = step_grid([(one.name, one.rows) for one in comparisons])
    return "\n".join([*map(fit, [*lines, "", LEGEND]), *aligned(grid, left=(0, 1), close=True)])


def step_grid(parts: Sequence[tuple[str, Sequence[RegionError]]]) -> Grid:
    """Step-time errors in %: a row for each kind of step of each part, without the column of the parts' names where
    none has one; the bias of kernels and of the host apart where any were timed so."""
    apart = any(row.kernel_bias is not None for _, rows in parts for row in rows)
    grid = [["", "steps", "n", "of the time", "median", "p95", "bias", *["kernels' bias", "host's bias"] * apart]]
    for name, rows in parts:
        for row in rows:
            biases = [row.bias, *[row.kernel_bias, row.host_bias] * apart]
            numbers = [f"{100 * row.p50:.2f}", f"{100 * row.p95:.2f}"]
            numbers += [DASH if bias is None else f"{100 * bias:+.2f}" for bias in biases]
            grid.append([name, row.region, f"{row.n:,}", f"{row.share:.0%}", *numbers])
    return grid if any(name for name, _ in parts) else [row[1:] for row in grid]
