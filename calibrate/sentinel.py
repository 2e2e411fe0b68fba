"""One step of a profile, timed again: how much slower the machine is now than when the profile was made."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from calibrate.inputs import StepInputs
from calibrate.plan import Point
from calibrate.runner import ModelRunner
from sim.cost.profile import Profile

_READING_S = 0.3
_REPLAYS = (10, 1000)  # at least and at most


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
        inputs = StepInputs.synthetic(
            self.point.decode,
            self.point.chunks,
            block_size=runner.block_size,
            num_blocks=runner.num_blocks,
            vocab_size=runner.spec.vocab_size,
            seed=0,
        )
        runner.load(inputs)
        runner.replay(3)
        least, most = _REPLAYS
        replays = min(max(math.ceil(_READING_S * 1e9 / self.ns), least), most)
        return [statistics.median(runner.replay(replays)) / self.ns - 1]
