"""Parts that the pictures of whole runs share: curves, error bars, crosses of growing queues, load labels, limits, and
a horizontal lane for each policy with the marks of its curve, which in the curves of many policies would overlap."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from batchsim.report.pictures.palette import PolicyStyle, policy_styles
from batchsim.report.pictures.style import PALE, label_points, load_axis, remark
from batchsim.report.reading import Flags, Floats, PolicyCurve, load_name, short_load, sweeps
from batchsim.results.landmarks import Landmarks
from batchsim.results.read import Results, curve_marks

# Crosses closer than APART side by side stand STEP below each other, in a strip; all are shares of the panel.
_CROSS_TOP, _CROSS_STEP = 0.965, 0.06
_STRIP_SHADE = 0.35
_CROSS_APART = 0.03
CROSS = "× in the grey strip, which has no scale: the queue grows without end from this load on"
WITHIN = "bar: within the cost's error of saturation, from the shortest steps to the longest"
NORMALISED = "normalised latency: E2E / output tokens"
OPEN = "open marker: fewer than 20 observations beyond the percentile (~ in tables)"


def styled_sweeps(results: Results) -> list[tuple[PolicyCurve, PolicyStyle]]:
    """For each policy its results over the loads (a PolicyCurve) and the style it is drawn in."""
    policies = sweeps(results)
    return list(zip(policies, policy_styles(policies).values(), strict=True))


def hidden_under(curves: list[Floats]) -> list[int]:
    """For each curve, how many later ones lie on it within 1 %; it is drawn that much wider, so that it shows."""
    return [
        sum(
            len(curve) == len(later) and np.allclose(curve, later, rtol=0.01, atol=0, equal_nan=True)
            for later in curves[i + 1 :]
        )
        for i, curve in enumerate(curves)
    ]


def wide_mark(results: Results) -> list[str]:
    """The footer's words for wide lines, where there are any."""
    hidden = any(hidden_under([sweep.stable("norm_latency_p99_s") for sweep in sweeps(results)]))
    return ["wide line: another policy with the same values lies on it"] if hidden else []


def widened(depth: int) -> dict[str, float]:
    """Line width and marker size, in points, of a curve that `depth` later ones lie on; both stop growing at three."""
    depth = min(depth, 3)
    return {"linewidth": 1.8 + 2.8 * depth, "markersize": 5.5 + 3.0 * depth}


def draw_line(ax: Axes, x: Floats, y: Floats, style: PolicyStyle, weak: Flags, depth: int = 0) -> None:
    """Draws a curve, broken where y is NaN; markers are open where `weak` is set.

    `weak`: fewer than 20 observations lie beyond the percentile. `depth`: how many later curves lie on this one.
    """
    size = widened(depth)
    ax.plot(x, y, color=style.color, linestyle=style.linestyle, linewidth=size["linewidth"])
    for chosen, face in ((weak, "white"), (~weak, style.color)):
        ax.plot(
            x[chosen],
            y[chosen],
            linestyle="none",
            marker=style.marker,
            markersize=size["markersize"],
            color=style.color,
            markerfacecolor=face,
            zorder=3,
        )


def draw_bands(ax: Axes, results: Results, curves: Sequence[tuple[Floats, Floats]]) -> None:
    """Draws against the load, a line a policy in the order of `styled_sweeps`, values with their half-widths."""
    load_axis(ax, results)
    drawn = styled_sweeps(results)
    depths = hidden_under([y for y, _ in curves])
    for (sweep, style), (y, half), depth in zip(drawn, curves, depths, strict=True):
        ax.fill_between(sweep.loads, y - half, y + half, color=style.color, alpha=0.8 / (2 + len(drawn)), linewidth=0)
        draw_line(ax, sweep.loads, y, style, np.zeros(len(y), bool), depth)


