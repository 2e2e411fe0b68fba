"""Fitted traffic beside its trace: rate over time, gaps, dispersion, lengths, and an engine's time to first token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from batchsim.base.units import NS_PER_S
from batchsim.fit.traffic.engine_check import CURVE, LoadCheck
from batchsim.fit.traffic.goodness import Traffic, survival
from batchsim.fit.traffic.traffic_fit import TrafficFit
from batchsim.report.pictures.style import (
    figure,
    house_style,
    picture_kind,
    put_around,
    remark,
    save,
    time_axis,
    time_axis_log,
)
from batchsim.report.text.traffic_fit_text import heading
from batchsim.workload.traces.arrival_stats import index_of_dispersion

KIND = picture_kind("a fitted trace")
_TRACE, _FIT = "black", "#0072B2"
_PARTS = 60  # of the time axis
_POINTS = 120  # of a curve
_SHARES = FuncFormatter(lambda value, _: f"{100 * value:g} %")


def traffic_fit_picture(
    fit: TrafficFit, trace: Traffic, draws: Sequence[Traffic], checks: Sequence[LoadCheck], path: Path
) -> None:
    """Writes the panels as a PNG: the trace in black, the draws of the fit as a band from the lowest to the highest."""
    with house_style():
        fig = figure(11.0, 7.2 if checks else 6.6)
        axes = list(fig.subplots(2, 3).flat)
        _rates(axes[0], trace, draws)
        _gaps(axes[1], trace, draws)
        _dispersion(axes[2], trace, draws)
        _lengths(axes[3], trace, draws, "prompt")
        _lengths(axes[4], trace, draws, "output")
        if checks:
            _ttft(axes[5], checks)
        else:
            axes[5].set_axis_off()
        handles = [Line2D([], [], color=_TRACE, label="trace"), Line2D([], [], color=_FIT, label="fit")]
        foot = f"bands: from the lowest to the highest of {len(draws)} draws of the fit"
        foot += f", of {len(checks[0].fit)} for time to first token" if checks else ""
        put_around(fig, Path(fit.rows.source).name, heading(fit).partition(" · ")[2], foot, handles)
        save(fig, path, KIND)


def _band(ax: Axes, x: np.ndarray, ours: np.ndarray, theirs: np.ndarray) -> None:
    """The trace's curve, and the band and middle of the fit's, a row a draw."""
    ax.fill_between(x, theirs.min(axis=0), theirs.max(axis=0), color=_FIT, alpha=0.25, linewidth=0)
    ax.plot(x, np.median(theirs, axis=0), color=_FIT, linewidth=1.2)
    ax.plot(x, ours, color=_TRACE, linewidth=1.2)


def _rates(ax: Axes, trace: Traffic, draws: Sequence[Traffic]) -> None:
    span_s = float(trace.sent_ns[-1]) / NS_PER_S
    edges = np.linspace(0, span_s, _PARTS + 1)

    def rates(each: Traffic) -> np.ndarray:
        return np.histogram(each.sent_ns / NS_PER_S, edges)[0] * _PARTS / span_s

    _band(ax, (edges[1:] + edges[:-1]) / 2 / 60, rates(trace), np.array([rates(draw) for draw in draws]))
    ax.set_ylim(0)
    ax.set_title("Requests/s")
    ax.set_xlabel("time (min)")


def _gaps(ax: Axes, trace: Traffic, draws: Sequence[Traffic]) -> None:
    gaps = [np.diff(each.sent_ns) / NS_PER_S for each in (trace, *draws)]
    known = gaps[0][gaps[0] > 0]
    low, high = float(np.quantile(known, 0.01)), float(known.max()) * 1.5
    at = np.geomspace(low, high, _POINTS)
    floor = 0.5 / len(gaps[0])
    curves = np.array([np.maximum(survival(each, at), floor) for each in gaps])
    _band(ax, at, curves[0], curves[1:])
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_ylim(floor, 1.6)
    time_axis_log(ax.xaxis, low, high)
    ax.yaxis.set_major_formatter(_SHARES)
    ax.set_title("Gaps longer than …")
    ax.set_xlabel("gap")


def _dispersion(ax: Axes, trace: Traffic, draws: Sequence[Traffic]) -> None:
    span_s = float(trace.sent_ns[-1]) / NS_PER_S
    windows_s = np.geomspace(0.1, max(min(600, span_s / 10), 1), 16)

    def index(each: Traffic) -> list[float]:
        return [index_of_dispersion(each.sent_ns, round(window * NS_PER_S)) or np.nan for window in windows_s]

    _band(ax, windows_s, np.array(index(trace)), np.array([index(draw) for draw in draws]))
    ax.set_xscale("log")
    ax.set_yscale("log")
    time_axis_log(ax.xaxis, windows_s[0], windows_s[-1])
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set_title("Index of dispersion")
    ax.set_xlabel("window")
    remark(ax, "Poisson: 1")


def _lengths(ax: Axes, trace: Traffic, draws: Sequence[Traffic], side: str) -> None:
    columns = [each.prompt_tokens if side == "prompt" else each.output_tokens for each in (trace, *draws)]
    at = np.geomspace(max(columns[0].min(), 1), columns[0].max() + 1, _POINTS)
    curves = np.array([survival(each.astype(float), at) for each in columns])
    _band(ax, at, curves[0], curves[1:])
    ax.set_xscale("log")
    ax.yaxis.set_major_formatter(_SHARES)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ax.set_title(f"{side.capitalize()}s longer than …")
    ax.set_xlabel("tokens")


def _ttft(ax: Axes, checks: Sequence[LoadCheck]) -> None:
    for check, line in zip(checks, ("solid", "dashed"), strict=True):
        draws = np.array([draw.curve_s for draw in check.fit])
        ax.fill_betweenx(1 - CURVE, draws.min(axis=0), draws.max(axis=0), color=_FIT, alpha=0.2, linewidth=0)
        ax.plot(np.median(draws, axis=0), 1 - CURVE, color=_FIT, linewidth=1.2, linestyle=line)
        label = f"{100 * check.share:g} %"
        ax.plot(check.trace.curve_s, 1 - CURVE, color=_TRACE, linewidth=1.2, linestyle=line, label=label)
    curves = np.concatenate([each.curve_s for check in checks for each in (check.trace, *check.fit)])
    low, high = float(curves[curves > 0].min()), float(curves.max())
    ax.axhline(0.01, color="black", linewidth=0.8, linestyle=(0, (1, 2)))
    ax.set_yscale("log")
    time_axis(ax, "x", low, high)
    ax.yaxis.set_major_formatter(_SHARES)
    ax.legend(title="of capacity", fontsize=8)
    ax.set_title("First token later than …")
    ax.set_xlabel("time to first token")
    remark(ax, "dotted: P99")
