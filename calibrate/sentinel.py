"""One step of a profile, timed again: how much slower the machine is now than when the profile was made."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from batchsim.calibrate.bench import Bench
from batchsim.calibrate.point_plan import Point
from batchsim.calibrate.runner import ModelRunner
from batchsim.cost.profile import Profile

_VISITS = 15  # each as the calibration made them, since caches are warmer the longer a step is replayed


@dataclass(frozen=True)
class Sentinel:
    """The step whose kernels took `ns` while the profile was made, and `mean_ns` with what interrupted them then."""

    point: Point
    ns: float
    mean_ns: float

    @classmethod
    def of(cls, profile: Profile) -> Sentinel | None:
        """That of a measured profile; None for one that has none, or whose mean nobody kept."""
        found = profile.made.get("sentinel")
        if found is None or "mean_ns" not in found:
            return None
        return cls(Point.from_row(found["step"]), found["ns"], found["mean_ns"])

    def drift(self, runner: ModelRunner) -> tuple[float, float] | None:
        """The shares by which the step takes longer now, negative where it is shorter: by its median, and by its mean,
        in which interruptions count; None if the runner is too small for it. Overwrites the KV cache."""
        blocks = sum(-(-n // runner.block_size) for n in self.point.lengths())
        if blocks > runner.num_blocks or len(self.point.decode) > runner.max_num_seqs:
            return None
        bench = Bench(runner, self.point, seed=0)
        medians, means = zip(*(bench.look(self.point) for _ in range(_VISITS)), strict=True)
        return statistics.median(medians) / self.ns - 1, statistics.fmean(means) / self.mean_ns - 1
