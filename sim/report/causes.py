"""Why requests missed their objective, per policy and class: as data, table and picture. See `sim.explain`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from sim.errors import ScenarioError
from sim.explain.attribution import PARTS
from sim.explain.causes import NEVER_LET_IN, Objectives, slo_misses
from sim.report.layout import fit
from sim.report.reading import at_load, load_name, sweeps_at
from sim.report.style import GREY, figure, frame, house_style, save
from sim.results.read import scenario_of
from sim.units import format_duration

if TYPE_CHECKING:
    from sim.results.read import Results

# One colour a kind of cause, paler for its further reasons: waiting blue, own work green, others' work orange, KV red.
_COLORS = {
    "queued": "#0072B2",
    "waiting_step": "#8CC8E8",
    "prefill": "#009E73",
    "decode_alone": "#6CCFAE",
    "decode_beside_prefill": "#E69F00",
    "sat_out": "#F0E442",
    "preempted": "#D55E00",
    "swapped": "#A84300",
    "recompute": "#CC79A7",
    "response_held": "#8C6D31",
    "whole_response": "#C4B088",
    "rejected": "#000000",
    "host_gap": "#7F7F7F",
    "frontend": "#BDBDBD",
    "failover": "#5B3A8C",
}
_KINDS = [*PARTS, "whole_response", "rejected"]  # the order of segments
_PALER = 0.38  # toward white with each further reason of a kind
_OTHERS = "fewer"
_LEAST = 0.01  # of a bar of misses: causes smaller in all bars are added up in the picture
_BAR_INCH = 0.42


def causes(results: Results, policies: Sequence[str], load: float, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """By policy and class: offered, missed, and `causes`: metric, cause, misses, median_ns (of the time blamed).

    Counts are summed over `seeds`; the most frequent cause comes first. ScenarioError for an objective that judges no
    request.
    """
    if not seeds:
        raise ScenarioError(f"{results.path}: the misses of no seed were asked for. Give at least one, like [0].")
    names = {s.policy: s.labels[s.index(load)] for s in sweeps_at(results, load)}
    found = []
    for policy in policies:
        missed, offered = [], {}
        objectives = Objectives.of(scenario_of(results, policy))
        for seed in seeds:
            records = results.records(policy, load, seed)
            cohort = records.requests[objectives.cohort(records)]
            for code, count in zip(*np.unique(cohort["klass"], return_counts=True), strict=True):
                klass = records.texts[code]
                offered[klass] = offered.get(klass, 0) + int(count)
            missed.append(slo_misses(records, objectives))
            lost = _never_let_in(results, policy, load, seed, len(cohort))
            if lost:
                offered["?" if objectives.class_names else ""] = lost + offered.get("", 0)
                missed.append(_lost_frame(lost, "?" if objectives.class_names else ""))
        every = pd.concat(missed, ignore_index=True)
        order = [name for name in ("", *objectives.class_names, "?") if name in offered]
        found += [
            {"policy": policy, "label": names[policy], "klass": klass, "offered": offered[klass]}
            | _counted(every.loc[every["klass"] == klass])
            for klass in order
        ]
    return found


def _never_let_in(results: Results, policy: str, load: float, seed: int, known: int) -> int:
    """How many requests of the cohort the run never let in: they have no row of their own."""
    points = results.points
    mine = (points["policy"] == policy) & (points["load"] == load) & (points["seed"] == seed)
    return round(float(points.loc[mine, "cohort"].iloc[0])) - known


def _lost_frame(count: int, klass: str) -> pd.DataFrame:
    row = {"request_id": -1, "klass": klass, "metric": "unfinished", "cause": NEVER_LET_IN, "cause_ns": 0}
    return pd.DataFrame([row] * count).astype({"cause_ns": np.int64})


def _counted(misses: pd.DataFrame) -> dict[str, Any]:
    rows = []
    for keys, ns in misses.groupby(["metric", "cause"])["cause_ns"]:
        metric, cause = map(str, keys)  # type: ignore[arg-type]
        rows.append({"metric": metric, "cause": cause, "misses": len(ns), "median_ns": int(np.median(ns))})
    return {"missed": len(misses), "causes": sorted(rows, key=lambda row: -row["misses"])}


# ---- the table


def causes_text(results: Results, found: list[dict[str, Any]], load: float, num_seeds: int) -> str:
    """The same for people, as wide as the output: a line a policy (and class), below it one a cause."""
    seeds = "1 seed" if num_seeds == 1 else f"{num_seeds} seeds"
    lines = [f"SLO misses {at_load(load_name(results), load)} ({seeds}): {results.manifest['objective']}"]
    width = max([len(row["cause"]) for one in found for row in one["causes"]] + [5])
    for one in found:
        klass = f", class {one['klass']}" if one["klass"] else ""
        share = 100 * one["missed"] / one["offered"]
        lines.append(f"{one['label']}{klass}: {one['missed']:,} of {one['offered']:,} requests missed ({share:.3g} %)")
        for row in one["causes"]:
            of_misses = f"{100 * row['misses'] / one['missed']:.0f} %"
            time = f"  median {format_duration(row['median_ns'])}" if row["median_ns"] else ""
            shown = f"  {row['metric']:<12}  {row['cause']:<{width}}  {row['misses']:>8,}  {of_misses:>5}{time}"
            lines.append(shown)
    return "\n".join(fit(line) for line in lines)


# ---- the picture


def causes_picture(results: Results, found: list[dict[str, Any]], load: float, num_seeds: int, path: Path) -> None:
    """Writes two bars for each policy (and class), by cause: the share of its offered requests, and of its misses."""
    order = _order(found)
    colors = _shades(order)
    with house_style():
        fig = figure(12.0, 2.6 + _BAR_INCH * len(found) + 0.2 * (len(order) // 4))
        shares, makeup = fig.subplots(1, 2, sharey=True)
        _draw_bars(shares, found, order, colors, "offered")
        _draw_bars(makeup, found, order, colors, "missed")
        for row, one in enumerate(found):
            share = 100 * one["missed"] / one["offered"]
            shares.text(share, row, f" {share:.3g} % of {one['offered']:,}", va="center", size=8, color=GREY)
        names = [one["label"] + (f" · {one['klass']}" if one["klass"] else "") for one in found]
        shares.set_yticks(range(len(found)), names)
        shares.set_ylim(len(found) - 0.4, -0.6)
        # Room for the figures beside the bars.
        shares.set_xlim(0, max(1.0, *(130 * one["missed"] / one["offered"] for one in found)))
        shares.set_xticks([tick for tick in shares.get_xticks() if 0 <= tick <= 100])
        shares.set_xlabel("offered requests that missed the SLO (%)")
        makeup.set_xlim(0, 100)
        makeup.set_xlabel("of the misses (%)")
        seeds = "1 seed" if num_seeds == 1 else f"{num_seeds} seeds together"
        frame(
            fig,
            results,
            f"Why requests missed the SLO {at_load(load_name(results), load)}",
            f"measured at: {results.manifest['measured_at']} · {seeds} · SLO: {results.manifest['objective']}"
            " · one cause a miss: the largest part of the time that counts for the bound exceeded most; own work only"
            " where that alone is too long",
            [Patch(color=colors[cause], label=cause) for cause in order],  # type: ignore[list-item]
        )
        save(fig, path)


def _draw_bars(ax: Axes, found: list[dict[str, Any]], order: list[str], colors: dict[str, Any], of: str) -> None:
    """A stacked bar a row of `found`: each cause's misses as a share of what `of` counts."""
    left = np.zeros(len(found))
    for cause in order:
        share = np.array([100 * _misses(one, cause, order) / max(one[of], 1) for one in found])
        ax.barh(range(len(found)), share, left=left, height=0.68, color=colors[cause], edgecolor="white", linewidth=0.5)
        left += share
    ax.grid(visible=False, axis="y")


