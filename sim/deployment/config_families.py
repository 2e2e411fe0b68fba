"""Reads the layers of families whose attention is windowed, sparse or compressed in ways of their own: DeepSeek-V4,
MiniMax-M3, Gemma 4, MiMo-V2 and Step-3.7; and names the reader of every family.

Sources: their model classes in vLLM 0.33 (deepseek_v4, minimax_m3, gemma4, mimo_v2_flash, step3p5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

from batchsim.base.errors import ScenarioError, shown
from batchsim.deployment.config_hybrids import corrected_experts, kimi_linear, nemotron_h, qwen3_5, qwen3_next
from batchsim.deployment.config_values import count_at, count_or_none, list_at, object_at
from batchsim.deployment.layers import (
    Attention,
    BlockSparseAttention,
    CompressedAttention,
    DenseMlp,
    Experts,
    GroupedAttention,
    Layers,
)

WINDOWS = ("full_attention", "sliding_attention")
"""Kinds of layers where some have a window, by their names in `layer_types`."""


def deepseek_v4(config: Mapping[str, object], name: str) -> list[Layers]:
    """Compressed attention: of 4 tokens with an index, of 128, or the window alone; experts in every layer."""
    count, hidden = count_at(config, "num_hidden_layers", name), count_at(config, "hidden_size", name)
    ratios = list_at(config, "compress_ratios", name, (0, 4, 128))
    extra = count_or_none(config, "num_nextn_predict_layers", name)
    if len(ratios) not in (count, count + extra):
        raise ScenarioError(f"{name}: compress_ratios has {len(ratios)} of {count} layers.")
    streams = count_at(config, "hc_mult", name, default=1)
    mixing = 0
    if streams > 1:  # before and after each part, on all residual streams at once
        mixing = 2 * ((2 + streams) * streams * (streams * hidden + 1) + 3)
    dense = CompressedAttention(
        count_at(config, "num_attention_heads", name),
        count_at(config, "head_dim", name),
        count_at(config, "qk_rope_head_dim", name),
        count_at(config, "q_lora_rank", name),
        count_at(config, "o_lora_rank", name),
        count_at(config, "o_groups", name),
        ratio=128,
        kept_window=count_at(config, "sliding_window", name),
    )
    indexed = replace(
        dense,
        ratio=4,
        index_heads=count_at(config, "index_n_heads", name),
        index_dim=count_at(config, "index_head_dim", name),
        top_k=count_at(config, "index_topk", name),
    )
    kinds: dict[object, Attention] = {0: replace(dense, ratio=0), 4: indexed, 128: dense}
    experts = corrected_experts(config, name)
    return [Layers(1, kinds[ratio], experts, mixing) for ratio in ratios[:count]]


def minimax_m3(config: Mapping[str, object], name: str) -> list[Layers]:
    """Block-sparse attention where `sparse_attention_freq` is 1; dense MLPs where `moe_layer_freq` is 0."""
    count = count_at(config, "num_hidden_layers", name)
    stated = object_at(config, "sparse_attention_config", name)
    heads, kv_heads = count_at(config, "num_attention_heads", name), count_at(config, "num_key_value_heads", name)
    head_dim = count_at(config, "head_dim", name)
    norms = 2 * head_dim if config.get("use_qk_norm") else 0
    full = GroupedAttention(heads, kv_heads, head_dim, vectors=norms)
    sparse = BlockSparseAttention(
        heads,
        kv_heads,
        head_dim,
        count_at(stated, "sparse_num_index_heads", name),
        count_at(stated, "sparse_index_dim", name),
        count_at(stated, "sparse_block_size", name),
        count_at(stated, "sparse_topk_blocks", name) + count_or_none(stated, "sparse_local_block", name),
        vectors=norms,
    )
    width = count_at(config, "moe_intermediate_size", name, default=count_at(config, "intermediate_size", name))
    shared = count_or_none(config, "n_shared_experts", name) * count_or_none(config, "shared_intermediate_size", name)
    per_token = count_at(config, "num_experts_per_tok", name)
    experts = Experts(count_at(config, "num_local_experts", name), per_token, width, shared, vectors=1)
    dense = DenseMlp(count_at(config, "dense_intermediate_size", name))
    attention = list_at(stated, "sparse_attention_freq", f"{name}: sparse_attention_config", (0, 1), count)
    mlps = list_at(config, "moe_layer_freq", name, (0, 1), count)
    return [
        Layers(1, sparse if is_sparse else full, experts if has_experts else dense)
        for is_sparse, has_experts in zip(attention, mlps, strict=True)
    ]


def gemma4(config: Mapping[str, object], name: str) -> list[Layers]:
    """Windows, and full attention with other heads whose keys and values are of one matrix; a dense MLP, with experts
    beside it where `enable_moe_block` is.

    The last `num_kv_shared_layers` read the KV of the last layer of their kind before; their MLP is twice as wide with
    `use_double_wide_mlp`. With an embedding for each layer every GPU has its gate and its projection (vLLM's
    `ReplicatedLinear`)."""
    count, hidden = count_at(config, "num_hidden_layers", name), count_at(config, "hidden_size", name)
    heads, head_dim = count_at(config, "num_attention_heads", name), count_at(config, "head_dim", name)
    kv_heads, window = count_at(config, "num_key_value_heads", name), count_at(config, "sliding_window", name)
    wide = count_at(config, "global_head_dim", name, default=head_dim)
    one = config.get("attention_k_eq_v") is True
    full_heads = count_at(config, "num_global_key_value_heads", name, default=kv_heads) if one else kv_heads
    kinds: dict[object, GroupedAttention] = {
        "sliding_attention": GroupedAttention(heads, kv_heads, head_dim, window, vectors=2 * head_dim),
        "full_attention": GroupedAttention(heads, full_heads, wide, vectors=2 * wide, one_matrix=one),
    }
    width, norms = count_at(config, "intermediate_size", name), 2 * hidden + 1  # after each part, and a scale
    mlp: DenseMlp | Experts = DenseMlp(width)
    if config.get("enable_moe_block"):
        experts = count_at(config, "num_experts", name)
        per_token, own = count_at(config, "top_k_experts", name), count_at(config, "moe_intermediate_size", name)
        mlp, norms = Experts(experts, per_token, own, width, vectors=1), norms + 4 * hidden
    if own_input := count_or_none(config, "hidden_size_per_layer_input", name):
        norms += (2 * own_input + 1) * hidden
    types = list_at(config, "layer_types", name, WINDOWS, count)
    keeping = count - count_or_none(config, "num_kv_shared_layers", name)
    if keeping < count and not set(types) <= set(types[: max(keeping, 0)]):
        raise ScenarioError(
            f"{name}: num_kv_shared_layers is {count - keeping} of {count} layers, and of some kind none keeps KV for"
            " them. Correct it, or layer_types."
        )
    wider = DenseMlp(2 * width) if config.get("use_double_wide_mlp") and isinstance(mlp, DenseMlp) else mlp
    sharing = {kind: replace(attention, shares_kv=True) for kind, attention in kinds.items()}
    kept = [Layers(1, kinds[kind], mlp, norms) for kind in types[:keeping]]
    return kept + [Layers(1, sharing[kind], wider, norms) for kind in types[keeping:]]


def input_of_layers(config: Mapping[str, object], name: str) -> tuple[int, int]:
    """(Words, width) of the embedding that gives each layer an input of its own; zeros of a model without one."""
    width = count_or_none(config, "hidden_size_per_layer_input", name)
    if not width or not str(config.get("model_type")).startswith("gemma4"):
        return 0, 0
    return count_at(config, "vocab_size_per_layer_input", name, default=count_at(config, "vocab_size", name)), width


def mimo_v2(config: Mapping[str, object], name: str) -> list[Layers]:
    """Windows where `hybrid_layer_pattern` is 1, with heads of their own; values narrower than keys."""
    count = count_at(config, "num_hidden_layers", name)
    full = GroupedAttention(
        count_at(config, "num_attention_heads", name),
        count_at(config, "num_key_value_heads", name),
        count_at(config, "head_dim", name),
        value_dim=count_at(config, "v_head_dim", name),
    )
    windowed = GroupedAttention(
        count_at(config, "swa_num_attention_heads", name),
        count_at(config, "swa_num_key_value_heads", name),
        count_at(config, "swa_head_dim", name),
        window=count_or_none(config, "sliding_window_size", name) or count_at(config, "sliding_window", name),
        vectors=count_at(config, "swa_num_attention_heads", name) if config.get("add_swa_attention_sink_bias") else 0,
        value_dim=count_at(config, "swa_v_head_dim", name),
    )
    experts = corrected_experts(config, name)
    dense = DenseMlp(count_at(config, "intermediate_size", name))
    pattern = list_at(config, "hybrid_layer_pattern", name, (0, 1), count)
    mlps = list_at(config, "moe_layer_freq", name, (0, 1), count)
    return [
        Layers(1, windowed if is_windowed else full, experts if has_experts else dense)
        for is_windowed, has_experts in zip(pattern, mlps, strict=True)
    ]


def step3p7(config: Mapping[str, object], name: str) -> list[Layers]:
    """Windows with heads of their own where `attention_other_setting` says so, full attention; experts but at first."""
    count = count_at(config, "num_hidden_layers", name)
    heads, head_dim = count_at(config, "num_attention_heads", name), count_at(config, "head_dim", name)
    kv_heads = count_or_none(config, "num_attention_groups", name) or count_at(config, "num_key_value_heads", name)
    full = GroupedAttention(heads, kv_heads, head_dim, vectors=2 * head_dim)
    windowed = replace(full, window=count_at(config, "sliding_window", name))
    if config.get("attention_other_setting"):
        other = object_at(config, "attention_other_setting", name)
        windowed = replace(
            windowed,
            num_heads=count_at(other, "num_attention_heads", name),
            num_kv_heads=count_at(other, "num_attention_groups", name),
            head_dim=count_at(other, "head_dim", name, default=head_dim),
        )
    width = count_at(config, "moe_intermediate_size", name)
    shared = count_at(config, "share_expert_dim", name, default=width * count_or_none(config, "n_shared_experts", name))
    per_token = count_or_none(config, "num_experts_per_tok", name) or count_at(config, "moe_top_k", name)
    number = count_or_none(config, "num_experts", name) or count_at(config, "moe_num_experts", name)
    experts = Experts(number, per_token, width, shared, vectors=1)
    dense = DenseMlp(count_at(config, "intermediate_size", name))
    routed = _listed_layers(config, name, count)
    if routed is None:
        routed = set(range(count_at(config, "first_k_dense_replace", name), count))
    kinds = {"full_attention": full, "sliding_attention": windowed}
    types = list_at(config, "layer_types", name, WINDOWS, count)
    return [Layers(1, kinds[cast("str", kind)], experts if i in routed else dense) for i, kind in enumerate(types)]


def _listed_layers(config: Mapping[str, object], name: str, count: int) -> set[int] | None:
    """The layers that `moe_layers_enum` lists, numbers from 0 on between commas; None where it is not there."""
    listed = config.get("moe_layers_enum")
    if listed is None:
        return None
    known = {str(i) for i in range(count)}
    numbers = [number.strip() for number in listed.split(",")] if isinstance(listed, str) else [""]
    if not known.issuperset(numbers):
        raise ScenarioError(
            f"{name}: moe_layers_enum is {shown(listed)}. Write the numbers of layers with experts, from 0"
            f" to {count - 1}, with commas between."
        )
    return set(map(int, numbers))


FAMILIES: dict[str, Callable[[Mapping[str, object], str], list[Layers]]] = {
    "qwen3_next": qwen3_next,
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"), qwen3_5),
    **dict.fromkeys(("kimi_linear", "kimi_k3"), kimi_linear),
    "nemotron_h": nemotron_h,
    **dict.fromkeys(("deepseek_v4", "deepseek_ref"), deepseek_v4),
    **dict.fromkeys(("minimax_m3", "minimax_m3_vl"), minimax_m3),
    **dict.fromkeys(("gemma4", "gemma4_text"), gemma4),
    "mimo_v2_flash": mimo_v2,
    **dict.fromkeys(("step3p5", "step3p7"), step3p7),
}
"""By model type, a reader of a config.json's layers, each by itself, which raises ScenarioError headed by the name."""


def rotary_dim(config: Mapping[str, object], name: str) -> int | None:
    """Elements of vLLM's table of rotations for one position of a model of a family above; None: all of a head.

    ScenarioError, headed `name`, for a number or a share that cannot be.
    """
    kind, head_dim = str(config.get("model_type")), config.get("head_dim")
    if kind == "nemotron_h" or config.get("mla_use_nope") is True:
        return 0
    if config.get("rotary_dim") is not None:
        return count_or_none(config, "rotary_dim", name)
    if type(head_dim) is not int:
        return None
    if kind.startswith("gemma4"):  # a table for each kind of layer
        return head_dim + count_or_none(config, "global_head_dim", name)
    inside = object_at(config, "rope_parameters", name) if config.get("rope_parameters") is not None else {}
    factor = config.get("partial_rotary_factor", inside.get("partial_rotary_factor"))
    if factor is None:
        return None
    if not isinstance(factor, int | float) or isinstance(factor, bool) or not 0 <= factor <= 1:
        raise ScenarioError(f"{name}: partial_rotary_factor is {shown(factor)}. Write a share from 0 to 1.")
    return int(head_dim * factor)
