"""FLOPs of a training step. N parameters (without input embeddings, with the output head), T computed tokens, L layers,
h heads x head size, S2 the sum of squares of what attends to itself.

Forward and backward are 6·N·T + 6·L·h·S2 with a causal mask, as Megatron-LM counts (`num_floating_point_operations`);
PaLM's convention (Chowdhery et al. 2022, appendix B) is 12·L·h·S2, without the causal halving. What is done is another
number: FlashAttention's backward does 2.5 times its forward, and full recomputation one forward more.
"""

from __future__ import annotations

from dataclasses import dataclass

COUNTED = 6
"""FLOPs a parameter and token, and a squared token of a layer's width, forward and backward."""
FORWARD = 2
PALM_ATTENTION = 12
FLASH_ATTENTION = 7
LORA = 4
"""FLOPs a parameter and token without the gradients of frozen weights."""


@dataclass(frozen=True)
class Shape:
    """What FLOPs depend on of a model. `params` are the active ones of a mixture of experts."""

    params: float
    layers: int
    width: int


def counted(shape: Shape, tokens: float, squares: float) -> float:
    """FLOPs of model and attention by Megatron-LM's convention, whatever was done to get there."""
    return COUNTED * shape.params * tokens + attention(shape, squares)


def attention(shape: Shape, squares: float) -> float:
    """The part of `counted` that is attention."""
    return COUNTED * shape.layers * shape.width * squares


def palm(shape: Shape, tokens: float, squares: float) -> float:
    """FLOPs by PaLM's convention."""
    return COUNTED * shape.params * tokens + PALM_ATTENTION * shape.layers * shape.width * squares


def done(
    shape: Shape, tokens: float, squares: float, *, flash: bool, recompute: bool, lora: bool
) -> tuple[float, float]:
    """FLOPs that are done, of matrices and of attention."""
    again = FORWARD if recompute else 0
    matrices = ((LORA if lora else COUNTED) + again) * shape.params * tokens
    return matrices, ((FLASH_ATTENTION if flash else COUNTED) + again) * shape.layers * shape.width * squares
