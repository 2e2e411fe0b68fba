"""The forward pass of a dense decoder over a paged KV cache: one pass of matmuls over all tokens of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from batchsim.calibrate.engine.architecture import Architecture, Llama3Scaling
from batchsim.calibrate.engine.backend import SdpaBackend
from batchsim.calibrate.engine.weights import LayerWeights, Weights


@dataclass(frozen=True)
class Reads:
    """The KV that attention reads for n sequences: `tables` [n, W] and `seq_lens` [n], int32, on the device."""

    tables: Tensor
    seq_lens: Tensor


@dataclass(frozen=True)
class DeviceInputs:
    """A step's inputs on its device: `StepInputs` with decodes and chunks apart; None for a part that the step lacks.

    `decodes` holds the padding's reads behind those of the `num_decode` rows. `cu_seqlens` [C + 1] are the bounds of
    the chunks' tokens, counted from the first. `logit_rows` None: every token.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    num_decode: int
    decodes: Reads | None
    chunks: Reads | None
    cu_seqlens: Tensor | None
    max_query_len: int
    logit_rows: Tensor | None


class Transformer:
    """A model with its KV cache `kv` [layers, 2, num_blocks + SPARE_BLOCKS, block_size, kv heads, head_dim]."""

    def __init__(
        self, architecture: Architecture, weights: Weights, backend: SdpaBackend, kv: Tensor, max_model_len: int
    ) -> None:
        self.architecture = architecture
        self.weights = weights
        self.backend = backend
        self.kv = kv
        angles = _angles(architecture, max_model_len).to(kv.device)
        self._cos, self._sin = angles.cos(), angles.sin()
        self._scale = architecture.spec.head_dim**-0.5

    def hidden(self, inputs: DeviceInputs) -> Tensor:
        """The normalised last hidden state of the tokens whose logits are asked for, [rows, hidden]."""
        backend, eps = self.backend, self.architecture.rms_norm_eps
        residual = F.embedding(inputs.ids, self.weights.embedding)
        x: Tensor | None = None
        for index, layer in enumerate(self.weights.layers):
            if x is None:
                h = backend.rms_norm(residual, layer.input_norm, eps)
            else:
                h, residual = backend.add_rms_norm(x, residual, layer.input_norm, eps)
            h = F.linear(self._attention(h, layer, self.kv[index], inputs), layer.o)
            h, residual = backend.add_rms_norm(h, residual, layer.post_norm, eps)
            x = F.linear(backend.silu_mul(F.linear(h, layer.gate_up)), layer.down)
        assert x is not None, "a model has at least one layer"
        if inputs.logit_rows is not None:
            x, residual = x[inputs.logit_rows], residual[inputs.logit_rows]
        return backend.add_rms_norm(x, residual, self.weights.norm, eps)[0]

    def _attention(self, h: Tensor, layer: LayerWeights, kv: Tensor, inputs: DeviceInputs) -> Tensor:
        """The heads' outputs side by side, [T, q_size]; stores the step's keys and values."""
        spec, backend = self.architecture.spec, self.backend
        sizes = [spec.q_size, spec.kv_size, spec.kv_size]
        q, k, v = (
            part.unflatten(-1, (-1, spec.head_dim))
            for part in F.linear(h, layer.qkv, layer.qkv_bias).split(sizes, dim=-1)
        )
        k_cache, v_cache = kv[0], kv[1]
        q = backend.rope_store(
            q, k, v, self._cos, self._sin, inputs.positions, k_cache, v_cache, inputs.slots,
            layer.q_norm, layer.k_norm, self.architecture.rms_norm_eps,
        )  # fmt: skip
        parts: list[Tensor] = []
        if (reads := inputs.decodes) is not None:
            rows = q[: inputs.num_decode]
            if padding := len(reads.seq_lens) - inputs.num_decode:  # reads of padding: their results are dropped
                rows = torch.cat([rows, q.new_zeros(padding, *q.shape[1:])])
            heads = backend.decode(rows, k_cache, v_cache, reads.tables, reads.seq_lens, self._scale)
            parts.append(heads[: inputs.num_decode])
        if (reads := inputs.chunks) is not None and inputs.cu_seqlens is not None:
            rows = q[inputs.num_decode :]
            parts.append(
                backend.prefill(
                    rows, k_cache, v_cache, reads.tables, inputs.cu_seqlens, reads.seq_lens, inputs.max_query_len,
                    self._scale,
                )
            )  # fmt: skip
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)


def _angles(architecture: Architecture, max_model_len: int) -> Tensor:
    """The rotation angle of every position and pair of dimensions, fp32 [max_model_len, head_dim / 2], on the CPU."""
    head_dim = architecture.spec.head_dim
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / architecture.rope_theta**exponents
    if architecture.rope_scaling is not None:
        frequencies = _stretched(frequencies, architecture.rope_scaling)
    return torch.arange(max_model_len, dtype=torch.float32)[:, None] * frequencies


def _stretched(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """`frequencies`: low ones divided by the factor, high ones kept, others blended. Source: Llama 3.1's RoPE."""
    original, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
    waves = 2 * math.pi / frequencies
    blend = ((original / waves - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies
