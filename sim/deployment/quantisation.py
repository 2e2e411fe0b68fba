"""Reads in which types a checkpoint keeps its matrices, from the quantisation that its config.json states.

Understood are `quantization_config` of fp8, fbgemm_fp8, mxfp4, modelopt, compressed-tensors, awq, gptq and auto-round
checkpoints, and `hf_quant_config.json` of modelopt beside it (its content under the key `hf_quant_config`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

from batchsim.base.errors import ScenarioError
from batchsim.base.ranges import check_ranges

ELEMENT_BYTES: dict[str, float] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "fp8": 1,
    "fp8_block": 1,  # a float32 scale for 128 × 128 weights, 0.02 %, is left out
    "int8": 1,
    "int4": 0.5 + 2.5 / 128,  # a scale of two bytes and a zero point of four bits for 128 weights
    "nvfp4": 9 / 16,  # a scale of one byte for 16 weights
    "mxfp4": 17 / 32,  # a scale of one byte for 32 weights
}
"""Bytes of one element by its type, of weights and KV as engines keep them."""

_BY_BITS = {("float", 8): "fp8", ("int", 8): "int8", ("int", 4): "int4", ("float", 4): "nvfp4"}
_BY_ALGORITHM = {"FP8": "fp8", "FP8_PB_WO": "fp8_block", "NVFP4": "nvfp4", "MXFP4": "mxfp4", "INT4_AWQ": "int4"}
_IGNORED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
_MODULES = {
    "attention": ("self_attn.o_proj",),
    "weights": ("mlp.down_proj", "mlp.shared_experts.down_proj"),
    "experts": ("mlp.experts.0.down_proj", "block_sparse_moe.experts.0.w2"),
}
"""One matrix of each part by its name in a layer, and in which checkpoints it may stand for the part."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The types of a checkpoint's matrices, by their names in `ELEMENT_BYTES`; "": the model's own `dtype`.

    `attention`: of queries, keys, values and output; `weights`: of MLPs through which all tokens go, shared experts
    included; `experts`: of routed experts; `kv`: of the KV cache for which the checkpoint has scales. All else, such as
    embedding, output matrix, router and norms, is in the model's own.
    """

    weights: str = ""
    attention: str = ""
    experts: str = ""
    kv: str = ""

    __post_init__ = check_ranges

    def __str__(self) -> str:
        named = (("weights", self.weights), ("attention", self.attention), ("moe", self.experts), ("kv", self.kv))
        return ", ".join(f"{name} {dtype}" for name, dtype in named if dtype) or "none"


def read_quantisation(config: Mapping[str, object], name: str) -> Quantisation:
    """The types that a parsed config.json states. ScenarioError, headed `name`, for a method that is not known."""
    given = config.get("quantization_config") or config.get("hf_quant_config")
    if not given:
        return Quantisation()
    if not isinstance(given, dict):
        raise ScenarioError(f"{name}: quantization_config is {given!r}. A config.json holds an object there.")
    stated = cast("dict[str, Any]", given)
    stated = {**stated, **cast("dict[str, Any]", stated.get("quantization") or {})}
    stated_type, experts_only = _type_of(stated, name), stated.get("quant_method") == "mxfp4"
    kept = [str(item) for key in _IGNORED for item in cast("list[object]", stated.get(key) or [])]
    layers = config.get("num_hidden_layers")
    count = layers if type(layers) is int else 1
    types = {
        part: "" if (experts_only and part != "experts") or _mostly_kept(kept, modules, count) else stated_type
        for part, modules in _MODULES.items()
    }
    kv = stated.get("kv_cache_quant_algo") or stated.get("kv_cache_scheme")
    return Quantisation(**types, kv=_kv_type(kv, name))


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
    if groups := stated.get("config_groups"):
        types = {_type_of_group(cast("dict[str, Any]", group)) for group in groups.values()}
        if len(types) == 1 and (only := types.pop()):
            return only
    what = f"quant_method {method!r}" + (f", quant_algo {algorithm!r}" if algorithm else "")
    known = "fp8, fbgemm_fp8, mxfp4, modelopt (FP8, NVFP4), compressed-tensors, awq and gptq with one type of weights"
    raise ScenarioError(
        f"{name}: quantization_config has {what}, which is not known; known are {known}. Remove it from a copy of the"
        " file and state the types in the scenario: deployment: {weights: ..., moe: ..., kv: ...}."
    )


def _type_of_group(group: Mapping[str, Any]) -> str:
    """The type of the weights in one group of a compressed-tensors config; "" if it is not known."""
    weights = cast("dict[str, Any]", group.get("weights") or {})
    kind = _BY_BITS.get((str(weights.get("type")), weights.get("num_bits", 0)), "")
    if kind == "fp8" and weights.get("strategy") == "block":
        return "fp8_block"
    return "mxfp4" if kind == "nvfp4" and weights.get("group_size") == 32 else kind


def _kv_type(stated: object, name: str) -> str:
    if isinstance(stated, dict):
        scheme = cast("dict[str, Any]", stated)
        stated = _BY_BITS.get((str(scheme.get("type")), scheme.get("num_bits", 0)), scheme)
    kind = {"none": "", "": "", "fp8": "fp8", "nvfp4": "nvfp4", "int8": "int8"}.get(str(stated or "").lower())
    if kind is None:
        raise ScenarioError(f"{name}: the KV cache's type is stated as {stated!r}. Known are FP8, INT8 and NVFP4.")
    return kind


def _mostly_kept(kept: list[str], modules: tuple[str, ...], layers: int) -> bool:
    """Whether any of `modules` is named as not quantised in more than half of the layers."""
    if not kept:
        return False
    counts = (
        sum(any(_names(item, f"layers.{i}.{module}") for item in kept) for i in range(layers)) for module in modules
    )
    return any(2 * count > layers for count in counts)


def _names(item: str, module: str) -> bool:
    """Whether `item` of a list of modules that are not quantised means `module`, a path from `layers.` on."""
    if item.startswith("re:"):
        return re.match(item[3:], f"model.{module}") is not None
    own = item[item.find("layers.") :] if "layers." in item else item
    if "*" in own:
        return any(fnmatchcase(path, own) for path in (module, f"model.{module}")) or fnmatchcase(module, f"{own}.*")
    return f".{module}.".find(f".{own}.") >= 0
