"""What a curve of latency against load shows: its knee, where it crosses the SLO, from where the queue grows.

All of it is read off tested loads:

    knee           the stable load of greatest power = throughput / mean E2E. Kleinrock, Power and deterministic rules
                   of thumb for probabilistic problems in computer communications, ICC 1979.
    SLO crossing   between the highest load that meets the SLO and the next one, interpolated: the logarithm of the
                   share of misses is taken to be linear in the load; where the objective is of no share of the
                   requests, or classes have their own, its margin is.
    unstable       from the lowest load at which the queue grows (`batchsim.metrics.stability`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchsim.metrics.slo import Slo


@dataclass(frozen=True)
class Tested:
    """A tested load of a policy. `excess` is above 0 where the SLO is missed, larger the further; None: unknown.
    `grows`: the queue grows whatever the cost's error; `unstable`: as simulated."""

    load: float
    unstable: bool
    grows: bool
    meets_slo: bool
    throughput_rps: float
    e2e_mean_s: float | None
    excess: float | None

    @property
    def power(self) -> float | None:
        """Throughput over mean E2E; None where the queue grows, or nothing completed."""
        known = self.e2e_mean_s is not None and not self.unstable
        return self.throughput_rps / self.e2e_mean_s if known and self.e2e_mean_s else None


@dataclass(frozen=True)
class Knee:
    """The tested load of greatest power, and the tested loads beside it: the greatest of all lies between these.

    `low` or `high` is None where the knee is the first or the last stable load, so that it may lie beyond.
    """

    load: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Crossing:
    """The load up to which the SLO is met: `low` meets it, `high`, the next tested, does not. Both None: never tested.

    `load` is interpolated, None where nothing can be. `low` None: not met at the lowest load. `high` None: met at all.
    """

    load: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Landmarks:
    """What a policy's curve shows. `unstable_from` None: the queue grows at no tested load."""

    knee: Knee | None
    crossing: Crossing
    unstable_from: float | None


def marks(tested: list[Tested]) -> Landmarks:
    """Knee, SLO crossing and instability of a curve as `curve` returns it."""
    return Landmarks(knee(tested), crossing(tested), unstable_from(tested))


def curve(rows: Iterable[Mapping[str, Any]], slo: Slo | None) -> list[Tested]:
    """The loads of one policy from the lowest up, but for those at which a point failed.

    `rows` are those of a summary, means over seeds by metric. `slo` is the one objective of all requests; None where
    classes have their own.
    """
    tested = []
    for row in sorted(rows, key=lambda row: float(row["load"])):
        if _number(row, "failed"):
            continue  # nothing is known of it
        unstable = bool(row["unstable"])
        margin = _number(row, "slo_margin")  # the mean over the seeds
        meets = not unstable and margin is not None and margin >= 0
        tested.append(
            Tested(
                load=float(row["load"]),
                unstable=unstable,
                grows=unstable and _number(row, "within_cost_error") != 1,
                meets_slo=meets,
                throughput_rps=_number(row, "throughput_rps") or 0.0,
                e2e_mean_s=_number(row, "e2e_mean_s"),
                excess=_excess(row, slo),
            )
        )
    return tested


def knee(tested: list[Tested]) -> Knee | None:
    """The knee of a curve; None without a load at which something completed and the queue does not grow."""
    stable = [point for point in tested if point.power is not None]
    if not stable:
        return None
    best = max(range(len(stable)), key=lambda i: stable[i].power or 0.0)
    at = stable[best].load
    above = [point.load for point in tested if point.load > at]
    high = above[0] if above else None
    return Knee(at, stable[best - 1].load if best else None, high)


def crossing(tested: list[Tested]) -> Crossing:
    """Where a curve crosses the SLO for the last time: above it no tested load meets it."""
    good = [i for i, point in enumerate(tested) if point.meets_slo]
    if not good:
        return Crossing(None, None, tested[0].load if tested else None)
    last = tested[good[-1]]
    if good[-1] + 1 == len(tested):
        return Crossing(None, last.load, None)
    after = tested[good[-1] + 1]
    if last.excess is None or after.excess is None:
        return Crossing(None, last.load, after.load)
    # A load at which the queue grows misses whatever its margin: where they disagree the crossing is near it.
    below, above = min(last.excess, 0.0), max(after.excess, 0.0)
    share = -below / (above - below) if above > below else 0.5
    return Crossing(last.load + share * (after.load - last.load), last.load, after.load)


def unstable_from(tested: list[Tested]) -> float | None:
    """The lowest load at which the queue grows whatever the cost's error; None if there is none."""
    return next((point.load for point in tested if point.grows), None)


def _excess(row: Mapping[str, Any], slo: Slo | None) -> float | None:
    """The logarithm of the share of misses over the allowed one, where the objective has one; else minus the margin."""
    in_slo, requests = _number(row, "in_slo"), _number(row, "cohort")
    if slo is not None and slo.share not in (None, 1.0) and in_slo is not None and requests:
        least = 0.5 / (requests * (_number(row, "num_seeds") or 1.0))  # no miss was seen: half a miss
        return math.log(max(1 - in_slo, least) / (1 - slo.share))
    margin = _number(row, "slo_margin")
    return None if margin is None else -margin


def _number(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    return None if value is None or np.isnan(value) else float(value)
