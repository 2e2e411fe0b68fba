"""What a drafter takes of each GPU's memory: its weights, and the KV of its layers, which every token has there too.

A head on the model's own hidden states (EAGLE, multi-token prediction) shares the model's embedding, and its output
matrix where it writes as many words. vLLM loads it before it measures what KV memory has room for, and its layers take
their part of every block: with EAGLE on Llama-3.1-8B a block has 33 layers, not 32 (github.com/vllm-project/vllm issue
19996: 51.63 GiB are 410,128 tokens). That SGLang and TensorRT-LLM count likewise is assumed.
"""

from __future__ import annotations

from dataclasses import replace

from batchsim.deployment.deployment import Deployment, DraftMemory
from batchsim.deployment.layers import Layers
from batchsim.deployment.model import ModelSpec
from batchsim.deployment.quantisation import ELEMENT_BYTES

HEADS = ("eagle", "eagle3", "mtp")
"""Methods whose drafter is a head on the model's hidden states; where nothing is stated it has one layer like the
model's last."""
EAGLE3_WORDS = 32_000
"""Words that EAGLE-3 drafts where nothing else is stated, as its published heads for Llama 3 do."""


def draft_memory(
    engine: Deployment, method: str, *, own: ModelSpec | None = None, layers: int = 1, words: int | None = None
) -> DraftMemory | None:
    """The share of a drafter beside `engine`, on each of its GPUs; None where it has no model, or none that is known.

    `own`: a draft model of its own, in the place of `layers` like the engine's last. `words`: those of an output matrix
    of the head's own.
    """
    if method not in HEADS:
        return None if own is None or method == "ngram" else _whole(engine, own)
    model = engine.model if own is None else own
    kinds = model.kinds if own is not None else (replace(_like_last(model), count=layers),)
    types = engine.types
    plain = ELEMENT_BYTES[types.plain]
    matrices = (types.attention, types.mlp, types.experts, types.plain, types.linear)
    if method != "mtp":  # published heads are not quantised
        matrices = (types.plain,) * len(matrices)
    split, hidden = engine.split, model.hidden_size
    size = sum(_bytes(each, engine, hidden, matrices) for each in kinds)
    joined = 3 if method == "eagle3" else 2  # rows of hidden states, with the embedding's where it is not apart
    size += joined * hidden * hidden * plain
    if method == "eagle3":
        size += kinds[0].attention.weights(hidden, split).attention / 2 * plain  # q, k and v read two rows, not one
        words = EAGLE3_WORDS if words is None and own is None else words
    vocabulary = words or model.vocab_size
    if vocabulary != engine.model.vocab_size:
        size += vocabulary * hidden * plain / split.tp
    return DraftMemory(int(size), _token_bytes(kinds, engine), sum(each.count for each in kinds))


def _like_last(model: ModelSpec) -> Layers:
    """A layer with the model's last attention that keeps tokens and its last MLP, which are one in most models."""
    kept = [each for each in model.kinds if each.attention.kv_elements()]
    mlps = [each.mlp for each in model.kinds if each.mlp.kind != "none"] or [kept[-1].mlp]
    return replace(kept[-1], mlp=mlps[-1])


def _whole(engine: Deployment, own: ModelSpec) -> DraftMemory:
    """A draft model that shares nothing, over the same GPUs."""
    beside = Deployment(own, engine.gpu, engine.engine, engine.version, tp=engine.tp, kv_dtype=engine.kv_dtype)
    return DraftMemory(beside.weight_bytes, _token_bytes(own.kinds, engine), own.num_hidden_layers)


def _bytes(each: Layers, engine: Deployment, hidden: int, types: tuple[str, ...]) -> float:
    weights = each.weights(hidden, engine.split)
    return each.count * sum(n * ELEMENT_BYTES[kind] for n, kind in zip(weights, types, strict=True))


def _token_bytes(kinds: tuple[Layers, ...], engine: Deployment) -> float:
    element = ELEMENT_BYTES[engine.types.kv]
    return sum(each.count * each.attention.kv_bytes(engine.tp, element) for each in kinds)
