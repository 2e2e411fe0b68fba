"""One step of a profile, timed again: how much slower the machine is now than when the profile was made."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from calibrate.measure import Bench
from calibrate.plan import Point
from calibrate.runner import ModelRunner
from sim.cost.profile import Profile

_VISITS = 7  # each as the calibration made them, since caches are warmer the longer a step is replayed


@dataclass(frozen=True)
class Sentinel:
    """The step whose kernels took `ns` while the profile was made."""

    point: Point
    ns: float

    @classmethod
    def of(cls, profile: Profile) -> Sentinel | None:
        """That of a measured profile; None for one that has none."""
        found = profile.made.get("sentinel")
        return None if found is None else cls(Point.from_row(found["step"]), found["ns"])

    def drift(self, runner: ModelRunner) -> list[float]:
        """The share by which the step takes longer now, negative where it is shorter; none if the runner is too small
        for it. Overwrites the KV cache."""
        blocks = sum(-(-n // runner.block_size) for n in self.point.lengths())
        if blocks > runner.num_blocks or len(self.point.decode) > runner.max_num_seqs:
            return []
        bench = Bench(runner, self.point, seed=0)
        return [statistics.median(bench.visit(self.point) for _ in range(_VISITS)) / self.ns - 1]
