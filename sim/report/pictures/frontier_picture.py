"""What a GPU delivers against what its users get: speed of the median user, and the slowest of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from batchsim.report.pictures.curve_lines import (
    CROSS,
    NORMALISED,
    OPEN,
    draw_crosses,
    draw_error_bars,
    draw_line,
    hidden_under,
    label_loads,
    latency_limits,
    numbers_mark,
    styled_sweeps,
    wide_mark,
)
from batchsim.report.pictures.palette import PolicyStyle
from batchsim.report.pictures.style import (
    GREY,
    figure,
    footer,
    frame,
    growth_notes,
    house_style,
    policy_legend,
    save,
    time_axis,
)
from batchsim.report.reading import GPU, USER, column, log_ends, sweeps
from batchsim.results.read import Results

_TAIL = "norm_latency_p99_s"


def frontier(results: Results, path: Path | str) -> None:
    """Writes output tokens/s per GPU against the median user's tokens/s, the Pareto frontier in grey, and the P99
    normalised latency against the same tokens/s per GPU; points are labelled by load."""
    with house_style():
        fig = figure(12.0, 5.8)
        left, right = fig.subplots(1, 2)
        draw_frontier(left, results)
        left.set_title("Median user: upper right is better")
        draw_throughput_latency(right, results, _TAIL)
        right.set_title("P99 normalised latency: lower right is better")
        frame(
            fig,
            results,
            "What a GPU delivers against what its users get",
            footer(
                results,
                numbers_mark(results),
                "grey: points that no other beats in both",
                CROSS,
                OPEN,
                NORMALISED,
                *wide_mark(results),
            ),
            policy_legend(results, _frontier_notes(results)),
        )
        fig.draw_without_rendering()
        fig.set_layout_engine("none")  # labels within the axes move nothing
        label_loads(left, results, USER, GPU)
        label_loads(right, results, GPU, _TAIL)
        save(fig, path)


def draw_frontier(ax: Axes, results: Results) -> None:
    """Draws output tokens/s per GPU against the median user's tokens/s, with the points that no other beats joined."""
    every: list[tuple[float, float]] = []
    drawn = styled_sweeps(results)
    depths = hidden_under([sweep.stable(USER) for sweep, _ in drawn])
    for (sweep, style), depth in zip(drawn, depths, strict=True):
        x, y = sweep.stable(USER), sweep.stable(GPU)
        half = sweep.half_width(GPU)
        draw_error_bars(ax, x, y, sweep.half_width(USER), (y - half, y + half), style)
        draw_line(ax, x, y, style, sweep.weak(USER), depth)
        every += [(a, b) for a, b in zip(x, y, strict=True) if np.isfinite(a) and np.isfinite(b)]
    best = pareto(every)
    if best:
        xs, ys = zip(*best, strict=True)
        ax.plot(xs, ys, color="#C8C8C8", linewidth=7, solid_capstyle="round", zorder=1)
    ax.set_xlim(0, 1.08 * (max((x for x, _ in every), default=0.0) or 1.0))  # a short run may complete nothing in time
    ax.set_ylim(0, 1.10 * (max((y for _, y in every), default=0.0) or 1.0))
    ax.set_xlabel("tokens/s of the median user")
    ax.set_ylabel("output tokens/s per GPU")
    ax.annotate(
        "better",
        (0.985, 0.985),
        (0.90, 0.90),
        xycoords="axes fraction",
        textcoords="axes fraction",
        color=GREY,
        ha="right",
        va="top",
        arrowprops={"arrowstyle": "-|>", "color": GREY},
    )


def draw_throughput_latency(ax: Axes, results: Results, metric: str = "norm_latency_p99_s") -> None:
    """Draws a latency metric (seconds) against output tokens/s per GPU, a line a policy through its stable loads."""
    low, high = latency_limits(results, [metric], [])
    ax.set_xlim(0, 1.06 * np.nanmax(column(results.summary, GPU), initial=1e-9))
    time_axis(ax, "y", low, high)
    ax.set_xlabel("output tokens/s per GPU")
    grows: list[tuple[PolicyStyle, float]] = []
    drawn = styled_sweeps(results)
    depths = hidden_under([sweep.stable(metric) for sweep, _ in drawn])
    for (sweep, style), depth in zip(drawn, depths, strict=True):
        x, y = sweep.values(GPU), sweep.stable(metric)
        draw_error_bars(ax, x, y, sweep.half_width(GPU), log_ends(y, sweep.half_width(metric)), style)
        draw_line(ax, x, y, style, sweep.weak(metric), depth)
        at = x[sweep.grows]
        if len(at) and np.isfinite(at[0]):
            grows.append((style, float(at[0])))
    draw_crosses(ax, grows)


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in x and in y (more is better in both), by falling x."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(points, reverse=True):
        if not best or y > best[-1][1]:
            best.append((x, y))
    return best


def _frontier_notes(results: Results) -> dict[str, str]:
    """For each policy that lacks points here, by name, the reason for its legend label."""
    absent = {s.policy: "no tokens/s per user" for s in sweeps(results) if np.isnan(s.values(USER)).all()}
    return growth_notes(results) | absent