def draw_error_bars(
    ax: Axes, x: Floats, y: Floats, x_half: Floats, y_ends: tuple[Floats, Floats], style: PolicyStyle
) -> None:
    """Draws confidence intervals in both directions, given by half-widths in x and by their ends in y."""
    y_halves = np.stack([y - y_ends[0], y_ends[1] - y])
    ax.errorbar(x, y, xerr=x_half, yerr=y_halves, fmt="none", ecolor=style.color, alpha=0.35, linewidth=1.2)


def draw_ends(ax: Axes, sweep: PolicyCurve, style: PolicyStyle, metric: str) -> None:
    """Draws a bar in the place of each point that lies within the cost's error of saturation: from the metric with the
    shortest steps to that with the longest, to the panel's top where the queue grows. Call when the limits are final.
    """
    fast, slow = sweep.ends(metric)
    shown = sweep.within_error & ~np.isnan(fast) & ~np.isnan(slow)
    tops = np.minimum(slow, ax.get_ylim()[1])
    ax.vlines(sweep.loads[shown], fast[shown], tops[shown], color=style.color, linewidth=5, alpha=0.35)


def within_mark(results: Results) -> list[str]:
    """The footer's words for such bars, where there are any."""
    return [WITHIN] if any(sweep.within_error.any() for sweep in sweeps(results)) else []


def draw_crosses(ax: Axes, grows: Sequence[tuple[PolicyStyle, float]]) -> None:
    """Draws, in a strip at the panel's top, a cross for each policy (style, x) at the load from which its queue grows:
    it has no latency there, so that no line leads to it. Call when the limits are final.
    """
    if not grows:
        return
    places: list[tuple[float, int]] = []
    for style, at in grows:
        across = float(ax.transAxes.inverted().transform(ax.transData.transform((at, ax.get_ylim()[0])))[0])
        place = sum(abs(across - other) < _CROSS_APART for other, _ in places)
        places.append((across, place))
        top = _CROSS_TOP - _CROSS_STEP * place
        ax.plot(
            [at], [top], color=style.color, marker="x", markersize=7.5, markeredgewidth=2.2, clip_on=False, zorder=4,
            transform=ax.get_xaxis_transform(),
        )  # fmt: skip
    bottom = _CROSS_TOP - _CROSS_STEP * (max(place for _, place in places) + 0.6)
    ax.fill_between(
        [0.0, 1.0], bottom, 1.0, transform=ax.transAxes, color=PALE, alpha=_STRIP_SHADE, linewidth=0, zorder=0.5
    )


def label_loads(ax: Axes, results: Results, x_metric: str, y_metric: str) -> None:
    """Writes the load beside each stable point, and remarks how many labels had no room."""
    name = load_name(results)
    points = [
        (float(x), float(y), short_load(name, float(load)), style.color)
        for sweep, style in styled_sweeps(results)
        for x, y, load in zip(sweep.stable(x_metric), sweep.stable(y_metric), sweep.loads, strict=True)
        if name and np.isfinite(x) and np.isfinite(y)
    ]
    hidden = label_points(ax, points)
    if hidden:
        remark(ax, f"{hidden} {'load has' if hidden == 1 else 'loads have'} no number: no room")


def latency_limits(results: Results, metrics: Sequence[str], bounds: Sequence[float]) -> tuple[float, float]:
    """(low, high) of a latency axis in seconds, around values and SLO bounds; intervals widen it threefold at most."""
    policies = sweeps(results)
    values = np.concatenate([sweep.stable(metric) for metric in metrics for sweep in policies])
    halves = np.concatenate([sweep.half_width(metric) for metric in metrics for sweep in policies])
    ends = np.concatenate([end[sweep.within_error] for m in metrics for sweep in policies for end in sweep.ends(m)])
    ends = ends[np.isfinite(ends)]
    shown = np.concatenate([values[values > 0], ends[ends > 0], np.asarray(bounds, dtype=float)])
    if not len(shown):
        return 0.01, 1.0  # nothing to draw
    low, high = float(shown.min()), float(shown.max())
    high = max(high, min(float(np.nanmax(values + np.nan_to_num(halves), initial=0)), 3 * high))
    if high / low < 4:  # a flat curve should look flat
        low, high = low / 2, high * 2
    margin = (high / low) ** 0.06
    return low / margin, high * margin**3  # above: room for the crosses


