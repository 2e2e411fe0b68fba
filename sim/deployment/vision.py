"""The vision tower of a model that sees: what a config.json says of the layers that compute an image's embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from batchsim.base.errors import ScenarioError
from batchsim.base.ranges import NonNegativeInt, PositiveInt, check_ranges
from batchsim.deployment.config_values import count_at, object_at


@dataclass(frozen=True, slots=True)
class VisionTower:
    """A vision transformer with full attention of the patches of an image to each other, rotary positions and MLPs of
    two matrices, and a projector of two matrices behind it.

    `patches`: of an image for each of its embeddings, which the projector merges. `deepstack`: projectors more, whose
    embeddings are added to layers of the language model. `out_size`: width of an embedding.
    """

    num_hidden_layers: PositiveInt
    hidden_size: PositiveInt
    num_heads: PositiveInt
    intermediate_size: PositiveInt
    patches: PositiveInt
    out_size: PositiveInt
    deepstack: NonNegativeInt = 0

    __post_init__ = check_ranges

    def __str__(self) -> str:
        return f"{self.num_hidden_layers} layers of {self.hidden_size:,}"


_QWEN3 = frozenset({"qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})
TOWERS = (*sorted(_QWEN3), "qwen2_vl", "kimi_k25")
"""Model types whose vision tower is of that form. Source: their classes in vLLM 0.33 and transformers."""


def vision_tower(config: Mapping[str, object], name: str) -> VisionTower | None:
    """The vision tower in `config`, a parsed config.json; None where it says nothing of one, or is of another type than
    `TOWERS`. ScenarioError, headed `name`, for sizes that are missing or wrong."""
    model_type = config.get("model_type")
    if model_type not in TOWERS or config.get("vision_config") is None:
        return None
    seen, name = object_at(config, "vision_config", name), f"{name}: vision_config"
    if model_type == "kimi_k25":
        sides = seen.get("merge_kernel_size")
        if not isinstance(sides, list) or len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
            raise ScenarioError(f"{name}: merge_kernel_size is {sides!r}. Write the two sides in patches, like [2, 2].")
        return VisionTower(
            count_at(seen, "vt_num_hidden_layers", name),
            count_at(seen, "vt_hidden_size", name),
            count_at(seen, "vt_num_attention_heads", name),
            count_at(seen, "vt_intermediate_size", name),
            sides[0] * sides[1],
            count_at(seen, "text_hidden_size", name),
        )
    patches = count_at(seen, "spatial_merge_size", name) ** 2
    layers, heads = count_at(seen, "depth", name), count_at(seen, "num_heads", name)
    if model_type == "qwen2_vl":
        width = count_at(seen, "embed_dim", name)
        inner = count_at(seen, "mlp_ratio", name) * width
        return VisionTower(layers, width, heads, inner, patches, count_at(seen, "hidden_size", name))
    deeper = seen.get("deepstack_visual_indexes") or []
    if not isinstance(deeper, list):
        raise ScenarioError(f"{name}: deepstack_visual_indexes is {deeper!r}. Write a list of layers.")
    return VisionTower(
        layers,
        count_at(seen, "hidden_size", name),
        heads,
        count_at(seen, "intermediate_size", name),
        patches,
        count_at(seen, "out_hidden_size", name),
        len(deeper),
    )
