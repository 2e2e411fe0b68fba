"""Pictures of a validation: latencies predicted and measured, and step times predicted and measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

from batchsim.base.units import NS_PER_S
from batchsim.check.validation.compare_runs import PointReport
from batchsim.check.validation.step_error import StepPairs
from batchsim.cost.periods import REGIONS
from batchsim.kernel.record import FINISHED, Records
from batchsim.metrics.latencies import LATENCIES, values_ns
from batchsim.metrics.point_inputs import between
from batchsim.report.pictures.palette import OKABE_ITO
from batchsim.report.pictures.style import (
    GREY,
    figure,
    house_style,
    picture_kind,
    put_around,
    remark,
    save,
    time_axis_log,
)
from batchsim.report.reading import short_load
from batchsim.report.validation_report import Validation

KIND = picture_kind("a validation")
_SHOWN = ("ttft", "tpot", "e2e")
_LOADS = OKABE_ITO[:-1]  # one a load
_REGIONS = ("#56B4E9", "#0072B2", "#000000", "#D55E00", "#E69F00")  # a colour for each of REGIONS
_MOST_DOTS = 4000  # dots in a panel; more would hide each other
_WIDEST = 0.20  # largest signed error shown, as a share

Floats = NDArray[np.float64]


def write_pictures(found: Validation, stem: Path) -> list[Path]:
    """Writes STEM.png (latencies) and, where a live run counts, STEM-steps.png (step times); returns their paths."""
    latencies = stem.with_name(f"{stem.name}.png")
    draw_latencies(found, latencies)
    pairs = [point.pairs for point in found.points if point.pairs is not None]
    if not pairs:
        return [latencies]
    steps = stem.with_name(f"{stem.name}-steps.png")
    draw_steps(found, StepPairs.join(pairs), steps)
    return [latencies, steps]


def draw_latencies(found: Validation, path: Path) -> None:
    """Writes distributions of TTFT, TPOT and E2E, a row a policy: live runs as lines, the simulation dashed above."""
    policies = list(dict.fromkeys(point.policy.name for point in found.points))
    with house_style():
        fig = figure(12.0, 1.9 + 2.5 * len(policies))
        axes = fig.subplots(len(policies), len(_SHOWN), squeeze=False, sharey=True)
        for row, policy in zip(axes, policies, strict=True):
            points = [point for point in found.points if point.policy.name == policy]
            for ax, name in zip(row, _SHOWN, strict=True):
                _draw_cdfs(ax, found, points, name)
                ax.set_title(f"{LATENCIES[name].title} · {policy}")
            row[0].set_ylabel("share of requests")
        handles = [
            Line2D([], [], color=GREY, linewidth=1.0, label="live, a line a repeat"),
            Line2D([], [], color="black", linewidth=1.6, linestyle=(0, (4, 2)), label="simulated, in the darker shade"),
        ]
        put_around(
            fig,
            "Latencies, simulated and live, of the same requests",
            found.heading,
            "finished requests sent after the warm-up, from their intended arrival · colours: the loads of each policy",
            handles,
        )
        save(fig, path, KIND)


def _draw_cdfs(ax: Axes, found: Validation, points: list[PointReport], name: str) -> None:
    """Draws the distributions of one policy's latency `name`, a colour for each load."""
    low, high = np.inf, 0.0
    for color, point in zip(_LOADS * (1 + len(points) // len(_LOADS)), points, strict=False):
        window_ns = point.simulated.workload.window_ns
        share = "" if point.share is None else f" ({point.share:.0%})"
        load = short_load(found.load_name, float(f"{point.load:.3g}"))
        sides = [(run.played.records, run.played.streams, False) for run in point.counted]
        sides.append((point.simulated.records, point.simulated.streams, True))
        for records, streams, is_simulated in sides:
            values = latencies_s(records, window_ns, name) if streams or not LATENCIES[name].streamed else np.empty(0)
            if not len(values):
                continue
            low, high = min(low, values[0]), max(high, values[-1])
            shares = np.arange(1, len(values) + 1) / len(values)
            look = {"linewidth": 1.6, "linestyle": (0, (4, 2)), "color": _dark(color), "zorder": 3}
            if not is_simulated:
                look = {"linewidth": 1.8, "alpha": 0.6, "color": color}
            ax.plot(values, shares, drawstyle="steps-post", **look)  # type: ignore[arg-type]
        if len(points) > 1 and name == "ttft":
            ax.plot([], [], color=color, label=f"{load}{share}" or "the load")
    if high == 0.0:
        remark(ax, "not defined: responses are sent whole")
        return
    if len(points) > 1 and name == "ttft":
        ax.legend(loc="lower right", frameon=False, fontsize=8, handlelength=1.2)
    ax.set_xscale("log")
    low, high = low / 1.15, high * 1.15
    ax.set_xlim(low, high)
    time_axis_log(ax.xaxis, low, high)


def _dark(color: str) -> tuple[float, ...]:
    """A darker RGB shade of `color`, which stands out from it."""
    return tuple(0.45 * part for part in to_rgb(color))


def latencies_s(records: Records, window_ns: tuple[int, int], name: str) -> Floats:
    """Sorted seconds of latency `name` of finished requests sent in the window; TPOT from two output tokens on."""
    requests = records.requests
    done = requests[(requests["outcome"] == FINISHED) & between(requests["sent_ns"], window_ns)]
    values = values_ns(done)[name]
    return np.sort(np.maximum(values[~np.isnan(values)], 1) / NS_PER_S)


def draw_steps(found: Validation, pairs: StepPairs, path: Path) -> None:
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
            found.heading,
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
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(low, high)
    ax.set_ylim(low, high)
    time_axis_log(ax.xaxis, low, high)
    time_axis_log(ax.yaxis, low, high)
    ax.set_xlabel("measured")
    ax.set_ylabel("predicted")
    ax.set_title("Each step")
    if len(pairs.measured) > _MOST_DOTS:
        remark(ax, f"{_MOST_DOTS:,} of {len(pairs.measured):,} steps drawn")


def _draw_errors(ax: Axes, pairs: StepPairs) -> None:
    off = pairs.predicted / pairs.measured - 1
    for code, color in enumerate(_REGIONS):
        mine = np.sort(off[pairs.region == code])
        if len(mine):
            ax.plot(mine, np.arange(1, len(mine) + 1) / len(mine), color=color, drawstyle="steps-post")
    ax.axvline(0, color="black", linewidth=0.9)
    ax.set_xlim(-_WIDEST, _WIDEST)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:+.0f} %"))
    ax.set_xlabel("predicted / measured − 1")
    ax.set_ylabel("share of the region's steps")
    ax.set_title("Signed error")
    beyond = int((np.abs(off) > _WIDEST).sum())
    if beyond:
        remark(ax, f"{beyond:,} of {len(off):,} steps beyond ±{_WIDEST:.0%}")
