"""The flags of `trtllm-serve`, and the options of the YAML file that they may name.

Source: nvidia.github.io/TensorRT-LLM, "trtllm-serve" and the deployment guides, 0.18 to 1.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from batchsim.base.errors import ScenarioError, cut, nearest, shown
from batchsim.base.files import read_text, reason_text
from batchsim.scenario.command_lines.flags import (
    Engine,
    Flag,
    Keys,
    as_share,
    integer,
    one_of,
    share,
)
from batchsim.scenario.document import read_document

_KV = one_of(auto=None, fp8="fp8", nvfp4="nvfp4", bfloat16="bfloat16")
_POLICIES = ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH")
_CHUNKING = ("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS")


def _pytorch(text: str) -> None:
    if text != "pytorch":
        raise ValueError(
            "one of pytorch: no tables time the kernels of others. What TensorRT engines schedule is the knob backend:"
            " tensorrt of policy tensorrt_llm"
        )


def _upper(*known: str) -> Any:
    return one_of(**{word.lower(): word for word in known})


_FLAGS = (
    Flag("deployment.tp", "--tp_size", ("--tp",)),
    Flag("deployment.pp", "--pp_size", ("--pp",)),
    Flag("deployment.ep", "--ep_size", ("--ep",)),
    Flag("deployment.kv", "--kv_cache_dtype", read=_KV),
    Flag("max_model_len", "--max_seq_len"),
    Flag("kv.utilisation", "--kv_cache_free_gpu_memory_fraction", ("--free_gpu_memory_fraction",), share, as_share),
    Flag("policy.max_batch_size", "--max_batch_size"),
    Flag("policy.max_num_tokens", "--max_num_tokens"),
    Flag("policy.enable_chunked_prefill", "--enable_chunked_prefill", read=None),
    Flag("", "--backend", read=_pytorch),
    Flag("", "--max_beam_width", read=one_of(**{"1": None})),
    Flag("options", "--config", ("--extra_llm_api_options",), read=str),
)
_BOOL = one_of(true=True, false=False)
_OPTIONS = {
    "tensor_parallel_size": ("deployment.tp", integer),
    "pipeline_parallel_size": ("deployment.pp", integer),
    "moe_expert_parallel_size": ("deployment.ep", integer),
    "enable_attention_dp": ("dp_attention", _BOOL),
    "kv_cache_config.dtype": ("deployment.kv", _KV),
    "kv_cache_config.free_gpu_memory_fraction": ("kv.utilisation", share),
    "kv_cache_config.tokens_per_block": ("kv.block_size", integer),
    "kv_cache_config.max_tokens": ("kv.tokens", integer),
    "kv_cache_config.enable_block_reuse": ("policy.enable_block_reuse", _BOOL),
    "kv_cache_config.enable_partial_reuse": ("policy.enable_partial_reuse", _BOOL),
    "kv_cache_config.host_cache_size": ("policy.host_cache_size", integer),
    "kv_cache_config.use_kv_cache_manager_v2": ("", one_of(false=None, auto=None)),
    "backend": ("", _pytorch),
    "max_batch_size": ("policy.max_batch_size", integer),
    "max_num_tokens": ("policy.max_num_tokens", integer),
    "max_seq_len": ("max_model_len", integer),
    "enable_chunked_prefill": ("policy.enable_chunked_prefill", _BOOL),
    "disable_overlap_scheduler": ("policy.disable_overlap_scheduler", _BOOL),
    "scheduler_config.capacity_scheduler_policy": ("policy.capacity_scheduler_policy", _upper(*_POLICIES)),
    "scheduler_config.context_chunking_policy": ("policy.context_chunking_policy", _upper(*_CHUNKING)),
    "scheduler_config.use_python_scheduler": ("", one_of(false=None)),
}
"""Of each option of the YAML file that has a counterpart: the key, and the reader of its value."""


def options_of(path: str) -> Keys:
    """The keys that the YAML file at `path` sets. ScenarioError, with file and line, for an option that is unknown."""
    try:
        document = read_document(read_text(Path(path)), path)
    except (OSError, ValueError) as error:
        raise ScenarioError(
            f"{path}: cannot be read: {reason_text(error)}. It is the file of options that the command names."
        ) from None
    keys: Keys = {}
    if not isinstance(options := {} if document.value is None else document.value, dict):
        raise ScenarioError(f"{path}: holds {shown(options)}, no options by name. Write lines like max_batch_size: 64.")
    flat, same = list(_flat(options, "")), TENSORRT_LLM.others.same_options
    for name, value in flat:
        where = f"{document.where(tuple(name.split('.')))}: {name}"
        if sum(name == other for other, _ in flat) > 1:
            raise ScenarioError(f"{where} is given twice, once with its owner before a dot. Keep one.")
        if name in same:
            continue
        if name not in _OPTIONS:
            advice = nearest(name, [*_OPTIONS, *same], "Leave it out if it does not change timing.")
            raise ScenarioError(f"{where} is no option that is known of TensorRT-LLM. {advice}")
        key, read = _OPTIONS[name]
        text = str(value).lower() if isinstance(value, bool) else str(value)
        try:
            meant = read(text)
        except ValueError as error:
            raise ScenarioError(f"{where} is {cut(text)!r}. Write {error}.") from None
        if meant is not None:
            keys[key] = meant
    return keys


def _flat(options: dict[str, Any], owner: str) -> Iterator[tuple[str, Any]]:
    """Every option under its dotted name."""
    for key, value in options.items():
        name = f"{owner}{key}"
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def option_lines(keys: Keys) -> list[str]:
    """The lines of a YAML file that says `keys`, as far as options do; these are taken out of `keys`."""
    tree: dict[str, Any] = {}
    for name, (key, _) in _OPTIONS.items():
        if key in keys and not any(flag.key == key and flag.read is not None for flag in _FLAGS):
            value, (*owner, last) = keys.pop(key), name.split(".")
            text = str(value).lower() if isinstance(value, bool) else str(value)
            block = tree.setdefault(owner[0], {}) if owner else tree
            block[last] = text
    lines: list[str] = []
    for name, value in tree.items():
        lines += [f"{name}: {value}"] if isinstance(value, str) else [f"{name}:"]
        lines += [] if isinstance(value, str) else [f"  {inner}: {text}" for inner, text in value.items()]
    return lines


def _settle(keys: Keys) -> None:
    """TensorRT-LLM's tp is of all GPUs of a stage; with attention in parallel each of them is a group."""
    if keys.pop("dp_attention", False):
        keys["deployment.dp_attention"] = keys.pop("deployment.tp", 1)


def _unsettle(keys: Keys) -> None:
    groups = keys.pop("deployment.dp_attention", 1)
    if groups > 1:
        if keys.get("deployment.tp", 1) > 1:
            raise ScenarioError("TensorRT-LLM's groups of attention are of one GPU each, and tp is above 1.")
        keys |= {"deployment.tp": groups, "dp_attention": True}


TENSORRT_LLM = Engine(
    "tensorrt_llm",
    "TensorRT-LLM",
    (("trtllm-serve",), ("trtllm-serve", "serve")),
    _FLAGS,
    (),
    lambda name: f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name,
    _settle,
    _unsettle,
    options=options_of,
    option_lines=option_lines,
)
