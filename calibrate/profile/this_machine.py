"""A profile and this machine: whether it was measured here, with or without graphs, and how much slower it is here now.

The last is what the sentinel says: one step of the profile, timed again.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from batchsim.base.errors import CalibrationError
from batchsim.calibrate.engine.identity import catalog_gpu, identity
from batchsim.calibrate.engine.runner import ModelRunner
from batchsim.calibrate.profile.bench import Bench
from batchsim.calibrate.profile.point_plan import StepShape
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
        sentinel = profile.made.get("sentinel")
        if sentinel is None or "mean_ns" not in sentinel:
            return None
        return cls(StepShape.from_row(sentinel["step"]), sentinel["ns"], sentinel["mean_ns"])

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


def check_machine(profile: Profile, device: str) -> None:
    """CalibrationError if `profile` is of another machine than this one's `device`.

    An imported profile is of another executor on any machine; only its GPU must be this one's.
    """
    ours = identity(device)["hardware"]
    if profile.origin == "measured":
        key = "gpu" if device == "cuda" else "cpu"
        hardware = profile.hardware
        same = hardware.get("device") == device and hardware.get(key) == ours[key]
        of = str(hardware.get("gpu") or hardware.get("cpu"))
    else:
        key, of = "gpu", str(profile.gpu)
        same = catalog_gpu(ours) == profile.gpu
    if not same:
        raise CalibrationError(
            f"profile {profile.name} is of {of}, this is {ours.get('gpu') or ours['cpu']}. Calibrate here: batchsim"
            f" calibrate --model {profile.model.name} --device {device} -o PROFILE.json, then --set cost=PROFILE.json."
        )


def graphs_of(profile: Profile, device: str, asked: bool | None = None) -> bool | None:
    """The argument `graphs` of `build_runner` with which a runner runs as `profile` was measured; None: the default.

    CalibrationError if something else was `asked`.
    """
    measured = profile.made.get("options", {}).get("graphs") if profile.origin == "measured" else None
    if device != "cuda" or measured is None:
        return False if asked is False else None
    if asked is not None and asked != measured:
        had, option = ("with", "--graphs") if measured else ("without", "--no-graphs")
        raise CalibrationError(
            f"profile {profile.name} was measured {had} CUDA graphs. Run with {option}, or calibrate again."
        )
    return measured
