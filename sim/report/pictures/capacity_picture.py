"""The loads that a capacity search tried for each policy, drawn: held or missed, and the capacity with its interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from batchsim.report.pictures.palette import PolicyStyle, kind_styles
from batchsim.report.pictures.style import GREY, figure, house_style, nines, nines_axis, put_around, save
from batchsim.report.text.capacity_text import (
    SPREAD,
    asked_share,
    capacity_in_words,
    load_edges,
    share_or_margin,
)
from batchsim.results.heading import heading
from batchsim.study.capacity.book import most_margin, probes
from batchsim.study.capacity.capacities import CapacityStudy, PolicyCapacity


def capacity_picture(study: CapacityStudy, path: Path) -> None:
    """Writes a panel a policy: the share within the SLO at each load tried, or its margin where the SLO is not
    one share, with intervals; the band is the capacity's interval.

    >>> batchsim.capacity_picture(study, Path("capacity.png"))
    """
    policies = [policy for policy in study.policies if policy.case.book]
    styles = kind_styles([policy.case.spec.kind for policy in policies])
    with house_style():
        fig = figure(8.5, 1.4 + max(2.1 * len(policies), 3.4))
        panels = np.atleast_1d(fig.subplots(len(policies), 1, sharex=True))
        loads = [load for policy in policies for load in policy.case.book]
        edges = load_edges(min(loads), max(loads))
        for ax, policy, style in zip(panels, policies, styles, strict=True):
            _panel(ax, study, policy, style, asked_share(study), edges)
        panels[-1].set_xlim(*edges)
        if max(loads) > SPREAD * min(loads):
            panels[-1].set_xscale("log")
            panels[-1].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
            panels[-1].xaxis.set_minor_locator(NullLocator())
            panels[-1].xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        names = {"mean_rate": "offered load (requests/s)", "users": "users", "rate_scale": "times the trace's rate"}
        panels[-1].set_xlabel(names[study.scenario.load_name])
        head = heading(study.setup).partition(" · measured at: ")[0]
        foot = (
            "bars: 95 % interval over seeds · hollow: undecided · × the queue grows · band: where the verdict is open"
            " · dotted: between loads that nothing was decided of"
        )
        handles = [Line2D([], [], color=GREY, linestyle=(0, (4, 1.5)), label=f"the SLO: {study.objective}")]
        put_around(fig, "Highest load within the SLO", head, foot, handles)
        save(fig, path)


def _panel(
    ax: Any,
    study: CapacityStudy,
    policy: PolicyCapacity,
    style: PolicyStyle,
    asked: float | None,
    edges: tuple[float, float],
) -> None:
    """Draws one policy; `edges` are those of the axis of loads, up to which an open verdict reaches."""
    capacity = policy.found

    def place(margin: float) -> float:
        return margin if asked is None else float(nines(asked + margin))

    if asked is None:
        _margin_axis(ax, most_margin(policy.case.book))
    else:
        nines_axis(ax.yaxis)
        ax.set_ylim(-0.08, nines(1.0) + 0.15)
        ax.set_ylabel("within the SLO")
    for p in probes(policy.case.book):
        if p.low is not None and p.high is not None:
            ax.plot([p.load, p.load], [place(p.low), place(p.high)], color=style.color, alpha=0.5, linewidth=1.4)
        marker = "x" if p.grows else style.marker
        filled = style.color if p.decided else "white"
        ax.plot([p.load], [place(p.margin)], marker=marker, color=style.color, markersize=5.5, zorder=3, mfc=filled)
    ax.axhline(place(0), color=GREY, linestyle=(0, (4, 1.5)), linewidth=1.2)
    if capacity.load is not None:
        ends = [edge if end is None else end for end, edge in zip((capacity.low, capacity.high), edges, strict=True)]
        ax.axvspan(*ends, color=style.color, alpha=0.18, linewidth=0)
        decided = capacity.low is not None and capacity.high is not None
        ax.axvline(capacity.load, color=style.color, linewidth=1.0, linestyle="-" if decided else ":")
    ax.set_title(f"{policy.name}: {capacity_in_words(study, capacity)}", size=9)


def _margin_axis(ax: Any, most: float) -> None:
    """Linear between the largest margin and as much below 0, by powers of ten down to where everybody misses."""
    scale = max(most, 1e-3)
    ax.set_yscale("symlog", linthresh=scale, linscale=0.8)
    ax.set_ylim(-1.2, 1.25 * scale)
    ax.set_yticks([-1.0, *(tick for tick in (-0.1, -0.01) if tick <= -scale), 0.0, scale])
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: share_or_margin(y, None)))
    ax.set_ylabel("margin of the SLO")
