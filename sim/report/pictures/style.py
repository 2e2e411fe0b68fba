"""How every picture looks: colours, the frame around the axes, axes of loads and times, labels, saving.

Pictures are drawn on bare `Figure` objects, never through pyplot, so nothing here needs a display or keeps state.
"""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from batchsim.base.files import Kind, write_bytes
from batchsim.base.units import NS_PER_S, YEAR_NS, format_duration
from batchsim.report.layout import wrapped
from batchsim.report.pictures.palette import policy_styles
from batchsim.report.reading import (
    AXIS_LABELS,
    is_auto,
    load_name,
    load_text,
    num_seeds,
    seeds_text,
    short_load,
    sweeps,
    systems_note,
    tested_loads,
)
from batchsim.results.read import Results

GREY = "#6B6B6B"
PALE = "#E3E3E3"
DPI = 130
_NINES = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999)
# Labels of an axis that spans fewer factors of ten than the first: how often powers of ten of seconds, days and years,
# then minutes, then hours.
_TIME_TICKS: tuple[tuple[float, tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...] = (
    (1.2, (1, 2, 3, 5, 7), (1, 2, 3, 5, 7, 10, 15, 20, 30), (1, 2, 3, 5, 7, 12)),
    (2.2, (1, 2, 5), (1, 2, 5, 10, 20), (1, 2, 5, 12)),
    (3.0, (1, 3), (1, 3, 10, 30), (1, 4, 12)),
    (math.inf, (1,), (1, 10), (1, 6)),
)
# Text height in inches a point of font size takes up with its leading.
_LEAST_INCH = 1.5  # of axes with their labels
_LINE_INCH = 1.45 / 72

_RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # shipped with matplotlib: the same picture on every machine
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "grid.color": PALE,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "savefig.dpi": DPI,
    "figure.dpi": DPI,
}


@contextmanager
def house_style() -> Iterator[None]:
    """Draws with batchsim's settings whatever the user's matplotlibrc says, and restores the user's own afterwards."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        # Of letters that the font lacks, of axes that span all that floats can: no user could do anything about it.
        warnings.filterwarnings("ignore", module=r"matplotlib|numpy|batchsim\.report\.pictures")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield


def seconds_text(seconds: float) -> str:
    """The label of a time on an axis: `200 ms`, `1 s`, `2 min`; for the long spans of broken traces `12 d`, `3 y`."""
    for unit_s, unit in ((YEAR_NS // NS_PER_S, "y"), (86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.3g} {unit}"
    return format_duration(seconds * NS_PER_S)


def policy_legend(results: Results, notes: dict[str, str] | None = None) -> list[Line2D]:
    """A legend handle for each policy; the label ends with the policy's note, by default `growth_notes`."""
    policies = sweeps(results)
    notes = growth_notes(results) if notes is None else notes
    styles = policy_styles(policies)
    handles = []
    for sweep in policies:
        style = styles[sweep.policy]
        label = f"{sweep.name} · {notes[sweep.policy]}" if sweep.policy in notes else sweep.name
        handles.append(Line2D([], [], color=style.color, marker=style.marker, linestyle=style.linestyle, label=label))
    return handles


def growth_notes(results: Results) -> dict[str, str]:
    """Notes by policy, for those whose queue grows without end or whose simulation failed: from which load on (at
    which, if it is stable again above), and the loads that failed.
    """
    name = load_name(results)
    notes = {}
    for sweep in sweeps(results):
        grows = sweep.loads[sweep.grows]
        if len(grows):
            # A bounded queue that overflows grows no more: its survivors are points again.
            where = "from" if sweep.grows[sweep.loads >= grows[0]].all() else "at"
            notes[sweep.policy] = f"× {where} {load_text(name, float(grows[0]))}" if name else "× its queue grows"
        if sweep.failed.any():
            at = f"failed at {', '.join(f'{load:g}' for load in sweep.loads[sweep.failed > 0])}" if name else "failed"
            notes[sweep.policy] = f"{notes[sweep.policy]}, {at}" if sweep.policy in notes else at
    return notes


def footer(results: Results, *marks: str) -> str:
    """The footer of a picture over all seeds: where it was measured, the seeds, `marks`; none of growth without any."""
    counted = f"{seeds_text(results)} · bands and bars ± 95 %" if num_seeds(results) > 1 else "1 seed, no interval"
    shown = (mark for mark in marks if "the queue grows" not in mark or any(results.summary["unstable"]))
    return " · ".join((f"measured at: {results.manifest['measured_at']}", counted, *shown))


def frame(fig: Figure, results: Results, title: str, foot: str, handles: list[Line2D]) -> None:
    """Puts the title, the run's heading, the legend and the footer around the axes, wrapped to the figure's width."""
    heading = str(results.manifest["heading"]).partition(" · measured at: ")[0]  # the footer says so
    heading += " · " * bool(systems_note(results)) + systems_note(results)
    put_around(fig, title, heading, foot, handles)


