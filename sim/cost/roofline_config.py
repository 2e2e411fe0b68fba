"""How a scenario names a GPU by whose sheet step times are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from batchsim.base.ranges import Config, Range
from batchsim.base.units import Bandwidth, Watts
from batchsim.cost.drafter_config import DraftersConfig
from batchsim.cost.encoder_config import EncoderConfig
from batchsim.cost.host_config import HostCost
from batchsim.cost.shapes.config import ShapesConfig

if TYPE_CHECKING:
    from batchsim.cost.roofline import Roofline
    from batchsim.deployment.model import ModelSpec


@dataclass(frozen=True, slots=True)
class RooflineConfig(Config):
    """`cost: h200`, or the long form of that."""

    gpu: str
    """The GPU: a name of `batchsim catalog`, or a sheet of its numbers."""
    kind: Literal["roofline"] = "roofline"
    tp: Annotated[int, Range(1, 1024)] = 1
    """GPUs that share each layer (tensor parallel)."""
    pp: Annotated[int, Range(1, 1024)] = 1
    """Stages of a pipeline, each with as many layers."""
    host: HostCost = HostCost()  # noqa: RUF009 - which is frozen
    """The host's time of each step, stated: `base`, `per_sequence`, `per_token`."""
    swap_bandwidth: Bandwidth | None = None
    """Bandwidth of swaps, one way; without it, that of the host link's sheet × 0.85."""
    draft: DraftersConfig | None = None
    """What drafting costs, by method."""
    encoder: EncoderConfig | None = None
    """What encoding images, audios and videos takes, beside the steps."""
    shapes: ShapesConfig | None = None
    """Compiled shapes, to which steps are padded; without it no step is."""
    power_cap: Watts | None = None
    """The most W that each GPU may draw: steps that would draw more run at a lower clock."""

    @property
    def num_gpus(self) -> int:
        """GPUs of one engine."""
        return self.tp * self.pp

    def build(self, model: ModelSpec, *, block_size: int = 16, max_model_len: int | None = None) -> Roofline:
        """The cost model of `model` on the GPU. ScenarioError if the GPU is not known, or the model cannot be split."""
        from batchsim.cost.roofline import Roofline  # no reader of a scenario needs step times
        from batchsim.deployment.catalog import load_gpu

        return Roofline(
            model,
            load_gpu(self.gpu),
            tp=self.tp,
            pp=self.pp,
            host=self.host,
            swap_bandwidth=self.swap_bandwidth,
            block_size=block_size,
        )
