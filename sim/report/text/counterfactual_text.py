"""What one change to a run would have done, as data and as text: SLO misses that vanish and appear, latencies."""

from __future__ import annotations

from typing import Any

import pandas as pd

from batchsim.base.units import NS_PER_S, format_duration
from batchsim.explain.counterfactual import Counterfactual
from batchsim.metrics.table import METRICS
from batchsim.report.layout import aligned, filled
from batchsim.report.numbers import DASH
from batchsim.report.reading import point_text
from batchsim.results.read import Results

_LATENCIES = ("ttft", "tpot", "e2e")
_SHOWN = tuple(f"{name}_{of}_s" for name in _LATENCIES for of in ("mean", "p99"))
_COUNTED = ("in_slo", "slo_met", "goodput_rps", "throughput_rps", "uncompleted_share")
_IDS = 24  # request ids that the text lists at most


def counterfactual_data(comparison: Counterfactual) -> dict[str, Any]:
    """JSON values: misses before and after with their causes, ids of the misses that vanish, appear and remain, and
    metrics [before, after] in seconds or shares.

    `requests` counts the requests judged on each side, `shared` those judged on both; the ids are of shared ones, None
    if there are none.
    """
    base, changed = comparison.base, comparison.changed
    before, after = set(base.misses["request_id"].tolist()), set(changed.misses["request_id"].tolist())
    shared = comparison.shared
    missed_before, missed_after = before & shared, after & shared
    return {
        "policy": comparison.point.spec.label,
        "load": comparison.point.load,
        "seed": comparison.point.seed,
        "changes": [{"key": c.key, "before": c.before, "after": c.after} for c in comparison.changes],
        "rerun": comparison.rerun,
        "no_effect": comparison.no_effect,
        "shared": len(shared),
        "requests": [int(side.judged.sum()) for side in (base, changed)],
        "misses": [len(before), len(after)],
        "vanish": sorted(missed_before - missed_after) if shared else None,
        "appear": sorted(missed_after - missed_before) if shared else None,
        "remain": sorted(missed_before & missed_after) if shared else None,
        "causes": _causes(base.misses, changed.misses),
        "metrics": {name: [base.values.get(name), changed.values.get(name)] for name in (*_SHOWN, *_COUNTED)},
    }


def _causes(before: pd.DataFrame, after: pd.DataFrame) -> list[dict[str, Any]]:
    """For each cause its misses [before, after]; the most frequent cause before the change comes first."""
    counts = [side["cause"].value_counts().to_dict() for side in (before, after)]
    names = sorted({*counts[0], *counts[1]}, key=lambda cause: (-counts[0].get(cause, 0), cause))
    return [{"cause": cause, "misses": [int(count.get(cause, 0)) for count in counts]} for cause in names]


def counterfactual_text(results: Results, comparison: dict[str, Any]) -> str:
    """`comparison`, which `counterfactual_data` returned, as text wrapped to the output's width."""
    changes = ", ".join(f"{c['key']} {_value(c['before'])} → {_value(c['after'])}" for c in comparison["changes"])
    lines = [_fill(f"{point_text(results, comparison)}: {changes}")]
    if comparison["rerun"]:
        lines.append(_fill(f"! the results were {comparison['rerun']}; the unchanged point was simulated for this"))
    before, after = comparison["misses"]
    if comparison["no_effect"] and before == after:
        return "\n".join([*lines, f"no effect: every request's times are the same, and so are {before:,} SLO misses"])
    if comparison["shared"]:
        vanish, appear = comparison["vanish"], comparison["appear"]
        lines.append(
            f"{before:,} SLO misses before, {after:,} after: {len(vanish):,} vanish, {len(appear):,} appear,"
            f" {len(comparison['remain']):,} remain"
        )
        alone = sum(comparison["requests"]) - 2 * comparison["shared"]
        lines += [f"  (of the requests that both sides judge: {alone:,} are of one side alone)"] if alone else []
        lines += [_fill(f"  {word}: {_ids(ids)}") for word, ids in (("vanish", vanish), ("appear", appear)) if ids]
    else:
        lines.append(f"{before:,} SLO misses before, {after:,} after; the requests differ, so no two are compared")
    rows = [["misses by cause", "before", "after"]] if comparison["causes"] else []
    rows += [[row["cause"], *(f"{count:,}" for count in row["misses"])] for row in comparison["causes"]]
    rows += [["", "", ""]] if rows else []
    rows.append(["", "before", "after"])
    rows += [[_name(name), *(_shown(name, x) for x in pair)] for name, pair in comparison["metrics"].items()]
    return "\n".join([*lines, *aligned(rows, left=(0,))])


def _fill(text: str) -> str:
    return "\n".join(filled(text, "    "))


def _ids(ids: list[int]) -> str:
    shown = ", ".join(map(str, ids[:_IDS]))
    return f"{shown} and {len(ids) - _IDS:,} more" if len(ids) > _IDS else shown


def _value(value: Any) -> str:
    if value is None:
        return "(not stated)"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _name(metric: str) -> str:
    return METRICS[metric].words if metric in _SHOWN else metric


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return DASH
    unit = METRICS[name].unit
    if unit == "s":
        return format_duration(value * NS_PER_S)
    if unit == "yes or no":
        return "yes" if value else "no"
    return f"{100 * value:.3g} %" if unit == "share" else f"{value:.3g}"
