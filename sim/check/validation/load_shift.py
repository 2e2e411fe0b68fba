"""Load-equivalent errors: by how much the load would have to change for the simulation to equal the measurement.

Near saturation a latency is so steep in the load that its own error says little: there a step time 1 % off moves the
mean TTFT by tens of percent, but the load by 1 % only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

REACH = 0.20
"""Largest shift of the load that is tried, up or down, as a share."""

POINTS = 17  # shifts simulated, one every 2.5 %

Floats = NDArray[np.float64]
MeasureAt = Callable[[float], Mapping[str, float | None]]


def load_shifts(measure_at: MeasureAt, load: float, targets: Mapping[str, float | None]) -> dict[str, float | None]:
    """By metric of `targets` (name to measured value), the shift of the load, as a share, that simulates that value.

    +0.01: simulated at a load 1 % higher it equals the measurement, so the simulation is optimistic by that much. None
    where no shift within REACH does it, or where the metric is not defined. `measure_at` gives the metrics simulated on
    the same requests at a load.
    """
    shifts = np.linspace(-REACH, REACH, POINTS)
    simulated = [measure_at(load * (1 + shift)) for shift in shifts]
    return {name: crossing(shifts, [values[name] for values in simulated], target) for name, target in targets.items()}


def crossing(shifts: Floats, values: list[float | None], target: float | None) -> float | None:
    """The shift at which `values`, made increasing, reach `target`: the middle of a flat stretch; None if none does."""
    known = [value for value in values if value is not None]
    if target is None or len(known) < len(values):
        return None
    rising = isotonic_regression(known).x  # the nearest sequence that never falls
    if not rising[0] <= target <= rising[-1]:
        return None
    levels, first, counts = np.unique(rising, return_index=True, return_counts=True)
    middles = (shifts[first] + shifts[first + counts - 1]) / 2
    return float(np.interp(target, levels, middles))
