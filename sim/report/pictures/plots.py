"""Pictures of a whole run: latency against load, latency against throughput, tokens/s per user against per GPU.

Each `draw_` function draws on given Axes and touches nothing else; the function without the prefix makes the file. An
unstable point is never part of a curve: a cross marks the load from which the queue grows without end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from batchsim.base.units import NS_PER_S
from batchsim.metrics.latencies import LATENCIES
from batchsim.metrics.slo import parse_slo
from batchsim.report.drafting import draft_curves
from batchsim.report.pictures import closeup
from batchsim.report.pictures.curve_lines import (
    draw_cross,
    draw_error_bars,
    draw_line,
    hidden_under,
    label_loads,
    latency_limits,
    numbers_mark,
    styled_sweeps,
)
from batchsim.report.pictures.drafting_picture import drafting_picture
from batchsim.report.pictures.fleet_picture import fleet_picture
from batchsim.report.pictures.lanes import MARKS as LANE_MARKS
from batchsim.report.pictures.lanes import draw_lanes, has_lanes, height_inch
from batchsim.report.pictures.style import (
    GREY,
    figure,
    footer,
    frame,
    growth_notes,
    house_style,
    load_axis,
    policy_legend,
    remark,
    save,
    seconds_text,
    time_axis_log,
)
from batchsim.report.pictures.vary import vary_picture
from batchsim.report.reading import check_load, column, load_to_show, sweeps
from batchsim.results.read import Results

VARY, DRAFTING, FLEET = "vary.png", "drafting.png", "fleet.png"
SHOWN = ("ttft", "tpot", "norm_latency")
_CROSS = "× the queue grows without end from this load on: no point of the curve"
_NORMALISED = "normalised latency: E2E / output tokens"
_OPEN = "open marker: fewer than 20 observations beyond the percentile (~ in tables)"


def p99_vs_qps(results: Results, path: Path | str) -> None:
    """Writes P99 (top) and P50 (bottom) of TTFT, TPOT and normalised latency against the offered load."""
    with house_style():
        below = height_inch(results) if has_lanes(results) else 0.0
        fig = figure(13.0, 7.6 + below)
        grid = fig.add_gridspec(2 + bool(below), len(SHOWN), height_ratios=[3.2, 3.2, *([below] if below else [])])
        axes: Any = grid[:2, :].subgridspec(2, len(SHOWN)).subplots(sharex=True)
        if below:
            draw_lanes(fig.add_subplot(grid[2, :]), results)
        for column, name in enumerate(SHOWN):
            limits = latency_limits(results, [f"{name}_p99_s", f"{name}_p50_s"], _bounds(results, name))
            for row, percentile in enumerate(("p99", "p50")):
                ax = axes[row, column]
                draw_latency(ax, results, f"{name}_{percentile}_s", limits)
                ax.set_title(f"{percentile.upper()} {LATENCIES[name].title}")
                ax.set_xlabel(ax.get_xlabel() if row == 1 else "")
        frame(
            fig,
            results,
            "P99 and P50 latency against offered load",
            footer(
                results,
                _CROSS,
                _OPEN,
                *_wide_mark(results),
                _slo_mark(results),
                *(LANE_MARKS if below else ()),
                _NORMALISED,
            ),
            policy_legend(results),
        )
        save(fig, path)


def draw_latency(ax: Axes, results: Results, metric: str, limits: tuple[float, float] | None = None) -> None:
    """Draws one latency metric (seconds) against the load, a line a policy, with its interval and the SLO's bounds.

    `limits` fixes the y axis, so that panels can be compared; the default covers this metric.
    """
    name, percentile = metric.removesuffix("_s").rsplit("_", 1)
    bounds = _bounds(results, name, percentile)
    low, high = limits if limits is not None else latency_limits(results, [metric], bounds)
    ax.set_yscale("log")
    ax.set_ylim(low, high)
    load_axis(ax, results)
    time_axis_log(ax.yaxis, low, high)
    for bound in bounds:
        ax.axhline(bound, color="black", linewidth=1, linestyle=(0, (6, 3)), zorder=1.5)
        ax.annotate(
            f"SLO\n{seconds_text(bound)}",
            (1.0, bound),
            (4, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            size=8,
            va="center",
        )
    crosses: list[float] = []
    absent = []
    drawn = styled_sweeps(results)
    shade = 0.8 / (2 + len(drawn))  # overlapping bands add up
    depths = hidden_under([sweep.stable(metric) for sweep, _ in drawn])
    for (sweep, style), depth in zip(drawn, depths, strict=True):
        if np.isnan(sweep.values(metric)).all():
            absent.append(sweep.name)
            continue
        x, y, half = sweep.loads, sweep.stable(metric), sweep.half_width(metric)
        floor = low * 1e-3  # a band that reaches below 0 runs off the bottom of a logarithmic panel
        ax.fill_between(x, np.maximum(y - half, floor), y + half, color=style.color, alpha=shade, linewidth=0)
        draw_line(ax, x, y, style, sweep.weak(metric), depth)
        if sweep.unstable_from is not None:
            draw_cross(ax, style, x, y, sweep, sweep.unstable_from, crosses)
    if absent:
        remark(ax, f"no value: {', '.join(absent) if len(absent) < 3 else f'{len(absent)} policies'}")


def throughput_latency(results: Results, path: Path | str) -> None:
    """Writes mean and P99 normalised latency against achieved output tokens/s per GPU, points labelled by load."""
    with house_style():
        fig = figure(12.0, 5.6)
        axes = fig.subplots(1, 2)
        for ax, statistic in zip(axes, ("mean", "p99"), strict=True):
            draw_throughput_latency(ax, results, f"norm_latency_{statistic}_s")
            ax.set_title(f"{statistic.capitalize()} normalised latency: lower right is better")
        frame(
            fig,
            results,
            "Normalised latency against throughput",
            footer(results, numbers_mark(results), _CROSS, _OPEN, _NORMALISED, *_wide_mark(results)),
            policy_legend(results),
        )
        fig.draw_without_rendering()
        for ax, statistic in zip(axes, ("mean", "p99"), strict=True):
            label_loads(ax, results, "output_tokens_per_s_per_gpu", f"norm_latency_{statistic}_s")
        save(fig, path)


def draw_throughput_latency(ax: Axes, results: Results, metric: str = "norm_latency_mean_s") -> None:
    """Draws a latency metric (seconds) against output tokens/s per GPU, a line a policy through its stable loads."""
    throughput = "output_tokens_per_s_per_gpu"
    low, high = latency_limits(results, [metric], [])
    ax.set_yscale("log")
    ax.set_ylim(low, high)
    ax.set_xlim(0, 1.06 * np.nanmax(column(results.summary, throughput), initial=1e-9))
    time_axis_log(ax.yaxis, low, high)
    ax.set_xlabel("output tokens/s per GPU")
    crosses: list[float] = []
    drawn = styled_sweeps(results)
    depths = hidden_under([sweep.stable(metric) for sweep, _ in drawn])
    for (sweep, style), depth in zip(drawn, depths, strict=True):
        x, y = sweep.values(throughput), sweep.stable(metric)
        draw_error_bars(ax, x, y, sweep.half_width(throughput), sweep.half_width(metric), style)
        draw_line(ax, x, y, style, sweep.weak(metric), depth)
        at = x[sweep.unstable]
        if len(at) and np.isfinite(at[0]):
            draw_cross(ax, style, x, y, sweep, float(at[0]), crosses)


def frontier(results: Results, path: Path | str) -> None:
    """Writes tokens/s per user against tokens/s per GPU, points labelled by load, the Pareto frontier in grey."""
    with house_style():
        fig = figure(9.0, 6.6)
        ax = fig.subplots()
        draw_frontier(ax, results)
        frame(
            fig,
            results,
            "Tokens/s of a user against tokens/s of a GPU: upper right is better",
            footer(
                results,
                numbers_mark(results),
                "grey: points that no other beats in both",
                "× the queue grows without end from this load on: left out",
            ),
            policy_legend(results, _frontier_notes(results)),
        )
        fig.draw_without_rendering()
        label_loads(ax, results, "user_tokens_per_s_p50", "output_tokens_per_s_per_gpu")
        save(fig, path)


def draw_frontier(ax: Axes, results: Results) -> None:
    """Draws output tokens/s per GPU against the median user's tokens/s, with the points that no other beats joined."""
    user, gpu = "user_tokens_per_s_p50", "output_tokens_per_s_per_gpu"
    every: list[tuple[float, float]] = []
    drawn = styled_sweeps(results)
    depths = hidden_under([sweep.stable(user) for sweep, _ in drawn])
    for (sweep, style), depth in zip(drawn, depths, strict=True):
        x, y = sweep.stable(user), sweep.stable(gpu)
        draw_error_bars(ax, x, y, sweep.half_width(user), sweep.half_width(gpu), style)
        draw_line(ax, x, y, style, sweep.weak(user), depth)
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


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in x and in y (more is better in both), by falling x."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(points, reverse=True):
        if not best or y > best[-1][1]:
            best.append((x, y))
    return best


