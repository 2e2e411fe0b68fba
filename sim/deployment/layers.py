"""What the layers of a decoder are made of: kinds of attention and of MLP, with their parameters and KV elements.

Every layer is one attention and one MLP. Matrices have no biases; norms inside an attention are counted with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from batchsim.base.ranges import NonNegativeInt, PositiveInt, check_ranges


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Grouped-query attention: query heads in groups, each of which shares one head of keys and values.

    Multi-head and multi-query attention are the ends: as many KV heads as heads, and one. `window`: the most tokens
    back that a query reads (sliding-window attention); None: all.
    """

    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    window: PositiveInt | None = None
    kind: Literal["grouped"] = "grouped"

    __post_init__ = check_ranges

    def num_parameters(self, hidden_size: int) -> int:
        """Number of weights of one layer's matrices for queries, keys, values and output."""
        return 2 * hidden_size * (self.num_heads + self.num_kv_heads) * self.head_dim

    def kv_elements(self, tp: int = 1) -> int:
        """Elements of a token's keys and values in one layer on each of `tp` GPUs; fewer KV heads are replicated."""
        return 2 * max(1, self.num_kv_heads // tp) * self.head_dim


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, 2024): all heads' keys and values of a token are made of one vector.

    `kv_rank` is the width of that vector, beside a rotary key of `rope_dim` that all heads share. A head's keys have
    `nope_dim` more, its values `value_dim`. `q_rank` None: queries are not compressed.
    """

    num_heads: PositiveInt
    kv_rank: PositiveInt
    q_rank: PositiveInt | None
    nope_dim: PositiveInt
    rope_dim: PositiveInt
    value_dim: PositiveInt
    kind: Literal["latent"] = "latent"

    __post_init__ = check_ranges

    def num_parameters(self, hidden_size: int) -> int:
        """Number of weights of one layer's matrices down to the vectors, up from them and out, and of their norms."""
        query = self.num_heads * (self.nope_dim + self.rope_dim)
        queries = hidden_size * query if self.q_rank is None else self.q_rank * (hidden_size + 1 + query)
        keys = hidden_size * (self.kv_rank + self.rope_dim) + self.kv_rank
        up = self.kv_rank * self.num_heads * (self.nope_dim + self.value_dim)
        return queries + keys + up + self.num_heads * self.value_dim * hidden_size

    def kv_elements(self, tp: int = 1) -> int:
        """Elements of a token's vector and rotary key in one layer, of which every GPU has a copy."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """A gated MLP through which every token goes: gate, up and down."""

    width: PositiveInt
    kind: Literal["dense"] = "dense"

    __post_init__ = check_ranges

    def num_parameters(self, hidden_size: int) -> int:
        return 3 * hidden_size * self.width


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: `count` gated MLPs of `width`, of which a router sends each token through `per_token`, and
    one of `shared_width` through which all tokens go."""

    count: PositiveInt
    per_token: PositiveInt
    width: PositiveInt
    shared_width: NonNegativeInt = 0
    kind: Literal["experts"] = "experts"

    __post_init__ = check_ranges

    def num_parameters(self, hidden_size: int) -> int:
        """Number of weights of one layer's experts, all of them, and router."""
        return hidden_size * (3 * (self.count * self.width + self.shared_width) + self.count)


@dataclass(frozen=True, slots=True)
class Layers:
    """`count` layers of one kind."""

    count: PositiveInt
    attention: GroupedAttention | LatentAttention
    mlp: DenseMlp | Experts

    __post_init__ = check_ranges
