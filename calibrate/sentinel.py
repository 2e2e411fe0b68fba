"""The sentinel, one step of a profile timed again: how much slower the machine is than when the profile was made."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from batchsim.calibrate.bench import Bench
from batchsim.calibrate.point_plan import StepShape
from batchsim.calibrate.runner import ModelRunner
from batchsim.cost.profile import Profile

_VISITS = 15  # of as many replays as in the calibration: caches are warmer the longer a step is replayed


@dataclass(frozen=True)
class Sentinel:
    """A step whose kernels took `ns` (median) while the profile was made, and `mean_ns` with interruptions."""

    point: StepShape
    ns: float
    mean_ns: float

    @classmethod
    def of(cls, profile: Profile) -> Sentinel | None:
        """The sentinel of a measured profile; None if the profile has none, or not its mean."""
        found = profile.made.get("sentinel")
        if found is None or "mean_ns" not in found:
            return None
        return cls(StepShape.from_row(found["step"]), found["ns"], found["mean_ns"])

    def drift(self, runner: ModelRunner) -> tuple[float, float] | None:
        """(by median, by mean) the share by which the step takes longer now than at calibration, negative if less.

        Interruptions are in the mean. None if the runner is too small for the step. Overwrites the KV cache.
        """
        blocks = sum(-(-n // runner.block_size) for n in self.point.lengths())
        if blocks > runner.num_blocks or len(self.point.decode) > runner.max_num_seqs:
            return None
        bench = Bench(runner, self.point, seed=0)
        medians, means = zip(*(bench.look(self.point) for _ in range(_VISITS)), strict=True)
        return statistics.median(medians) / self.ns - 1, statistics.fmean(means) / self.mean_ns - 1
