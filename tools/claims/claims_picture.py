"""Claims about batching and their measured values, drawn: one panel for each claim."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from batchsim.report.pictures.style import GREY, PALE, figure, house_style, put_around, save
from batchsim.report.reading import SAME_COSTS
from tools.claims.nouns import Claim, Finding

VERDICT_COLORS = {
    "yes": "#009E73",
    "no: less": "#D55E00",
    "no: more": "#0072B2",
    "seeds differ": "#7F7F7F",
}
_CLAIMED = "#DDF1EA"
_ROW_INCH, _PANEL_INCH = 0.27, 0.9  # of the picture's height: a condition, and what a panel needs besides


def claims_picture(findings: Sequence[Finding], heading: str, path: Path | str) -> None:
    """Writes a panel for each claim: the value under each condition, a mark for each seed, beside the claimed range."""
    groups = [(claim, list(group)) for claim, group in itertools.groupby(findings, key=lambda f: f.claim)]
    heights = [_PANEL_INCH + _ROW_INCH * len(group) for _, group in groups]
    with house_style():
        fig = figure(10.5, 1.3 + sum(heights))
        axes = fig.subplots(len(groups), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
        for ax, (claim, group) in zip(axes, groups, strict=True):
            draw_claim(ax, claim, group)
        handles = [
            Line2D([], [], color=color, marker="o", linestyle="none", label=f"holds: {verdict}")
            for verdict, color in VERDICT_COLORS.items()
        ]
        handles.append(Patch(color=_CLAIMED, label="claimed"))  # type: ignore[arg-type]
        put_around(
            fig,
            "Sayings about batching, and where they hold",
            heading,
            f"{SAME_COSTS} · a mark a seed · `python -m tools.claims` prints sources, readings and conditions",
            handles,
        )
        save(fig, path)


def draw_claim(ax: Axes, claim: Claim, findings: Sequence[Finding]) -> None:
    """Draws the conditions of one claim from top to bottom, a mark for each seed, over the claimed range."""
    known = [value for finding in findings for value in finding.values]
    if claim.unit == "×":
        bounds = [bound for bound in (1.0, claim.low, claim.high) if bound]
        ax.set_xscale("log")
        ax.set_xlim(min(*known, *bounds) / 1.3 if known else 0.5, max(*known, *bounds) * 1.5)
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    else:
        ax.set_xlim(min(0.0, *known, 0.0) - 0.03, 1.03)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
    right = ax.get_xlim()[1] if claim.high is None else claim.high
    if claim.low < right:
        ax.axvspan(claim.low, right, color=_CLAIMED, linewidth=0, zorder=0)
    ax.axvline(claim.low, color=GREY, linewidth=1, zorder=1)
    for row, finding in enumerate(findings):
        if not finding.values:
            ax.text(0.01, row, f"undefined: {finding.note}", transform=ax.get_yaxis_transform(), size=8, va="center")
            continue
        color = VERDICT_COLORS[finding.verdict]
        ax.plot([min(finding.values), max(finding.values)], [row, row], color=color, linewidth=2, alpha=0.4)
        ax.plot(finding.values, [row] * len(finding.values), "o", color=color, markersize=5.5, clip_on=False, zorder=3)
    ax.set_ylim(len(findings) - 0.5, -0.5)
    ax.set_yticks(range(len(findings)), [finding.condition.text for finding in findings])
    ax.grid(visible=True, axis="x", color=PALE)
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel(claim.reading, size=8, color=GREY)
    ax.set_title(f'"{claim.said}"', weight="bold")