def write_pictures(results: Results, load: float | None = None) -> list[Path]:
    """Writes the five pictures, one more where a key is varied, one where a policy runs with and without drafts, one of
    the replicas of an autoscaler, into the results' folder; returns their paths.

    Pictures of a single point show the first seed at `load`, by default the load that `load_to_show` gives.
    """
    load = load_to_show(results) if load is None else load
    check_load(results, load)
    seed = int(column(results.points, "seed").min())
    sweep: dict[str, Callable[[Results, Path], None]] = {
        "p99_vs_qps.png": p99_vs_qps,
        "throughput_latency.png": throughput_latency,
        "frontier.png": frontier,
    }
    point: dict[str, Callable[[Results, Path, float, int], None]] = {
        "timeline.png": closeup.timeline,
        "latency_cdf.png": closeup.latency_cdf,
    }
    for name, draw in sweep.items():
        draw(results, results.path / name)
    for name, draw_point in point.items():
        draw_point(results, results.path / name, load, seed)
    names = [*sweep, *point]
    if (results.scenario.get("replicas") or {}).get("autoscaler"):
        fleet_picture(results, results.path / FLEET, load, seed)
        names.append(FLEET)
    if "vary" in results.manifest:
        vary_picture(results, results.path / VARY, load)
        names.append(VARY)
    if "vary" not in results.manifest and any(curve.plain is not None for curve in draft_curves(results)):
        drafting_picture(results, results.path / DRAFTING)
        names.append(DRAFTING)
    return [results.path / name for name in names]


