"""`cost:` of a scenario as a profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from batchsim.base.errors import CalibrationError
from batchsim.base.ranges import Config
from batchsim.base.units import HostDuration, PartDuration
from batchsim.cost.drafter_config import DraftersConfig

if TYPE_CHECKING:
    from batchsim.cost.calibrated import Calibrated
    from batchsim.cost.profile import HostTerm
    from batchsim.deployment.model import ModelSpec


@dataclass(frozen=True, slots=True)
class StatedHost(Config):
    """Host time as a scenario states it, in place of the profile's."""

    base: HostDuration
    per_sequence: PartDuration = 0
    per_token: PartDuration = 0
    mode: Literal["serial", "overlapped"] = "serial"

    def term(self) -> HostTerm:
        """The same as a profile has it."""
        from batchsim.cost.profile import HostTerm

        return HostTerm(self.base, self.per_sequence, self.per_token, self.mode, assumed=False)


@dataclass(frozen=True, slots=True)
class ProfileConfig(Config):
    """`cost:` as the path of a profile, or the long form, which takes the name of a shipped one too. `extrapolate`
    continues the curves beyond what was measured; `host` replaces the profile's host time; `draft`: what drafting
    costs, if anything is said of it."""

    profile: str
    kind: Literal["profile"] = "profile"
    extrapolate: bool = False
    host: StatedHost | None = None
    draft: DraftersConfig | None = None

    @property
    def num_gpus(self) -> int:
        """GPUs of one engine."""
        return 1

    def build(self, model: ModelSpec, *, block_size: int = 16, max_model_len: int | None = None) -> Calibrated:
        """The cost model from the profile. CalibrationError if the profile cannot be read, or is not of `model`."""
        from batchsim.cost.calibrated import Calibrated  # no reader of a scenario needs profiles
        from batchsim.cost.profile import check_model, load_profile

        profile = load_profile(self.profile)
        check_model(profile, model)
        if (gpus := profile.deployment.num_gpus) > 1:
            raise CalibrationError(
                f"cost: profile {profile.name} is of a deployment on {gpus} GPUs. Write it as "
                "deployment: {engine: ..., gpu: ..., tp: ...}, which finds the profile."
            )
        host = None if self.host is None else self.host.term()
        return Calibrated(
            profile, extrapolate=self.extrapolate, host=host, block_size=block_size, max_model_len=max_model_len
        )
