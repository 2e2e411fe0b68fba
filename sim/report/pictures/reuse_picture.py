"""The part of a trace's prompts that a cache finds again, over the cache's size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from batchsim.report.numbers import percent_text
from batchsim.report.pictures.style import GREY, figure, house_style, picture_kind, put_around, save
from batchsim.report.text.reuse_text import bytes_text
from batchsim.workload.traces.reuse import ReuseCurve

KIND = picture_kind("cache sizes")
_CURVE = "#0072B2"


def reuse_picture(
    curve: ReuseCurve, caches: Mapping[str, float], token_bytes: int | None, source: str, path: Path
) -> None:
    """Writes the curve, with a line at each of `caches` (tokens by name), and in bytes where `token_bytes` is known."""
    sizes, rates = curve.steps()
    least = min([curve.least_tokens, *caches.values()])
    largest = max([curve.working_tokens, *caches.values()]) * 1.5
    scale = 1 if token_bytes is None else token_bytes
    with house_style():
        fig = figure(8.0, 4.4)
        ax = fig.subplots()
        ax.plot(
            np.concatenate(([least], sizes, [largest])) * scale,
            np.concatenate(([0.0], rates, [curve.most])),
            drawstyle="steps-post",
            color=_CURVE,
        )
        ax.axhline(curve.most, color=GREY, linestyle=(0, (4, 1.5)), linewidth=1)
        for i, (name, tokens) in enumerate(sorted(caches.items(), key=lambda each: each[1])):
            rate = curve.hit_rate(tokens)
            ax.axvline(tokens * scale, color=GREY, linewidth=1)
            ax.plot([tokens * scale], [rate], "o", color=_CURVE, markersize=5)
            # The curve rises: above it and to the left there is room, but for the dashed line.
            height = rate if rate < 0.85 * curve.most else curve.most
            ax.annotate(
                f"{name}: {percent_text(rate)}",
                (tokens * scale, height),
                xytext=(-5, 5 + 12 * (i % 2)),
                textcoords="offset points",
                ha="right",
            )
        ax.set_xscale("log")
        ax.set_xlim(least * scale, largest * scale)
        ax.set_ylim(0, max(1.15 * curve.most, 0.01))
        ax.yaxis.set_major_formatter(lambda y, _: f"{100 * y:.3g} %")
        if token_bytes is not None:
            ax.xaxis.set_major_formatter(lambda x, _: bytes_text(x))
        ax.set_xlabel("size of the cache" + ("" if token_bytes else " (tokens)"))
        ax.set_ylabel("prompt tokens found")
        foot = "least recently used, one request after another; dashed: a cache that forgets nothing"
        heading = f"{Path(source).name} · {curve.num_tokens:,} prompt tokens"
        put_around(fig, "What a cache of each size would find again", heading, foot, [])
        save(fig, path, KIND)
