"""What a step costs: `cost:` of a scenario, made into an object with `step_ns` and the estimator's two questions.

All kinds answer `explain(columns)` (what the time of recorded steps is made of), `describe()` (one line for the head of
a report) and `sources()` (where the numbers come from).
"""

from __future__ import annotations

from sim.catalog import load_gpu
from sim.cost.constant import Constant, Linear
from sim.cost.roofline import HostCost, Roofline, RooflineConfig
from sim.model import ModelSpec

Cost = Roofline | Constant | Linear
CostConfig = RooflineConfig | Constant | Linear

COSTS: dict[str, type[CostConfig]] = {"roofline": RooflineConfig, "constant": Constant, "linear": Linear}
"""By `kind`. Constant and Linear are their own configs."""

__all__ = ["COSTS", "Constant", "Cost", "CostConfig", "HostCost", "Linear", "Roofline", "RooflineConfig", "build_cost"]


def build_cost(config: str | CostConfig, model: ModelSpec, *, block_size: int = 16) -> Cost:
    """The cost that `config` asks for; a string is the name of a GPU, for its roofline.

    ScenarioError if the GPU is not in the catalog or the model cannot be cut as asked.
    """
    if isinstance(config, str):
        config = RooflineConfig(gpu=config)
    if not isinstance(config, RooflineConfig):
        return config
    return Roofline(
        model,
        load_gpu(config.gpu),
        tp=config.tp,
        host=config.host,
        swap_bandwidth=config.swap_bandwidth,
        block_size=block_size,
    )
