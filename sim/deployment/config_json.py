"""Reads the layers of a Hugging Face config.json: which kind of attention and of MLP each of them has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import cast

from batchsim.base.errors import ScenarioError
from batchsim.base.ranges import INT32_MAX, Range, number_text
from batchsim.deployment.layers import DenseMlp, Experts, GroupedAttention, LatentAttention, Layers

_COUNTS = Range(1, INT32_MAX)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
SIZED = frozenset(
    {
        *("llama", "mistral", "qwen2", "qwen3", "mimo", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe"),
        *("glm4_moe", "minimax_m2", "gpt_oss", "llama4", "llama4_text"),
        *("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm_moe_dsa"),
    }
)
"""Model types whose weights and KV are known but for what sees: of others, layers may be of kinds that are not."""
_QKV_BIAS = frozenset({"qwen2", "qwen2_moe", "mimo"})
_QK_NORM = frozenset({"qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe"})
"""Model types whose attention has, whatever their config.json says, a bias on q, k and v (not on o), and a norm of
head_dim weights for q and for k. Source: their model classes in transformers."""
_NO_O_BIAS = frozenset({"glm4_moe"})
_ROUTER_BIAS = frozenset({"deepseek_v3", "kimi_k2", "glm4_moe", "gpt_oss", "minimax_m2", "deepseek_v32", "glm_moe_dsa"})
"""Model types whose `attention_bias` leaves out o, and whose router has a bias, or a correction, for each expert."""


def count_at(config: Mapping[str, object], key: str, name: str, default: int | None = None) -> int:
    """The positive integer at `key`; ScenarioError if it is something else or missing without a default."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value not in _COUNTS:
        shown = "missing" if value is None else number_text(value) if type(value) is int else repr(value)
        raise ScenarioError(f"{name}: {key} is {shown}. A config.json holds a whole number {_COUNTS} there.")
    return value


def window_told(config: Mapping[str, object], model_type: str) -> str:
    """Which key of `config` asks for sliding-window attention, in words; "" if none does.

    The qwen types name a window yet may switch it off.
    """
    layers = config.get("layer_types")
    if isinstance(layers, list) and any(kind != "full_attention" for kind in cast("list[object]", layers)):
        return "layer_types holds others than full_attention"
    used = config.get("use_sliding_window", not model_type.startswith("qwen"))
    window = config.get("sliding_window")
    return f"sliding_window is {window}" if used and window is not None else ""


def read_layers(config: Mapping[str, object], name: str, plain: Layers) -> tuple[Layers, ...]:
    """The layers in order, each run of equal ones as one `Layers`; () where all are as in `plain`.

    ScenarioError, headed `name`, for a kind that is not known, or for which a number is missing.
    """
    full, dense = cast("GroupedAttention", plain.attention), cast("DenseMlp", plain.mlp)
    hidden = count_at(config, "hidden_size", name)
    biases = 2 * dense.width + hidden if config.get("mlp_bias") else 0
    vectors = attention_vectors(config, full.num_heads, full.num_kv_heads, full.head_dim, hidden)
    attention = _attention(config, name, replace(full, vectors=vectors))
    mlp = _mlp(config, name, replace(dense, vectors=biases))
    each = [(attention(i), mlp(i)) for i in range(plain.count)]
    layers = tuple(Layers(len(list(same)), *kind) for kind, same in groupby(each))
    return () if layers == (plain,) else layers


def attention_vectors(config: Mapping[str, object], heads: int, kv_heads: int, head_dim: int, hidden: int) -> int:
    """Elements of the biases, norms and sinks of one layer's attention, as `config` and its model type have them."""
    model_type = config.get("model_type")
    widths = (heads + 2 * kv_heads) * head_dim
    vectors = widths if model_type in _QKV_BIAS else 0
    if config.get("attention_bias"):
        vectors = widths + (0 if model_type in _NO_O_BIAS else hidden)
    if model_type in _QK_NORM or (config.get("use_qk_norm") and not str(model_type).startswith("llama4")):
        whole = config.get("qk_norm_type") == "per_layer"
        vectors += (heads + kv_heads) * head_dim if whole else 2 * head_dim
    return vectors + (heads if model_type == "gpt_oss" else 0)


