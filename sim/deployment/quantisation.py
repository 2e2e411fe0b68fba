"""Reads in which types a checkpoint keeps its matrices, from the quantisation that its config.json states.

Understood are `quantization_config` of fp8, fbgemm_fp8, mxfp4, modelopt, compressed-tensors, awq, gptq and auto-round
checkpoints, and `hf_quant_config.json` of modelopt beside it (its content under the key `hf_quant_config`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, cast

from batchsim.base.errors import ScenarioError, shown
from batchsim.base.plain import LEFT_OUT
from batchsim.base.ranges import check_ranges
from batchsim.deployment.config_values import object_at
from batchsim.deployment.layers import Layers

ELEMENT_BYTES: dict[str, float] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "fp8": 1,
    "fp8_block": 1,  # a float32 scale for 128 × 128 weights, 0.02 %, is left out
    "int8": 1,
    "int4": 0.5 + 2.5 / 128,  # a scale of two bytes and a zero point of four bits for 128 weights
    "nvfp4": 9 / 16,  # a scale of one byte for 16 weights
    "w4a16_nvfp4": 9 / 16,  # the same weights, multiplied in 16 bits
    "mxfp4": 17 / 32,  # a scale of one byte for 32 weights
    "mxfp8": 33 / 32,
}
"""Bytes of one element by its type, of weights and KV as engines keep them."""

_BY_BITS = {("float", 8): "fp8", ("int", 8): "int8", ("int", 4): "int4", ("float", 4): "nvfp4"}
_BY_ALGORITHM = {
    "FP8": "fp8",
    "FP8_PB_WO": "fp8_block",
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "w4a16_nvfp4",
    "MXFP4": "mxfp4",
    "MXFP8": "mxfp8",
    "INT4_AWQ": "int4",
}
_IGNORED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
_MODULES = {
    "attention": ("self_attn.o_proj",),
    "weights": ("mlp.down_proj", "mlp.shared_experts.down_proj"),
    "experts": ("mlp.experts.0.down_proj", "block_sparse_moe.experts.0.w2"),
    "linear": ("linear_attn.out_proj", "self_attn.o_proj"),
}
"""One matrix of each part by its name in a layer, and in which checkpoints it may stand for the part."""
_MODULES_OF = {
    "nemotron_h": {
        "attention": ("mixer.o_proj",),
        "weights": ("mixer.shared_experts.down_proj", "mixer.down_proj"),
        "experts": ("mixer.experts.0.down_proj",),
        "linear": ("mixer.in_proj",),
    },
    "gemma4": {"experts": ("moe.experts.0.down_proj", "experts.0.down_proj")},
    "qwen3_5_moe": {"weights": ("mlp.down_proj", "mlp.shared_expert.down_proj")},
    "minimax_m3_vl": {"weights": ("mlp.down_proj", "block_sparse_moe.shared_experts.down_proj")},
    "deepseek_v4": {
        "attention": ("attn.wo_b",),
        "weights": ("ffn.shared_experts.w2",),
        "experts": ("ffn.experts.0.w2",),
    },
}
"""The same of model types whose modules have other names."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The types of a checkpoint's matrices, by their names in `ELEMENT_BYTES`; "": the model's own `dtype`.

    `attention`: of queries, keys, values and output; `weights`: of MLPs through which all tokens go, shared experts
    included; `experts`: of routed experts; `kv`: of the KV cache for which the checkpoint has scales; `linear`: of
    linear attention; `head`: of the output matrix. All else, such as embedding and norms, is in the model's own.
    """

    weights: str = ""
    attention: str = ""
    experts: str = ""
    kv: str = ""
    linear: str = field(default="", metadata=LEFT_OUT)
    head: str = field(default="", metadata=LEFT_OUT)

    __post_init__ = check_ranges

    def __str__(self) -> str:
        named = (("weights", self.weights), ("attention", self.attention), ("moe", self.experts), ("kv", self.kv))
        return ", ".join(f"{name} {dtype}" for name, dtype in named if dtype) or "none"


def read_quantisation(config: Mapping[str, object], name: str, layers: Sequence[Layers] = ()) -> Quantisation:
    """The types that a parsed config.json states, of a model of those `layers`, by default all of full attention and
    an MLP or experts. ScenarioError, headed `name`, for a method that is not known."""
    given = config.get("quantization_config") or config.get("hf_quant_config")
    if not given:
        return Quantisation()
    if not isinstance(given, dict):
        raise ScenarioError(f"{name}: quantization_config is {shown(given)}. A config.json holds an object there.")
    stated = cast("dict[str, Any]", given)
    stated = {**stated, **_object(stated, "quantization", name)}
    modules_of = _MODULES | _MODULES_OF.get(str(config.get("model_type")), {})
    count = config.get("num_hidden_layers")
    with_part = _layers_with(layers) if layers else dict.fromkeys(_MODULES, range(count if type(count) is int else 1))
    if not any(each.attention.kind in ("gdn", "kda", "mamba2") for each in layers):
        del modules_of["linear"]
    kv = _kv_type(stated.get("kv_cache_quant_algo") or stated.get("kv_cache_scheme"), name)
    if stated.get("quantized_layers"):
        return Quantisation(**_listed_types(stated, modules_of, name), kv=kv)
    stated_type, experts_only = _type_of(stated, name), stated.get("quant_method") == "mxfp4"
    kept = _kept(stated, name)
    types = {
        part: ""
        if (experts_only and part != "experts") or _mostly_kept(kept, modules, with_part[part])
        else stated_type
        for part, modules in modules_of.items()
    }
    if (of_experts := config.get("expert_dtype")) not in (None, "fp4", "fp8"):
        raise ScenarioError(f"{name}: expert_dtype is {shown(of_experts)}. Known are fp4 and fp8.")
    if of_experts == "fp4":  # DeepSeek-V4
        types["experts"] = "mxfp4"
    return Quantisation(**types, kv=kv)


def _layers_with(layers: Sequence[Layers]) -> dict[str, list[int]]:
    """The numbers of the layers that have each part."""
    each = [kind for kind in layers for _ in range(kind.count)]
    return {
        "attention": [i for i, kind in enumerate(each) if kind.attention.kind not in ("none", "gdn", "kda", "mamba2")],
        "weights": [i for i, kind in enumerate(each) if kind.mlp.kind == "dense" or kind.mlp.shared_width],
        "experts": [i for i, kind in enumerate(each) if kind.mlp.kind == "experts"],
        "linear": [i for i, kind in enumerate(each) if kind.attention.kind in ("gdn", "kda", "mamba2")],
    }


def _listed_types(stated: Mapping[str, Any], modules_of: Mapping[str, tuple[str, ...]], name: str) -> dict[str, str]:
    """The types by `quantized_layers`, of each part that of most of its matrices; what is not listed has that of a
    block-wise fp8 checkpoint, or none."""
    listed = _object(stated, "quantized_layers", name)
    listed = {path: _object(listed, path, name) for path in listed}
    unlisted = "fp8_block" if stated.get("quant_method") == "fp8" and stated.get("weight_block_size") else ""
    types: dict[str, str] = {}
    for part, modules in {**modules_of, "head": ("lm_head",)}.items():
        ends = tuple(f".{end}" for module in modules for end in (module, module.partition(".0.")[0]))
        counts = Counter(str(kind.get("quant_algo")) for path, kind in listed.items() if f".{path}".endswith(ends))
        types[part] = _type_of({"quant_algo": counts.most_common(1)[0][0]}, name) if counts else unlisted
    return types | {"head": "" if types["head"] == unlisted else types["head"]}


def _type_of(stated: Mapping[str, Any], name: str) -> str:
    """The type of the quantised matrices."""
    method, algorithm = str(stated.get("quant_method", "")), str(stated.get("quant_algo", ""))
    bits = stated.get("bits")
    if method in ("fp8", "fbgemm_fp8"):
        return "fp8_block" if stated.get("weight_block_size") else "fp8"
    if method == "mxfp4":
        return "mxfp4"
    if algorithm in _BY_ALGORITHM:
        return _BY_ALGORITHM[algorithm]
    if method in ("awq", "gptq", "auto-round") and bits in (4, 8):
        return f"int{bits}"
    if groups := _object(stated, "config_groups", name):
        types = {_type_of_group(_object(_object(groups, group, name), "weights", name)) for group in groups}
        if len(types) == 1 and (only := types.pop()):
            return only
    what = f"quant_method {method!r}" + (f", quant_algo {algorithm!r}" if algorithm else "")
    known = "fp8, fbgemm_fp8, mxfp4, modelopt (FP8, NVFP4), compressed-tensors, awq and gptq with one type of weights"
    raise ScenarioError(
        f"{name}: quantization_config has {what}, which is not known; known are {known}. Remove it from a copy of the"
        " file and state the types in the scenario: deployment: {weights: ..., moe: ..., kv: ...}."
    )


def _object(stated: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    """The object at `key`; an empty one where nothing or null is."""
    return {} if stated.get(key) is None else object_at(stated, key, f"{name}: quantization_config")


def _kept(stated: Mapping[str, Any], name: str) -> list[str]:
    """The names, or patterns of names, of modules that are not quantised."""
    kept: list[str] = []
    for key in _IGNORED:
        listed = stated.get(key) or []
        if not isinstance(listed, list):
            raise ScenarioError(
                f"{name}: quantization_config: {key} is {shown(listed)}. Write a list of modules there."
            )
        kept += map(str, cast("list[object]", listed))
    for item in kept:
        try:
            re.compile(item.removeprefix("re:") if item.startswith("re:") else "")
        except re.error as error:
            raise ScenarioError(
                f"{name}: quantization_config: {shown(item)} is no pattern: {error}. Correct it."
            ) from None
    return kept


def _by_bits(weights: Mapping[str, Any]) -> str:
    """The type that `type` and `num_bits` say; "" if it is not known."""
    bits = weights.get("num_bits")
    return _BY_BITS.get((str(weights.get("type")), bits), "") if type(bits) is int else ""


def _type_of_group(weights: Mapping[str, Any]) -> str:
    """The type of the weights in one group of a compressed-tensors config; "" if it is not known."""
    kind = _by_bits(weights)
    if kind == "fp8" and weights.get("strategy") == "block":
        return "fp8_block"
    return "mxfp4" if kind == "nvfp4" and weights.get("group_size") == 32 else kind


def _kv_type(stated: object, name: str) -> str:
    if isinstance(stated, dict):
        scheme = cast("dict[str, Any]", stated)
        stated = _by_bits(scheme) or scheme
    kind = {"none": "", "": "", "fp8": "fp8", "nvfp4": "nvfp4", "int8": "int8"}.get(str(stated or "").lower())
    if kind is None:
        raise ScenarioError(f"{name}: the KV cache's type is stated as {stated!r}. Known are FP8, INT8 and NVFP4.")
    return kind


def _mostly_kept(kept: list[str], modules: tuple[str, ...], layers: Sequence[int]) -> bool:
    """Whether any of `modules` is named as not quantised in more than half of the layers of those numbers."""
    if not kept:
        return False
    counts = (sum(any(_names(item, f"layers.{i}.{module}") for item in kept) for i in layers) for module in modules)
    return any(2 * count > len(layers) for count in counts)


def _names(item: str, module: str) -> bool:
    """Whether `item` of a list of modules that are not quantised means `module`, a path from `layers.` on."""
    if item.startswith("re:"):
        return re.match(item[3:], f"model.{module}") is not None
    own = item[item.find("layers.") :] if "layers." in item else item
    if "*" in own:
        return any(fnmatchcase(path, own) for path in (module, f"model.{module}")) or fnmatchcase(module, f"{own}.*")
    return f".{module}.".find(f".{own}.") >= 0
