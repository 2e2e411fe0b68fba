"""The share of requests within the SLO against load, with the share that is asked for."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes

from batchsim.report.pictures.curve_lines import hidden_under, styled_sweeps, widened
from batchsim.report.pictures.style import (
    figure,
    footer,
    frame,
    house_style,
    load_axis,
    nines,
    nines_axis,
    policy_legend,
    save,
)
from batchsim.report.slo_shares import SloShare, slo_shares
from batchsim.results.read import Results

_PANEL_INCH = 3.6


def slo_share_picture(results: Results, path: Path | str) -> None:
    """Writes the share of requests within the SLO against the load, a panel for each class that has an objective of its
    own. `slo_shares` must find one."""
    shares = slo_shares(results)
    columns = min(len(shares), 3)
    with house_style():
        rows = -(-len(shares) // columns)
        fig = figure(8.5 if columns == 1 else 13.0, 1.4 + _PANEL_INCH * rows)
        axes = fig.subplots(rows, columns, squeeze=False, sharey=True).flat
        for ax, share in zip(axes, shares, strict=False):
            draw_slo_share(ax, results, share)
        for ax in list(axes)[len(shares) :]:
            ax.set_visible(False)
        frame(
            fig,
            results,
            "Requests within the SLO against offered load",
            footer(results, "dashed: the share asked for", "× the queue grows", "90 to 99 % is as far as 99 to 99.9 %"),
            policy_legend(results),
        )
        save(fig, path)


def draw_slo_share(ax: Axes, results: Results, share: SloShare) -> None:
    """Draws one share against the load, a line a policy with its interval; a cross where the queue grows, whose
    requests are counted all the same."""
    load_axis(ax, results)
    nines_axis(ax.yaxis)
    ax.set_ylim(-0.06, nines(1.0) + 0.1)
    ax.set_ylabel(f"{share.counted} within the SLO")
    ax.set_title(f"{share.request_class}: {share.objective}" if share.request_class else share.objective)
    ax.axhline(nines(share.target), color="black", linewidth=1, linestyle=(0, (6, 3)), zorder=1.5)
    drawn = styled_sweeps(results)
    shade = 0.8 / (2 + len(drawn))
    for (sweep, style), depth in zip(drawn, hidden_under([s.values(share.metric) for s, _ in drawn]), strict=True):
        x, y, half = sweep.loads, sweep.values(share.metric), sweep.half_width(share.metric)
        size = widened(depth)
        ax.fill_between(x, nines(y - half), nines(y + half), color=style.color, alpha=shade, linewidth=0)
        ax.plot(x, nines(y), color=style.color, linestyle=style.linestyle, linewidth=size["linewidth"])
        for chosen, marker in ((~sweep.unstable, style.marker), (sweep.unstable, "x")):
            if not chosen.any():
                continue  # an empty unclipped line would stretch the panel to the figure's corner
            ax.plot(
                x[chosen], nines(y[chosen]), linestyle="none", marker=marker, markersize=size["markersize"],
                color=style.color, zorder=3, clip_on=False,
            )  # fmt: skip
