"""The vision towers that config.json files describe."""

from __future__ import annotations

from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.deployment.catalog import read_model
from batchsim.deployment.vision import VisionTower, vision_tower

QWEN2 = {"depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4, "spatial_merge_size": 2, "hidden_size": 3584}


@pytest.mark.parametrize(
    ("name", "out_size", "deepstack"),
    [("Qwen/Qwen3-VL-8B-Instruct", 4096, 3), ("Qwen/Qwen3.6-27B", 5120, 0), ("moonshotai/Kimi-K2.5", 7168, 0)],
)
def test_towers_of_the_catalog(name: str, out_size: int, deepstack: int) -> None:
    """Three families have one of 27 layers, whose projectors differ."""
    tower = read_model(name).vision
    assert tower == VisionTower(27, 1152, 16, 4304, 4, out_size, deepstack)


def test_a_tower_with_a_ratio_in_place_of_a_width() -> None:
    """Of Qwen2-VL, whose own width has another name, and whose embeddings are as wide as the model."""
    tower = vision_tower({"model_type": "qwen2_vl", "vision_config": QWEN2}, "m")
    assert tower == VisionTower(32, 1280, 16, 5120, 4, 3584)


@pytest.mark.parametrize("name", ["google/gemma-4-26B-A4B", "meta-llama/Llama-3.1-8B", "moonshotai/Kimi-K3"])
def test_models_without_a_known_tower_have_none(name: str) -> None:
    """Whether they cannot see, or see by layers of another kind."""
    assert read_model(name).vision is None


@pytest.mark.parametrize(
    ("model_type", "change", "said"),
    [
        ("qwen2_vl", {"depth": None}, "m: vision_config: depth is missing"),
        ("qwen2_vl", {"mlp_ratio": 2.5}, "m: vision_config: mlp_ratio is 2.5"),
        ("qwen3_vl", {"intermediate_size": 9, "out_hidden_size": 9, "deepstack_visual_indexes": 3}, "is 3. Write a"),
        ("kimi_k25", {"merge_kernel_size": 2}, "merge_kernel_size is 2. Write the two sides"),
    ],
)
def test_a_wrong_size_is_named(model_type: str, change: dict[str, Any], said: str) -> None:
    """With the file and where in it."""
    with pytest.raises(ScenarioError, match=said):
        vision_tower({"model_type": model_type, "vision_config": QWEN2 | change}, "m")
