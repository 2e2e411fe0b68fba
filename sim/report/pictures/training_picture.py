"""Packers beside each other, as files and a picture: the GPUs' time, how uneven rows are, steps over an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from batchsim.base.files import write_text
from batchsim.report.pictures.palette import OKABE_ITO
from batchsim.report.pictures.style import GREY, figure, house_style, put_around, save
from batchsim.report.text.training_text import (
    step_rows,
    training_heading,
    training_rows,
    training_sentences,
    training_text,
)
from batchsim.results.provenance import as_json, provenance, write_csv
from batchsim.training.kpis import Run, squares_of
from batchsim.training.load import TrainingScenario

FILES = PACKERS, STEPS, JSON, TEXT, PICTURE = (
    "packers.csv",
    "steps.csv",
    "training.json",
    "training.txt",
    "training.png",
)
WORK, PADDING, WAITING, BUBBLE = OKABE_ITO[0], OKABE_ITO[4], OKABE_ITO[1], OKABE_ITO[3]
ROW_INCH = 0.62
HEADS = ("time of the GPUs", "squares of rows over their mean", "time of steps over its mean")
AGE = "age of examples at their step, s"
LEAST = 0.03
"""Squares over their mean from which on they are drawn, on a logarithmic axis."""
MOST_DRAWN = 400
"""Points of a line at most: of more, the largest of equal runs are drawn."""


def write_training(scenario: TrainingScenario, runs: Sequence[Run], folder: Path) -> dict[str, Any]:
    """Writes FILES into `folder`, and returns what training.json has: the scenario, a row a packer, how it was made."""
    rows = training_rows(runs)
    result = {"scenario": scenario.document.value, "seed": scenario.config.seed, "packers": rows, **provenance()}
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / PACKERS, rows)
    write_csv(folder / STEPS, step_rows(runs))
    write_text(folder / JSON, as_json(result, indent=1) + "\n")
    write_text(folder / TEXT, training_text(scenario.name, runs) + "\n")
    training_picture(scenario.name, runs, folder / PICTURE)
    return result


def training_picture(name: str, runs: Sequence[Run], path: Path) -> None:
    """Writes a row of three panels for each packer: its GPUs' time in parts, the squares of documents of its rows from
    the most on, the time of its steps over the epoch."""
    with house_style():
        fig = figure(11.0, 2.0 + ROW_INCH * len(runs))
        axes: Any = fig.subplots(len(runs), 3, squeeze=False, sharex="col", gridspec_kw={"width_ratios": [1.5, 1, 1]})
        tops = [max(_squares(run)) for run in runs], [_times(run).max() for run in runs]
        for row, run in zip(axes, runs, strict=True):
            _parts(row[0], run)
            _descending(row[1], _squares(run), max(tops[0]))
            _over_epoch(row[2], run, max(tops[1]))
        heads = (*HEADS[:2], AGE if runs[0].stream else HEADS[2])
        for ax, head in zip(axes[0], heads, strict=True):
            ax.set_title(head, size=9)
        labels = ("share of all time", "share of the rows", "share of the epoch")
        for ax, label in zip(axes[-1], labels, strict=True):
            ax.set_xlabel(label)
            ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:.0f}%"))
        handles: list[Any] = [Patch(color=WORK, label="examples' tokens"), Patch(color=PADDING, label="padding")]
        handles += [Patch(color=WAITING, label="waiting for other ranks")]
        if runs[0].config.ranks.pipeline > 1:
            handles.append(Patch(color=BUBBLE, label="pipeline bubble"))
        foot = (
            "tokens/s: of examples, of each GPU · squares: sum over the documents of a row, or of a micro-batch of"
            " samples · numbers: max over mean" + ("; of ages the largest mean of a step" if runs[0].stream else "")
        )
        title = next(iter(training_sentences(runs)), "One packer")
        put_around(fig, title.rstrip("."), training_heading(name, runs), foot, handles)
        save(fig, path)


def _parts(ax: Any, run: Run) -> None:
    """One bar: the time in which GPUs compute examples' tokens, padding, wait, or have nothing to do."""
    figures = run.figures
    waiting, bubble, padding = (figures[name] or 0.0 for name in ("waiting", "bubble", "padding"))
    working = (1 - waiting) * (1 - bubble)
    left = 0.0
    for width, color in (
        (working * (1 - padding), WORK),
        (working * padding, PADDING),
        ((1 - waiting) * bubble, BUBBLE),
        (waiting, WAITING),
    ):
        ax.barh([0], [width], left=left, color=color, height=0.62)
        left += width
    ax.set_xlim(0, 1)
    ax.set_ylim(-0.5, 0.5)
    ax.set_yticks([])
    ax.grid(False)
    speed = figures["tokens_per_gpu_s"] or 0.0
    ax.set_ylabel(f"{run.label}\n{speed:,.0f} tokens/s", rotation=0, ha="right", va="center", size=8.5)
    ax.spines["left"].set_visible(False)


def _squares(run: Run) -> list[float]:
    """The sums of squares of rows, or of micro-batches of samples, over their mean, from the largest on."""
    squares = np.sort(np.array(squares_of(run), dtype=float))[::-1]
    return (squares / squares.mean()).tolist()


def _descending(ax: Any, values: Sequence[float], top: float) -> None:
    x = np.linspace(0, 1, len(values))
    ax.fill_between(x, values, color=WORK, alpha=0.25, linewidth=0)
    ax.plot(x, values, color=WORK, linewidth=1.2)
    ax.axhline(1, color=GREY, linewidth=0.8, linestyle=(0, (4, 1.5)))
    ax.set_yscale("log")
    _mark(ax, top, max(values))
    ax.set_ylim(LEAST, 2 * top)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))


def _times(run: Run) -> Any:
    """By step its time over the mean, or in a stream the mean age of its examples."""
    if run.stream:
        return np.array(run.stream.step_ages_s)
    times = np.array([step.time_s for step in run.steps])
    return times / times.mean()


def _over_epoch(ax: Any, run: Run, top: float) -> None:
    times = _times(run)
    ends = np.linspace(0, len(times), min(len(times), MOST_DRAWN) + 1).astype(int)
    largest = np.maximum.reduceat(times, ends[:-1])
    ax.plot((ends[:-1] + 0.5) / len(times), largest, color=WORK, linewidth=0.9)
    _mark(ax, top, float(times.max()))


def _mark(ax: Any, top: float, value: float) -> None:
    """The scale that all rows share, and the largest value in a corner."""
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1.35 * top)
    ax.text(0.98, 0.92, f"{value:.2f}", transform=ax.transAxes, ha="right", va="top", size=8, color="#333333")