def put_around(fig: Figure, title: str, heading: str, foot: str, handles: list[Line2D]) -> None:
    """Puts title, heading, legend and footer around the axes, as `frame` does, for a picture that is not of a run."""
    width, height = fig.get_size_inches()
    left = 0.12 / width

    def lines(text: str, size: float) -> str:
        # DejaVu Sans: 0.54 em an average letter, 0.6 with many digits and capitals among them.
        letters = int((width - 0.24) * 72 / (0.6 * size))
        return "\n".join(textwrap.fill(line, letters) for line in wrapped(text, letters).split("\n"))

    title, heading, foot = lines(title, 13), lines(heading, 9), lines(foot, 8)
    under_title = 0.10 + 13 * _LINE_INCH * (title.count("\n") + 1)
    y = under_title + 9 * _LINE_INCH * (heading.count("\n") + 1) + 0.05
    labels = [textwrap.fill(str(handle.get_label()), int((width - 1.0) * 72 / (0.54 * 9))) for handle in handles]
    columns = _legend_columns(labels, width) if handles else 1
    rows = math.ceil(len(handles) / columns) * max((label.count("\n") + 1 for label in labels), default=0)
    top = y + (9 * _LINE_INCH * rows + 0.12 if handles else 0)
    below = 0.12 + 8 * _LINE_INCH * (foot.count("\n") + 1)
    if height < top + below + _LEAST_INCH:  # a long legend would leave no room for the axes
        height = top + below + _LEAST_INCH
        fig.set_size_inches(width, height)
    fig.text(left, 1 - 0.10 / height, title, size=13, weight="bold", va="top")
    fig.text(left, 1 - under_title / height, heading, size=9, color=GREY, va="top")
    if handles:
        fig.legend(
            handles=handles,
            labels=labels,
            loc="upper left",
            bbox_to_anchor=(left, 1 - y / height),
            ncols=columns,
            frameon=False,
            borderpad=0,
            borderaxespad=0,
            handlelength=2.6,
            columnspacing=1.6,
        )
    fig.text(left, 0.07 / height, foot, size=8, color=GREY, va="bottom")
    engine = fig.get_layout_engine()
    assert engine is not None  # every figure here is made by `figure`
    engine.set(rect=(0.005, below / height, 0.99, 1 - (top + below) / height))  # type: ignore[call-arg]


def _legend_columns(labels: list[str], width_inch: float) -> int:
    """As many columns as fit the width, balanced over the rows they need."""
    longest = max(len(line) for label in labels for line in label.split("\n"))
    column_inch = 0.75 + longest * 0.54 * 9 / 72  # handle and gap, then the longest text
    rows = math.ceil(len(labels) / max(1, int(width_inch / column_inch)))
    return math.ceil(len(labels) / rows)


class _Shown(Figure):
    """A Figure that a notebook shows where a cell ends with it, though pyplot was never asked for one."""

    def _repr_png_(self) -> bytes:
        with house_style():
            return _png(self)


def figure(width_inch: float, height_inch: float) -> Figure:
    """An empty Figure of this size whose axes will not overlap."""
    return _Shown(figsize=(width_inch, height_inch), layout="constrained")


def picture_kind(of: str) -> Kind:
    """Pictures that say in their text what they are of, as `save` writes it."""
    name = f"picture of {of} by batchsim"
    return Kind(name, rb"\x89PNG.*tEXtSoftware\0" + name.encode())


def save(fig: Figure, path: Path | str, kind: Kind | None = None) -> None:
    """Writes a PNG, whole or not at all, whose bytes depend on the drawing alone: no date, no program version."""
    write_bytes(path, _png(fig, None if kind is None else kind.name), kind)


def _png(fig: Figure, software: str | None = None) -> bytes:
    drawn = io.BytesIO()
    # savefig would draw it twice; a higher level packs for twice as long, and 5 % smaller
    FigureCanvasAgg(fig).print_png(drawn, metadata={"Software": software}, pil_kwargs={"compress_level": 3})
    return drawn.getvalue()


def load_axis(ax: Axes, results: Results) -> None:
    """Labels x with the tested loads; logarithmic where they span more than a factor of eight."""
    name, loads = load_name(results), tested_loads(results)
    span = 8.0  # doubling loads 1, 2, 4, 8 crowd no linear axis
    logarithmic = loads[0] > 0 and loads[-1] / loads[0] > span
    ax.set_xscale("log" if logarithmic else "linear")
    low, high = loads[0], loads[-1]
    if low == high:
        ax.set_xlim(low - 1, high + 1)
    elif logarithmic:
        ax.set_xlim(low / (high / low) ** 0.05, high * (high / low) ** 0.05)
    else:
        ax.set_xlim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    if is_auto(results):  # loads of their own are no better labels than round numbers
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if logarithmic else MaxNLocator(8))
    else:
        ax.xaxis.set_major_locator(FixedLocator(_spaced(loads, logarithmic)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short_load(name, x)))
    ax.set_xlabel(AXIS_LABELS.get(name, name))


