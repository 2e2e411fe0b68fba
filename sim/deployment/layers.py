"""What the layers of a decoder are made of: a kind of attention and one of MLP, with their weights.

A block of Nemotron-H is one of both alone. Kinds of attention are in `attention.py` and `linear_attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from batchsim.base.plain import LEFT_OUT
from batchsim.base.ranges import NonNegativeInt, PositiveInt, check_ranges
from batchsim.deployment.attention import (
    BlockSparseAttention,
    CompressedAttention,
    GroupedAttention,
    LatentAttention,
)
from batchsim.deployment.linear_attention import LinearAttention, NoAttention
from batchsim.deployment.weights import WHOLE, Split, Weights, cannot_cut

__all__ = [
    "WHOLE",
    "Attention",
    "BlockSparseAttention",
    "CompressedAttention",
    "DenseMlp",
    "Experts",
    "GroupedAttention",
    "LatentAttention",
    "Layers",
    "LinearAttention",
    "Mlp",
    "NoAttention",
    "NoMlp",
    "Split",
    "Weights",
]

Attention = (
    GroupedAttention | LatentAttention | BlockSparseAttention | CompressedAttention | LinearAttention | NoAttention
)


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """An MLP through which every token goes: gate, up and down, or without a gate. `vectors`: its biases."""

    width: PositiveInt
    kind: Literal["dense"] = "dense"
    vectors: NonNegativeInt = field(default=0, metadata=LEFT_OUT)
    gated: bool = field(default=True, metadata=LEFT_OUT)

    __post_init__ = check_ranges

    def weights(self, hidden_size: int, split: Split = WHOLE) -> Weights:
        matrices = 3 if self.gated else 2
        return Weights(mlp=matrices * hidden_size * self.width // split.tp, plain=self.vectors)

    def cannot_cut(self, tp: int) -> str:
        """The first of its sizes that `tp` does not divide, in words; "" where it divides all."""
        return cannot_cut(tp, ("MLP width", self.width))


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: `count` MLPs of `width`, of which a router sends each token through `per_token`, and one of
    `shared_width` through which all tokens go. `vectors`: one expert's biases, the router's for it included.

    `gated`: all have a gate beside up and down. `latent_width`: experts read and write rows of that width, and two
    matrices for all tokens go between these and the hidden size; 0: none. `weighed_shared`: what all tokens go through
    has a weight for each token (Qwen3.5).
    """

    count: PositiveInt
    per_token: PositiveInt
    width: PositiveInt
    shared_width: NonNegativeInt = 0
    kind: Literal["experts"] = "experts"
    vectors: NonNegativeInt = field(default=0, metadata=LEFT_OUT)
    gated: bool = field(default=True, metadata=LEFT_OUT)
    latent_width: NonNegativeInt = field(default=0, metadata=LEFT_OUT)
    weighed_shared: bool = field(default=False, metadata=LEFT_OUT)

    __post_init__ = check_ranges

    def weights(self, hidden_size: int, split: Split = WHOLE) -> Weights:
        """Each GPU's weights: `count` / `ep` experts, of each a part of `moe_tp`, and a copy of the router and of the
        matrices to and from the latent rows."""
        own, matrices = self.count // split.ep, 3 if self.gated else 2
        rows = self.latent_width or hidden_size
        return Weights(
            mlp=matrices * hidden_size * self.shared_width // split.tp + 2 * hidden_size * self.latent_width,
            experts=own * matrices * rows * self.width // split.moe_tp,
            plain=hidden_size * (self.count + self.weighed_shared) + own * self.vectors // split.moe_tp,
        )

    def cannot_cut(self, tp: int) -> str:
        """The first of its sizes that `tp` does not divide, in words; "" where it divides all."""
        return cannot_cut(tp, ("shared width", self.shared_width))


@dataclass(frozen=True, slots=True)
class NoMlp:
    """In a block that is attention alone (Nemotron-H)."""

    kind: Literal["none"] = "none"

    width = 0
    shared_width = 0

    def weights(self, hidden_size: int, split: Split = WHOLE) -> Weights:
        return Weights()

    def cannot_cut(self, tp: int) -> str:
        return ""


Mlp = DenseMlp | Experts | NoMlp


@dataclass(frozen=True, slots=True)
class Layers:
    """`count` layers of one kind. `vectors`: weights that no quantisation touches, beside those of its parts."""

    count: PositiveInt
    attention: Attention
    mlp: Mlp
    vectors: NonNegativeInt = field(default=0, metadata=LEFT_OUT)

    __post_init__ = check_ranges

    def weights(self, hidden_size: int, split: Split = WHOLE) -> Weights:
        """The weights of one of these layers that each GPU holds, the norm before each of its parts included."""
        attention, mlp = self.attention.weights(hidden_size, split), self.mlp.weights(hidden_size, split)
        summed = Weights(*map(sum, zip(attention, mlp, strict=True)))
        norms = (self.attention.kind != "none") + (self.mlp.kind != "none")
        return summed._replace(plain=summed.plain + norms * hidden_size + self.vectors)

    def active_weights(self, hidden_size: int) -> int:
        """The weights of one layer's matrices that one token is multiplied with; without a router's."""
        weights, mlp = self.weights(hidden_size), self.mlp
        share = (mlp.per_token, mlp.count) if isinstance(mlp, Experts) else (1, 1)
        return weights.attention + weights.linear + weights.mlp + weights.experts * share[0] // share[1]
