"""The loads that a capacity search tried for each policy, drawn: held or missed, and the capacity with its interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from batchsim.report.pictures.palette import PolicyStyle, kind_styles
from batchsim.report.pictures.style import GREY, figure, house_style, put_around, save
from batchsim.report.text.capacity_text import capacity_in_words
from batchsim.results.heading import heading
from batchsim.study.capacity.find import CapacityStudy, PolicyCapacity
from batchsim.study.capacity.search import most_margin, probes

# ---- the picture


def capacity_picture(study: CapacityStudy, path: Path) -> None:
    """Writes a panel a policy: SLO margins of probes with intervals, by load; the band is the capacity's interval."""
    policies = [policy for policy in study.policies if policy.case.book]
    styles = kind_styles([policy.case.spec.kind for policy in policies])
    with house_style():
        fig = figure(8.5, 1.4 + 2.1 * len(policies))
        panels = np.atleast_1d(fig.subplots(len(policies), 1, sharex=True))
        for ax, policy, style in zip(panels, policies, styles, strict=True):
            _panel(ax, study, policy, style)
        loads = [load for policy in policies for load in policy.case.book]
        if max(loads) > 8 * min(loads):
            panels[-1].set_xscale("log")
            panels[-1].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
            panels[-1].xaxis.set_minor_locator(NullLocator())
            panels[-1].xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        names = {"mean_rate": "offered load (requests/s)", "users": "users", "rate_scale": "times the trace's rate"}
        panels[-1].set_xlabel(names[study.scenario.load_name])
        head = heading(study.setup).partition(" · measured at: ")[0]
        foot = (
            "bars: 95 % interval over seeds · hollow: undecided · × the queue grows · band: where the verdict is open"
        )
        handles = [Line2D([], [], color=GREY, linestyle=(0, (4, 1.5)), label=f"the SLO: {study.objective}")]
        put_around(fig, "Highest load within the SLO", head, foot, handles)
        save(fig, path)


def _panel(ax: Any, study: CapacityStudy, policy: PolicyCapacity, style: PolicyStyle) -> None:
    found = policy.found
    # Linear between the largest margin and as much below 0, by powers of ten down to where everybody misses.
    scale = max(most_margin(policy.case.book), 1e-3)
    ax.set_yscale("symlog", linthresh=scale, linscale=0.8)
    ax.set_ylim(-1.2, 1.25 * scale)
    ax.set_yticks([-1.0, *(tick for tick in (-0.1, -0.01) if tick <= -scale), 0.0, scale])
    for p in probes(policy.case.book):
        if p.low is not None and p.high is not None:
            ax.plot([p.load, p.load], [p.low, p.high], color=style.color, alpha=0.5, linewidth=1.4)
        marker = "x" if p.grows else style.marker
        filled = style.color if p.decided else "white"
        ax.plot([p.load], [p.margin], marker=marker, color=style.color, markersize=5.5, zorder=3, mfc=filled)
    ax.axhline(0, color=GREY, linestyle=(0, (4, 1.5)), linewidth=1.2)
    if found.load is not None:
        ends = [found.load if end is None else end for end in (found.low, found.high)]
        ax.axvspan(*ends, color=style.color, alpha=0.18, linewidth=0)
        ax.axvline(found.load, color=style.color, linewidth=1.0)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:+.3g} %".replace("-", "−") if y else "0"))
    ax.set_ylabel("margin of the SLO")
    ax.set_title(f"{policy.name}: {capacity_in_words(study, found)}", size=9)
