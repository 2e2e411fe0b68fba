"""Reads the layers of a Hugging Face config.json: which kind of attention and of MLP each of them has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import cast

from batchsim.base.errors import ScenarioError, shown
from batchsim.deployment.config_families import FAMILIES, WINDOWS
from batchsim.deployment.config_values import COUNTS, count_at, flag_at, list_at
from batchsim.deployment.layers import DenseMlp, Experts, GroupedAttention, LatentAttention, Layers

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PLAIN = frozenset(
    {
        *("llama", "mistral", "qwen2", "qwen3", "mimo", "qwen3_vl", "mixtral", "qwen2_moe", "qwen3_moe"),
        *("qwen3_vl_moe", "glm4_moe", "minimax_m2", "gpt_oss", "llama4", "llama4_text"),
        *("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm_moe_dsa"),
    }
)
SIZED = _PLAIN | set(FAMILIES)
"""Model types whose weights and KV are known but for what sees."""
NEAR = frozenset(
    {
        *(
            "gemma",
            "gemma2",
            "gemma3",
            "gemma3_text",
            "granite",
            "phi",
            "phi3",
            "olmo2",
            "olmo3",
            "smollm3",
            "seed_oss",
        ),
        *("glm4", "cohere", "cohere2", "exaone4", "ernie4_5", "ernie4_5_moe", "granitemoe", "olmoe", "apertus"),
        *("mistral3", "llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "kimi_vl", "internvl", "internvl_chat"),
    }
)
"""Model types whose KV is read, while norms, biases or a gate of their weights may be other than is counted here."""
UNKNOWN_LAYERS = {
    "nemotron-nas": "blocks of shapes of their own",
    "nemotron_nas": "blocks of shapes of their own",
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), "Mamba alone"),
    **dict.fromkeys(
        ("jamba", "bamba", "zamba", "zamba2", "falcon_h1", "granitemoehybrid", "plamo2"), "Mamba, beside attention"
    ),
    **dict.fromkeys(("lfm2", "lfm2_moe"), "short convolution"),
    "minimax_text_01": "lightning attention",
    "minimax": "lightning attention",
    "recurrentgemma": "recurrent block",
    "gemma3n": "attention with an embedding for each layer",
}
"""Model types whose layers are of kinds that are not known here, and which. Source: their classes in vLLM 0.33."""
_QKV_BIAS = frozenset({"qwen2", "qwen2_moe", "mimo"})
_QK_NORM = frozenset({"qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe"})
"""Model types whose attention has, whatever their config.json says, a bias on q, k and v (not on o), and a norm of
head_dim weights for q and for k. Source: their model classes in transformers."""
_NO_O_BIAS = frozenset({"glm4_moe"})
_ROUTER_BIAS = frozenset({"deepseek_v3", "kimi_k2", "glm4_moe", "gpt_oss", "minimax_m2", "deepseek_v32", "glm_moe_dsa"})
"""Model types whose `attention_bias` leaves out o, and whose router has a bias, or a correction, for each expert."""


_FLAGS = (
    *("attention_bias", "mlp_bias", "use_qk_norm", "use_sliding_window", "attn_output_gate", "attention_k_eq_v"),
    *("enable_moe_block", "add_swa_attention_sink_bias", "mla_use_nope", "mla_use_output_gate"),
)
"""Keys that switch on what a layer has beside, or off."""


def check_flags(config: Mapping[str, object], name: str) -> None:
    """ScenarioError, headed `name`, where a switch is neither true nor false."""
    for key in _FLAGS:
        flag_at(config, key, name)


def check_kinds(model_type: object, name: str, way_out: str) -> None:
    """ScenarioError, headed `name`, where layers of `model_type` are of kinds that are not known, or it is no type of
    which they are."""
    kind = str(model_type)
    if kinds := UNKNOWN_LAYERS.get(kind):
        raise ScenarioError(f"{name}: model_type {model_type!r}: layers of kind {kinds} are not known. {way_out}")
    if kind not in SIZED and kind not in NEAR:
        raise ScenarioError(f"{name}: model_type {model_type!r} is none whose layers are known. {way_out}")


def window_told(config: Mapping[str, object], model_type: str) -> str:
    """Which key of `config` asks for sliding-window attention, in words; "" if none does.

    The qwen types name a window yet may switch it off.
    """
    layers = config.get("layer_types")
    listed = cast("list[object]", layers) if isinstance(layers, list) else [layers]
    if layers is not None and any(kind != "full_attention" for kind in listed):
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
    if config.get("kv_lora_rank"):
        sparse = bool(config.get("index_topk"))
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
        sharing = replace(latent, index_heads=0, index_dim=0, shares_index=True)
        owns = _owns_index(config, name) if sparse else None
        return lambda i: latent if owns is None or owns(i) else sharing
    if config.get("attention_chunk_size"):  # llama4: all but every fourth layer
        chunked = replace(full, window=count_at(config, "attention_chunk_size", name))
        return lambda i: chunked if (i + 1) % 4 else full
    if not (window := window_told(config, str(config.get("model_type")))):
        return lambda i: full
    types, model_type = config.get("layer_types"), str(config.get("model_type"))
    listed: list[object] = []
    if types is not None:
        listed = list_at(config, "layer_types", name, WINDOWS, count_at(config, "num_hidden_layers", name))
    windowed = replace(full, window=count_at(config, "sliding_window", name))
    if types is None and model_type in ("mistral", "mixtral"):
        return lambda i: windowed
    if types is None and model_type.startswith("qwen"):
        first = count_at(config, "max_window_layers", name)
        return lambda i: windowed if i >= first else full
    if types is None:
        raise ScenarioError(f"{name}: {window}: write layer_types, one of {', '.join(WINDOWS)} for each layer.")
    return lambda i: windowed if listed[i] == "sliding_attention" else full


def _owns_index(config: Mapping[str, object], name: str) -> Callable[[int], bool]:
    """A function from the index of a layer to whether it has an index of its own; the others use the last one's."""
    if config.get("indexer_types") is not None:
        layers = count_at(config, "num_hidden_layers", name)
        types = list_at(config, "indexer_types", name, ("full", "shared"), layers)
        return lambda i: types[i] == "full"
    if config.get("index_topk_pattern") is not None:
        raise ScenarioError(
            f"{name}: index_topk_pattern is not known. Write indexer_types, full or shared, of each layer."
        )
    every, first = count_at(config, "index_topk_freq", name, default=1), config.get("index_skip_topk_offset", 0)
    if type(first) is not int:
        raise ScenarioError(f"{name}: index_skip_topk_offset is {first!r}. Write the number of the first layers.")
    return lambda i: i < first or (i - first + 1) % every == 0


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
    listed: list[object] = []
    if config.get("mlp_only_layers") is not None:
        listed = list_at(config, "mlp_only_layers", name, range(count_at(config, "num_hidden_layers", name)))
    return lambda i: dense if i < first or (i + 1) % every or i in listed else experts


