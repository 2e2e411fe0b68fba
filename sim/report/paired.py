"""How far each policy is from the best one at a load, in one or two lines under the table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sim.report.numbers import DASH, rounded
from sim.report.reading import num_seeds

if TYPE_CHECKING:
    from sim.results import Results

METRIC, NAME = "ttft_p99_s", "ttft p99"


def paired_parts(results: Results, load: float) -> tuple[str, Sequence[str]]:
    """What the line begins with, and a part a policy; no parts with one policy or one seed, which shows no interval.

    Unstable policies and those that failed are left out: the table calls them so.
    """
    if num_seeds(results) < 2:
        return "", []
    rows = [row for row in results.differences(load, [METRIC]) if not row["why"].endswith(("unstable", "failed"))]
    return f"{NAME} minus that of {results.best(load)}, seed by seed (95 %):", [_part(row) for row in rows]


def _part(row: Mapping[str, Any]) -> str:
    return f"{row['policy']} {difference_text(row['mean'], row['half_width'], row['no_difference'])}"


def difference_text(mean: float | None, half_width: float | None, no_difference: bool) -> str:
    """`−412 ± 31 ms`, `no difference (± 8 ms)`, `the same` where every seed agrees, `–` if not defined."""
    if mean is None:
        return DASH
    half = math.nan if half_width is None else half_width
    size = max(abs(mean), 0.0 if half_width is None else half)
    unit, scale = ("s", 1) if size >= 1 else ("ms", 1e3)
    if no_difference:
        return "the same" if half == 0 else f"no difference (± {half * scale:.2g} {unit})"
    return f"{'+' if mean > 0 else '−'}{rounded(abs(mean), half, scale)} {unit}"
