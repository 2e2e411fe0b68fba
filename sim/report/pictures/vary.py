"""The picture of a run that varies a key: how results change with the key's value, a line for each policy.

Where all policies share loads: P99 latencies at one of them, and the highest load that meets the SLO. Where each policy
has loads of its own: saturation, knee and SLO crossing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from batchsim.metrics.latencies import LATENCIES
from batchsim.report.pictures.curve_lines import OPEN, draw_line, hidden_under, latency_limits
from batchsim.report.pictures.palette import PolicyStyle, policy_styles
from batchsim.report.pictures.style import figure, footer, frame, house_style, save, time_axis
from batchsim.report.reading import Floats, PolicyCurve, at_load, is_auto, load_name, log_ends, sweeps
from batchsim.results.landmarks import Crossing, Landmarks
from batchsim.results.read import Results, curve_marks

_P99 = {f"{name}_p99_s": f"P99 {LATENCIES[name].title}" for name in ("ttft", "tpot", "norm_latency")}
_UNITS = {"mean_rate": "req/s", "users": "users", "rate_scale": "times the trace's rate"}
_SPREAD = 4.0  # values further apart than this factor stand on a logarithmic axis
_TOP = 0.965

Value = Callable[[PolicyCurve, Landmarks], float]


def vary_picture(results: Results, path: Path | str, load: float) -> None:
    """Writes the results against the varied key's value; latencies at `load`, where the policies share loads."""
    vary, unit = results.manifest["vary"], _UNITS.get(load_name(results), "")
    rates: dict[str, Value] = {f"SLO crossed ({unit})": lambda _, landmarks: _crossed(landmarks.crossing)}
    if is_auto(results):
        saturation = results.manifest["saturation_rps"]
        rates |= {
            "saturation (req/s)": lambda sweep, _: float(saturation[sweep.policy]),
            f"knee ({unit})": lambda _, landmarks: np.nan if landmarks.knee is None else landmarks.knee.load,
        }
    latencies = {} if is_auto(results) else _P99
    by_policy = curve_marks(results) if load_name(results) else {}
    known = {title: _by_curve(results, by_policy, value) for title, value in rates.items()} if by_policy else {}
    empty = [title for title, values in known.items() if not np.isfinite(list(values.values())).any()]
    shown = {title: values for title, values in known.items() if title not in empty}
    with house_style():
        fig = figure(13.0, 5.0)
        axes = fig.subplots(1, len(latencies) + len(shown), squeeze=False)[0]
        for ax, (metric, title) in zip(axes, latencies.items(), strict=False):
            draw_latency(ax, results, metric, load)
            ax.set_title(title)
        for ax, (title, values) in zip(axes[len(latencies) :], shown.items(), strict=True):
            draw_rate(ax, results, values)
            ax.set_title(title[0].upper() + title[1:])
        styles = _styles(results)
        handles = [
            Line2D([], [], color=s.color, marker=s.marker, linestyle=s.linestyle, label=label)
            for label, s in styles.items()
        ]
        at = "" if is_auto(results) else f" {at_load(load_name(results), load)}"
        same = [] if vary["same_requests"] else ["the requests change with the value"]
        marks = () if is_auto(results) else ("latencies" + at, "× the queue grows without end", OPEN)
        seen = "SLO crossed: interpolated between tested loads, or the highest one where that still meets it"
        none = [f"not drawn, as no value has one: {', '.join(empty)}"] if empty else []
        seen = [seen] if any(title.startswith("SLO") for title in shown) else []
        frame(fig, results, f"What {vary['key']} changes", footer(results, *marks, *seen, *none, *same), handles)
        save(fig, path)


