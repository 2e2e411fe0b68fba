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


def count_at(config: Mapping[str, object], key: str, name: str, default: int | None = None) -> int:
    """The positive integer at `key`; ScenarioError if it is something else or missing without a default."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value not in _COUNTS:
        found = "missing" if value is None else number_text(value) if type(value) is int else repr(value)
        raise ScenarioError(f"{name}: {key} is {found}. A config.json holds a whole number {_COUNTS} there.")
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
    attention = _attention(config, name, cast("GroupedAttention", plain.attention))
    mlp = _mlp(config, name, cast("DenseMlp", plain.mlp))
    each = [(attention(i), mlp(i)) for i in range(plain.count)]
    found = tuple(Layers(len(list(same)), *kind) for kind, same in groupby(each))
    return () if found == (plain,) else found


def _attention(
    config: Mapping[str, object], name: str, full: GroupedAttention
) -> Callable[[int], GroupedAttention | LatentAttention]:
    """A function from the index of a layer to its attention."""
    if config.get("kv_lora_rank"):
        latent = LatentAttention(
            full.num_heads,
            kv_rank=count_at(config, "kv_lora_rank", name),
            q_rank=None if config.get("q_lora_rank") is None else count_at(config, "q_lora_rank", name),
            nope_dim=count_at(config, "qk_nope_head_dim", name),
            rope_dim=count_at(config, "qk_rope_head_dim", name),
            value_dim=count_at(config, "v_head_dim", name),
        )
        return lambda i: latent
    if not window_told(config, str(config.get("model_type"))):
        return lambda i: full
    windowed = replace(full, window=count_at(config, "sliding_window", name))
    types, model_type = config.get("layer_types"), str(config.get("model_type"))
    if types is None and model_type in ("mistral", "mixtral"):
        return lambda i: windowed
    if types is None and model_type.startswith("qwen"):
        first = count_at(config, "max_window_layers", name)
        return lambda i: windowed if i >= first else full
    kinds = {"full_attention": full, "sliding_attention": windowed}
    listed = cast("list[object]", types) if isinstance(types, list) else []
    layers = count_at(config, "num_hidden_layers", name)
    if len(listed) != layers or any(kind not in kinds for kind in listed):
        raise ScenarioError(f"{name}: layer_types are {types!r}. Write one of {', '.join(kinds)} for each layer.")
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
    experts = Experts(count_at(config, key, name), count_at(config, "num_experts_per_tok", name), width, shared)
    for key in ("moe_layer_freq", "interleave_moe_layer_step"):
        if config.get(key, 1) != 1:
            raise ScenarioError(f"{name}: {key} is {config[key]!r}. Only 1, experts in every layer, can be read.")
    first = count_at(config, "first_k_dense_replace", name) if config.get("first_k_dense_replace") else 0
    every = count_at(config, "decoder_sparse_step", name, default=1)
    only = config.get("mlp_only_layers") or []
    listed = cast("list[object]", only) if isinstance(only, list) else []
    return lambda i: dense if i < first or (i + 1) % every or i in listed else experts
