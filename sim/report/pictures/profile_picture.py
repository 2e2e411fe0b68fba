"""A picture of a cost profile: measured against fitted times, residuals, the fitted curves, and the measured range."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import NDArray

from batchsim.cost.calibrated import Calibrated
from batchsim.cost.profile import Profile
from batchsim.cost.work import WORK_COLUMNS
from batchsim.report.pictures.style import GREY, figure, house_style, picture_kind, put_around, save, time_axis_log

KIND = picture_kind("a profile")
Floats = NDArray[np.float64]

# Blocks of samples: name, colour of Okabe and Ito's palette, marker.
_BLOCKS = {
    "A": ("decodes", "#0072B2", "o"),
    "B": ("unequal contexts", "#56B4E9", "v"),
    "C": ("tokens", "#E69F00", "s"),
    "D": ("chunk after prefix", "#D55E00", "D"),
    "E": ("decodes beside chunks", "#009E73", "^"),
    "H": ("held out", "#000000", "x"),
}


def draw_profile(profile: Profile, path: Path | str) -> None:
    """Writes a profile's picture as PNG; without raw samples, as imported profiles are, the fitted curves alone."""
    with house_style():
        table = _Samples(profile) if profile.samples else None
        fig = figure(10.5, 8.4 if table else 4.4)
        axes = fig.subplots(2 if table else 1, 2, squeeze=False)
        if table is not None:
            _draw_fit(axes[0, 0], table)
            _draw_residuals(axes[0, 1], table)
        _draw_tokens(axes[-1, 0], profile, table)
        _draw_decodes(axes[-1, 1], profile, table)
        heading = f"{profile.origin} · executor {profile.executor} · {profile.model.name} on {profile.machine}"
        handles = [] if table is None else table.handles()
        put_around(fig, f"Profile {profile.name}", heading, _foot(profile, table), handles)
        save(fig, path, KIND)


