"""Reads the layers of hybrids from their config.json: Qwen3-Next, Qwen3.5, Kimi Linear and Kimi-K3, Nemotron-H.

Sources: their model classes in vLLM 0.33 (`qwen3_next.py`, `qwen3_5.py`, `kimi_linear.py`, `nemotron_h.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, cast

from batchsim.base.errors import ScenarioError, shown
from batchsim.deployment.config_values import count_at, count_or_none, list_at, object_at
from batchsim.deployment.layers import (
    Attention,
    DenseMlp,
    Experts,
    GroupedAttention,
    LatentAttention,
    Layers,
    LinearAttention,
    Mlp,
    NoAttention,
    NoMlp,
)

StateType = Literal["float32", "bfloat16", "float16"]


def _state_type(config: Mapping[str, object], key: str, name: str, default: StateType = "float32") -> StateType:
    value = config.get(key, default)
    if value not in ("float32", "bfloat16", "float16"):
        raise ScenarioError(f"{name}: {key} is {value!r}. Write float32, bfloat16 or float16.")
    return cast("StateType", value)


def corrected_experts(
    config: Mapping[str, object],
    name: str,
    keys: tuple[str, str, str] = ("n_routed_experts", "num_experts_per_tok", "n_shared_experts"),
) -> Experts:
    """Experts whose router has a correction for each, and shared ones of the same width. `keys`: of how many experts
    there are, how many a token goes through, and how many are shared."""
    width, (count, per_token, shared) = count_at(config, "moe_intermediate_size", name), keys
    return Experts(
        count_at(config, count, name),
        count_at(config, per_token, name),
        width,
        width * count_or_none(config, shared, name),
        vectors=1,
    )


def qwen3_next(config: Mapping[str, object], name: str) -> list[Layers]:
    """As of Qwen3.5, with experts in every layer. The states are of the model's type, as vLLM keeps them where no other
    is asked for: only of Qwen3.5 it reads `mamba_ssm_dtype` (`MambaStateDtypeCalculator`, `models/config.py`)."""
    if (step := config.get("decoder_sparse_step", 1)) != 1:
        raise ScenarioError(f"{name}: decoder_sparse_step is {shown(step)}, and layers without experts are not known.")
    count_at(config, "num_experts", name)
    return qwen3_5({**config, "mamba_ssm_dtype": config.get("torch_dtype", config.get("dtype"))}, name)


def qwen3_5(config: Mapping[str, object], name: str) -> list[Layers]:
    """Gated delta nets, and full attention with a gate of its output; dense, or experts in every layer."""
    count = count_at(config, "num_hidden_layers", name)
    full = GroupedAttention(
        count_at(config, "num_attention_heads", name),
        count_at(config, "num_key_value_heads", name),
        (head_dim := count_at(config, "head_dim", name)),
        vectors=2 * head_dim,  # norms of queries and keys
        gated=config.get("attn_output_gate", True) is True,
    )
    value_dim = count_at(config, "linear_value_head_dim", name)
    linear = LinearAttention(
        "gdn",
        count_at(config, "linear_num_value_heads", name),
        value_dim,
        count_at(config, "linear_num_key_heads", name),
        count_at(config, "linear_key_head_dim", name),
        count_at(config, "linear_conv_kernel_dim", name),
        _state_type(config, "mamba_ssm_dtype", name),
        vectors=value_dim,
    )
    kinds: dict[object, Attention] = {"linear_attention": linear, "full_attention": full}
    if config.get("layer_types") is None:
        every = count_at(config, "full_attention_interval", name)
        attention = [linear if (i + 1) % every else full for i in range(count)]
    else:
        attention = [kinds[kind] for kind in list_at(config, "layer_types", name, tuple(kinds), count)]
    mlp: Mlp
    if config.get("num_experts"):
        if config.get("mlp_only_layers"):
            raise ScenarioError(f"{name}: mlp_only_layers means layers without experts, which are not known here.")
        mlp = Experts(
            count_at(config, "num_experts", name),
            count_at(config, "num_experts_per_tok", name),
            count_at(config, "moe_intermediate_size", name),
            count_at(config, "shared_expert_intermediate_size", name),
            weighed_shared=True,
        )
    else:
        mlp = DenseMlp(count_at(config, "intermediate_size", name))
    return [Layers(1, each, mlp) for each in attention]


def kimi_linear(config: Mapping[str, object], name: str) -> list[Layers]:
    """Kimi delta attention and latent attention, by lists of layers from 1 on; experts, of Kimi-K3 on latent rows."""
    count = count_at(config, "num_hidden_layers", name)
    stated = object_at(config, "linear_attn_config", name)
    heads, dim = count_at(stated, "num_heads", name), count_at(stated, "head_dim", name)
    kernel = count_at(stated, "short_conv_kernel_size", name)
    linear = LinearAttention(
        "kda", heads, dim, heads, dim, kernel, full_gate=stated.get("use_full_rank_gate") is True, vectors=dim
    )
    latent = LatentAttention(
        count_at(config, "num_attention_heads", name),
        kv_rank=count_at(config, "kv_lora_rank", name),
        q_rank=count_or_none(config, "q_lora_rank", name) or None,
        nope_dim=count_at(config, "qk_nope_head_dim", name),
        rope_dim=count_at(config, "qk_rope_head_dim", name),
        value_dim=count_at(config, "v_head_dim", name),
        gated=config.get("mla_use_output_gate") is True,
    )
    numbers = range(1, count + 1)
    linears, fulls = (
        set(list_at(stated, key, f"{name}: linear_attn_config", numbers)) for key in ("kda_layers", "full_attn_layers")
    )
    if linears & fulls or linears | fulls != set(numbers):
        raise ScenarioError(
            f"{name}: linear_attn_config has {len(linears)} kda_layers and {len(fulls)} full_attn_layers, which are not"
            f" each of {count} layers once."
        )
    if config.get("moe_layer_freq", 1) != 1:
        raise ScenarioError(f"{name}: moe_layer_freq is {config['moe_layer_freq']!r}; known is 1.")
    experts = corrected_experts(config, name, ("num_experts", "num_experts_per_token", "num_shared_experts"))
    experts = replace(experts, latent_width=count_or_none(config, "routed_expert_hidden_size", name))
    dense, first = (
        DenseMlp(count_at(config, "intermediate_size", name)),
        count_at(config, "first_k_dense_replace", name),
    )
    return [
        Layers(1, linear if i in linears else latent, dense if i <= first else experts) for i in range(1, count + 1)
    ]


_BLOCKS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}


def nemotron_h(config: Mapping[str, object], name: str) -> list[Layers]:
    """Blocks of Mamba2, attention, experts or an MLP alone; all MLPs without a gate."""
    if config.get("layers_block_type") is not None:
        blocks = list_at(config, "layers_block_type", name, tuple(_BLOCKS.values()))
    else:
        pattern = config.get("hybrid_override_pattern")
        if not isinstance(pattern, str) or not pattern or set(pattern) - set(_BLOCKS):
            shown = "missing" if pattern is None else repr(pattern)
            raise ScenarioError(
                f"{name}: hybrid_override_pattern is {shown}. Write a character a block: {' '.join(_BLOCKS)}."
            )
        blocks = [_BLOCKS[letter] for letter in pattern]
    count = count_at(config, "num_hidden_layers", name, default=len(blocks))
    if count != len(blocks):
        raise ScenarioError(f"{name}: num_hidden_layers is {count}, and {len(blocks)} blocks are listed. Correct one.")
    parts = {"mamba": _mamba2, "attention": _plain_attention, "moe": _nemotron_experts, "mlp": _nemotron_mlp}
    made = {kind: parts[str(kind)](config, name) for kind in dict.fromkeys(blocks)}
    return [made[kind] for kind in blocks]


def _mamba2(config: Mapping[str, object], name: str) -> Layers:
    mixer = LinearAttention(
        "mamba2",
        count_at(config, "mamba_num_heads", name),
        count_at(config, "mamba_head_dim", name),
        count_at(config, "n_groups", name),
        count_at(config, "ssm_state_size", name),
        count_at(config, "conv_kernel", name),
        _state_type(config, "mamba_ssm_cache_dtype", name),
    )
    return Layers(1, mixer, NoMlp())


def _plain_attention(config: Mapping[str, object], name: str) -> Layers:
    heads = count_at(config, "num_attention_heads", name)
    head_dim = count_or_none(config, "head_dim", name) or count_at(config, "attention_head_dim", name)
    return Layers(1, GroupedAttention(heads, count_at(config, "num_key_value_heads", name), head_dim), NoMlp())


def _nemotron_experts(config: Mapping[str, object], name: str) -> Layers:
    experts = Experts(
        count_at(config, "n_routed_experts", name),
        count_at(config, "num_experts_per_tok", name),
        count_at(config, "moe_intermediate_size", name),
        count_or_none(config, "moe_shared_expert_intermediate_size", name),
        vectors=1,  # a correction of the router's
        gated=False,
        latent_width=count_or_none(config, "moe_latent_size", name),
    )
    return Layers(1, NoAttention(), experts)


def _nemotron_mlp(config: Mapping[str, object], name: str) -> Layers:
    return Layers(1, NoAttention(), DenseMlp(count_at(config, "intermediate_size", name), gated=False))
