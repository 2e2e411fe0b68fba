"""Design matrix of the fit: by request, the simulated time in each cost term, and the residual to the measurement.

A request waits for its first token through all steps from its arrival at the engine on, and for the others through all
steps from its first token to its last. What the steps in such a window hold of a feature, times the feature's term,
summed over the features, is the latency but for idle times, so that it is linear in the terms while the schedule stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import MeasuredError
from batchsim.check.measured.run import MeasuredRequests
from batchsim.check.validation.replay import Replay, simulated_requests
from batchsim.cost.fitted import TERMS, Fitted
from batchsim.cost.work import work_columns
from batchsim.scenario.point import Run

Floats = NDArray[np.float64]

NAMES = (*TERMS, "frontend")
"""The columns of a window: the terms of a step, and the way from the client, which is there once."""


@dataclass(frozen=True)
class Rows:
    """Equations of one latency (`ttft`, `tpot` or `e2e`) of one run, an element or a row a request.

    `windows` has a column for each of NAMES; times in ns. `left` is what was measured less what was simulated; of
    aggregates there is one row, of means. `measured_ns` and `simulated_ns` are the means.
    """

    latency: str
    windows: Floats
    left: Floats
    measured_ns: float
    simulated_ns: float

    @property
    def step_ns(self) -> Floats:
        """Mean of each column."""
        return self.windows.mean(axis=0)


def rows_of(replay: Replay, played: Run, cost: Fitted) -> list[Rows]:
    """The equations of a run: of TTFT and TPOT, of E2E where neither was measured.

    MeasuredError where requests that the measured engine served did not finish in simulation.
    """
    simulated = simulated_requests(played)
    if lost := replay.unfinished(simulated):
        raise MeasuredError(
            f"{replay.run.name}: {lost:,} of its {len(simulated):,} requests did not finish in simulation, and the"
            " measured engine served them. Look at kv, max_waiting and the policy of the scenario."
        )
    windows = _windows(played, cost)
    measured = replay.run.requests
    first = [_rows(name, replay, measured, simulated, windows[name]) for name in ("ttft", "tpot")]
    kept = [rows for rows in first if rows is not None]
    last = [] if kept else [_rows("e2e", replay, measured, simulated, windows["e2e"])]
    return kept + [rows for rows in last if rows is not None]


def _windows(played: Run, cost: Fitted) -> dict[str, Floats]:
    """By latency, the windows of all requests by id, those of TPOT for each token after the first."""
    steps = played.records.steps
    starts, ends = steps["start_ns"], steps["start_ns"] + steps["duration_ns"]
    knots = np.stack([starts, ends], axis=1).reshape(-1)
    features = cost.features(work_columns(steps))
    sums = np.concatenate([np.zeros((1, features.shape[1])), np.cumsum(features, axis=0)])
    requests = np.sort(played.records.requests, order="request_id")
    times = {name: requests[name] for name in ("arrival_ns", "first_token_ns", "last_token_ns")}

    def until(name: str) -> Floats:
        """What the steps hold until a time of each request; one that runs then counts in part."""
        knotted = [np.interp(times[name], knots, np.repeat(sums[:, j], 2)[1:-1]) for j in range(features.shape[1])]
        return np.stack(knotted, axis=1)

    begun, first, last = map(until, times)
    after = np.maximum(requests["output_tokens"] - 1, 1)[:, None]
    one, none = np.ones((len(requests), 1)), np.zeros((len(requests), 1))
    return {
        "ttft": np.hstack([first - begun, one]),
        "tpot": np.hstack([(last - first) / after, none]),
        "e2e": np.hstack([last - begun, one]),
    }


def _rows(
    name: str, replay: Replay, measured: MeasuredRequests | None, simulated: MeasuredRequests, windows: Floats
) -> Rows | None:
    """The equations of latency `name`; None where it was not measured, or no request has it in simulation."""
    simulated_ns = simulated.latency_s(name) * 1e9
    if measured is None:
        mean = replay.run.figures.get(f"{name}_mean_s")
        known = ~np.isnan(simulated_ns)
        if mean is None or not known.any():
            return None
        mean_ns = float(simulated_ns[known].mean())
        return Rows(name, windows[known].mean(axis=0)[None], np.array([mean * 1e9 - mean_ns]), mean * 1e9, mean_ns)
    measured_ns = measured.picked(replay.index).latency_s(name) * 1e9
    known = ~(np.isnan(simulated_ns) | np.isnan(measured_ns))
    if not known.any():
        return None
    left = (measured_ns - simulated_ns)[known]
    return Rows(name, windows[known], left, float(measured_ns[known].mean()), float(simulated_ns[known].mean()))