def largest_image(config: Mapping[str, object], name: str) -> tuple[int, int]:
    """(Tokens, numbers of pixels in three colours) of the largest image of a model that sees, of the types whose rule
    is known here: gemma3, mistral3, llava_next, llama4; (0, 0) of others and of models that only read. ScenarioError,
    headed `name`, for sizes that are no pairs.

    Source: their classes in vLLM 0.19, which says of them `profiled with N image items` at its start.
    """
    vision = config.get("vision_config")
    seen = cast("Mapping[str, object]", vision) if isinstance(vision, Mapping) else {}
    side, patch = _whole(seen, "image_size"), _whole(seen, "patch_size")
    kind = config.get("model_type")
    if kind in ("llama4", "llama4_text"):  # 16 tiles and the whole, each a quarter of its patches
        side, patch = side or 336, patch or 14
        return 17 * (side // patch) ** 2 // 4, 17 * 3 * side**2
    if not side or not patch:
        return 0, 0
    if kind == "gemma3":
        return _whole(config, "mm_tokens_per_image") or 256, 3 * side**2
    if kind == "mistral3":  # a token for a square of patches, and one at the end of each row
        rows = side // (patch * (_whole(config, "spatial_merge_size") or 1))
        return rows * (rows + 1), 3 * side**2
    if kind == "llava_next":  # tiles in a grid, with a token at the end of each row, and the whole
        sizes = _grids(config, name) or [(side, side)]
        edge = side // patch
        tokens = max(edge * edge * (h // side) * (w // side) + edge * (h // side) for h, w in sizes)
        tiles = max((h // side) * (w // side) for h, w in sizes)
        return edge * edge + tokens, (1 + tiles) * 3 * side**2
    return 0, 0


def _grids(config: Mapping[str, object], name: str) -> list[tuple[int, int]]:
    """Heights and widths of an image's grids of tiles; [] where none are stated."""
    stated = config.get("image_grid_pinpoints") or []
    listed = cast("list[object]", stated) if isinstance(stated, list) else [stated]
    sizes = [tuple(cast("list[object]", size)) for size in listed if isinstance(size, list)]
    if len(sizes) < len(listed) or any(
        len(size) != 2 or any(type(n) is not int or n not in COUNTS for n in size) for size in sizes
    ):
        raise ScenarioError(f"{name}: image_grid_pinpoints is {shown(stated)}. Write a list of heights and widths.")
    return cast("list[tuple[int, int]]", sizes)


def _whole(config: Mapping[str, object], key: str) -> int:
    value = config.get(key)
    return value if type(value) is int and value in COUNTS else 0
