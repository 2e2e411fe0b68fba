"""A trace drawn: its arrivals over time, the gaps between them, and the lengths of prompts and outputs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from batchsim.base.units import NS_PER_S
from batchsim.report.pictures.style import (
    GREY,
    figure,
    house_style,
    picture_kind,
    put_around,
    remark,
    save,
    seconds_text,
    time_axis,
)
from batchsim.report.text.trace_text import arrival_lines, trace_heading
from batchsim.workload.traces.trace_rows import Ints, TraceRows

KIND = picture_kind("a trace")
_ARRIVALS, _LENGTHS = "#0072B2", {"prompt": "#009E73", "output": "#D55E00"}
_WINDOWS_S = (1, 2, 5, 10, 30, 60, 300, 600, 1800, 3600, 21600, 86400)
_MOST_WINDOWS = 400  # more are narrower than the line that draws them
_LENGTH_BINS = 48


def trace_picture(rows: TraceRows, figures: dict[str, Any], path: Path) -> None:
    """Writes arrivals over time, gaps beside those of a Poisson process, and both length distributions as a PNG."""
    timed = figures["arrivals"] is not None and figures["arrivals"]["rate_rps"] is not None
    with house_style():
        fig = figure(11.0, 6.6 if timed else 4.0)
        if timed and rows.arrival_ns is not None:
            grid = fig.add_gridspec(2, 3)
            draw_arrivals(fig.add_subplot(grid[0, :]), rows.arrival_ns)
            draw_gaps(fig.add_subplot(grid[1, 0]), rows.arrival_ns)
            axes = [fig.add_subplot(grid[1, 1]), fig.add_subplot(grid[1, 2])]
        else:
            axes = list(fig.subplots(1, 2))
        draw_lengths(axes[0], rows.prompt_tokens, "prompt")
        draw_lengths(axes[1], rows.output_tokens, "output")
        heading = " · ".join([trace_heading(figures).partition(" · ")[2], *arrival_lines(figures["arrivals"])])
        foot = "lengths: the area of a bar is its share of the requests"
        engine = fig.get_layout_engine()
        assert engine is not None  # `figure` sets one
        engine.set(wspace=0.06)  # type: ignore[call-arg]
        put_around(fig, Path(figures["source"]).name, heading, foot, [])
        save(fig, path, KIND)


def draw_arrivals(ax: Axes, arrival_ns: Ints) -> None:
    """Draws requests/s in consecutive whole windows, and their mean; `arrival_ns` is sorted and starts at 0."""
    span_s = arrival_ns[-1] / NS_PER_S
    longest = _WINDOWS_S[-1] * math.ceil(span_s / _WINDOWS_S[-1] / _MOST_WINDOWS)
    window_s = next((w for w in _WINDOWS_S if span_s / w <= _MOST_WINDOWS), longest)
    whole = max(int(arrival_ns[-1] // (window_s * NS_PER_S)), 1)
    rate = np.bincount(arrival_ns // (window_s * NS_PER_S), minlength=whole)[:whole] / window_s
    unit, scale = ("h", 3600) if whole * window_s > 2 * 3600 else ("min", 60) if whole * window_s > 120 else ("s", 1)
    edges = np.arange(whole + 1) * window_s / scale
    ax.stairs(rate, edges, fill=True, color=_ARRIVALS, alpha=0.35, linewidth=0)
    ax.stairs(rate, edges, color=_ARRIVALS, linewidth=0.9)
    ax.axhline(rate.mean(), color="black", linewidth=1, linestyle=(0, (6, 3)))
    ax.set_xlim(0, edges[-1])
    ax.set_ylim(0, 1.05 * rate.max())
    ax.set_title("Requests/s")
    ax.set_xlabel(f"time ({unit})")
    remark(ax, f"in windows of {seconds_text(window_s)}; dashed: the mean")


def draw_gaps(ax: Axes, arrival_ns: Ints) -> None:
    """Draws the share of interarrival gaps longer than x, both axes logarithmic, beside an exponential of that mean."""
    gaps = np.sort(np.diff(arrival_ns)) / NS_PER_S
    positive = gaps[gaps > 0]
    longer = 1 - np.arange(1, len(gaps) + 1) / len(gaps)
    low = min(max(positive[0], gaps.mean() / 1e4), gaps.mean() / 10) / 1.5
    high = 1.5 * positive[-1]
    floor = 0.5 / len(gaps)
    last = np.append(gaps[1:] > gaps[:-1], True)  # of equal gaps
    x, y = gaps[last & (gaps > 0)], longer[last & (gaps > 0)]
    start = longer[np.count_nonzero(gaps == 0) - 1] if gaps[0] == 0 else 1.0
    ax.step(np.append(low, x), np.append(start, np.maximum(y, floor)), where="post", color=_ARRIVALS)
    smooth = np.geomspace(low, high, 200)
    ax.plot(smooth, np.exp(-smooth / gaps.mean()), color=GREY, linewidth=1.2, linestyle=(0, (4, 2)))
    ax.set_yscale("log")
    ax.set_ylim(floor, 1.6)
    time_axis(ax, "x", low, high)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_title("Gaps longer than …")
    ax.set_xlabel("gap")
    remark(ax, "dashed: Poisson")


def draw_lengths(ax: Axes, tokens: Ints, kind: str) -> None:
    """Draws the density of prompt or output lengths, `kind`, on a logarithmic axis, with median and 99th percentile."""
    edges = np.unique(np.round(np.geomspace(tokens.min(), tokens.max() + 1, _LENGTH_BINS + 1))) - 0.5
    counts, _ = np.histogram(tokens, edges)
    ax.stairs(counts / np.diff(np.log(edges)), edges, fill=True, color=_LENGTHS[kind], alpha=0.75)
    ax.set_xscale("log")
    low, high = edges[0], edges[-1]
    ax.set_xlim(low, high)
    marks = {"p50": np.percentile(tokens, 50), "p99": np.percentile(tokens, 99)}
    for name, value in marks.items():
        ax.axvline(value, color="black", linewidth=1, linestyle=(0, (6, 3) if name == "p50" else (1, 2)))
    ax.set_yticks([])
    ax.grid(visible=False, axis="y")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if high / low < 10:
        ax.set_xscale("linear")
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        ax.set_xlim(low, high)
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_title(f"{kind.capitalize()} tokens")
    remark(ax, f"dashed p50 {marks['p50']:,.0f} · dotted p99 {marks['p99']:,.0f}")
