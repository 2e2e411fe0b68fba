"""A horizontal lane for each policy over the load: where the SLO is met, the knee, from where on the queue grows.

Lanes keep the marks of many policies apart; as curves with three marks each they would overlap.
"""

from __future__ import annotations

from matplotlib.axes import Axes

from batchsim.report.pictures.curve_lines import styled_sweeps
from batchsim.report.pictures.style import load_axis
from batchsim.report.reading import PolicyCurve, load_name
from batchsim.results.landmarks import Landmarks
from batchsim.results.read import Results, curve_marks

LANE_INCH, LANES_INCH = 0.2, 0.75
"""Inches: height of one lane, and of the margins around all lanes."""
FEWEST = 3
"""Fewest tested loads of a policy from which the shape of its curve can be told."""

_THICK, _SHADE = 5.5, 0.35
MARKS = (
    "lanes: thick: the SLO is met, to where it is crossed (interpolated between tested loads)",
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
    found = curve_marks(results)
    drawn = styled_sweeps(results)
    right = float(ax.get_xlim()[1])
    for lane, (sweep, style) in enumerate(drawn):
        _draw_lane(ax, lane, sweep, found[sweep.policy], style.color, right)
    ax.set_ylim(len(drawn) - 0.4, -0.6)
    ax.set_yticks(range(len(drawn)), [sweep.name for sweep, _ in drawn], size=8)
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)


def _draw_lane(ax: Axes, lane: int, sweep: PolicyCurve, its: Landmarks, color: str, right: float) -> None:
    if its.unstable_from is not None:
        ax.fill_between([its.unstable_from, right], lane - 0.36, lane + 0.36, color=color, alpha=_SHADE, linewidth=0)
    stable = sweep.loads[~sweep.unstable & (sweep.failed == 0)]
    if len(stable):
        until = right if its.unstable_from is None and len(sweep.loads) == len(stable) else float(stable[-1])
        ax.plot([float(stable[0]), min(until, float(sweep.loads[-1]))], [lane, lane], color=color, linewidth=1.0)
    for i in range(len(sweep.loads) - 1):
        if sweep.meets_slo[i] and sweep.meets_slo[i + 1]:
            _thick(ax, lane, float(sweep.loads[i]), float(sweep.loads[i + 1]), color)
    if its.crossing.low is not None:
        end = its.crossing.load or its.crossing.low
        _thick(ax, lane, its.crossing.low, end, color)
        if its.crossing.high is not None:
            ax.plot([end], [lane], marker="|", markersize=11, markeredgewidth=2.4, color=color, zorder=4)
    if its.knee is not None and len(sweep.loads) >= FEWEST:
        ax.plot(
            [its.knee.load], [lane], marker="D", markersize=6, markerfacecolor="white", color=color, zorder=5,
            markeredgewidth=1.5,
        )  # fmt: skip


def _thick(ax: Axes, lane: int, start: float, end: float, color: str) -> None:
    ax.plot([start, end], [lane, lane], color=color, linewidth=_THICK, solid_capstyle="butt")
