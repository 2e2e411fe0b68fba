"""Cost models by kind: `cost:` of a scenario, made into a `Cost`.

A new kind is a file with its class, which derives from `Cost`, and its config: a frozen dataclass that derives from
`Config` and has the fields `kind`, `draft` and `encoder`, the GPUs of one engine as `num_gpus`, and `build`. The config
then becomes a row of `COSTS` and a member of `CostConfig`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchsim.base.errors import ScenarioError, nearest

if TYPE_CHECKING:
    from batchsim.cost.constant import Constant, Linear
    from batchsim.cost.fitted import Free
    from batchsim.cost.profile_config import ProfileConfig
    from batchsim.cost.roofline_config import RooflineConfig

    CostConfig = RooflineConfig | ProfileConfig | Constant | Linear | Free
    """What a scenario's `cost` may be. Constant, Linear and Free are their own configs."""

COSTS = {
    "roofline": "batchsim.cost.roofline_config:RooflineConfig",
    "profile": "batchsim.cost.profile_config:ProfileConfig",
    "constant": "batchsim.cost.constant:Constant",
    "linear": "batchsim.cost.constant:Linear",
    "free": "batchsim.cost.fitted:Free",
}
"""The config class of every `kind`, imported where a scenario names it."""


def long_form(name: str) -> dict[str, Any]:
    """The keys that `cost: NAME` stands for: those of a GPU's roofline, or of a profile in a .json file.

    ScenarioError if there is neither of that name.
    """
    from batchsim.deployment.catalog import GPUS

    if name in GPUS:
        return {"kind": "roofline", "gpu": name}
    if name.endswith(".json"):
        return {"kind": "profile", "profile": name}
    advice = nearest(name.lower(), GPUS, f"Known are {', '.join(GPUS)}; a profile's own file ends in .json.")
    raise ScenarioError(f"cost: {name} is not in the catalog of GPUs. {advice}")
