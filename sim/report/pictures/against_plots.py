"""The picture of simulations beside measured runs: distributions of latencies, or what is known of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from batchsim.check.measured.run import LATENCIES, OF, MeasuredRequests
from batchsim.check.validation.against import Comparison
from batchsim.report.pictures.style import figure, house_style, picture_kind, put_around, remark, save, time_axis_log

KIND = picture_kind("a comparison")
_MEASURED, _SIMULATED = "#D55E00", "#000000"
MOST_ROWS = 12
"""Runs drawn at most, a row each; more would be no picture."""


def draw_against(heading: str, found: Sequence[Comparison], path: Path) -> None:
    """Writes distributions of TTFT, TPOT and E2E, a row for each policy and run, the first MOST_ROWS of them."""
    rows = found[:MOST_ROWS]
    with house_style():
        fig = figure(12.0, 1.9 + 2.5 * len(rows))
        axes = fig.subplots(len(rows), len(LATENCIES), squeeze=False, sharey=True)
        for row, one in zip(axes, rows, strict=True):
            for ax, latency in zip(row, LATENCIES, strict=True):
                _draw(ax, one, latency)
                ax.set_title(f"{latency.upper()} · {one.policy}" + (f", {one.part}" if one.part else ""))
            row[0].set_ylabel("share of requests")
        handles = [
            Line2D([], [], color=_MEASURED, linewidth=1.8, label="measured, a line a file; points: of aggregates"),
            Line2D([], [], color=_SIMULATED, linewidth=1.6, linestyle=(0, (4, 2)), label="simulated"),
        ]
        more = f" · {len(found) - len(rows)} more runs are in the table alone" if len(found) > len(rows) else ""
        title = "Latencies, simulated and measured, of the same requests"
        put_around(fig, title, heading, f"requests that ended well, from their sending{more}", handles)
        save(fig, path, KIND)


def _draw(ax: Axes, one: Comparison, latency: str) -> None:
    """Draws one latency of both sides."""
    seen: list[float] = []
    for replayed in one.replays:
        if replayed.run.requests is not None:
            look = {"color": _MEASURED, "linewidth": 1.8, "alpha": 0.6}
            seen += _curve(ax, replayed.run.requests, latency, **look)
            continue
        points = [
            (replayed.run.figures[f"{latency}_{of}_s"], percent / 100)
            for of, percent in OF.items()
            if percent is not None and f"{latency}_{of}_s" in replayed.run.figures
        ]
        if points:
            ax.plot(*zip(*points, strict=True), "o", color=_MEASURED)
            seen += [value for value, _ in points]
        elif (mean := replayed.run.figures.get(f"{latency}_mean_s")) is not None:
            ax.axvline(mean, color=_MEASURED, linewidth=1.2)
            remark(ax, "measured: the mean alone")
            seen.append(mean)
    for requests in one.simulated:
        seen += _curve(ax, requests, latency, color=_SIMULATED, linewidth=1.6, linestyle=(0, (4, 2)), zorder=3)
    if not seen or min(seen) <= 0:
        remark(ax, "not known")
        return
    low, high = min(seen) / 1.15, max(seen) * 1.15
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    time_axis_log(ax.xaxis, low, high)


def _curve(ax: Axes, requests: MeasuredRequests, latency: str, **look: object) -> list[float]:
    """Draws the distribution of a latency; returns its ends in seconds, [] where nobody has it."""
    values = requests.latency_s(latency)
    values = np.sort(np.maximum(values[~np.isnan(values)], 1e-9))
    if not len(values):
        return []
    ax.plot(values, np.arange(1, len(values) + 1) / len(values), drawstyle="steps-post", **look)  # type: ignore[arg-type]
    return [float(values[0]), float(values[-1])]
