"""A simulation beside measured runs of the same requests: the error of each figure, and what explains it.

Several runs of the same requests are repeats: an error is of their mean, and their spread half the range of a figure
over them, as a share of that mean. An error within SPREADS times the spread counts as agreement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from batchsim.check.measured.run import MeasuredRequests, MeasuredRun
from batchsim.cost.cost_error import CostError, Unknown

SPREADS = 2
_ROUNDING = 1e-9  # relative rounding error of a mean of equal values


@dataclass(frozen=True)
class MetricError:
    """One figure: simulated, the mean over the measured (`live`) runs, simulated / measured − 1, and the spread of the
    runs as a share.

    None where a value is not defined: a spread of one run, an error relative to 0. `few`: a percentile with fewer than
    20 observations beyond it. `ends`: where the load lies within the cost's error of saturation, what is simulated with
    the shortest and the longest steps that this allows; there is no `error` then, but `error_ends`.
    """

    name: str
    simulated: float | None
    live: float | None
    error: float | None
    spread: float | None
    few: bool
    ends: tuple[float, float] | None = None

    @classmethod
    def of(
        cls,
        name: str,
        simulated: float | None,
        runs: Sequence[MeasuredRun],
        *,
        few: bool,
        ends: Mapping[str, tuple[float, float]],
    ) -> MetricError:
        """The error of the figure `name` beside `runs`, of which all have to have it; `ends` by name of a figure."""
        values = [value for run in runs if (value := run.figures.get(name)) is not None]
        live = error = spread = None
        if values and len(values) == len(runs):
            live = float(np.mean(values))
            spread = _relative((max(values) - min(values)) / 2, live) if len(values) > 1 else None
            error = None if simulated is None or name in ends else _relative(simulated - live, live)
        return cls(name, simulated, live, error, spread, few, ends.get(name))

    @property
    def error_ends(self) -> tuple[float, float] | None:
        """The errors of both `ends`, as shares; None where there are none."""
        if self.ends is None or not self.live:
            return None
        return self.ends[0] / self.live - 1, self.ends[1] / self.live - 1

    @property
    def is_beyond(self) -> bool:
        """Whether the measured value lies outside both `ends` of the prediction."""
        return self.ends is not None and self.live is not None and not self.ends[0] <= self.live <= self.ends[1]

    @property
    def agrees(self) -> bool:
        """Whether the error is within SPREADS times the spread of the measured runs."""
        if self.error is None or self.spread is None:
            return False
        return abs(self.error) <= SPREADS * self.spread + _ROUNDING


def _relative(part: float, whole: float) -> float | None:
    """part / whole; 0 of anything is 0, and a share of 0 is None."""
    return 0.0 if part == 0 else part / whole if whole else None


@dataclass(frozen=True)
class Parting:
    """The first request, in the order of sending, whose latencies part, and why.

    `request` is its row in the measured file; `latency` is `ttft` or `tpot`; times in seconds. `cause`: `load`, others
    were in flight; `queue`, `preempted`, `prompt` or `decode`, the simulation's own.
    """

    request: int
    sent_s: float
    latency: str
    measured_s: float
    simulated_s: float
    cause: str
    text: str


@dataclass(frozen=True)
class Comparison:
    """One policy beside the `runs` that count of one set of requests, `part` of a file, "" for the only one.

    `simulated` are the requests of the simulations, by request id. `shifts` by figure: the share by which the load (the
    users of a closed loop) would have to change for the simulation to equal the measurement, None beyond reach; {}
    where not asked, or where the load axis is not a rate. `cost_error` is how far the step times may be off. `grows`:
    the queue of the first simulation grows for as long as its requests come. `notes`: what is to be known of the files
    and of the replay, each line once.
    """

    policy: str
    part: str
    runs: tuple[MeasuredRun, ...]
    simulated: tuple[MeasuredRequests, ...]
    errors: tuple[MetricError, ...]
    shifts: dict[str, float | None]
    cost_error: CostError | Unknown
    grows: bool = False
    parting: Parting | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_within_error(self) -> bool:
        """Whether the load lies within the cost's error of saturation, so that TTFT and E2E are intervals."""
        return any(one.ends is not None for one in self.errors)

    @property
    def unfit(self) -> str:
        """Why nothing can be judged on the machine that was measured; "" if it can, or if that is not known."""
        return ""

    def error(self, name: str) -> MetricError:
        return next(one for one in self.errors if one.name == name)

    def agrees(self, error: MetricError) -> bool:
        """Whether the figure's error counts as agreement: within the spread, on a machine fit to judge on."""
        return error.agrees and not self.unfit
