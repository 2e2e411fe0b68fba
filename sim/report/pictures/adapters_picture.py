"""What LoRA adapters cost requests: how many wait for a place for theirs, and how long steps wait for weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from batchsim.report.numbers import percent_text
from batchsim.report.pictures.curve_lines import draw_bands
from batchsim.report.pictures.style import figure, footer, frame, house_style, policy_legend, save
from batchsim.report.reading import at_load, column, load_name, sweeps
from batchsim.results.read import Results

HELD_BACK, LOADING = "adapter_held_back_share", "attr_adapter_load_share"
STATED = "times of steps with adapters, and of loading them, as stated in the scenario"


def has_adapters(results: Results) -> bool:
    """Whether any request of the run asked for a LoRA adapter."""
    return "adapters" in results.summary and bool((column(results.summary, "adapters") > 0).any())


def adapters_text(results: Results) -> str:
    """Which policy lets most requests wait for their adapters at the highest load tested, and which fewest, in a
    sentence."""
    high = max(float(sweep.loads[-1]) for sweep in sweeps(results))
    shares = [(float(sweep.values(HELD_BACK)[-1]), sweep.name) for sweep in sweeps(results) if sweep.loads[-1] == high]
    known = [(share, name) for share, name in shares if np.isfinite(share)]
    if not known:
        return "No request asked for an adapter at the highest load"
    (least, best), (most, worst) = min(known), max(known)
    at = at_load(load_name(results), high)
    one = f"{worst} has {percent_text(most)} of the requests with adapters overtaken {at}"
    return one if best == worst else f"{one}; {best} {percent_text(least)}"


def adapters_picture(results: Results, path: Path | str) -> None:
    """Writes, against the load, the share of requests that were overtaken because of their adapters, and the share of
    all time that steps waited for adapters' weights."""
    with house_style():
        fig = figure(12.0, 5.4)
        left, right = fig.subplots(1, 2)
        draw_share(left, results, HELD_BACK)
        left.set_title("Requests overtaken, for want of a place for their adapter")
        draw_share(right, results, LOADING)
        right.set_title("Time of requests in which steps load adapters")
        frame(fig, results, adapters_text(results), footer(results, STATED), policy_legend(results))
        save(fig, path)


def draw_share(ax: Axes, results: Results, metric: str) -> None:
    """Draws a share in per cent against the load, a line a policy with its interval."""
    curves = [(100 * sweep.values(metric), 100 * sweep.half_width(metric)) for sweep in sweeps(results)]
    draw_bands(ax, results, curves)
    ax.set_ylim(0, max(1.08 * np.nanmax([np.nanmax(y) for y, _ in curves]), 1))
    ax.set_ylabel("%")