def _spaced(loads: np.ndarray, logarithmic: bool) -> list[float]:
    """The loads that get a tick label: each at least 6 % of the axis beyond the one before, so that none touch."""
    place = np.log(loads) if logarithmic else loads
    gap = 0.06 * (place[-1] - place[0])
    kept = [0]
    for i in range(1, len(loads)):
        if place[i] - place[kept[-1]] >= gap:
            kept.append(i)
    return [float(loads[i]) for i in kept]


def nines(share: Any) -> Any:
    """Where shares from 0 to 1 stand on an axis that spreads the tail: -log10(1 - share), so that 90 %, 99 % and 99.9 %
    are equally far apart; what is above the last of its ticks stands at it."""
    return -np.log10(1 - np.clip(share, 0, _NINES[-1]))


def nines_axis(axis: Any) -> None:
    """Ticks and labels of an axis of shares placed by `nines`."""
    axis.set_major_locator(FixedLocator([float(nines(share)) for share in _NINES]))
    axis.set_minor_locator(NullLocator())
    texts = {round(float(nines(share)), 6): f"{100 * share:g} %" for share in _NINES}
    texts[round(float(nines(_NINES[-1])), 6)] += "\nor more"
    axis.set_major_formatter(FuncFormatter(lambda at, _: texts.get(round(at, 6), "")))


def time_axis(ax: Axes, which: Literal["x", "y"], low_s: float, high_s: float) -> None:
    """Makes x or y a logarithmic axis of times in seconds between these ends."""
    ax.set(**{f"{which}scale": "log", f"{which}lim": (low_s, high_s)})
    time_axis_log(ax.xaxis if which == "x" else ax.yaxis, low_s, high_s)


def time_axis_log(axis: Any, low_s: float, high_s: float) -> None:
    """Labels a logarithmic axis of times, at least twice whatever the span."""
    axis.set_major_locator(FixedLocator(time_ticks(low_s, high_s)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: seconds_text(value)))


def time_ticks(low_s: float, high_s: float) -> list[float]:
    """Round times in seconds from `low_s` to `high_s`, each a round number of the unit it is written in, the fewer a
    factor of ten the more of them are spanned."""
    decades = math.log10(high_s / low_s)
    subs, minutes, hours = next(ladder for most, *ladder in _TIME_TICKS if decades < most)
    rounds = [sub * 10.0**k for k in range(min(math.floor(math.log10(low_s)), 0), 13) for sub in subs]
    ticks = [s for s in rounds if s <= 30] + [60.0 * n for n in minutes] + [3600.0 * n for n in hours]
    year_s = YEAR_NS / NS_PER_S
    ticks += [86_400 * n for n in rounds if 1 <= n < 365] + [year_s * n for n in rounds if n >= 1]
    return [tick for tick in ticks if low_s <= tick <= high_s]


def label_points(ax: Axes, points: list[tuple[float, float, str, str]]) -> int:
    """Writes `(x, y, text, colour)` beside its point wherever that hides nothing; returns how many had no room.

    Neighbours of the same text share one label, in black. Greedy over eight places around the point, lower points
    first; a place is taken if the label would touch a point, an earlier label or the edge. Call when limits and layout
    are final.
    """
    scale = DPI / 72
    radius, line, near = 4.0 * scale, 7.5 * scale, 26 * scale
    dots = ax.transData.transform([(x, y) for x, y, _, _ in points]).tolist() if points else []
    box = ax.bbox
    taken = [_box(x, y, 1.6 * radius, 1.6 * radius) for x, y in dots]
    shared: set[int] = set()
    left_out = 0
    for i in sorted(range(len(points)), key=lambda i: dots[i][1]):
        if i in shared:
            continue
        (x, y), text, color = dots[i], points[i][2], points[i][3]
        alike = [k for k, dot in enumerate(dots) if points[k][2] == text and math.dist(dot, (x, y)) < near]
        width = 0.62 * line * len(text)
        for dx, dy in ((1, -1), (0, -1), (1, 0), (-1, 1), (0, 1), (-1, 0), (1, 1), (-1, -1)):
            place = _box(x + dx * (radius + width / 2), y + dy * (radius + line / 2), width, line)
            inside = box.x0 <= place[0] and place[2] <= box.x1 and box.y0 <= place[1] and place[3] <= box.y1
            if inside and not any(_touch(place, other) for other in taken):
                taken.append(place)
                shared.update(alike)
                middle = (place[0] + place[2]) / 2, (place[1] + place[3]) / 2
                center = ax.transData.inverted().transform(middle)
                ax.text(
                    float(center[0]),
                    float(center[1]),
                    text,
                    size=7.5,
                    color="black" if len(alike) > 1 else color,
                    ha="center",
                    va="center_baseline",
                    zorder=2.6,
                    bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.4},
                )
                break
        else:
            left_out += 1
    return left_out


def _box(x: float, y: float, width: float, height: float) -> tuple[float, float, float, float]:
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _touch(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def remark(ax: Axes, text: str) -> None:
    """A small grey remark above a panel's right end."""
    ax.set_title(text, loc="right", size=8, color=GREY)
