"""Pictures of a whole run: latency and the share within the SLO against load, and all of them written into its folder.

Each `draw_` function draws on given Axes and touches nothing else; the function without the prefix makes the file. An
unstable point is never part of a curve: a cross marks the load from which the queue grows without end.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from batchsim.report.decisions import headline
from batchsim.report.drafting import draft_curves
from batchsim.report.pictures import closeup
from batchsim.report.pictures.adapters_picture import adapters_picture, has_adapters
from batchsim.report.pictures.curve_lines import (
    CROSS,
    LANE_MARKS,
    NORMALISED,
    OPEN,
    draw_crosses,
    draw_ends,
    draw_lanes,
    draw_line,
    has_lanes,
    height_inch,
    hidden_under,
    latency_limits,
    styled_sweeps,
    wide_mark,
    widened,
    within_mark,
)
from batchsim.report.pictures.drafting_picture import drafting_picture
from batchsim.report.pictures.energy_picture import concerns_energy, energy_picture
from batchsim.report.pictures.fleet_picture import fleet_picture
from batchsim.report.pictures.frontier_picture import frontier
from batchsim.report.pictures.palette import PolicyStyle
from batchsim.report.pictures.rollout_picture import rollout_picture
from batchsim.report.pictures.style import (
    figure,
    footer,
    frame,
    house_style,
    load_axis,
    nines,
    nines_axis,
    policy_legend,
    remark,
    save,
    seconds_text,
    time_axis,
)
from batchsim.report.pictures.vary import vary_picture
from batchsim.report.reading import check_load, column, load_to_show, log_ends
from batchsim.report.slo_shares import LatencyPanel, SloShare, latency_panels, slo_bounds, slo_shares
from batchsim.results.read import Results

VARY, DRAFTING, FLEET = "vary.png", "drafting.png", "fleet.png"
ENERGY, ROLLOUT, ADAPTERS = "energy.png", "rollout.png", "adapters.png"
_NEED_ROWS = {"requests": ("timeline.png",), "minutes": ("timeline.png", "latency_cdf.png")}


def p99_vs_qps(results: Results, path: Path | str) -> None:
    """Writes P99 (top) and P50 (bottom) of TTFT, TPOT, normalised latency and, where there are tasks, their E2E against
    the offered load.

    >>> batchsim.p99_vs_qps(results, "p99.png")
    """
    with house_style():
        save(p99_vs_qps_figure(results), path)


def p99_vs_qps_figure(results: Results) -> Figure:
    """The figure that `p99_vs_qps` writes."""
    shown = latency_panels(results)
    with house_style():
        below = height_inch(results) if has_lanes(results) else 0.0
        fig = figure(13.0 / 3 * max(len(shown), 3), 7.6 + below)
        grid = fig.add_gridspec(2 + bool(below), 1, height_ratios=[3.2, 3.2, *([below] if below else [])])
        axes: Any = grid[:2, :].subgridspec(2, len(shown)).subplots(sharex=True, squeeze=False)
        if below:
            draw_lanes(fig.add_subplot(grid[2, :]), results)
        for column, panel in enumerate(shown):
            limits = latency_limits(results, [panel.metric("p99"), panel.metric("p50")], slo_bounds(results, panel))
            for row, percentile in enumerate(("p99", "p50")):
                ax = axes[row, column]
                draw_latency(ax, results, panel, percentile, limits)
                ax.set_title(f"{percentile.upper()} {panel.title}")
                ax.set_xlabel(ax.get_xlabel() if row == 1 else "")
        frame(
            fig,
            results,
            headline(results),
            footer(
                results,
                CROSS,
                OPEN,
                *within_mark(results),
                *wide_mark(results),
                _slo_mark(results),
                *(LANE_MARKS if below else ()),
                *([NORMALISED] if any(panel.latency == "norm_latency" for panel in shown) else ()),
            ),
            policy_legend(results),
        )
    return fig


def draw_latency(
    ax: Axes, results: Results, panel: LatencyPanel, percentile: str, limits: tuple[float, float] | None = None
) -> None:
    """Draws a `percentile` (`p50`, `p99`) of a latency in seconds against the load, a line a policy, with its interval
    and the SLO's bounds.

    `limits` fixes the y axis, so that panels can be compared; the default covers this metric.
    """
    metric, bounds = panel.metric(percentile), slo_bounds(results, panel, percentile)
    low, high = limits if limits is not None else latency_limits(results, [metric], bounds)
    load_axis(ax, results)
    time_axis(ax, "y", low, high)
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
    grows: list[tuple[PolicyStyle, float]] = []
    absent = []
    drawn = styled_sweeps(results)
    shade = 0.8 / (2 + len(drawn))  # overlapping bands add up
    depths = hidden_under([sweep.stable(metric) for sweep, _ in drawn])
    for (sweep, style), depth in zip(drawn, depths, strict=True):
        if np.isnan(sweep.values(metric)).all():
            absent.append(sweep.name)
            continue
        x, y, half = sweep.loads, sweep.stable(metric), sweep.half_width(metric)
        ax.fill_between(x, *log_ends(y, half), color=style.color, alpha=shade, linewidth=0)
        draw_line(ax, x, y, style, sweep.weak(metric), depth)
        draw_ends(ax, sweep, style, metric)
        if sweep.unstable_from is not None:
            grows.append((style, sweep.unstable_from))
    draw_crosses(ax, grows)
    if absent:
        remark(ax, f"no value: {', '.join(absent) if len(absent) < 3 else f'{len(absent)} policies'}")


def lacking(results: Results) -> list[str]:
    """The pictures that cannot be drawn, since what they show was not kept of the points."""
    return list(_NEED_ROWS.get(str(results.scenario.get("keep", "all")), ()))


def write_pictures(results: Results, load: float | None = None) -> list[Path]:
    """Writes a run's pictures into its folder and returns their paths: those of every run, one more where single
    requests have an SLO, where a key is varied, where a policy runs with and without drafts, where replicas come, where
    the scenario is about energy, of a rollout; without the `lacking` ones.

    Pictures of a single point show the first seed at `load`, by default the load that `load_to_show` gives.
    """
    load = load_to_show(results) if load is None else load
    check_load(results, load)
    seed = int(column(results.points, "seed").min())
    sweep: dict[str, Callable[[Results, Path], None]] = {
        "p99_vs_qps.png": p99_vs_qps,
        "frontier.png": frontier,
    }
    point: dict[str, Callable[[Results, Path, float, int], None]] = {
        "timeline.png": closeup.timeline,
        "latency_cdf.png": closeup.latency_cdf,
    }
    if slo_shares(results):
        sweep["slo_share.png"] = slo_share_picture
    lacks = lacking(results)
    for name in lacks:
        del point[name]
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
    if "vary" not in results.manifest and concerns_energy(results):
        energy_picture(results, results.path / ENERGY)
        names.append(ENERGY)
    if "vary" not in results.manifest and has_adapters(results):
        adapters_picture(results, results.path / ADAPTERS)
        names.append(ADAPTERS)
    if results.trainings() is not None:
        rollout_picture(results, results.path / ROLLOUT)
        names.append(ROLLOUT)
    return [results.path / name for name in names]


def _slo_mark(results: Results) -> str:
    objective, slo = results.manifest["objective"], results.manifest["slo"]
    return f"dashed: the SLO {slo}" if objective == slo else f"dashed: {objective}"


_PANEL_INCH = 3.6


def slo_share_picture(results: Results, path: Path | str) -> None:
    """Writes the share of requests within the SLO against the load, a panel for each class that has an objective of its
    own. `slo_shares` must find one."""
    shares = slo_shares(results)
    columns = min(len(shares), 3)
    with house_style():
        rows = -(-len(shares) // columns)
        fig = figure(8.5 if columns == 1 else 13.0, 1.4 + _PANEL_INCH * rows)
        axes = fig.subplots(rows, columns, squeeze=False, sharey=True).flat
        for ax, share in zip(axes, shares, strict=False):
            draw_slo_share(ax, results, share)
        for ax in list(axes)[len(shares) :]:
            ax.set_visible(False)
        frame(
            fig,
            results,
            "Requests within the SLO against offered load",
            footer(results, "dashed: the share asked for", "× the queue grows", "90 to 99 % is as far as 99 to 99.9 %"),
            policy_legend(results),
        )
        save(fig, path)


def draw_slo_share(ax: Axes, results: Results, share: SloShare) -> None:
    """Draws one share against the load, a line a policy with its interval; a cross where the queue grows, whose
    requests are counted all the same."""
    load_axis(ax, results)
    nines_axis(ax.yaxis)
    ax.set_ylim(-0.06, nines(1.0) + 0.1)
    ax.set_ylabel(f"{share.counted} within the SLO")
    ax.set_title(f"{share.request_class}: {share.objective}" if share.request_class else share.objective)
    ax.axhline(nines(share.target), color="black", linewidth=1, linestyle=(0, (6, 3)), zorder=1.5)
    drawn = styled_sweeps(results)
    shade = 0.8 / (2 + len(drawn))
    for (sweep, style), depth in zip(drawn, hidden_under([s.values(share.metric) for s, _ in drawn]), strict=True):
        x, y, half = sweep.loads, sweep.values(share.metric), sweep.half_width(share.metric)
        size = widened(depth)
        ax.fill_between(x, nines(y - half), nines(y + half), color=style.color, alpha=shade, linewidth=0)
        ax.plot(x, nines(y), color=style.color, linestyle=style.linestyle, linewidth=size["linewidth"])
        for chosen, marker in ((~sweep.grows, style.marker), (sweep.grows, "x")):
            if not chosen.any():
                continue  # an empty unclipped line would stretch the panel to the figure's corner
            ax.plot(
                x[chosen], nines(y[chosen]), linestyle="none", marker=marker, markersize=size["markersize"],
                color=style.color, zorder=3, clip_on=False,
            )  # fmt: skip
