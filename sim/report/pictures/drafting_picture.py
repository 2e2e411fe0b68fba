"""The picture of a run with and without draft tokens: from which load on they stop to pay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from batchsim.report.drafting import crossing_text, draft_curves
from batchsim.report.pictures.curve_lines import draw_line, latency_limits, styled_sweeps
from batchsim.report.pictures.style import (
    GREY,
    figure,
    footer,
    frame,
    house_style,
    load_axis,
    policy_legend,
    save,
    time_axis,
)
from batchsim.results.read import Results

_METRIC = "norm_latency_mean_s"


def drafting_picture(results: Results, path: Path | str) -> None:
    """Writes the mean normalised latency against the load, and how many times as fast a token comes with drafts."""
    with house_style():
        fig = figure(12.0, 5.4)
        latency, speedup = fig.subplots(1, 2)
        draw_latency(latency, results)
        draw_speedup(speedup, results)
        marks = ("normalised latency: E2E / output tokens", "speed: that of the same policy without drafts / its own")
        notes = {curve.sweep.policy: crossing_text(results, curve) for curve in draft_curves(results)}
        legend = policy_legend(results, {policy: note for policy, note in notes.items() if note})
        frame(fig, results, "Draft tokens: up to which load they pay", footer(results, *marks), legend)
        save(fig, path)


def draw_latency(ax: Axes, results: Results) -> None:
    """Draws the mean normalised latency in seconds of the policies that verify drafts and of those without."""
    low, high = latency_limits(results, [_METRIC], [])
    load_axis(ax, results)
    time_axis(ax, "y", low, high)
    curves = draft_curves(results)
    drawn = {sweep.policy for curve in curves for sweep in (curve.sweep, curve.plain) if sweep is not None}
    for sweep, style in styled_sweeps(results):
        if sweep.policy in drawn:
            y, half = sweep.stable(_METRIC), sweep.half_width(_METRIC)
            ax.fill_between(sweep.loads, np.maximum(y - half, low / 10), y + half, color=style.color, alpha=0.15)
            draw_line(ax, sweep.loads, y, style, np.zeros(len(y), dtype=bool))
    ax.set_title("Mean normalised latency")


def draw_speedup(ax: Axes, results: Results) -> None:
    """Draws how many times as fast a token comes as without drafts, over the loads where both are stable."""
    load_axis(ax, results)
    styles = {sweep.policy: style for sweep, style in styled_sweeps(results)}
    curves = draft_curves(results)
    for curve in curves:
        y = np.where(np.isfinite(curve.speedup) & (curve.speedup > 0), curve.speedup, np.nan)
        draw_line(ax, curve.sweep.loads, y, styles[curve.sweep.policy], np.zeros(len(y), dtype=bool))
        if drawn := np.flatnonzero(np.isfinite(y)).tolist():
            place = curve.sweep.loads[drawn[0]], y[drawn[0]]
            ax.annotate(curve.sweep.name, place, (5, 6), textcoords="offset points", size=8, zorder=4)
    ax.axhline(1.0, color="black", linewidth=1.2, zorder=1.5)
    low, high = ax.get_ylim()
    ax.set_ylim(min(low, 0.8), 1.03 * max(high, 1.2))
    ax.axhspan(ax.get_ylim()[0], 1.0, color="#F2F2F2", linewidth=0, zorder=0)
    ax.annotate("slower than without", (0.01, 1.0), (4, -4), xycoords=("axes fraction", "data"),
                textcoords="offset points", size=8, color=GREY, va="top")  # fmt: skip
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} ×"))
    ax.set_title("Speed against the same policy without drafts")
