"""What the layers of a decoder are made of: kinds of attention and of MLP, with their parameters and KV elements.

Every layer is one attention and one MLP. `weights` says how many of its weights each GPU holds, by the type that they
are kept in; norms, biases and attention sinks inside an attention are its `vectors`, each GPU has a copy of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from batchsim.base.plain import LEFT_OUT
from batchsim.base.ranges import NonNegativeInt, PositiveInt, check_ranges


class Weights(NamedTuple):
    """Numbers of weights: matrices of attention, of MLPs through which all tokens go, of routed experts; and `plain`,
    which no quantisation touches: router, norms, biases, embedding and output matrix."""

    attention: int = 0
    mlp: int = 0
    experts: int = 0
    plain: int = 0


class Split(NamedTuple):
    """How GPUs share a layer: `tp` parts of every matrix, whole experts over `ep` GPUs, `moe_tp` parts of each."""

    tp: int = 1
    ep: int = 1
    moe_tp: int = 1


WHOLE = Split()
"""One GPU holds all."""


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Grouped-query attention: query heads in groups, each of which shares one head of keys and values.

    Multi-head and multi-query attention are the ends: as many KV heads as heads, and one. `window`: the most tokens
    back that a query reads (sliding-window and chunked attention); None: all.
    """

    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    window: PositiveInt | None = None
    kind: Literal["grouped"] = "grouped"
    vectors: NonNegativeInt = field(default=0, metadata=LEFT_OUT)

    __post_init__ = check_ranges

    def weights(self, hidden_size: int, split: Split = WHOLE) -> Weights:
        """Each GPU's weights for queries, keys, values and output; fewer KV heads than GPUs are replicated."""
        queries = 2 * hidden_size * self.num_heads * self.head_dim // split.tp
        return Weights(attention=queries + hidden_size * self.kv_elements(split.tp), plain=self.vectors)

    def kv_elements(self, tp: int = 1) -> int:
        """Elements of a token's keys and values in one layer on each of `tp` GPUs; fewer KV heads are replicated."""
        return 2 * max(1, self.num_kv_heads // tp) * self.head_dim

    @property
    def pair_size(self) -> int:
        """Products of one query with one key and its value, of all heads."""
        return 2 * self.num_heads * self.head_dim

    def kv_bytes(self, tp: int, element: float) -> float:
        """Bytes of a token in one layer on each of `tp` GPUs, with `element` bytes an element."""
        return self.kv_elements(tp) * element


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, 2024): all heads' keys and values of a token are made of one vector.

    `kv_rank` is the width of that vector, beside a rotary key of `rope_dim` that all heads share. A head's keys have
    `nope_dim` more, its values `value_dim`. `q_rank` None: queries are not compressed. `index_heads` of `index_dim`:
    the indexer of sparse attention (DeepSeek-V3.2, 2025), which keeps a key of a token for all heads; 0: none.
    """

    num_heads: PositiveInt
    kv_rank: PositiveInt
    q_rank: PositiveInt | None
    nope_dim: PositiveInt
    rope_dim: PositiveInt
    value_dim: PositiveInt
    kind: Literal["latent"] = "latent"
    index_heads: NonNegativeInt = field(default=0, metadata=LEFT_OUT)
    index_dim: NonNegativeInt = field(default=0, metadata=LEFT_OUT)

    __post_init__ = check_ranges

    window = None  # as of grouped attention without one

    def weights(self, hidden_size: int, split: Split = WHOLE) -> Weights:
        """Each GPU's weights: all of the matrices down to the vectors, its heads' part of those up and out, and a copy
        of the indexer."""
        query = self.num_heads * (self.nope_dim + self.rope_dim)
        down = hidden_size * (self.kv_rank + self.rope_dim + (self.q_rank or 0))
        up = (self.q_rank or hidden_size) * query + self.kv_rank * self.num_heads * (self.nope_dim + self.value_dim)
        heads = (up + self.num_heads * self.value_dim * hidden_size) // split.tp
        index = self.index_dim * (self.index_heads * (self.q_rank or hidden_size) + hidden_size)
        weighing = self.index_heads * hidden_size + 2 * self.index_dim  # of heads, and a norm with its bias
        return Weights(attention=down + heads + index, plain=self.kv_rank + (self.q_rank or 0) + weighing)

    def kv_elements(self, tp: int = 1) -> int:
        """Elements of a token's vector and rotary key in one layer, of which every GPU has a copy."""
        return self.kv_rank + self.rope_dim

    @property
    def pair_size(self) -> int:
        """Products of one query with one key and its value, of all heads, as prompts are computed."""
        return self.num_heads * (self.nope_dim + self.rope_dim + self.value_dim)

    def kv_bytes(self, tp: int, element: float) -> float:
        """Bytes of a token in one layer on each GPU, with `element` bytes an element; with an indexer its key in FP8
        with a scale of four bytes beside, and the rotary key in 16 bits."""
        if not self.index_dim:
            return self.kv_elements(tp) * element
        return self.kv_rank * element + self.rope_dim * 2 + self.index_dim + 4 * self.index_dim / 128


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """A gated MLP through which every token goes: gate, up and down. `vectors`: its biases."""

    width: PositiveInt
    kind: Literal["dense"] = "dense"
    vectors: NonNegativeInt = field(default=0, metadata=LEFT_OUT)

    __post_init__ = check_ranges

    def weights(self, hidden_size: int, split: Split = WHOLE) -> Weights:
        return Weights(mlp=3 * hidden_size * self.width // split.tp, plain=self.vectors)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: `count` gated MLPs of `width`, of which a router sends each token through `per_token`, and
    one of `shared_width` through which all tokens go. `vectors`: one expert's biases, the router's for it included."""

    count: PositiveInt
    per_token: PositiveInt
    width: PositiveInt
    shared_width: NonNegativeInt = 0
    kind: Literal["experts"] = "experts"
    vectors: NonNegativeInt = field(default=0, metadata=LEFT_OUT)

    __post_init__ = check_ranges

    def weights(self, hidden_size: int, split: Split = WHOLE) -> Weights:
        """Each GPU's weights: `count` / `ep` experts, of each a part of `moe_tp`, and a copy of the router."""
        own = self.count // split.ep
        return Weights(
            mlp=3 * hidden_size * self.shared_width // split.tp,
            experts=own * 3 * hidden_size * self.width // split.moe_tp,
            plain=hidden_size * self.count + own * self.vectors // split.moe_tp,
        )


@dataclass(frozen=True, slots=True)
class Layers:
    """`count` layers of one kind."""

    count: PositiveInt
    attention: GroupedAttention | LatentAttention
    mlp: DenseMlp | Experts

    __post_init__ = check_ranges

    def weights(self, hidden_size: int, split: Split = WHOLE) -> Weights:
        """The weights of one of these layers that each GPU holds, its two norms included."""
        attention, mlp = self.attention.weights(hidden_size, split), self.mlp.weights(hidden_size, split)
        summed = Weights(*map(sum, zip(attention, mlp, strict=True)))
        return summed._replace(plain=summed.plain + 2 * hidden_size)

    def active_weights(self, hidden_size: int) -> int:
        """The weights of one layer's matrices that one token is multiplied with; without a router's."""
        weights, mlp = self.weights(hidden_size), self.mlp
        share = (mlp.per_token, mlp.count) if isinstance(mlp, Experts) else (1, 1)
        return weights.attention + weights.mlp + weights.experts * share[0] // share[1]