def numbers_mark(results: Results) -> str:
    """The footer's explanation of the numbers beside the points."""
    units = {"mean_rate": "offered req/s", "users": "users", "rate_scale": "times the trace's rate"}
    name = load_name(results)
    return f"numbers: {units.get(name, name)}, once for neighbours" if name else "one load"


LANE_INCH, LANES_INCH = 0.2, 0.75
"""Inches: height of one lane, and of the margins around all lanes."""
FEWEST = 3
"""Fewest tested loads of a policy from which the shape of its curve is described."""

_THICK, _SHADE = 5.5, 0.35
LANE_MARKS = (
    "lanes: thick: the SLO is met on average, to where it is crossed (interpolated between tested loads)",
    "◇ knee: greatest throughput / mean E2E",
    "shaded: the queue grows",
)


def has_lanes(results: Results) -> bool:
    """Whether the run has lanes: a load axis, and some policy with at least FEWEST tested loads."""
    return bool(load_name(results)) and max(len(s.loads) for s, _ in styled_sweeps(results)) >= FEWEST


def height_inch(results: Results) -> float:
    """Height of the lanes of all policies with their margins, in inches."""
    return LANES_INCH + LANE_INCH * len(styled_sweeps(results))


def draw_lanes(ax: Axes, results: Results) -> None:
    """Draws a lane for each policy, the first at the top."""
    load_axis(ax, results)
    marks = curve_marks(results)
    drawn = styled_sweeps(results)
    right = float(ax.get_xlim()[1])
    for lane, (sweep, style) in enumerate(drawn):
        _draw_lane(ax, lane, sweep, marks[sweep.policy], style.color, right)
    ax.set_ylim(len(drawn) - 0.4, -0.6)
    ax.set_yticks(range(len(drawn)), [sweep.name for sweep, _ in drawn], size=8)
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)


def _draw_lane(ax: Axes, lane: int, sweep: PolicyCurve, landmarks: Landmarks, color: str, right: float) -> None:
    if landmarks.unstable_from is not None:
        ax.fill_between(
            [landmarks.unstable_from, right], lane - 0.36, lane + 0.36, color=color, alpha=_SHADE, linewidth=0
        )
    stable = sweep.loads[~sweep.grows & (sweep.failed == 0)]
    if len(stable):
        until = right if landmarks.unstable_from is None and len(sweep.loads) == len(stable) else float(stable[-1])
        ax.plot([float(stable[0]), min(until, float(sweep.loads[-1]))], [lane, lane], color=color, linewidth=1.0)
    for i in range(len(sweep.loads) - 1):
        if sweep.meets_slo[i] and sweep.meets_slo[i + 1]:
            _thick(ax, lane, float(sweep.loads[i]), float(sweep.loads[i + 1]), color)
    if landmarks.crossing.low is not None:
        end = landmarks.crossing.load or landmarks.crossing.low
        _thick(ax, lane, landmarks.crossing.low, end, color)
        if landmarks.crossing.high is not None:
            ax.plot([end], [lane], marker="|", markersize=11, markeredgewidth=2.4, color=color, zorder=4)
    if landmarks.knee is not None and len(sweep.loads) >= FEWEST:
        ax.plot(
            [landmarks.knee.load], [lane], marker="D", markersize=6, markerfacecolor="white", color=color, zorder=5,
            markeredgewidth=1.5,
        )  # fmt: skip


def _thick(ax: Axes, lane: int, start: float, end: float, color: str) -> None:
    ax.plot([start, end], [lane, lane], color=color, linewidth=_THICK, solid_capstyle="butt")
