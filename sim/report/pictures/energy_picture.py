"""What GPUs draw, and what saving it costs: mean power against the load, energy a token against latency."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from batchsim.report.pictures.curve_lines import (
    CROSS,
    draw_bands,
    draw_error_bars,
    draw_line,
    hidden_under,
    label_loads,
    latency_limits,
    numbers_mark,
    styled_sweeps,
)
from batchsim.report.pictures.style import figure, footer, frame, house_style, policy_legend, save, time_axis
from batchsim.report.reading import at_load, column, load_name, log_ends, sweeps
from batchsim.results.read import Results

POWER, JOULES, LATENCY = "mean_power_w", "energy_with_idle_j_per_output_token", "e2e_p50_s"
ESTIMATE = "power by the law of the GPU, an estimate, unless a profile measured it; idle included"


def concerns_energy(results: Results) -> bool:
    """Whether the scenario is about energy: a policy that minds it or a power cap; and its power is known."""
    costs = [results.scenario.get(key) or {} for key in ("cost", "deployment")]
    caps = any(isinstance(cost, dict) and cost.get("power_cap") for cost in costs)
    minds = any(sweep.kind == "energy_aware" for sweep in sweeps(results))
    return (caps or minds) and POWER in results.summary and bool(np.isfinite(column(results.summary, POWER)).any())


def energy_text(results: Results) -> str:
    """Which policy needs least energy a token at the lowest load tested, and which most, in a sentence."""
    low = min(float(sweep.loads[0]) for sweep in sweeps(results))
    needs = [(float(sweep.stable(JOULES)[0]), sweep.name) for sweep in sweeps(results) if sweep.loads[0] == low]
    known = [(joules, name) for joules, name in needs if np.isfinite(joules)]
    if not known:
        return "Energy a token is not known at the lowest load"
    (least, best), (most, worst) = min(known), max(known)
    at = at_load(load_name(results), low)
    one = f"{best} takes {least:.3g} J an output token {at}, idle included"
    return one if best == worst else f"{one}; {worst} {most:.3g} J"


def energy_picture(results: Results, path: Path | str) -> None:
    """Writes the mean power against the load, and the energy of an output token, idle included, against the median
    end-to-end latency, labelled by load."""
    with house_style():
        fig = figure(12.0, 5.4)
        left, right = fig.subplots(1, 2)
        draw_power(left, results)
        left.set_title("Mean power, idle included")
        draw_energy(right, results)
        right.set_title("Energy against latency: lower left is better")
        notes = footer(results, ESTIMATE, numbers_mark(results), CROSS)
        frame(fig, results, energy_text(results), notes, policy_legend(results))
        fig.draw_without_rendering()
        fig.set_layout_engine("none")  # labels within the axes move nothing
        label_loads(right, results, LATENCY, JOULES)
        save(fig, path)


def draw_power(ax: Axes, results: Results) -> None:
    """Draws the mean power of all GPUs in W against the load, a line a policy with its interval."""
    draw_bands(ax, results, [(sweep.stable(POWER), sweep.half_width(POWER)) for sweep in sweeps(results)])
    ax.set_ylim(0, 1.08 * np.nanmax(column(results.summary, POWER)))
    ax.set_ylabel("W of all GPUs")


def draw_energy(ax: Axes, results: Results) -> None:
    """Draws J an output token, idle included, against the median end-to-end latency, a line a policy."""
    low, high = latency_limits(results, [LATENCY], [])
    time_axis(ax, "x", low, high)
    drawn = styled_sweeps(results)
    depths = hidden_under([sweep.stable(JOULES) for sweep, _ in drawn])
    for (sweep, style), depth in zip(drawn, depths, strict=True):
        x, y, half = sweep.stable(LATENCY), sweep.stable(JOULES), sweep.half_width(JOULES)
        draw_error_bars(ax, x, y, x - log_ends(x, sweep.half_width(LATENCY))[0], (y - half, y + half), style)
        draw_line(ax, x, y, style, np.zeros(len(x), bool), depth)
    ax.set_ylim(0, 1.08 * np.nanmax(column(results.summary, JOULES)))
    ax.set_xlabel("median end-to-end latency")
    ax.set_ylabel("J an output token")
