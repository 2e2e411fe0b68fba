"""Linear attention, whose layers keep a state of a fixed size in the place of keys and values of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from batchsim.base.plain import LEFT_OUT
from batchsim.base.ranges import NonNegativeInt, PositiveInt, check_ranges
from batchsim.deployment.weights import WHOLE, Split, Weights, cannot_cut

STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element of a state by its type."""


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """A gated delta net (`gdn`, Qwen3.5), Kimi delta attention (`kda`) or `mamba2` (Nemotron-H).

    A state has `num_heads` matrices of `value_dim` × `key_dim`; keys are of `key_heads`, which are mamba2's groups and
    for kda as many as `num_heads`. Before it goes a convolution over the last `conv_kernel` tokens of queries, keys and
    values. `state_type`: of the state's elements. `full_gate`: kda's gate of the output is one matrix, not two of low
    rank.
    """

    kind: Literal["gdn", "kda", "mamba2"]
    num_heads: PositiveInt
    value_dim: PositiveInt
    key_heads: PositiveInt
    key_dim: PositiveInt
    conv_kernel: PositiveInt
    state_type: Literal["float32", "bfloat16", "float16"] = "float32"
    full_gate: bool = field(default=False, metadata=LEFT_OUT)
    vectors: NonNegativeInt = field(default=0, metadata=LEFT_OUT)

    __post_init__ = check_ranges

    window = None  # no token leaves it
    pair_size = 0  # no query reads a key

    def weights(self, hidden_size: int, split: Split = WHOLE) -> Weights:
        """Each GPU's part of the matrices in and out; of the small ones and the convolution all count as `plain`."""
        values, keys, heads, tp = self._values, self.key_heads * self.key_dim, self.num_heads, split.tp
        conv = self.conv_kernel * self._convolved(1)
        if self.kind == "gdn":  # queries, keys, values, gate and output; two rates of a head
            linear, plain = hidden_size * (2 * keys + 3 * values), 2 * hidden_size * heads + conv + 2 * heads
        elif self.kind == "kda":  # three projections and output, a low-rank decay and a gate, a rate of a head
            rank = self.value_dim
            low = rank * (hidden_size + values)
            gate = hidden_size * values if self.full_gate else low
            linear, plain = hidden_size * 4 * values + low + gate, hidden_size * heads + conv + heads + values
        else:  # gate, values, keys, queries and step sizes in one matrix; norm, rates, skips and biases
            linear = hidden_size * (3 * values + 2 * keys + heads)
            plain = conv + self._convolved(1) + 3 * heads + values
        return Weights(linear=linear // tp, plain=plain // tp + self.vectors)

    @property
    def _values(self) -> int:
        return self.num_heads * self.value_dim

    def _convolved(self, tp: int) -> int:
        """Channels of the convolution on all of `tp` GPUs together; mamba2's groups are replicated where `tp` does not
        divide them."""
        groups = tp if self.kind == "mamba2" and self.key_heads % tp else self.key_heads
        return 2 * groups * self.key_dim + self._values

    def conv_bytes(self, tp: int, element: int, drafts: int = 0) -> int:
        """Bytes of the convolution's last tokens of one request on each of `tp` GPUs, with `element` bytes an element
        and as many speculative tokens as `drafts`."""
        return self._convolved(tp) // tp * (self.conv_kernel - 1 + drafts) * element

    def state_bytes(self, tp: int, element: int, drafts: int = 0) -> int:
        """Bytes that one layer keeps of one request on each of `tp` GPUs: the state, and the convolution's tokens in
        the model's type, of `element` bytes. Source: vllm/model_executor/layers/mamba/mamba_utils.py of 0.33."""
        state = self.num_heads // tp * self.value_dim * self.key_dim * STATE_BYTES[self.state_type]
        return state + self.conv_bytes(tp, element, drafts)

    @property
    def checkpoint_grid(self) -> int:
        """Tokens between two places of a prompt at which vLLM's kernels can keep a state within a step: FlashInfer's of
        gated delta nets and those of KDA at every 64, Mamba2's anywhere."""
        return 1 if self.kind == "mamba2" else 64

    def kv_elements(self, tp: int = 1) -> int:
        """None of a token: the state is of a request."""
        return 0

    def kv_bytes(self, tp: int, element: float) -> float:
        """None of a token: the state is of a request."""
        return 0.0

    def cannot_cut(self, tp: int) -> str:
        """The first of its sizes that `tp` does not divide, in words; "" where it divides all."""
        keys = () if self.kind == "mamba2" else (("linear key heads", self.key_heads),)
        return cannot_cut(tp, ("linear heads", self.num_heads), *keys)


@dataclass(frozen=True, slots=True)
class NoAttention:
    """In a block that is an MLP alone (Nemotron-H)."""

    kind: Literal["none"] = "none"

    window = None
    pair_size = 0

    def weights(self, hidden_size: int, split: Split = WHOLE) -> Weights:
        return Weights()

    def kv_elements(self, tp: int = 1) -> int:
        return 0

    def kv_bytes(self, tp: int, element: float) -> float:
        return 0.0

    def cannot_cut(self, tp: int) -> str:
        return ""