class _Samples:
    """A profile's raw samples as parallel arrays, with fitted times; seconds of kernels run back to back."""

    def __init__(self, profile: Profile) -> None:
        rows = profile.samples
        decodes = [_contexts(row["decode"]) for row in rows]
        chunks = [row["chunks"] for row in rows]
        self.block = np.array([row["block"] for row in rows])
        self.measured = np.array([row["ns"] for row in rows]) / 1e9
        self.scatter = np.array([row["mad"] for row in rows]) / 1e9
        self.num_decode = np.array([len(decode) for decode in decodes])
        self.context = np.array([sum(decode) for decode in decodes])
        self.num_chunks = np.array([len(chunk) for chunk in chunks])
        self.prefill = np.array([sum(n for _, n in chunk) for chunk in chunks])
        self.longest = np.array([max((prefix + n for prefix, n in chunk), default=0) for chunk in chunks])
        pairs = [sum(n * prefix + n * (n + 1) // 2 for prefix, n in chunk) for chunk in chunks]
        self.fitted = _alone(profile, self.num_decode, self.context, self.prefill, self.num_chunks, np.array(pairs))

    def handles(self) -> list[Line2D]:
        return [
            Line2D([], [], color=color, marker=marker, linestyle="none", label=name)
            for block, (name, color, marker) in _BLOCKS.items()
            if (self.block == block).any()
        ]


def _contexts(decode: Any) -> list[int]:
    return [decode["context"]] * decode["B"] if isinstance(decode, dict) else decode


def _alone(profile: Profile, decodes: Any, context: Any, prefill: Any, chunks: Any, pairs: Any) -> Floats:
    """Fitted seconds of each step's kernels run back to back: without what cold caches in an engine add."""
    zeros = np.zeros(len(decodes), dtype=np.int64)
    columns = dict.fromkeys(WORK_COLUMNS, zeros) | {
        "num_decode": decodes,
        "num_decode_tokens": decodes,
        "num_prefill_tokens": prefill,
        "num_chunks": chunks,
        "context_tokens": context,
        "prefill_pairs": pairs,
    }
    added = profile.made.get("in_engine", {})
    cold_ns = added.get("step_ns", 0.0) + added.get("chunk_ns", 0.0) * chunks + added.get("decode_ns", 0.0) * decodes
    cold_ns = cold_ns + profile.costs.prefill_ns * ((chunks > 0) & (decodes == 0))
    return (Calibrated(profile, extrapolate=True).kernel_ns(columns) - cold_ns) / profile.costs.in_situ / 1e9


def _foot(profile: Profile, table: _Samples | None) -> str:
    hull = profile.hull
    text = f"measured up to {hull.max_sequences} decodes, {hull.max_tokens} tokens a step, mean context"
    text += f" {hull.max_context:.0f}, prompts of {hull.max_chunk_context}"
    if table is not None:
        text += " · lines: fitted · bars: median distance between visits"
    held = profile.held_out
    if held is not None:
        text += f" · held out: median {100 * held['p50']:.1f} %, bias {100 * held['bias']:+.2f} % ({held['what']})"
    return text


def _scatter(ax: Axes, table: _Samples, x: Floats, y: Floats) -> None:
    for block, (_, color, marker) in _BLOCKS.items():
        shown = table.block == block
        if shown.any():
            ax.plot(x[shown], y[shown], color=color, marker=marker, linestyle="none", markersize=4, alpha=0.8)


def _draw_fit(ax: Axes, table: _Samples) -> None:
    ax.set_title("Measured and fitted kernel time")
    low, high = (
        edge(table.measured.min(), table.fitted.min(), table.measured.max(), table.fitted.max()) for edge in (min, max)
    )
    ax.plot([low, high], [low, high], color=GREY, linewidth=1)
    _scatter(ax, table, table.measured, table.fitted)
    ax.set_xscale("log")
    ax.set_yscale("log")
    for axis in (ax.xaxis, ax.yaxis):
        time_axis_log(axis, low, high)
    ax.set_xlabel("measured")
    ax.set_ylabel("fitted")


def _draw_residuals(ax: Axes, table: _Samples) -> None:
    ax.set_title("What the fit leaves over")
    ax.axhspan(-5, 5, color=GREY, alpha=0.12, linewidth=0)
    ax.axhline(0, color=GREY, linewidth=1)
    _scatter(ax, table, table.measured, 100 * (table.fitted / table.measured - 1))
    ax.set_xscale("log")
    time_axis_log(ax.xaxis, table.measured.min(), table.measured.max())
    ax.set_xlabel("measured kernel time (the band is ±5 %)")
    ax.set_ylabel("fitted / measured − 1 (%)")


def _draw_tokens(ax: Axes, profile: Profile, table: _Samples | None) -> None:
    """Draws the time of a single prefill chunk against its tokens."""
    ax.set_title("One chunk without prefix")
    most = min(profile.hull.max_tokens, profile.hull.max_chunk_context)
    tokens = np.unique(np.geomspace(1, most, 300).astype(np.int64))
    zeros, ones = np.zeros(len(tokens), dtype=np.int64), np.ones(len(tokens), dtype=np.int64)
    fitted = _alone(profile, zeros, zeros, tokens, ones, tokens * (tokens + 1) // 2)
    ax.plot(tokens, fitted, color=_BLOCKS["C"][1])
    if table is not None:
        alone = (table.block == "C") & (table.num_chunks == 1)
        ax.errorbar(
            table.prefill[alone],
            table.measured[alone],
            table.scatter[alone],
            color=_BLOCKS["C"][1],
            fmt=_BLOCKS["C"][2],
            markersize=4,
            linewidth=1,
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    time_axis_log(ax.yaxis, float(fitted.min()), float(fitted.max()))
    _plain_ticks(ax, most)
    ax.set_xlabel("tokens of the chunk")


def _draw_decodes(ax: Axes, profile: Profile, table: _Samples | None) -> None:
    """Draws the time of decode-only steps against their sequences, a line for each of up to five contexts."""
    ax.set_title("Decodes, by context")
    hull = profile.hull
    sequences = np.unique(np.geomspace(1, hull.max_sequences, 200).astype(np.int64))
    zeros = np.zeros(len(sequences), dtype=np.int64)
    contexts = _some_contexts(profile, table)
    lows, highs = [], []
    for i, context in enumerate(contexts):
        color = _BLOCKS["A"][1]
        shade = 0.35 + 0.65 * (i + 1) / len(contexts)
        fitted = _alone(profile, sequences, sequences * int(context), zeros, zeros, zeros)
        ax.plot(sequences, fitted, color=color, alpha=shade)
        ax.annotate(f" {context:,.0f}", (sequences[-1], fitted[-1]), fontsize=8, color=GREY, va="center")
        lows.append(fitted.min())
        highs.append(fitted.max())
        if table is not None:
            shown = (table.block == "A") & (table.context == table.num_decode * context)
            ax.errorbar(
                table.num_decode[shown],
                table.measured[shown],
                table.scatter[shown],
                color=color,
                fmt="o",
                markersize=4,
                linewidth=1,
                alpha=shade,
            )
    ax.set_xscale("log")
    ax.set_yscale("log")
    time_axis_log(ax.yaxis, float(min(lows)), float(max(highs)))
    _plain_ticks(ax, hull.max_sequences)
    ax.set_xlabel("sequences (beside each line: context tokens)")


def _plain_ticks(ax: Axes, most: int) -> None:
    """Labels a logarithmic x axis up to `most` with whole numbers, each four times the one before."""
    ticks = [4**i for i in range(12) if 4**i <= most]
    ax.xaxis.set_major_locator(FixedLocator([*ticks, most] if most > 2 * ticks[-1] else ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))


def _some_contexts(profile: Profile, table: _Samples | None) -> list[float]:
    """Up to five contexts to draw, tokens a sequence: of block A's samples, or without samples of the fitted grid."""
    if table is None:
        contexts = [float(c) for c in profile.costs.decode_attention.context if c <= profile.hull.max_context]
    else:
        even = table.block == "A"
        contexts = sorted(set((table.context[even] / table.num_decode[even]).tolist()))
    step = max(1, -(-len(contexts) // 5))
    return contexts[::-step][::-1]