def draw_latency(ax: Axes, results: Results, metric: str, load: float) -> None:
    """Draws a latency in seconds at `load` against the varied value, with its interval; a cross if the queue grows."""
    low, high = latency_limits(results, [metric], [])
    time_axis(ax, "y", low, high)

    def at(values: Floats, sweep: PolicyCurve) -> float:
        return float(values[sweep.index(load)]) if sweep.tested(load) else np.nan

    for style, x, members in _lines(ax, results):
        y = np.array([at(sweep.stable(metric), sweep) for sweep in members])
        half = np.array([at(sweep.half_width(metric), sweep) for sweep in members])
        draw_line(
            ax,
            x,
            y,
            style,
            np.array([sweep.tested(load) and sweep.weak(metric)[sweep.index(load)] for sweep in members]),
        )
        low_end, high_end = log_ends(y, half)
        ax.errorbar(x, y, yerr=np.stack([y - low_end, high_end - y]), fmt="none", ecolor=style.color, alpha=0.5)
        grows = np.array([sweep.tested(load) and bool(sweep.grows[sweep.index(load)]) for sweep in members])
        ax.plot(
            x[grows], np.full(grows.sum(), _TOP), transform=ax.get_xaxis_transform(), color=style.color,
            linestyle="none", marker="x", markersize=7.5, markeredgewidth=2.2,
        )  # fmt: skip


def _by_curve(results: Results, marks: Mapping[str, Landmarks], value: Value) -> dict[str, float]:
    """`value` of each curve by the name of its policy."""
    return {sweep.policy: value(sweep, marks[sweep.policy]) for sweep in sweeps(results)}


def draw_rate(ax: Axes, results: Results, values: Mapping[str, float]) -> None:
    """Draws `values` of the curves, loads such as their knees, against the varied key's value."""
    curves = [
        (style, x, np.array([values[sweep.policy] for sweep in members])) for style, x, members in _lines(ax, results)
    ]
    for (style, x, y), depth in zip(curves, hidden_under([y for *_, y in curves]), strict=True):
        draw_line(ax, x, y, style, np.zeros(len(x), dtype=bool), depth)
    ax.set_ylim(0, 1.08 * float(np.nanmax(list(values.values()))))


def _lines(ax: Axes, results: Results) -> list[tuple[PolicyStyle, Floats, list[PolicyCurve]]]:
    """Sets up the x axis of varied values. Returns for each policy its style, x positions and Sweeps; a policy that
    lacks the key is the same across all values.
    """
    values = results.manifest["vary"]["values"]
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    places = dict(zip(map(str, values), map(float, values) if numbers else range(len(values)), strict=True))
    x = sorted(places.values())
    logarithmic = numbers and x[0] > 0 and x[-1] / x[0] > _SPREAD
    ax.set_xscale("log" if logarithmic else "linear")
    span = (x[-1] - x[0]) or 1.0
    margin = (x[-1] / x[0]) ** 0.06 if logarithmic else 0.06 * span
    ax.set_xlim(x[0] / margin, x[-1] * margin) if logarithmic else ax.set_xlim(x[0] - margin, x[-1] + margin)
    names = {place: name for name, place in places.items()}
    ax.xaxis.set_major_locator(FixedLocator(x))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda place, _: names.get(place, "")))
    ax.set_xlabel(results.manifest["vary"]["key"])
    done = []
    for label, style in _styles(results).items():
        members = [sweep for sweep in sweeps(results) if sweep.label == label]
        if members[0].value is None:
            members, at = [members[0], members[0]], [x[0], x[-1]]
        else:
            at = [places[str(sweep.value)] for sweep in members]
            order = np.argsort(at)
            members, at = [members[i] for i in order], [at[i] for i in order]
        done.append((style, np.array(at, dtype=float), members))
    return done


def _styles(results: Results) -> dict[str, PolicyStyle]:
    """The style of each policy by its label, the same for all values of the varied key."""
    first = {sweep.label: sweep for sweep in reversed(sweeps(results))}
    chosen = [first[label] for label in dict.fromkeys(sweep.label for sweep in sweeps(results))]
    return {sweep.label: style for sweep, style in zip(chosen, policy_styles(chosen).values(), strict=True)}


def _crossed(crossing: Crossing) -> float:
    """The load at which the SLO is crossed, or else the highest tested load that meets it; NaN if none does."""
    known = crossing.load if crossing.load is not None else crossing.low
    return np.nan if known is None else known