def _kind(cause: str) -> str:
    return cause.partition(":")[0]


def _order(found: list[dict[str, Any]]) -> list[str]:
    """The causes that some bar shows, in the order of segments; `fewer` stands for what is too small everywhere."""
    largest: dict[str, float] = {}
    for one in found:
        for row in one["causes"]:
            share = sum(r["misses"] for r in one["causes"] if r["cause"] == row["cause"]) / one["missed"]
            largest[row["cause"]] = max(largest.get(row["cause"], 0.0), share)
    shown = [cause for cause, share in largest.items() if share >= _LEAST or len(largest) <= len(_COLORS) // 2]
    place = {kind: i for i, kind in enumerate(_KINDS)}
    shown.sort(key=lambda cause: (place.get(_kind(cause), len(place)), -largest[cause]))
    return shown + ([_OTHERS] if len(shown) < len(largest) else [])


def _misses(one: dict[str, Any], cause: str, order: list[str]) -> int:
    mine = (row for row in one["causes"] if row["cause"] == cause or (cause == _OTHERS and row["cause"] not in order))
    return sum(row["misses"] for row in mine)


def _shades(order: list[str]) -> dict[str, Any]:
    seen: dict[str, int] = {}
    shades: dict[str, Any] = {}
    for cause in order:
        kind = _kind(cause)
        number = seen[kind] = seen.get(kind, -1) + 1
        base = _COLORS.get(kind, "#E3E3E3")
        rgb = np.array([int(base[k : k + 2], 16) for k in (1, 3, 5)]) / 255
        shades[cause] = tuple(1 - (1 - rgb) * (1 - _PALER) ** number)
    return shades
