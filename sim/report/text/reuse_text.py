"""How often caches of some sizes would find a trace's prompts again, as lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchsim.base.units import counted
from batchsim.report.layout import aligned, fit
from batchsim.report.numbers import percent_text
from batchsim.workload.traces.reuse import ReuseCurve
from batchsim.workload.traces.trace_rows import TraceRows

PARTS = (0.5, 0.9, 0.99)


def reuse_text(rows: TraceRows, curve: ReuseCurve, caches: Mapping[str, float], token_bytes: int | None) -> str:
    """The part of the trace's prompts that a cache finds which forgets nothing, and that of smaller ones.

    `caches`: tokens of the caches asked about, by name. `token_bytes`: bytes of a token's KV; None: sizes are tokens
    alone.
    """
    unit = curve.block_tokens
    lines = [
        f"{Path(rows.source).name} · {rows.format} · {counted(len(rows), 'request')} ·"
        f" {counted(curve.num_tokens, 'prompt token')} in units of {unit:,},"
        f" {counted(curve.num_distinct, 'different unit')}",
        f"found again by a cache that forgets nothing: {_rate(curve, curve.working_tokens)} of the prompt tokens",
    ]
    if curve.share < 1:
        lines.append(f"{percent_text(curve.share)} of the units followed, by their hashes; ± 95 %")
    sizes = [(f"{100 * part:g} % of that", float(curve.size_for(part))) for part in PARTS]
    sizes = [*sizes, ("all of it", float(curve.working_tokens)), *caches.items()]
    grid = [["", "tokens", *([] if token_bytes is None else ["size"]), "found"]]
    for name, tokens in sorted(sizes, key=lambda each: each[1]):
        size = [] if token_bytes is None else [bytes_text(tokens * token_bytes)]
        grid.append([name, f"{tokens:,.0f}", *size, _rate(curve, tokens)])
    lines += aligned(grid, left=(0,))
    lines.append(
        "least recently used, one request after another, units of a request touched from its end when it is over;"
        " under load requests overlap, and a cache finds somewhat less or more"
    )
    return "\n".join(fit(line) for line in lines)


def reuse_plain(curve: ReuseCurve, caches: Mapping[str, float], token_bytes: int | None) -> dict[str, Any]:
    """The same figures, fit for JSON, with up to 200 points of the curve."""
    sizes, rates = curve.steps()
    every = max(len(sizes) // 200, 1)
    return {
        "prompt_tokens": curve.num_tokens,
        "unit_tokens": curve.block_tokens,
        "units": curve.num_units,
        "different_units": curve.num_distinct,
        "followed": curve.share,
        "token_bytes": token_bytes,
        "hit_rate_without_limit": curve.most,
        "caches": {
            name: {"tokens": tokens, "hit_rate": curve.hit_rate(tokens), "error": curve.error(tokens)}
            for name, tokens in caches.items()
        },
        "curve": {"tokens": sizes[::every].tolist(), "hit_rate": rates[::every].tolist()},
    }


def bytes_text(size: float) -> str:
    """A size in GB or TB to three digits."""
    number, unit = (size / 1e12, "TB") if size >= 1e12 else (size / 1e9, "GB")
    return f"{number:.3g} {unit}"


def _rate(curve: ReuseCurve, tokens: float) -> str:
    text = f"{100 * curve.hit_rate(tokens):.1f} %"
    return text if curve.share == 1 else f"{text} ± {100 * curve.error(tokens):.1f}"
