"""Pictures of a validation: latencies simulated and measured, and step times predicted and measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from batchsim.base.files import Kind
from batchsim.base.units import NS_PER_S
from batchsim.check.measured.run import LATENCIES, OF, MeasuredRequests
from batchsim.check.validation.comparison import Comparison
from batchsim.check.validation.step_error import StepPairs
from batchsim.cost.periods import REGIONS
from batchsim.report.pictures.style import figure, house_style, picture_kind, put_around, remark, save, time_axis
from batchsim.report.validation_report import Validation

KIND = Kind(picture_kind("a validation").name, picture_kind("a (?:validation|comparison)").begins)
MOST_ROWS = 12
"""Points drawn at most, a row each; more would be no picture."""
_MEASURED, _SIMULATED, _DASHED = "#D55E00", "#000000", (0, (4, 2))
_REGIONS = ("#56B4E9", "#0072B2", "#000000", "#D55E00", "#E69F00")  # a colour for each of REGIONS
_MOST_DOTS = 4000  # dots in a panel; more would hide each other
_WIDEST = 0.20  # largest signed error shown, as a share


def write_pictures(validation: Validation, stem: Path) -> list[Path]:
    """Writes STEM.png (latencies) and, where a live run counts, STEM-steps.png (step times); returns their paths."""
    latencies = stem.with_name(f"{stem.name}.png")
    draw_latencies(validation, latencies)
    pairs = [point.pairs for point in validation.live if point.pairs is not None]
    if not pairs:
        return [latencies]
    steps = stem.with_name(f"{stem.name}-steps.png")
    draw_steps(validation, StepPairs.join(pairs), steps)
    return [latencies, steps]


def draw_latencies(validation: Validation, path: Path) -> None:
    """Writes distributions of TTFT, TPOT and E2E, a row for each of the first MOST_ROWS points: measured runs as lines,
    the simulation dashed above; of aggregates the points that are known."""
    points = validation.points[:MOST_ROWS]
    with house_style():
        fig = figure(12.0, 1.9 + 2.5 * len(points))
        axes = fig.subplots(len(points), len(LATENCIES), squeeze=False, sharey=True)
        for row, point in zip(axes, points, strict=True):
            for ax, latency in zip(row, LATENCIES, strict=True):
                _draw(ax, point, latency)
                ax.set_title(f"{latency.upper()} · {validation.where(point)}")
            row[0].set_ylabel("share of requests")
        kinds = "a line a run" if validation.live else "a line a run; points: of aggregates"
        handles = [
            Line2D([], [], color=_MEASURED, linewidth=1.8, label=f"{validation.beside}, {kinds}"),
            Line2D([], [], color=_SIMULATED, linewidth=1.6, linestyle=_DASHED, label="simulated"),
        ]
        title = f"Latencies, simulated and {validation.beside}, of the same requests"
        foot = f"requests {'sent after the warm-up ' * bool(validation.live)}that ended well, from their sending"
        if (more := len(validation.points) - len(points)) > 0:
            foot += f" · {more} more runs are in the table alone"
        put_around(fig, title, validation.heading, foot, handles)
        save(fig, path, KIND)


def _draw(ax: Axes, point: Comparison, latency: str) -> None:
    """Draws one latency of both sides."""
    seen: list[float] = []
    for run in point.runs:
        if run.requests is not None:
            seen += _curve(ax, run.requests, latency, color=_MEASURED, linewidth=1.8, alpha=0.6)
            continue
        points = [
            (run.figures[f"{latency}_{of}_s"], percent / 100)
            for of, percent in OF.items()
            if percent is not None and f"{latency}_{of}_s" in run.figures
        ]
        if points:
            ax.plot(*zip(*points, strict=True), "o", color=_MEASURED)
            seen += [value for value, _ in points]
        elif (mean := run.figures.get(f"{latency}_mean_s")) is not None:
            ax.axvline(mean, color=_MEASURED, linewidth=1.2)
            remark(ax, "measured: the mean alone")
            seen.append(mean)
    for requests in point.simulated:
        seen += _curve(ax, requests, latency, color=_SIMULATED, linewidth=1.6, linestyle=_DASHED, zorder=3)
    if not seen or min(seen) <= 0:
        remark(ax, "not known, or responses are sent whole")
        return
    low, high = min(seen) / 1.15, max(seen) * 1.15
    time_axis(ax, "x", low, high)


def _curve(ax: Axes, requests: MeasuredRequests, latency: str, **look: object) -> list[float]:
    """Draws the distribution of a latency; returns its ends in seconds, [] where no request has it."""
    values = requests.latency_s(latency)
    values = np.sort(np.maximum(values[~np.isnan(values)], 1e-9))
    if not len(values):
        return []
    ax.plot(values, np.arange(1, len(values) + 1) / len(values), drawstyle="steps-post", **look)  # type: ignore[arg-type]
    return [float(values[0]), float(values[-1])]


def draw_steps(validation: Validation, pairs: StepPairs, path: Path) -> None:
    """Writes two panels: every live step, predicted against measured; the spread of signed errors by region."""
    with house_style():
        fig = figure(12.0, 5.6)
        left, right = fig.subplots(1, 2)
        _draw_dots(left, pairs)
        _draw_errors(right, pairs)
        handles = [
            Line2D([], [], color=_REGIONS[code], marker="o", linestyle="none", label=f"{name}: {n:,} steps")
            for code, name in enumerate(REGIONS)
            if (n := int((pairs.region == code).sum()))
        ]
        put_around(
            fig,
            "Step times, predicted and measured",
            validation.heading,
            "measured: from a step's start to the next one's, the host's part included · steps of all live runs that"
            " count",
            handles,
        )
        save(fig, path, KIND)


def _draw_dots(ax: Axes, pairs: StepPairs) -> None:
    chosen = np.random.default_rng(0).permutation(len(pairs.measured))[:_MOST_DOTS]
    measured, predicted = pairs.measured[chosen] / NS_PER_S, pairs.predicted[chosen] / NS_PER_S
    colors = np.array(_REGIONS)[pairs.region[chosen]]
    ax.scatter(measured, predicted, s=7, c=list(colors), alpha=0.35, linewidths=0)
    low = 0.9 * float(min(measured.min(), predicted.min()))
    high = 1.1 * float(max(measured.max(), predicted.max()))
    ax.plot([low, high], [low, high], color="black", linewidth=0.9)
    time_axis(ax, "x", low, high)
    time_axis(ax, "y", low, high)
    ax.set_xlabel("measured")
    ax.set_ylabel("predicted")
    ax.set_title("Each step")
    if len(pairs.measured) > _MOST_DOTS:
        remark(ax, f"{_MOST_DOTS:,} of {len(pairs.measured):,} steps drawn")


def _draw_errors(ax: Axes, pairs: StepPairs) -> None:
    off = pairs.predicted / pairs.measured - 1
    for code, color in enumerate(_REGIONS):
        region_errors = np.sort(off[pairs.region == code])
        if len(region_errors):
            ax.plot(
                region_errors,
                np.arange(1, len(region_errors) + 1) / len(region_errors),
                color=color,
                drawstyle="steps-post",
            )
    ax.axvline(0, color="black", linewidth=0.9)
    ax.set_xlim(-_WIDEST, _WIDEST)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:+.0f} %"))
    ax.set_xlabel("predicted / measured − 1")
    ax.set_ylabel("share of the region's steps")
    ax.set_title("Signed error")
    beyond = int((np.abs(off) > _WIDEST).sum())
    if beyond:
        remark(ax, f"{beyond:,} of {len(off):,} steps beyond ±{_WIDEST:.0%}")
