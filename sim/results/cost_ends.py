"""Points whose load may lie within the cost's error of saturation, simulated with the shortest and the longest steps.

The columns that they add to summary.csv, where a run has any: within_cost_error (1: the load lies within the error of
saturation, so that what holds time in the queue is whatever that error makes of it), unstable_fast and unstable_slow,
meets_slo_fast and meets_slo_slow, and both ends of every latency and share within the SLO, like ttft_p99_s_fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchsim.cost.cost_error import CostError
from batchsim.metrics.latencies import LATENCIES, TASK_E2E
from batchsim.metrics.measure import Combined, combine, measured_of
from batchsim.metrics.stability import is_within_error
from batchsim.metrics.table import STATISTICS

FAST, SLOW = "fast", "slow"


@dataclass(frozen=True)
class CostEnds:
    """One policy at one load, with the results of its seeds at both ends of the cost's `error`."""

    policy: str
    load: float
    error: CostError
    fast: tuple[dict[str, Any], ...]
    slow: tuple[dict[str, Any], ...]

    @property
    def both(self) -> dict[str, Combined]:
        return {FAST: combined(self.fast), SLOW: combined(self.slow)}

    @property
    def within_error(self) -> bool:
        """Whether the load lies within the error of saturation. A queue that grows at both ends is beyond it."""
        fast, slow = self.both.values()
        grow = {"fast_grows": fast.unstable, "slow_grows": slow.unstable}
        return not (fast.unstable and slow.unstable) and is_within_error(self.error, fast.mean, slow.mean, **grow)

    @property
    def disagree(self) -> bool:
        """Whether the objective is met at one end alone."""
        fast, slow = map(meets, self.both.values())
        return fast != slow

    @property
    def facts(self) -> dict[str, Any]:
        """What the manifest says: which points these were."""
        points = {name: [run["point"] for run in getattr(self, name)] for name in (FAST, SLOW)}
        return {"policy": self.policy, "load": self.load, "factors": list(self.error.factors), **points}


def combined(runs: Sequence[dict[str, Any]]) -> Combined:
    """Means over the seeds of one point."""
    return combine(map(measured_of, runs))


def meets(point: Combined) -> bool:
    """Whether the queue does not grow and the objective is met on the mean."""
    margin = point.mean["slo_margin"]
    return not point.unstable and margin is not None and margin >= 0


def has_ends(metric: str) -> bool:
    """Whether summary.csv has both ends of a metric."""
    name, _, of = metric.removesuffix("_s").rpartition("_")
    latency = (name in LATENCIES or name == TASK_E2E) and of in STATISTICS
    return latency or metric.partition("[")[0] in ("in_slo", "slo_margin", "ttft_p99_s")


def add_ends(summary: Sequence[dict[str, Any]], ends: Sequence[CostEnds]) -> None:
    """Writes the columns of `ends` into the rows of `summary`: empty ones where a point has none; no column without."""
    columns = {(one.policy, one.load): _columns(one) for one in ends}
    empty = dict.fromkeys(next(iter(columns.values()), {}))
    for row in summary:
        row |= columns.get((row["policy"], row["load"]), empty)


def _columns(one: CostEnds) -> Mapping[str, Any]:
    columns: dict[str, Any] = {"within_cost_error": int(one.within_error)}
    for name, point in one.both.items():
        columns |= {f"unstable_{name}": int(point.unstable), f"meets_slo_{name}": int(meets(point))}
        columns |= {f"{metric}_{name}": value for metric, value in point.mean.items() if has_ends(metric)}
    return columns
