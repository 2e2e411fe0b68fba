"""Step times that were fitted to measured runs, over the kernel that they were fitted with: a cost of kind `fitted`,
which the numbers of a fit's file become (`fit_file`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from batchsim.base.errors import ScenarioError, shown
from batchsim.base.ranges import Config, Range
from batchsim.cost.drafter_config import DraftersConfig
from batchsim.cost.encoder_config import EncoderConfig
from batchsim.cost.fitted import Fitted, StepTerms
from batchsim.cost.profile_config import ProfileConfig
from batchsim.cost.roofline_config import RooflineConfig
from batchsim.deployment.model import ModelSpec
from batchsim.scenario.deployment_config import DeploymentConfig
from batchsim.scenario.fit_file import FIT_AGAIN
from batchsim.workload.tagged import ByKind

Kernel = Annotated[RooflineConfig | ProfileConfig | DeploymentConfig, ByKind()]


@dataclass(frozen=True, slots=True)
class FittedConfig(Config):
    """Step times that were fitted, to runs or to steps."""

    terms: StepTerms
    """The terms of the fit."""
    kind: Literal["fitted"] = "fitted"
    kernel: Kernel | None = None
    """The cost that the terms are over; null: the free form."""
    kernel_source: str = ""
    """The first line of the kernel's sources when it was fitted."""
    words: str = ""
    """To what it was fitted."""
    tpot_error: Annotated[float, Range(0, 1e3)] | None = None
    """The error claimed for mean TPOT, or for the time of steps, as a share."""
    draft: DraftersConfig | None = None
    """What drafting costs, by method."""
    encoder: EncoderConfig | None = None
    """What encoding images, audios and videos takes, beside the steps."""

    @property
    def num_gpus(self) -> int:
        """GPUs of one engine."""
        return 1 if self.kernel is None else self.kernel.num_gpus

    def build(self, model: ModelSpec, *, block_size: int = 16, max_model_len: int | None = None) -> Fitted:
        """The cost of the terms. ScenarioError where the kernel is not the one that they were fitted with."""
        if getattr(self.kernel, "power_cap", None) is not None:
            raise ScenarioError("cost: power_cap of a fit's kernel is in what was measured already. Leave it out.")
        if self.kernel is None:
            return Fitted(None, self.terms, self.words, self.tpot_error)
        kernel = self.kernel.build(model, block_size=block_size, max_model_len=max_model_len)
        if self.kernel_source not in ("", source := kernel.sources()[0]):
            raise ScenarioError(
                f"cost: was fitted with the kernel {shown(self.kernel_source)}, and this is {shown(source)}."
                f" {FIT_AGAIN}"
            )
        return Fitted(kernel.without_host(), self.terms, self.words, self.tpot_error)
