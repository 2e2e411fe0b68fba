"""Models as the kernel tables need them: a config.json of the shape that is asked for, of their own or made for it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

from batchsim.base.errors import ScenarioError
from batchsim.base.files import read_json, write_text
from batchsim.cost.profile import work_of
from batchsim.deployment.layers import Experts, GroupedAttention
from batchsim.deployment.model import ModelSpec
from batchsim.tables.modes import PACKAGE, WAYS_OUT, NoTablesError


@contextmanager
def model_folder(model: ModelSpec, weight_dtype: str) -> Iterator[tuple[str, str]]:
    """(id, folder with config.json) of the model of the tables that has the shape of `model`.

    A folder, since the package would ask the network for what it does not call its own.
    """
    work = work_of(model)
    known = {name: config for name, config in _configs().items() if _works()[name] == work}
    if not known and (plain := _plain_config(model)):
        known = {f"a plain {plain['architectures'][0]}": plain}
    if not known:
        raise NoTablesError(
            f"model: {PACKAGE} has no model of the shape of {model.name}, so no graph of kernels. {WAYS_OUT}"
        )
    mark = {"nvfp4": "NVFP4", "fp8": "FP8", "fp8_block": "FP8"}.get(weight_dtype, "")
    others = {each: config.get("model_type") != model.model_type for each, config in known.items()}
    name = min(known, key=lambda each: (each != model.name, others[each], mark not in each, len(each), each))
    with tempfile.TemporaryDirectory() as folder:
        write_text(Path(folder, "config.json"), json.dumps(known[name]))
        yield name, folder


def _plain_config(model: ModelSpec) -> dict[str, Any] | None:
    """The config.json of a decoder of that shape whose layers are alike, with full grouped attention and one MLP or a
    mixture without shared experts: for these the tables need no model of their own. None for any other."""
    first, *others = model.kinds
    attention, mlp = first.attention, first.mlp
    if others or not isinstance(attention, GroupedAttention) or attention.window or getattr(mlp, "shared_width", 0):
        return None
    normed = model.model_type.startswith("qwen3")  # with a norm of queries and keys, which the tables time
    experts = isinstance(mlp, Experts)
    kind = {(True, False): "Qwen3", (True, True): "Qwen3Moe", (False, False): "Llama", (False, True): "Mixtral"}
    config: dict[str, Any] = {
        "architectures": [f"{kind[normed, experts]}ForCausalLM"],
        "model_type": {"Qwen3Moe": "qwen3_moe"}.get(kind[normed, experts], kind[normed, experts].lower()),
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": mlp.width,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    if isinstance(mlp, Experts):
        count = "num_experts" if normed else "num_local_experts"
        config |= {count: mlp.count, "num_experts_per_tok": mlp.per_token, "moe_intermediate_size": mlp.width}
    return config


@cache
def _works() -> dict[str, dict[str, Any] | None]:
    """`work_of` of every model of the tables by its id; None of one that is not understood."""
    return {name: _work(config, name) for name, config in _configs().items()}


def _work(config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The work in a config.json. No type changes it, and so the long lists of unquantised modules are not read."""
    plain: dict[str, Any] = {"hf_quant_config": None}
    if "quantization_config" in config:
        plain["quantization_config"] = {"quant_method": "fp8"}
    try:
        return work_of(spec_of(config | plain, name))
    except ScenarioError:
        return None


def spec_of(config: dict[str, Any], name: str) -> ModelSpec:
    """The shape in a config.json of the tables."""
    return ModelSpec.from_config(config, name)


@cache
def _configs() -> dict[str, dict[str, Any]]:
    """The config.json of every model of the tables by its id."""
    return {name: config for name, config in _files("_config.json").items() if not name.endswith("_hf_quant")}


def _files(end: str) -> dict[str, dict[str, Any]]:
    """The files of the tables' models whose names end so, by the id before that."""
    from importlib import resources

    folder = resources.files("aiconfigurator_core") / "model_configs"
    files = {item.name: item for item in folder.iterdir() if item.name.endswith(end)}
    return {
        name.removesuffix(end).replace("--", "/", 1): cast("dict[str, Any]", read_json(str(item)))
        for name, item in sorted(files.items())
    }


def models() -> list[str]:
    """The ids of the models of the tables."""
    return list(_configs())


def model_spec(model_id: str) -> ModelSpec:
    """The shape of the tables' model of that id, with the types of its checkpoint. ScenarioError if it is not
    understood."""
    types = _files("_hf_quant_config.json").get(model_id)
    return spec_of(_configs()[model_id] | ({"hf_quant_config": types} if types else {}), model_id)
