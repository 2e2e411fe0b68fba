"""Kinds of attention whose layers keep keys and values of tokens: how many weights, how many bytes a token.

`weights` says how many of its weights each GPU holds, by the type that they are kept in; norms, biases and attention
sinks are its `vectors`, each GPU has a copy of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from batchsim.base.plain import LEFT_OUT
from batchsim.base.ranges import NonNegativeInt, PositiveInt, check_ranges
from batchsim.deployment.weights import WHOLE, Split, Weights, cannot_cut


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Grouped-query attention: query heads in groups, each of which shares one head of keys and values.

    Multi-head and multi-query attention are the ends: as many KV heads as heads, and one. `window`: the most tokens
    back that a query reads (sliding-window and chunked attention); None: all. `value_dim`: width of a head's values; 0:
    `head_dim`, as of its keys. `gated`: the queries' matrix has a gate of the output beside (Qwen3.5). `one_matrix`:
    keys and values are of one matrix, and both are cached (Gemma 4). `shares_kv`: it reads the keys and values of an
    earlier layer and keeps none, though engines hold its matrices for them (Gemma 4 E2B).
    """

    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    window: PositiveInt | None = None
    kind: Literal["grouped"] = "grouped"
    vectors: NonNegativeInt = field(default=0, metadata=LEFT_OUT)
    value_dim: NonNegativeInt = field(default=0, metadata=LEFT_OUT)
    gated: bool = field(default=False, metadata=LEFT_OUT)
    one_matrix: bool = field(default=False, metadata=LEFT_OUT)
    shares_kv: bool = field(default=False, metadata=LEFT_OUT)

    __post_init__ = check_ranges

    def weights(self, hidden_size: int, split: Split = WHOLE) -> Weights:
        """Each GPU's weights for queries, keys, values and output; fewer KV heads than GPUs are replicated."""
        value = self.value_dim or self.head_dim
        width = self.num_heads * (self.head_dim + value + (value if self.gated else 0))
        kept = max(1, self.num_kv_heads // split.tp) * (self.head_dim + (0 if self.one_matrix else value))
        return Weights(attention=hidden_size * width // split.tp + hidden_size * kept, plain=self.vectors)

    def kv_elements(self, tp: int = 1) -> int:
        """Elements of a token's keys and values in one layer on each of `tp` GPUs; fewer KV heads are replicated."""
        if self.shares_kv:
            return 0
        return max(1, self.num_kv_heads // tp) * (self.head_dim + (self.value_dim or self.head_dim))

    @property
    def pair_size(self) -> int:
        """Products of one query with one key and its value, of all heads."""
        return self.num_heads * (self.head_dim + (self.value_dim or self.head_dim))

    def kv_bytes(self, tp: int, element: float) -> float:
        """Bytes of a token in one layer on each of `tp` GPUs, with `element` bytes an element."""
        return self.kv_elements(tp) * element

    def cannot_cut(self, tp: int) -> str:
        """The first of its sizes that `tp` does not divide, in words; "" where it divides all."""
        return cannot_cut(tp, ("heads", self.num_heads)) or _kv_heads(tp, self.num_kv_heads)


@dataclass(frozen=True, slots=True)
class BlockSparseAttention:
    """Grouped-query attention to the blocks of tokens that an index picks (MiniMax-M3, 2026).

    Of every `block_size` tokens before it a query reads those of `top_blocks` blocks, those near included. The index
    has `index_heads` of `index_dim`, and keeps one key of a token for all of them.
    """

    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    index_heads: PositiveInt
    index_dim: PositiveInt
    block_size: PositiveInt
    top_blocks: PositiveInt
    kind: Literal["block_sparse"] = "block_sparse"
    vectors: NonNegativeInt = field(default=0, metadata=LEFT_OUT)

    __post_init__ = check_ranges

    window = None  # as of grouped attention without one

    @property
    def dense(self) -> GroupedAttention:
        """The same without an index, which reads all tokens."""
        return GroupedAttention(self.num_heads, self.num_kv_heads, self.head_dim, vectors=self.vectors)

    def weights(self, hidden_size: int, split: Split = WHOLE) -> Weights:
        """Each GPU's weights, with a copy of the index."""
        own = self.dense.weights(hidden_size, split)
        return own._replace(attention=own.attention + hidden_size * self.index_dim * (self.index_heads + 1))

    def kv_elements(self, tp: int = 1) -> int:
        """Elements of a token's keys and values in one layer on each of `tp` GPUs, and its index key on all."""
        return self.dense.kv_elements(tp) + self.index_dim

    @property
    def pair_size(self) -> int:
        """Products of one query with one key that it reads and its value, of all heads."""
        return self.dense.pair_size

    def kv_bytes(self, tp: int, element: float) -> float:
        """Bytes of a token in one layer on each of `tp` GPUs, with `element` bytes an element."""
        return self.kv_elements(tp) * element

    def cannot_cut(self, tp: int) -> str:
        """The first of its sizes that `tp` does not divide, in words; "" where it divides all."""
        return self.dense.cannot_cut(tp)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, 2024): all heads' keys and values of a token are made of one vector.

    `kv_rank` is the width of that vector, beside a rotary key of `rope_dim` that all heads share. A head's keys have
    `nope_dim` more, its values `value_dim`. `q_rank` None: queries are not compressed. `index_heads` of `index_dim`:
    the indexer of sparse attention (DeepSeek-V3.2, 2025), which keeps a key of a token for all heads; 0: none.
    `shares_index`: the layer reads the tokens that the indexer of an earlier layer picked (GLM-5.2). `gated`: the
    output has a gate (Kimi-K3).
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
    shares_index: bool = field(default=False, metadata=LEFT_OUT)
    gated: bool = field(default=False, metadata=LEFT_OUT)

    __post_init__ = check_ranges

    window = None  # as of grouped attention without one

    def weights(self, hidden_size: int, split: Split = WHOLE) -> Weights:
        """Each GPU's weights: all of the matrices down to the vectors, its heads' part of those up and out, and a copy
        of the indexer."""
        query = self.num_heads * (self.nope_dim + self.rope_dim)
        down = hidden_size * (self.kv_rank + self.rope_dim + (self.q_rank or 0))
        up = (self.q_rank or hidden_size) * query + self.kv_rank * self.num_heads * (self.nope_dim + self.value_dim)
        out = self.num_heads * self.value_dim * hidden_size
        heads = (up + (2 if self.gated else 1) * out) // split.tp
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
        """Bytes of a token in one layer on each GPU, with `element` bytes an element; where an index picks tokens the
        rotary key in 16 bits and, with one byte an element, scales of four bytes for 128 (fp8_ds_mla); and the index
        key, of a layer that has one, in FP8 with its scale."""
        if not self.index_dim and not self.shares_index:
            return self.kv_elements(tp) * element
        scales = 4 * self.kv_rank / 128 if element == 1 else 0
        return self.kv_rank * element + scales + self.rope_dim * 2 + self.index_dim + 4 * self.index_dim / 128

    def cannot_cut(self, tp: int) -> str:
        """The first of its sizes that `tp` does not divide, in words; "" where it divides all."""
        return cannot_cut(tp, ("heads", self.num_heads))


@dataclass(frozen=True, slots=True)
class CompressedAttention:
    """Attention to a window and, beyond it, to compressed states of `ratio` tokens each (DeepSeek-V4, 2026).

    Every head reads one vector of `head_dim` a state, of which `rope_dim` are rotary. `ratio` 0: the window only. Where
    there is an index of `index_heads` of `index_dim`, a query reads the `top_k` states that it picks; else all. The
    output is of `out_groups` matrices of rank `out_rank`.
    """

    num_heads: PositiveInt
    head_dim: PositiveInt
    rope_dim: PositiveInt
    q_rank: PositiveInt
    out_rank: PositiveInt
    out_groups: PositiveInt
    ratio: NonNegativeInt
    kept_window: PositiveInt
    index_heads: NonNegativeInt = 0
    index_dim: NonNegativeInt = 0
    top_k: NonNegativeInt = 0
    kind: Literal["compressed"] = "compressed"
    vectors: NonNegativeInt = field(default=0, metadata=LEFT_OUT)

    __post_init__ = check_ranges

    window = None  # its states reach back to the first token

    def weights(self, hidden_size: int, split: Split = WHOLE) -> Weights:
        """Each GPU's weights: its heads' part of queries and output, and copies of what makes states and of the index.

        States of 4 tokens overlap, so that two are made at once (DeepSeek's inference code of V4).
        """
        queries = self.num_heads * self.head_dim * (self.q_rank + self.out_rank) // split.tp
        out = self.out_groups * self.out_rank * hidden_size // split.tp
        down = hidden_size * (self.q_rank + self.head_dim)
        index = self.index_heads * self.index_dim * self.q_rank
        made = (2 if self.index_heads else 1) * 2 * hidden_size * (self.head_dim + self.index_dim) if self.ratio else 0
        plain = self.vectors + self.q_rank + self.head_dim + hidden_size * self.index_heads
        return Weights(attention=queries + out + down + index, plain=plain + made)

    def kv_elements(self, tp: int = 1) -> int:
        """Elements of a state, of which every GPU has a copy."""
        return self.head_dim if self.ratio else 0

    @property
    def pair_size(self) -> int:
        """Products of one query with one state, as key and as value, of all heads."""
        return 2 * self.num_heads * self.head_dim

    def kv_bytes(self, tp: int, element: float) -> float:
        """Bytes by which a token more makes a layer's states grow on each GPU, window left out: with one byte an
        element the rotary part in 16 bits and eight bytes of scales beside; the index key in FP8 with its scale."""
        if not self.ratio:
            return 0.0
        state = self.head_dim * element if element > 1 else self.head_dim + self.rope_dim + 8
        return (state + self.index_dim + 4 * self.index_dim / 128) / self.ratio

    def cannot_cut(self, tp: int) -> str:
        """The first of its sizes that `tp` does not divide, in words; "" where it divides all."""
        return cannot_cut(tp, ("heads", self.num_heads), ("output groups", self.out_groups))


def _kv_heads(tp: int, kv_heads: int) -> str:
    return f"KV heads {kv_heads}" if kv_heads % tp and tp % kv_heads else ""
