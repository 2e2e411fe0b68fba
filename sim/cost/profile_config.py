"""`cost:` of a scenario as a profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from batchsim.base.errors import CalibrationError
from batchsim.base.ranges import Config
from batchsim.cost.drafter_config import DraftersConfig
from batchsim.cost.encoder_config import EncoderConfig
from batchsim.cost.host_config import StatedHost

if TYPE_CHECKING:
    from batchsim.cost.calibrated import Calibrated
    from batchsim.deployment.model import ModelSpec


@dataclass(frozen=True, slots=True)
class ProfileConfig(Config):
    """`cost:` as the path of a profile, or the long form, which takes the name of a shipped one too."""

    profile: str
    """The profile's name, or its path."""
    kind: Literal["profile"] = "profile"

    deviations: ClassVar[dict[str, str]] = {"more_work_no_less_time": "kernels are as measured, which is not monotone"}

    extrapolate: bool = False
    """Whether the curves are continued beyond what was measured."""
    host: StatedHost | None = None
    """The host's time of each step, stated, in place of the profile's."""
    draft: DraftersConfig | None = None
    """What drafting costs, by method."""
    encoder: EncoderConfig | None = None
    """What encoding images, audios and videos takes, beside the steps."""

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
