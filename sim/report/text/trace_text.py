"""A trace's figures as text: how its requests arrive, and how long they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batchsim.base.units import NS_PER_S, YEAR_NS, format_duration, two_digits
from batchsim.report.layout import aligned, fit


def trace_text(figures: dict[str, Any]) -> str:
    """The figures that `inspect_trace` returned as text, wrapped to the output's width."""
    lines = [trace_heading(figures), *arrival_lines(figures["arrivals"])]
    grid = [["", "mean", "cv", "min", "p50", "p90", "p99", "max"]]
    for kind in ("prompt", "output"):
        row = figures[f"{kind}_tokens"]
        grid.append([f"{kind} tokens", *(f"{row[name]:{'.2f' if name == 'cv' else ',.0f'}}" for name in grid[0][1:])])
    lines += aligned(grid, left=(0,))
    for name, row in figures.get("classes", {}).items():
        lines.append(
            f"class {name}: {row['rows']:,} rows, on average {row['mean_prompt_tokens']:,.1f} prompt and"
            f" {row['mean_output_tokens']:,.1f} output tokens"
        )
    return "\n".join(fit(line) for line in [*lines, *(f"- {note}" for note in figures["notes"])])


def trace_heading(figures: dict[str, Any]) -> str:
    arrivals = figures["arrivals"]
    span = "" if arrivals is None else f" in {_span_text(arrivals['span_s'])}"
    return f"{Path(figures['source']).name} · {figures['format']} · {figures['rows']:,} requests{span}"


def _span_text(seconds: float) -> str:
    if seconds * NS_PER_S >= 2 * YEAR_NS:
        return format_duration(seconds * NS_PER_S)
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds / 60:.3g} min" if seconds >= 120 else format_duration(seconds * NS_PER_S)


def arrival_lines(arrivals: dict[str, Any] | None) -> list[str]:
    if arrivals is None:
        return ["no arrival times"]
    if arrivals["rate_rps"] is None:
        return ["all at the same time: no rate, and a run sends them all at once"]
    change = arrivals["change"]
    return [
        f"{'mean ' if change else ''}rate {arrivals['rate_rps']:.4g} requests/s · CV of the gaps {arrivals['cv']:.3g}"
        + (f" · {100 * arrivals['zero_gap_share']:.3g} % of the gaps are 0" if arrivals["zero_gap_share"] else ""),
        f"index of dispersion {_index(arrivals['idc_1s'])} at 1 s, {_index(arrivals['idc_60s'])} at 60 s"
        " (Poisson arrivals have CV 1 and index 1)",
        *([change_text(change)] if change else []),
    ]


def change_text(change: dict[str, Any]) -> str:
    """How the rate changes: at both ends of the time, or between which rates, and how many times as high it gets."""
    rates = change["rates_rps"]
    parts = f"equal parts of {_span_text(change['every_s'])}"
    fold = f", {two_digits(max(rates) / min(rates))}-fold" if min(rates) else ""
    if change["way"] == "changes":
        return f"the rate changes: from {min(rates):.3g} to {max(rates):.3g} requests/s in {len(rates)} {parts}{fold}"
    ends = f"{rates[0]:.3g} requests/s in the first of {len(rates)} {parts}, {rates[-1]:.3g} in the last"
    return f"the rate {change['way']}: {ends}{fold}"


def _index(value: float | None) -> str:
    return "– (fewer than two windows)" if value is None else f"{value:.3g}"
