"""What of a step's work is of use: the FLOPs of its tokens, and the bytes of weights and KV that they must read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchsim.cost.work import Columns, useful_work
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.layers import Experts, LatentAttention, Layers
from batchsim.deployment.quantisation import ELEMENT_BYTES

Floats = NDArray[np.float64]


def useful_flops_bytes(deployment: Deployment, columns: Columns) -> tuple[Floats, Floats]:
    """(FLOPs of each step's useful work, bytes of weights and KV that it reads), on all GPUs together.

    A step of padding alone reads the weights too. A token goes through its own experts; which of them are read is as
    if each token chose at random. Windows are taken to hold the keys that a token reads on average.
    """
    model, types = deployment.model, deployment.types
    useful = useful_work(columns)
    busy = useful.tokens + columns["pad_decode_rows"] + columns["pad_prefill_tokens"] > 0
    others = useful.tokens - columns["num_decode"]  # of chunks, and drafts
    plain = ELEMENT_BYTES[types.plain]
    flops: NDArray[Any] = 2 * model.head_parameters * useful.rows
    moved: NDArray[Any] = model.head_parameters * plain * busy
    for layers in model.kinds:
        matrices = layers.attention.weights(model.hidden_size).attention
        active, read = _mlp(layers, model.hidden_size, useful.tokens, types.mlp, types.experts, plain)
        context = _within(layers, useful.context, columns["num_decode"])
        pairs = _within(layers, useful.pairs, others)
        flops = flops + layers.count * (2 * (matrices + active) * useful.tokens + _per_pair(layers) * (pairs + context))
        keys = layers.attention.kv_elements() * ELEMENT_BYTES[types.kv] * context
        moved = moved + layers.count * ((matrices * ELEMENT_BYTES[types.attention] + read) * busy + keys)
    return flops * 1.0, moved * 1.0


def _mlp(
    layers: Layers, hidden: int, tokens: NDArray[Any], dense_type: str, experts_type: str, plain: float
) -> tuple[int, Any]:
    """(weights that a token goes through, bytes of weights that so many tokens read) of one layer's MLP."""
    mlp = layers.mlp
    if not isinstance(mlp, Experts):
        return 3 * hidden * mlp.width, 3 * hidden * mlp.width * ELEMENT_BYTES[dense_type]
    expert, shared, router = 3 * hidden * mlp.width, 3 * hidden * mlp.shared_width, hidden * mlp.count
    chosen = mlp.count * (1 - (1 - mlp.per_token / mlp.count) ** np.maximum(tokens, 1))
    read = expert * ELEMENT_BYTES[experts_type] * chosen + shared * ELEMENT_BYTES[dense_type] + router * plain
    return mlp.per_token * expert + shared + router, read


def _per_pair(layers: Layers) -> int:
    """FLOPs of one query token reading one key in one layer: scores and weighted sum, all heads."""
    its = layers.attention
    if isinstance(its, LatentAttention):
        return 2 * its.num_heads * (its.nope_dim + its.rope_dim + its.value_dim)
    return 4 * its.num_heads * its.head_dim


def _within(layers: Layers, keys: NDArray[Any], tokens: NDArray[Any]) -> NDArray[Any]:
    """The keys that `tokens` read in a layer: all, or what of them its window holds."""
    window = layers.attention.window
    return keys if window is None else np.minimum(keys, window * tokens)
