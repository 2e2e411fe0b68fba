"""A plan's pictures, narrow enough to be read on a phone: cost against goodput, replicas against the SLO, the day."""

from __future__ import annotations

import io
from collections.abc import Callable
from textwrap import fill
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from matplotlib.transforms import offset_copy

from batchsim.report.page.plan_columns import Row, Tables, one_seed_alone
from batchsim.report.pictures.palette import OKABE_ITO
from batchsim.report.pictures.style import GREY, figure, house_style

WIDTH_INCH = 5.0
_LABEL = 64  # letters of a legend's line across the whole picture
_LINE_INCH = 0.2
_SIZE, _SMALL = 7, 4  # of marks; small those of one seed alone
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "d")


def draw_pictures(tables: Tables, currency: str) -> dict[str, tuple[str, str]]:
    """For each picture's name its caption and the picture itself as SVG."""
    drawn: dict[str, tuple[str, Callable[[Tables, str], Figure]]] = {}
    if any(row["goodput_rps"] is not None for row in _planned(tables)):
        drawn["pareto"] = (
            "Cost a month against goodput in the busiest window; marks at one place stand side by side",
            _pareto,
        )
    drawn["replicas"] = (
        "Within the SLO against the number of replicas; marks of one number stand side by side",
        _replicas,
    )
    if len(tables.get("traffic", [])) > 1:
        drawn["traffic"] = ("Traffic over time, within the SLO, and replicas enough", _traffic)
    pictures = {}
    with house_style():
        matplotlib.rcParams["svg.fonttype"] = "path"
        for name, (caption, draw) in drawn.items():
            matplotlib.rcParams["svg.hashsalt"] = name  # else the ids in the file differ from run to run
            pictures[name] = (caption, _svg(draw(tables, currency)))
    return pictures


def _svg(fig: Figure) -> str:
    buffer = io.StringIO()
    fig.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def _planned(tables: Tables) -> list[Row]:
    """The decided probes of the traffic planned for, without any change: rows of table `probes`."""
    unchanged: dict[str, Any] = {"traffic": 1.0, "dispersion": 1, "prompts": 1.0, "classes": "", "cost_factor": 1.0}
    unchanged |= {"slo_factor": 1.0, "window_share": 1.0}
    drawn = set(_look(tables))  # of a search, the configurations that were gone on with
    rows = [row for row in tables["probes"] if (row["gpu"], row["policy"]) in drawn]
    rows = [row for row in rows if all(row[name] == value for name, value in unchanged.items())]
    return [row for row in rows if row["attainment"] is not None and row["holds"] is not None]


def _look(tables: Tables) -> dict[tuple[str, str], tuple[str, str]]:
    """(colour, marker) of each (GPU, policy): the colour is the GPU's, the marker the policy's."""
    gpus = list(dict.fromkeys(row["gpu"] for row in tables["configurations"]))
    policies = list(dict.fromkeys(row["policy"] for row in tables["configurations"]))
    return {
        (gpu, policy): (OKABE_ITO[i % len(OKABE_ITO)], _MARKERS[k % len(_MARKERS)])
        for i, gpu in enumerate(gpus)
        for k, policy in enumerate(policies)
    }


def _legend(fig: Figure, tables: Tables, rows: list[Row], extra: list[Line2D]) -> None:
    look = _look(tables)
    shown = dict.fromkeys((row["gpu"], row["policy"]) for row in rows)
    names = [fill(f"{gpu} · {policy}", _LABEL) for gpu, policy in shown]
    handles = [
        Line2D([], [], color=look[key][0], marker=look[key][1], linestyle="none", label=name)
        for key, name in zip(shown, names, strict=True)
    ]
    is_wide = any(len(name) > _LABEL // 2 for name in names)  # names of a search have its knobs: one under another
    if is_wide:
        fig.set_figheight(fig.get_figheight() + _LINE_INCH * sum(1 + name.count("\n") for name in names))
    columns = 1 if is_wide else 2
    fig.legend(handles=[*handles, *extra], loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def _size(row: Row) -> int:
    return _SMALL if one_seed_alone(row) else _SIZE


def _kinds_of_marks(rows: list[Row]) -> list[Line2D]:
    """The legend's lines on open marks, and on small ones, where there are some."""
    kinds = {"open: not shown to hold": _SIZE}
    if any(one_seed_alone(row) for row in rows):
        kinds["small: one seed alone, no interval"] = _SMALL
    look: dict[str, Any] = {"color": GREY, "marker": "o", "markerfacecolor": "white", "linestyle": "none"}
    return [Line2D([], [], **look, markersize=size, label=label) for label, size in kinds.items()]


def _pareto(tables: Tables, currency: str) -> Figure:
    fig = figure(WIDTH_INCH, 4.4)
    ax = fig.subplots()
    look = _look(tables)
    rows = [row for row in _planned(tables) if row["goodput_rps"] is not None]
    offered = max((row["offered_rps"] for row in rows), default=0.0)
    for together in _together(rows, offered):
        for row, aside in zip(together, _asides(len(together)), strict=True):
            color, marker = look[row["gpu"], row["policy"]]
            ax.plot(
                row["cost_per_month"],
                row["goodput_rps"],
                marker,
                color=color,
                markerfacecolor=color if row["holds"] else "white",
                markersize=_size(row),
                zorder=3,
                transform=offset_copy(ax.transData, fig, x=aside, units="points"),
            )
    _numbers(ax, rows, look)
    _frontier(ax, rows)
    ax.axhline(offered, color=GREY, linewidth=1, linestyle=":")
    ax.set_ylim(0, offered * 1.12 or 1)
    ax.set_xlim(0, max((row["cost_per_month"] for row in rows), default=1.0) * 1.05)
    ax.set_xlabel(f"cost a month ({currency})")
    ax.set_ylabel("goodput (requests/s)")
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    ax.set_title("Cost against goodput, replicas at each mark")
    known = any(row["energy_j_per_output_token"] is not None for row in rows)
    energy = [Line2D([], [], linestyle="none", label="J: an output token's, measured or estimated")] if known else []
    extra = [
        Line2D([], [], color=GREY, linestyle=":", label="offered"),
        Line2D([], [], color=GREY, linewidth=1, label="no cheaper way to as much"),
        *_kinds_of_marks(rows),
        *energy,
    ]
    _legend(fig, tables, rows, extra)
    return fig


def _together(rows: list[Row], offered: float) -> list[list[Row]]:
    """`rows` with those side by side whose marks would hide each other, so close are they in cost and goodput."""
    most = max((row["cost_per_month"] for row in rows), default=0.0)
    groups: list[list[Row]] = []
    for row in rows:
        for others in groups:
            first = others[0]
            cost, goodput = (abs(row[name] - first[name]) for name in ("cost_per_month", "goodput_rps"))
            if cost < 0.015 * most and goodput < 0.02 * offered:
                others.append(row)
                break
        else:
            groups.append([row])
    return groups


def _asides(count: int) -> list[float]:
    """Offsets in points of `count` marks at one place, so that each is visible."""
    return [(i - (count - 1) / 2) * _SIZE for i in range(count)]


def _numbers(ax: Axes, rows: list[Row], look: dict[tuple[str, str], tuple[str, str]]) -> None:
    """Writes the replicas above the marks, and J an output token where that is known: once above those of one kind of
    GPU that cost the same."""
    highest: dict[tuple[str, int, float], Row] = {}
    for row in sorted(rows, key=lambda row: row["goodput_rps"]):
        highest[row["gpu"], row["replicas"], round(row["cost_per_month"], 6)] = row
    for row in highest.values():
        joules = row["energy_j_per_output_token"]
        ax.annotate(
            str(row["replicas"]) + ("" if joules is None else f": {joules:.2g} J"),
            (row["cost_per_month"], row["goodput_rps"]),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            size=8,
            color=look[row["gpu"], row["policy"]][0],
        )


def _frontier(ax: Axes, rows: list[Row]) -> None:
    """Draws the Pareto frontier as a step line: the configurations whose goodput none as cheap exceeds."""
    best, points = -1.0, []
    for row in sorted(rows, key=lambda row: (row["cost_per_month"], -row["goodput_rps"])):
        if row["goodput_rps"] > best:
            best = row["goodput_rps"]
            points.append((row["cost_per_month"], best))
    if len(points) > 1:
        ax.step(*zip(*points, strict=True), where="post", color=GREY, linewidth=1, zorder=1)


def _replicas(tables: Tables, currency: str) -> Figure:
    fig = figure(WIDTH_INCH, 4.4)
    ax = fig.subplots()
    look = _look(tables)
    rows = _planned(tables)
    keys = [key for key in look if any((row["gpu"], row["policy"]) == key for row in rows)]
    for key, aside in zip(keys, _asides(len(keys)), strict=True):
        color, marker = look[key]
        group_rows = sorted((r for r in rows if (r["gpu"], r["policy"]) == key), key=lambda row: row["replicas"])
        moved = offset_copy(ax.transData, fig, x=aside, units="points")
        missed = [max(1 - row["attainment"], _FLOOR) for row in group_rows]
        ax.plot([row["replicas"] for row in group_rows], missed, color=color, linewidth=1, transform=moved)
        for row, y in zip(group_rows, missed, strict=True):
            if row["attainment_low"] is not None:
                ends = [max(1 - row[name], _FLOOR) for name in ("attainment_high", "attainment_low")]
                ax.plot([row["replicas"]] * 2, ends, color=color, linewidth=3, alpha=0.35, transform=moved)
            face, size = color if row["holds"] else "white", _size(row)
            ax.plot(
                row["replicas"],
                y,
                marker,
                color=color,
                markerfacecolor=face,
                markersize=size,
                zorder=3,
                transform=moved,
            )
    counts = [row["replicas"] for row in rows] or [1]
    room = max(0.05 * (max(counts) - min(counts)), 0.3)
    ax.set_xlim(min(counts) - room, max(counts) + room)  # marks moved aside are not seen by autoscaling
    ax.set_yscale("log")
    ax.set_ylim(2, _FLOOR / 1.5)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_yticks([1, 0.1, 0.01, 0.001, _FLOOR], ["none", "90 %", "99 %", "99.9 %", "99.99 %\nor more"])
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("replicas")
    ax.set_ylabel("within the SLO")
    ax.set_title("How many replicas hold")
    extra = [
        Line2D([], [], color=GREY, linewidth=3, alpha=0.35, label="interval"),
        *_kinds_of_marks(rows),
    ]
    _legend(fig, tables, rows, extra)
    return fig


_FLOOR = 1e-4


def _traffic(tables: Tables, currency: str) -> Figure:
    fig = figure(WIDTH_INCH, 4.8)
    top, bottom = fig.subplots(2, 1, sharex=True)
    rows = tables["traffic"]
    x = list(range(len(rows)))
    top.bar(x, [row["rate_rps"] for row in rows], color=OKABE_ITO[0], width=0.85)
    top.set_ylabel("requests/s")
    top.set_title("The traffic, part by part")
    bottom.step(x, [row["replicas_enough"] for row in rows], where="mid", color=OKABE_ITO[1], label="replicas enough")
    bottom.set_ylabel("replicas enough")
    bottom.yaxis.set_major_locator(MaxNLocator(integer=True))
    bottom.set_ylim(bottom=0)
    right = bottom.twinx()
    known = [(i, 100 * row["attainment"]) for i, row in enumerate(rows) if row["attainment"] is not None]
    right.plot(*zip(*known, strict=True), marker="o", color=OKABE_ITO[2], linestyle="none")
    right.set_ylabel("within SLO (%)", color=OKABE_ITO[2])
    right.spines["right"].set_visible(True)
    right.grid(visible=False)
    low = min(value for _, value in known)
    right.set_ylim(min(low - 0.2, 99.0), 100.05)
    step = max(1, len(rows) // 6)
    bottom.set_xticks(x[::step], [str(row["part"])[: len("00:00")] for row in rows][::step])
    bottom.set_xlabel("from")
    return fig
