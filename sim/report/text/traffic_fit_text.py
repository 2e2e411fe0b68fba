"""Fitted traffic in words: which law of arrivals, how its figures agree with the trace's, and what an engine says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchsim.base.units import NS_PER_S, format_duration
from batchsim.fit.traffic.arrival_fit import ArrivalFit
from batchsim.fit.traffic.engine_check import REPLICATIONS, LoadCheck, Played
from batchsim.fit.traffic.goodness import Compared
from batchsim.fit.traffic.traffic_fit import TrafficFit
from batchsim.report.layout import aligned
from batchsim.report.layout import fit as fitted_to_width
from batchsim.workload.clocks import ends_rps
from batchsim.workload.lengths import StepLengths

_LAWS = 6
"""Laws of arrivals that are shown: the likeliest of each family."""


def traffic_text(fit: TrafficFit, figures: Sequence[Compared], checks: Sequence[LoadCheck]) -> str:
    """The fit as text, wrapped to the output's width; `checks` may be empty."""
    lines = [heading(fit), *(f"- {note}" for note in fit.notes), "", *_arrivals(fit), "", *_figures(figures)]
    if checks:
        lines += ["", *engine_lines(checks)]
    return "\n".join(map(fitted_to_width, lines))


def heading(fit: TrafficFit) -> str:
    """The trace and what was fitted to it, in one line."""
    rows = fit.rows
    assert rows.arrival_ns is not None, "checked when fitted"
    span = format_duration(int(rows.arrival_ns[-1]))
    sessions = "" if fit.workload.sessions is None else f" in {len(fit.first):,} sessions"
    ends = ends_rps(fit.arrivals[0].process)
    rates = "" if ends is None else f", rate from {ends[0]:.3g}/s to {ends[1]:.3g}/s"
    laws = f"arrivals: {fit.arrivals[0].name}{rates} · lengths: {lengths_text(fit)}"
    return f"{Path(rows.source).name} · {len(rows):,} requests{sessions} in {span} · {laws}"


def lengths_text(fit: TrafficFit) -> str:
    """The laws of lengths in words."""
    workload = fit.workload
    laws = [workload.lengths] if not workload.classes else [traffic.lengths for traffic in workload.classes.values()]
    steps = [len(law.parts) for law in laws if isinstance(law, StepLengths)]
    of = f" of {len(laws)} classes" if workload.classes else ""
    return f"pairs{of}" + (f", changing in {max(steps)} steps" if steps else "")


def shown_laws(fits: Sequence[ArrivalFit]) -> list[ArrivalFit]:
    """The likeliest law of each kind, in order."""
    best: dict[tuple[str, bool], ArrivalFit] = {}
    for each in fits:
        best.setdefault((each.process.kind, getattr(each.process, "states", None) is None), each)
    return list(best.values())[:_LAWS]


def _arrivals(fit: TrafficFit) -> list[str]:
    best = fit.arrivals[0].bic
    laws = [[each.name, f"{each.num_parameters}", f"{each.bic - best:,.0f}"] for each in shown_laws(fit.arrivals)]
    return aligned([["law of arrivals, by BIC", "numbers", "BIC above the best"], *laws], left=(0,))


def _figures(figures: Sequence[Compared]) -> list[str]:
    grid = [["", "trace", "fit", f"of {len(figures[0].draws)} draws, from lowest to highest", ""]]
    for each in figures:
        band, agrees = f"{each.low:.4g} .. {each.high:.4g}", "" if each.agrees else "differs"
        grid.append([each.name, f"{each.trace:.4g}", f"{each.median:.4g}", band, agrees])
    return aligned(grid, left=(0, 3, 4))


def engine_lines(checks: Sequence[LoadCheck]) -> list[str]:
    """The P99 of TTFT under the trace and under the fit, a line a load, and why they differ where they do."""
    grid, lost = [["P99 TTFT of one engine", "trace", "fit", "of draws, from lowest to highest"]], list[str]()
    for check in checks:
        load = f"at {100 * check.share:g} % of capacity"
        grid.append(_played(load, check.trace, check.fit))
        grid += [_played(f"- {name}", check.trace, draws_of) for name, draws_of in check.why.items()]
        if check.trace.unanswered:
            lost.append(f"{load} {check.trace.unanswered:,} requests of the trace are not answered")
    first, lines = checks[0], aligned(grid, left=(0, 3)) + lost
    lines.append(
        f"capacity {first.capacity_rps:.4g} requests/s at the engine's own speed; the traffic stays as it is, steps are"
        f" stretched {', '.join(f'{check.cost_factor:.3g}' for check in checks)} times"
    )
    lines += [verdict(check) for check in checks]
    return lines


def _played(name: str, trace: Played, draws: Sequence[Played]) -> list[str]:
    every = sorted(draw.p99_s for draw in draws)
    low, high, middle = every[0], every[-1], every[len(every) // 2]
    time = [format_duration(value * NS_PER_S) for value in (trace.p99_s, middle, low, high)]
    held = "within" if low <= trace.p99_s <= high else "outside"
    return [name, *time[:2], f"{time[2]} .. {time[3]}: {held} {len(draws)}"]


def verdict(check: LoadCheck) -> str:
    """Verdict: fit and trace agree within bounds, or the statistic that differs."""
    at = f"at {100 * check.share:g} %"
    if check.holds:
        return f"{at} the trace's P99 TTFT is one that the fit draws"
    factor = check.trace.p99_s / sorted(draw.p99_s for draw in check.fit)[len(check.fit) // 2]
    off = f"{at} it is not: the trace's is {factor:.2f} times the fit's"
    if (draws := len(check.fit)) < REPLICATIONS:
        off += f" (outside {draws} draws lie {200 // (draws + 1)} in 100 of a law's own traces; --draws {REPLICATIONS})"
    if not check.why:
        return off
    good = [name for name, draws in check.why.items() if _within(check.trace, draws)]
    if len(good) == 1:
        return f"{off}; with {good[0]} it is, so that the other part is to blame"
    if good:
        return f"{off}; either of its parts, with the other one the trace's, would pass"
    return f"{off}, and no part alone mends it: times and lengths depend on each other in the trace"


def _within(trace: Played, draws: Sequence[Played]) -> bool:
    return min(draw.p99_s for draw in draws) <= trace.p99_s <= max(draw.p99_s for draw in draws)


def traffic_plain(fit: TrafficFit, figures: Sequence[Compared], checks: Sequence[LoadCheck]) -> dict[str, Any]:
    """The same as values fit for JSON."""
    return {
        "source": fit.rows.source,
        "rows": len(fit.rows),
        "notes": [*fit.notes],
        "arrivals": [
            {"law": each.name, "numbers": each.num_parameters, "log_likelihood": each.log_likelihood, "bic": each.bic}
            for each in shown_laws(fit.arrivals)
        ],
        "lengths": lengths_text(fit),
        "figures": {
            each.name: {
                "trace": each.trace,
                "fit": each.median,
                "low": each.low,
                "high": each.high,
                "agrees": each.agrees,
            }
            for each in figures
        },
        "engine": [
            {
                "share_of_capacity": check.share,
                "capacity_rps": check.capacity_rps,
                "cost_factor": check.cost_factor,
                "p99_ttft_s": check.trace.p99_s,
                "p99_ttft_s_of_fits": sorted(draw.p99_s for draw in check.fit),
                "holds": check.holds,
                "of_parts": {name: sorted(draw.p99_s for draw in draws) for name, draws in check.why.items()},
                "verdict": verdict(check),
            }
            for check in checks
        ],
    }
