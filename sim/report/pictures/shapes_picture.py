"""The sizes of a scenario's steps, drawn with the buckets that waste least on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from batchsim.report.numbers import percent_text
from batchsim.report.pictures.style import GREY, figure, house_style, picture_kind, put_around, save
from batchsim.results.heading import heading
from batchsim.scenario.config import PolicySpec
from batchsim.scenario.setup import Setup
from batchsim.study.sweep.shapes_seen import SizesSeen

KIND = picture_kind("sizes of steps")
_REAL, _PADDED = "#0072B2", "#E69F00"
_AXIS = {"tokens": "tokens of a step", "requests": "decoding requests of a step"}


def shapes_picture(setup: Setup, spec: PolicySpec, load: float, lists: Sequence[SizesSeen], path: Path) -> None:
    """Writes a panel a list: steps by their real size, from the smallest up, and the size that they are padded to."""
    with house_style():
        fig = figure(9.0, 4.4)
        panels = np.atleast_1d(fig.subplots(1, len(lists)))
        for ax, each in zip(panels, lists, strict=True):
            _panel(ax, each)
        head = heading(setup).partition(" · measured at: ")[0]
        foot = f"{spec.name} at load {load:g} · steps in order of their size; the area between the lines is padding"
        handles = [
            Line2D([], [], color=_REAL, label="real size"),
            Line2D([], [], color=_PADDED, label="best buckets"),
            Line2D([], [], color=GREY, linestyle=(0, (4, 1.5)), label="powers of two"),
        ]
        put_around(fig, "Sizes of steps, and what they are padded to", head, foot, handles)
        save(fig, path, KIND)


def _panel(ax: Axes, each: SizesSeen) -> None:
    sizes, counts = np.array(list(each.seen), np.int64), np.array(list(each.seen.values()), np.int64)
    shares = np.concatenate([[0.0], np.cumsum(counts) / counts.sum()])
    for buckets, color, style in (
        (each.powers.buckets, GREY, (0, (4, 1.5))),
        (each.best.buckets, _PADDED, "-"),
        (tuple(each.seen), _REAL, "-"),
    ):
        at = np.array(buckets)[np.searchsorted(np.array(buckets), sizes)]
        ax.plot(shares, np.append(at[:1], at), drawstyle="steps-pre", color=color, linestyle=style)
    real = np.append(sizes[:1], sizes)
    best = np.array(each.best.buckets)[np.searchsorted(np.array(each.best.buckets), sizes)]
    ax.fill_between(shares, real, np.append(best[:1], best), step="pre", color=_PADDED, alpha=0.25, linewidth=0)
    ax.set_xlim(0, 1)
    ax.set_ylim(0, None)
    ax.xaxis.set_major_formatter(lambda x, _: percent_text(x))
    ax.set_xlabel("part of the steps")
    ax.set_ylabel(_AXIS[each.name])
    waste, powers = percent_text(each.best.waste), percent_text(each.powers.waste)
    ax.set_title(f"{each.name}: {len(each.best.buckets)} buckets waste {waste}, powers of two {powers}")
