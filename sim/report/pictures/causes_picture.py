"""Why requests missed the SLO, drawn: a bar for each policy, a segment for each cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from batchsim.explain.task_causes import BETWEEN
from batchsim.metrics.attribution import PARTS
from batchsim.report.pictures.style import GREY, figure, frame, house_style, picture_kind, save
from batchsim.report.reading import at_load, load_name
from batchsim.results.read import Results

KIND = picture_kind("the causes of misses")
# One colour a kind of cause, paler for its further reasons: waiting blue, own work green, others' work orange, KV red.
_COLORS = {
    "queued": "#0072B2",
    "waiting_step": "#8CC8E8",
    "prefill": "#009E73",
    "decode_alone": "#6CCFAE",
    "decode_beside_prefill": "#E69F00",
    "adapter_load": "#56B4E9",
    "waiting_for_gpu": "#7B9FCF",
    "kv_load": "#3F8FBF",
    "waiting_for_ranks": "#B07AA1",
    "padding_of_ranks": "#D4A6C8",
    "encoding": "#56B4A0",
    "encoding_of_others": "#C77C02",
    "mask_wait": "#9AA5B1",
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
    BETWEEN: "#A6CEE3",
}
_KINDS = [*PARTS, BETWEEN, "whole_response", "rejected"]  # the order of segments
_PALER = 0.38  # toward white with each further reason of a kind
_OTHERS = "fewer"
_LEAST = 0.01  # of a bar of misses: causes smaller in all bars are added up in the picture
_BAR_INCH = 0.42


# ---- the picture


def causes_picture(results: Results, bars: list[dict[str, Any]], load: float, num_seeds: int, path: Path) -> None:
    """Writes two bars a policy (and request class): misses by cause, as a share of offered requests and of misses.

    >>> rows = batchsim.misses(results, ["static", "vllm"], load=20, seeds=[0, 1])
    >>> batchsim.misses_picture(results, rows, load=20, num_seeds=2, path=Path("misses.png"))
    """
    order = _order(bars)
    colors = _shades(order)
    with house_style():
        fig = figure(12.0, 2.6 + _BAR_INCH * len(bars) + 0.2 * (len(order) // 4))
        shares, makeup = fig.subplots(1, 2, sharey=True)
        _draw_bars(shares, bars, order, colors, "offered")
        _draw_bars(makeup, bars, order, colors, "missed")
        for row, one in enumerate(bars):
            share = 100 * one["missed"] / one["offered"]
            shares.text(share, row, f" {share:.3g} % of {one['offered']:,}", va="center", size=8, color=GREY)
        names = [one["label"] + (f" · {one['request_class']}" if one["request_class"] else "") for one in bars]
        shares.set_yticks(range(len(bars)), names)
        shares.set_ylim(len(bars) - 0.4, -0.6)
        # Room for the figures beside the bars.
        shares.set_xlim(0, max(1.0, *(130 * one["missed"] / one["offered"] for one in bars)))
        shares.set_xticks([tick for tick in shares.get_xticks() if 0 <= tick <= 100])
        counted = " and ".join(dict.fromkeys(one["counted"] for one in bars))
        shares.set_xlabel(f"offered {counted} that missed the SLO (%)")
        makeup.set_xlim(0, 100)
        makeup.set_xlabel("of the misses (%)")
        seeds = "1 seed" if num_seeds == 1 else f"{num_seeds} seeds together"
        frame(
            fig,
            results,
            f"Why {counted} missed the SLO {at_load(load_name(results), load)}",
            f"measured at: {results.manifest['measured_at']} · {seeds} · SLO: {results.manifest['objective']}"
            " · one cause a miss: the largest part of the time that counts for the bound exceeded most; own work only"
            " where that alone is too long",
            [Patch(color=colors[cause], label=cause) for cause in order],  # type: ignore[list-item]
        )
        save(fig, path, KIND)


def _draw_bars(ax: Axes, bars: list[dict[str, Any]], order: list[str], colors: dict[str, Any], of: str) -> None:
    """A stacked bar for each row of `bars`: misses by cause in percent of its count `of`, `offered` or `missed`."""
    left = np.zeros(len(bars))
    for cause in order:
        share = np.array([100 * _misses(one, cause, order) / max(one[of], 1) for one in bars])
        ax.barh(range(len(bars)), share, left=left, height=0.68, color=colors[cause], edgecolor="white", linewidth=0.5)
        left += share
    ax.grid(visible=False, axis="y")


def _kind(cause: str) -> str:
    return cause.partition(":")[0]


def _order(bars: list[dict[str, Any]]) -> list[str]:
    """The causes that get a segment, in the order of segments; a last one, `fewer`, sums those small in every bar."""
    largest: dict[str, float] = {}
    for one in bars:
        for row in one["causes"]:
            share = sum(r["misses"] for r in one["causes"] if r["cause"] == row["cause"]) / one["missed"]
            largest[row["cause"]] = max(largest.get(row["cause"], 0.0), share)
    shown = [cause for cause, share in largest.items() if share >= _LEAST or len(largest) <= len(_COLORS) // 2]
    place = {kind: i for i, kind in enumerate(_KINDS)}
    shown.sort(key=lambda cause: (place.get(_kind(cause), len(place)), -largest[cause]))
    return shown + ([_OTHERS] if len(shown) < len(largest) else [])


def _misses(one: dict[str, Any], cause: str, order: list[str]) -> int:
    rows = (row for row in one["causes"] if row["cause"] == cause or (cause == _OTHERS and row["cause"] not in order))
    return sum(row["misses"] for row in rows)


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
