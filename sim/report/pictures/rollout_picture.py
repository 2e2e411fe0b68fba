"""The picture of rollouts: what the trainer did when under each curve, and where the time of a training goes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from batchsim.metrics.rollouts import WASTE
from batchsim.report.pictures.style import figure, footer, frame, house_style, save
from batchsim.report.reading import column, texts
from batchsim.results.read import Results

PARTS = {
    "waits for answers": ("wait_s", "#D9D9D9"),
    "trains": ("training_s", "#0072B2"),
    "waits for engines to drain": ("drain_s", "#A6A6A6"),
    "loads weights": ("loading_s", "#E69F00"),
}
"""What the trainer does, in the order of a cycle: the column of its time, and its colour."""
TAIL = "tail of the generation"
_TAIL_COLOR = "#C0392B"


def rollout_picture(results: Results, path: Path | str) -> None:
    """Writes the trainer's time as lanes, one a curve, and the tokens that were made with what became of them."""
    rows = first_seeds(results)
    with house_style():
        fig = figure(12.0, 1.9 + 0.52 * max(len(rows), 2))
        lanes, tokens = fig.subplots(1, 2, width_ratios=(2.2, 1))
        draw_lanes(lanes, rows)
        draw_tokens(tokens, results, list(rows))
        handles = [Line2D([], [], color=color, linewidth=8, label=name) for name, (_, color) in PARTS.items()]
        handles.append(Line2D([], [], color=_TAIL_COLOR, linewidth=2.5, label=TAIL))
        foot = footer(results, "lanes: first seed", "tail: from 90 % of a training's answers to its last one")
        frame(fig, results, "Rollouts: what the trainer waits for, and what is made in vain", foot, handles)
        save(fig, path)


def first_seeds(results: Results) -> dict[str, dict[str, np.ndarray]]:
    """By curve the columns of its trainings, of the first seed."""
    table = results.trainings()
    assert table is not None, "drawn for rollouts"
    policies, seeds = np.array(texts(table, "policy")), column(table, "seed")
    names = ["start_s", "generation_s", "tail_s", *(name for name, _ in PARTS.values())]
    curves: dict[str, dict[str, np.ndarray]] = {}
    for policy in dict.fromkeys(texts(results.summary, "policy")):
        of_curve = (policies == policy) & (seeds == seeds[policies == policy].min())
        at = np.flatnonzero(of_curve)
        curves[policy] = {name: np.nan_to_num(column(table, name)[at]) for name in names}
    return curves


def draw_lanes(ax: Axes, rows: dict[str, dict[str, np.ndarray]]) -> None:
    """Draws for each curve a lane of the trainer's time in seconds: waiting, training, loading; the tails beneath."""
    for place, of in enumerate(rows.values()):
        begin = of["start_s"] - of["wait_s"]
        for name, color in PARTS.values():
            ax.barh(np.full(len(begin), place), of[name], left=begin, height=0.5, color=color, linewidth=0)
            begin = begin + of[name]
        ends = of["start_s"]
        ax.hlines(np.full(len(ends), place + 0.36), ends - of["tail_s"], ends, color=_TAIL_COLOR, linewidth=2.5)
    _name_lanes(ax, list(rows))
    ax.set_xlabel("time (s)")
    ax.set_xlim(0, None)
    ax.set_title("The trainer's time")


def draw_tokens(ax: Axes, results: Results, curves: list[str]) -> None:
    """Draws for each curve the share of the tokens made that was used, and what became of the others."""
    policies = texts(results.summary, "policy")
    rows = [policies.index(curve) for curve in curves]
    of = {name: np.nan_to_num(column(results.summary, f"{name}_share")[rows]) for name in ("waste", *WASTE)}
    shares = {
        "used": (1 - of["waste"], "#009E73"),
        "aborted": (of["aborted"], "#D55E00"),
        "dropped": (of["filtered"] + of["stale"] + of["failed"], "#CC79A7"),
        "left over": (of["left"], "#BBBBBB"),
    }
    left = np.zeros(len(curves))
    for name, (share, color) in shares.items():
        ax.barh(range(len(curves)), 100 * share, left=left, height=0.5, color=color, linewidth=0, label=name)
        left = left + 100 * share
    _name_lanes(ax, curves)
    ax.set_yticklabels([])
    ax.set_xlim(0, 100)
    ax.set_xlabel("% of the tokens made")
    ax.set_title("What became of the tokens")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=4, fontsize=8, frameon=False)


def _name_lanes(ax: Axes, names: list[str]) -> None:
    short = [name.rsplit("kind=", 1)[-1].replace("_", " ") for name in names]
    ax.set_yticks(range(len(names)), short)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