def _frontier_notes(results: Results) -> dict[str, str]:
    """For each policy that lacks points here, by name, the reason for its legend label."""
    user = "user_tokens_per_s_p50"
    absent = {s.policy: "no tokens/s per user" for s in sweeps(results) if np.isnan(s.values(user)).all()}
    return growth_notes(results) | absent


def _bounds(results: Results, name: str, percentile: str | None = None) -> list[float]:
    """The SLO's bounds in seconds on the latency `name`: on every request or on `percentile` (`p50`, `p99`), no mean.

    Without `percentile`: the bounds that either the P50 or the P99 panel shows.
    """
    shown = (None, 0.5, 0.99) if percentile is None else (None, float(percentile.removeprefix("p")) / 100)
    if results.manifest["objective"] != results.manifest["slo"]:
        return []  # each request class has bounds of its own: no line holds for all
    bounds = [bound for bound in parse_slo(results.manifest["slo"]).bounds if not bound.mean]
    return [bound.limit_ns / NS_PER_S for bound in bounds if bound.metric == name and bound.share in shown]


def _wide_mark(results: Results) -> list[str]:
    hidden = any(hidden_under([sweep.stable("norm_latency_p99_s") for sweep in sweeps(results)]))
    return ["wide line: another policy with the same values lies on it"] if hidden else []


def _slo_mark(results: Results) -> str:
    objective, slo = results.manifest["objective"], results.manifest["slo"]
    return f"dashed: the SLO {slo}" if objective == slo else f"SLO: {objective}"