def _attention(
    config: Mapping[str, object], name: str, full: GroupedAttention
) -> Callable[[int], GroupedAttention | LatentAttention]:
    """A function from the index of a layer to its attention."""
    if config.get("linear_attn_config"):
        raise ScenarioError(f"{name}: linear_attn_config means linear attention, whose state is not modelled.")
    if config.get("kv_lora_rank"):
        sparse = bool(config.get("index_topk"))
        if config.get("index_topk_freq", 1) != 1:
            raise ScenarioError(f"{name}: index_topk_freq means layers that share an index, which are not modelled.")
        latent = LatentAttention(
            full.num_heads,
            kv_rank=count_at(config, "kv_lora_rank", name),
            q_rank=None if config.get("q_lora_rank") is None else count_at(config, "q_lora_rank", name),
            nope_dim=count_at(config, "qk_nope_head_dim", name),
            rope_dim=count_at(config, "qk_rope_head_dim", name),
            value_dim=count_at(config, "v_head_dim", name),
            index_heads=count_at(config, "index_n_heads", name) if sparse else 0,
            index_dim=count_at(config, "index_head_dim", name) if sparse else 0,
        )
        return lambda i: latent
    if config.get("attention_chunk_size"):  # llama4: all but every fourth layer
        chunked = replace(full, window=count_at(config, "attention_chunk_size", name))
        return lambda i: chunked if (i + 1) % 4 else full
    if not (window := window_told(config, str(config.get("model_type")))):
        return lambda i: full
    windowed = replace(full, window=count_at(config, "sliding_window", name))
    types, model_type = config.get("layer_types"), str(config.get("model_type"))
    if types is None and model_type in ("mistral", "mixtral"):
        return lambda i: windowed
    if types is None and model_type.startswith("qwen"):
        first = count_at(config, "max_window_layers", name)
        return lambda i: windowed if i >= first else full
    kinds = {"full_attention": full, "sliding_attention": windowed}
    if not isinstance(types, list):
        raise ScenarioError(f"{name}: {window}: write layer_types, one of {', '.join(kinds)} for each layer.")
    listed = cast("list[object]", types)
    layers = count_at(config, "num_hidden_layers", name)
    if len(listed) != layers or any(kind not in kinds for kind in listed):
        other = next((str(kind) for kind in listed if kind not in kinds), "")
        what = f"has {other!r}" if other else f"has {len(listed)} of {layers} layers"
        raise ScenarioError(f"{name}: layer_types {what}; known are {', '.join(kinds)}, one for each layer.")
    return lambda i: kinds[str(listed[i])]


def _mlp(config: Mapping[str, object], name: str, dense: DenseMlp) -> Callable[[int], DenseMlp | Experts]:
    """A function from the index of a layer to its MLP."""
    key = next((key for key in _EXPERTS if config.get(key)), None)
    if key is None:
        return lambda i: dense
    width = count_at(config, "moe_intermediate_size", name, default=dense.width)
    shared = width * count_at(config, "n_shared_experts", name) if config.get("n_shared_experts") else 0
    if config.get("shared_expert_intermediate_size"):
        shared = count_at(config, "shared_expert_intermediate_size", name)
    model_type, every = str(config.get("model_type")), count_at(config, "decoder_sparse_step", name, default=1)
    if config.get("moe_layer_freq", 1) != 1:
        raise ScenarioError(f"{name}: moe_layer_freq is not 1: experts in some layers only can be read of other keys.")
    if model_type.startswith("llama4"):  # each token goes through one expert and the shared one, of equal widths
        every, shared = count_at(config, "interleave_moe_layer_step", name), width
        dense = DenseMlp(count_at(config, "intermediate_size_mlp", name))
    biases = 2 * width + count_at(config, "hidden_size", name) if model_type == "gpt_oss" else 0
    vectors = biases + (model_type in _ROUTER_BIAS)
    per_token = count_at(config, "num_experts_per_tok", name)
    experts = Experts(count_at(config, key, name), per_token, width, shared, vectors=vectors)
    first = count_at(config, "first_k_dense_replace", name) if config.get("first_k_dense_replace") else 0
    only = config.get("mlp_only_layers") or []
    listed = cast("list[object]", only) if isinstance(only, list) else []
    return lambda i: dense if i < first or (i + 1) % every or i in listed else experts
