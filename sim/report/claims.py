"""The report on claims: a table of verdicts as plain text, and a picture of what was measured and what is claimed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from sim.claims import Claim, Finding
from sim.report.layout import fit
from sim.report.reading import SAME_COSTS
from sim.report.style import GREY, PALE, figure, house_style, put_around, save

VERDICT_COLORS = {
    "yes": "#009E73",
    "no: less": "#D55E00",
    "no: more": "#0072B2",
    "seeds differ": "#7F7F7F",
}
_CLAIMED = "#DDF1EA"
_ROW_INCH, _PANEL_INCH = 0.27, 0.9  # of the picture's height: a condition, and what a panel needs besides


def claims_text(findings: Sequence[Finding], heading: str) -> str:
    """All claims with their sources, readings and verdicts, as wide as the output."""
    seeds = max((len(finding.values) for finding in findings), default=0)
    spread = "1 seed" if seeds == 1 else f"mean of up to {seeds} seeds (lowest–highest)"
    head = [heading, f"{SAME_COSTS} · {spread}"]
    lines = [part for line in head for part in fit(line).split("\n")]
    for claim, group in itertools.groupby(findings, key=lambda finding: finding.claim):
        found = list(group)
        holds = sum(finding.verdict == "yes" for finding in found)
        lines += ["", fit(f'{claim.name}: "{claim.said}" holds under {holds} of {len(found)} conditions')]
        lines += fit(f"  told by   {claim.source}").split("\n") + fit(f"  measured  {claim.reading}").split("\n")
        rows = [("", "", "holds?", "")]
        rows += [(f.condition.text, measured(f), f.verdict, f.note) for f in found]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines += [fit(_row(row, widths)) for row in rows]
    return "\n".join(lines)


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    text, value, verdict, note = cells
    return f"  {text:<{widths[0]}}  {value:>{widths[1]}}  {verdict:<{widths[2]}}  {note}".rstrip()


def measured(finding: Finding) -> str:
    """`24 × (23.7–24.2)`: the mean over seeds, and where they differ the lowest and the highest; `–` without any."""
    if not finding.values:
        return "–"
    unit = finding.claim.unit
    mean, low, high = np.mean(finding.values), min(finding.values), max(finding.values)
    texts = [_number(float(value), unit) for value in (mean, low, high)]
    seeds = f" ({texts[1]}–{texts[2]})" if texts[1] != texts[2] else ""
    return f"{texts[0]} {unit}{seeds}"


def _number(value: float, unit: str) -> str:
    """A ratio to two or three digits; a share in percent, never rounded up to all."""
    if unit == "×":
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 10 else f"{value:.2g}"
    percent = 100 * value
    return f"{min(percent, 99.9):.1f}" if 99 < percent < 100 else f"{percent:.0f}"


def claims_as_json(findings: Sequence[Finding], heading: str) -> dict[str, Any]:
    """A row a condition, with the keys that were set and the value of every seed; shares are fractions."""
    rows = [
        {
            "claim": finding.claim.name,
            "said": finding.claim.said,
            "low": finding.claim.low,
            "high": finding.claim.high,
            "condition": finding.condition.text,
            "policy": finding.condition.policy,
            "against": list(finding.condition.against),
            "load": finding.condition.load,
            "set": list(finding.condition.overrides),
            "values": list(finding.values),
            "verdict": finding.verdict,
            "note": finding.note,
        }
        for finding in findings
    ]
    return {"heading": heading, "note": SAME_COSTS, "findings": rows}


def claims_picture(findings: Sequence[Finding], heading: str, path: Path | str) -> None:
    """Writes a panel a claim: what each condition gave, seed by seed, beside the range that is claimed."""
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
            f"{SAME_COSTS} · a mark a seed · `batchsim claims` prints sources, readings and conditions",
            handles,
        )
        save(fig, path)


def draw_claim(ax: Axes, claim: Claim, findings: Sequence[Finding]) -> None:
    """Draws a claim's conditions from top to bottom, a mark a seed, over the range that is claimed."""
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
