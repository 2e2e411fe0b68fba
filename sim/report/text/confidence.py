"""How certain a run's results are, in lines under its table: differences between policies, precision, warm-up."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from batchsim.base.units import NS_PER_S, format_duration, parse_duration_ns, two_digits
from batchsim.metrics.table import METRICS
from batchsim.report.numbers import DASH, rounded
from batchsim.report.reading import column, load_name, num_seeds, sweeps, sweeps_at
from batchsim.results.read import Results

METRIC = "ttft_p99_s"
FEW = 20
"""Requests below which not even the median of a simulation says much."""


def paired_parts(results: Results, load: float) -> tuple[str, Sequence[str]]:
    """The heading of the line of differences, and for each policy its P99 TTFT less that of the best, with an interval.

    ("", []) with one seed, which shows no interval. Left out are unstable and failed policies, and those within their
    cost's error of saturation: the table says so of them.
    """
    knee = {sweep.policy for sweep in sweeps_at(results, load) if sweep.within_error[sweep.index(load)]}
    if num_seeds(results) < 2 or results.best(load) in knee:
        return "", []
    rows = [row for row in results.differences(load, [METRIC]) if not row["why"].endswith(("unstable", "failed"))]
    rows = [row for row in rows if row["policy"] not in knee]
    return f"{METRICS[METRIC].words} minus that of {results.best(load)}, seed by seed (95 %):", [
        f"{row['policy']} {difference_text(row['mean'], row['half_width'], row['no_difference'])}" for row in rows
    ]


def difference_text(mean: float | None, half_width: float | None, no_difference: bool) -> str:
    """A difference in seconds with its half-width as text: `−412 ± 31 ms`, `no difference (± 8 ms)`, `the same` where
    every seed agrees, `–` if not defined.
    """
    if mean is None:
        return DASH
    half = math.nan if half_width is None else half_width
    size = max(abs(mean), 0.0 if half_width is None else half)
    unit, scale = ("s", 1) if size >= 1 else ("ms", 1e3)
    if no_difference:
        return "the same" if half == 0 else f"no difference (± {two_digits(half * scale)} {unit})"
    return f"{'+' if mean > 0 else '−'}{rounded(abs(mean), half, scale)} {unit}"


def precision_lines(results: Results) -> list[str]:
    """Lines on the precision asked for: how many points reached it after how many seeds, and which did not."""
    asked = results.manifest.get("precision")
    if asked is None:
        return []
    points, name = asked["points"], load_name(results)
    by_state: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for point in points:
        by_state[point["state"]].append(point)
    reached, budget = by_state["reached"], by_state["budget"]
    wanted = f"±{100 * asked['share']:g} % of {asked['metric']}"
    line = f"{len(reached)} of {len(reached) + len(budget)} points within {wanted}"
    if reached:
        counts = [point["num_seeds"] for point in reached]
        fewest, most = min(counts), max(counts)
        line += f" after {fewest if fewest == most else f'{fewest}–{most}'} seeds"
    left_out = [f"{len(by_state[state])} {state}" for state in ("unstable", "undefined", "failed") if by_state[state]]
    lines = [line + (f"; {', '.join(left_out)} left out" if left_out else "")]
    if budget:
        missed = []
        for point in budget:  # a mean of 0 has no share
            share = point["half_width_share"]
            where = f"{point['policy']} at {point['load']:g}" if name else str(point["policy"])
            missed.append(f"{where} {DASH if share is None else f'±{two_digits(100 * share)} %'}")
        seeds = max(point["num_seeds"] for point in budget)
        lines.append(f"! not within it with all {seeds} seeds: {', '.join(missed)}. Set --max-seeds, or a longer run")
    return lines


def few_warning(results: Results) -> list[str]:
    """One line where a simulation had fewer than FEW requests, with the least; [] if none had."""
    least = int(np.nanmin(column(results.points, "submitted")))
    if least >= FEW:
        return []
    return [
        f"! n = {least}: a simulation of fewer than {FEW} requests says little. Take a longer log, or more requests"
    ]


def warmup_warning(results: Results) -> list[str]:
    """One line naming the points whose start-up transient outlasts the warm-up in most seeds; [] if there are none."""
    if "warmup_needed_s" not in results.points:
        return []  # results of an older version
    warmup_s = parse_duration_ns(results.scenario["workload"].get("warmup", "0s")) / NS_PER_S
    points, longest_s = results.points, 0.0
    by_policy: dict[str, list[str]] = defaultdict(list)
    for sweep in sweeps(results):
        of_policy = points["policy"] == sweep.policy
        for load in sweep.loads[~sweep.unstable]:
            needed = column(points.loc[of_policy & (points["load"] == load)], "warmup_needed_s")
            median_s = float(np.median(needed)) if len(needed) else math.nan
            if median_s > warmup_s:  # False for NaN: some seed has no estimate
                by_policy[sweep.name].append(f"{load:g}")
                longest_s = max(longest_s, median_s)
    if not by_policy:
        return []
    name = load_name(results)
    where = ", ".join(f"{policy} at {', '.join(loads)}" if name else policy for policy, loads in by_policy.items())
    beginning = f"beyond the warm-up of {format_duration(warmup_s * NS_PER_S)}" if warmup_s else "and no warm-up is set"
    enough_s = math.ceil(longest_s / 10) * 10 if longest_s > 10 else math.ceil(longest_s)
    return [
        f"! the beginning differs from the rest {beginning} (MSER-5 of ttft, most seeds): {where}. Set workload.warmup:"
        f" {enough_s}s, in a run that is as much longer"
    ]
