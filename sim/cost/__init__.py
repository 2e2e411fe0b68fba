"""What a step costs: `cost:` of a scenario, made into an object with `step_ns` and the estimator's two questions.

All kinds answer `explain(columns)` (what the time of recorded steps is made of), `describe()` (one line for the head of
a report), `sources()` (where the numbers come from) and `error` (how far step times may be off, or why nobody knows).
"""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Any

from sim.catalog import GPUS, load_gpu
from sim.cost.calibrated import Calibrated
from sim.cost.constant import Constant, Linear
from sim.cost.error import CostError, Unknown
from sim.cost.profile import Profile, ProfileConfig, load_profile, profile_names
from sim.cost.roofline import HostCost, Roofline, RooflineConfig
from sim.cost.scaled import Scaled
from sim.errors import CalibrationError, ScenarioError
from sim.model import ModelSpec

Cost = Roofline | Calibrated | Constant | Linear | Scaled
CostConfig = RooflineConfig | ProfileConfig | Constant | Linear

COSTS: dict[str, type[CostConfig]] = {
    "roofline": RooflineConfig,
    "profile": ProfileConfig,
    "constant": Constant,
    "linear": Linear,
}
"""By `kind`. Constant and Linear are their own configs."""

__all__ = [
    "COSTS",
    "Calibrated",
    "Constant",
    "Cost",
    "CostConfig",
    "CostError",
    "HostCost",
    "Linear",
    "ProfileConfig",
    "Roofline",
    "RooflineConfig",
    "Scaled",
    "Unknown",
    "build_cost",
    "check_model",
    "long_form",
]


def long_form(name: str) -> dict[str, Any]:
    """What `cost: NAME` stands for: the roofline of a GPU, or a profile, shipped or in a .json file.

    ScenarioError if there is neither.
    """
    if name in GPUS:
        return {"kind": "roofline", "gpu": name}
    if name.endswith(".json") or name in profile_names():
        return {"kind": "profile", "profile": name}
    near = difflib.get_close_matches(name.lower(), [*GPUS, *profile_names()], n=1)
    known = f"Known are {', '.join([*GPUS, *profile_names()])}; a profile's own file ends in .json."
    raise ScenarioError(
        f"cost: {name} is not in the catalog of GPUs and profiles. {f'Did you mean {near[0]}?' if near else known}"
    )


def build_cost(
    config: str | CostConfig, model: ModelSpec, *, block_size: int = 16, max_model_len: int | None = None
) -> Roofline | Calibrated | Constant | Linear:
    """The cost that `config` asks for; a string is the short form, see `long_form`.

    ScenarioError if GPU or profile are not known, the model cannot be cut as asked, or is not that of the profile;
    CalibrationError if the profile cannot be read.
    """
    if isinstance(config, str):
        keys = long_form(config)
        config = COSTS[keys["kind"]](**keys)
    if isinstance(config, RooflineConfig):
        return Roofline(
            model,
            load_gpu(config.gpu),
            tp=config.tp,
            host=config.host,
            swap_bandwidth=config.swap_bandwidth,
            block_size=block_size,
        )
    if isinstance(config, ProfileConfig):
        profile = load_profile(config.profile)
        check_model(profile, model)
        host = None if config.host is None else config.host.term()
        return Calibrated(
            profile, extrapolate=config.extrapolate, host=host, block_size=block_size, max_model_len=max_model_len
        )
    return config


def check_model(profile: Profile, model: ModelSpec) -> None:
    """CalibrationError, naming the first difference, if `profile` was made of a model of another shape.

    Names may differ, and the positions a model allows: neither costs time.
    """
    for field in fields(ModelSpec):
        own, asked = getattr(profile.model, field.name), getattr(model, field.name)
        if own != asked and field.name not in ("name", "max_position_embeddings"):
            raise CalibrationError(
                f"cost: profile {profile.name} is of {profile.model.name} with {field.name} {own}; {model.name} has"
                f" {asked}. Calibrate {model.name}, or use a GPU's name as cost."
            )
