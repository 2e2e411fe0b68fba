"""Reads from an engine's own start-up log how much room for KV it has, and whether the log can be of the scenario.

What vLLM prints (vllm/v1/core/kv_cache_utils.py): up to 0.20 `GPU KV cache size` is whole blocks over the groups of
layers that share a pool, and `Maximum concurrency` blocks over those of a longest request; from 0.21 on the former is
the latter times that length. Of a model whose layers all keep everything both are the pool. Of one with windows or
states they are not: `logged_groups` finds how many blocks they are of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

from batchsim.base.errors import ScenarioError
from batchsim.base.files import read_text, reason_text
from batchsim.base.kv_pools import KvPools
from batchsim.deployment.kv_groups import has_layout, has_states
from batchsim.deployment.layers import GroupedAttention
from batchsim.deployment.log_lines import (
    ALIKE,
    ALLOCATED,
    BLOCK,
    DEGREES,
    DRAFTER,
    DRAFTS,
    FAILED,
    FP8,
    FULL,
    LINES,
    MODEL,
    SERVES,
    STATES,
    TWO_POOLS,
    VERSION,
    Logged,
    Wanted,
)
from batchsim.deployment.logged_groups import block_bytes, check_states, groups_in
from batchsim.deployment.model import ModelSpec
from batchsim.deployment.models import checkpoint_names, read_model
from batchsim.deployment.on_gpus import ModelOnGpus
from batchsim.deployment.quantisation import ELEMENT_BYTES
from batchsim.deployment.vllm_memory import GIB, release

_PRINTED = 0.0051
"""By how many GiB a size may be off that is printed with two digits."""


def read_kv_log(path: Path, wanted: Wanted) -> Logged:
    """The room for KV of the engine whose start-up log is at `path`: of several workers that of the least.

    ScenarioError, in one line, where there is no such file, no line of a known engine, or those of several; where the
    start failed; where the log is of another engine, version, model, number of GPUs, type of KV, size of blocks, or way
    of drafting than is `wanted`; and where its numbers are not those of one pool that can be.
    """
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise ScenarioError(f"kv.log: {path} cannot be read: {reason_text(error)}. Give a start-up log.") from None
    by_engine = {engine: [int(n.replace(",", "")) for n in line.findall(text)] for engine, line in LINES.items()}
    engines = [engine for engine, tokens in by_engine.items() if tokens]
    _check_start(text, path)
    if not engines:
        raise ScenarioError(
            f"kv.log: {path} has no line that says how many tokens of KV fit: of vLLM 'GPU KV cache size: N tokens', of"
            " SGLang 'max_total_num_tokens=N', of TensorRT-LLM '... for max tokens in paged KV cache (N)'. Write kv:"
            " {tokens: N}."
        )
    if len(engines) > 1:
        raise ScenarioError(f"kv.log: {path} has lines of {' and '.join(engines)}. Keep those of one engine.")
    engine, tokens = engines[0], by_engine[engines[0]]
    version = next(iter(VERSION.findall(text)), "")
    _check_deployment(text, path, wanted, engine, version)
    of_engine = DRAFTER.sub("", text)  # without the name of a draft model
    model, names = _check_model(of_engine, path, wanted.model)
    source = " ".join(("from the log", path.name + ":", ", ".join([f"{engine} {version}".strip(), *names])))
    least = tokens[-1] if engine == "tensorrt_llm" else _least(tokens, path)
    if model is not None:
        _check_known(path, model)
    if model is not None and engine == "vllm" and _keeps_unlike(model):
        grouped, num_blocks = groups_in(text, path, model, wanted, version, least)
        layout = replace(grouped.layout, block_bytes=block_bytes(grouped, model, wanted))
        if has_layout(model):
            return Logged(None, None, f"{source}, {num_blocks:,} blocks with the null block", layout, num_blocks)
        return Logged(None, num_blocks * (layout.block_bytes or 0), source)
    if model is not None and has_states(model):
        check_states(text, path, model, wanted, engine)
    if pools := TWO_POOLS.search(text):
        window = max((each.attention.window or 0 for each in model.kinds), default=0) if model is not None else 0
        if window < 2:
            raise ScenarioError(
                f"kv.log: {path} says {int(pools[1]):,} tokens of layers that keep all, and {int(pools[2]):,} of layers"
                f" with a window, and {wanted.model or 'the model'} is not known to have any. Write kv: {{tokens:"
                f" {pools[1]}, pools: {{window: ..., window_tokens: {pools[2]}}}}}."
            )
        return Logged(int(pools[1]), None, source, pools=KvPools(window, int(pools[2])))
    if engine == "tensorrt_llm" and model is not None:
        _check_allocated(text, path, model, wanted)
    if engine == "vllm":
        _check_pool(text, tokens, path, wanted.block_size, version)
    return Logged(least, None, source)


def _check_start(text: str, path: Path) -> None:
    """ScenarioError where the start failed after all, or several are in one log of which the last one did."""
    failures = list(FAILED.finditer(text))
    if failures and not SERVES.search(text, failures[-1].end()):
        begin = text.rfind("\n", 0, failures[-1].start()) + 1
        line = text[begin : text.find("\n", failures[-1].end()) if "\n" in text[failures[-1].end() :] else None]
        shown = " ".join("".join(filter(str.isprintable, line.expandtabs())).split())
        shown = shown if len(shown) <= 100 else failures[-1].group()
        raise ScenarioError(
            f"kv.log: {path} is of a start that failed: '{shown}'. Give the log of one that served, or write kv:"
            " {tokens: N}."
        )


def _check_deployment(text: str, path: Path, wanted: Wanted, engine: str, version: str) -> None:
    """ScenarioError where the log is of another deployment than is `wanted`."""
    if wanted.engine in LINES and engine != wanted.engine:
        raise ScenarioError(
            f"kv.log: {path} is of {engine}, and the deployment is of {wanted.engine}. Give its own log."
        )
    if wanted.version and version and release(version)[:2] != release(wanted.version)[:2]:
        raise ScenarioError(
            f"kv.log: {path} is of {engine} {version}, and the deployment asks for {wanted.version}. Give its own log,"
            f" or write version: {version}."
        )
    for name, pattern in DEGREES.items():
        asked = getattr(wanted, name)
        others = [n for n in pattern.findall(text) if asked is not None and n != str(asked)]
        if others:
            raise ScenarioError(
                f"kv.log: {path} is of {name} {others[0]}, and the deployment has {name} {asked}. Give its own log."
            )
    says_type = engine != "tensorrt_llm" or FP8.search(text)  # which says bytes instead
    if wanted.kv and says_type and (fp8 := bool(FP8.search(text))) != wanted.kv.startswith("fp8"):
        logged, ours = ("fp8", wanted.kv) if fp8 else ("another type", wanted.kv)
        raise ScenarioError(
            f"kv.log: {path} is of KV in {logged}, and the deployment's is {ours}. Correct deployment.kv."
        )
    blocks = [n for n in BLOCK.findall(text) if int(n) != wanted.block_size]
    if blocks:
        raise ScenarioError(
            f"kv.log: {path} is of blocks of {blocks[0]}, and kv.block_size is {wanted.block_size}. Write block_size:"
            f" {blocks[0]}."
        )
    lengths = [length for length, _ in FULL.findall(text)]
    if wanted.max_model_len is not None and lengths and int(lengths[0].replace(",", "")) != wanted.max_model_len:
        raise ScenarioError(
            f"kv.log: {path} is of a longest request of {lengths[0]} tokens, and max_model_len is"
            f" {wanted.max_model_len:,}. Write max_model_len: {lengths[0].replace(',', '')}, or give its own log."
        )
    drafts = {said != "None" for said in DRAFTS.findall(text)}
    if wanted.drafts is not None and drafts and drafts != {wanted.drafts}:
        theirs, ours = ("drafts", "no policy does") if not wanted.drafts else ("does not draft", "a policy does")
        raise ScenarioError(
            f"kv.log: {path} is of an engine that {theirs}, and {ours}: a drafter's weights and layers are a part of"
            " the memory. Give its own log."
        )


def _check_model(text: str, path: Path, model: str) -> tuple[ModelSpec | None, list[str]]:
    """The scenario's model, None where it is not known, and the names of the log's, each with a word where neither the
    catalog nor the scenario has it, since its layers are then taken for those of the scenario's. ScenarioError where
    the log names a known model whose layers keep other KV, or where it is of layers that keep more than KV."""
    ours = read_model(model) if model else None
    kept = ours is not None and has_states(ours)
    if (states := STATES.search(text)) and not kept:
        raise ScenarioError(
            f"kv.log: {path} has {states.group().rstrip(chr(39))!r}: of a model whose layers keep states or compressed"
            " KV beside tokens, so that its numbers are of no single pool. Give the log of a model that has one."
        )
    by_end = {_end(name): name for name in checkpoint_names()}
    said = list[str]()
    for written in dict.fromkeys(MODEL.findall(text)):
        config = by_end.get(_end(written))
        is_unknown = ours is not None and config is None and _end(written) != _end(ours.name)
        said.append(f"{written} (unknown, taken for {ours.name})" if ours and is_unknown else written)
        if config is None or ours is None:
            continue
        try:
            theirs = [(each.count, each.attention) for each in read_model(config).kinds]
        except ScenarioError:
            theirs = []  # of layers that are not known, which those of a scenario are
        if theirs != [(each.count, each.attention) for each in ours.kinds]:
            raise ScenarioError(f"kv.log: {path} is of {written}, and the model is {ours.name}. Give its own log.")
    return ours, said


def _end(name: str) -> str:
    """The name of a model without its owner or folder, as cases do not tell them apart."""
    return name.lower().rstrip("/").replace("--", "/").rpartition("/")[2].removesuffix(".json")


def _keeps_unlike(model: ModelSpec) -> bool:
    """Whether any layer keeps less than all tokens."""
    return has_states(model) or any(each.attention.window for each in model.kinds)


def _check_known(path: Path, model: ModelSpec) -> None:
    """ScenarioError where what the model keeps of a request is not known."""
    if any(each.attention.kind == "compressed" for each in model.kinds):
        raise ScenarioError(
            f"kv.log: {path} is of {model.name}, whose compressed attention keeps states in blocks that no number of a"
            " log says. Write kv: {memory: ..., per_token: ..., per_request: ...}."
        )


def _check_allocated(text: str, path: Path, model: ModelSpec, wanted: Wanted) -> None:
    """ScenarioError where the GiB of TensorRT-LLM's last line, over its tokens, are not what the model keeps of one on
    each of the deployment's GPUs. Only of models whose layers all keep the keys and values of every token, on GPUs of
    one stage: of others it is not known what the line says. Two public logs are so to the digits that they print."""
    said = ALLOCATED.findall(text)
    plain = all(isinstance(each.attention, GroupedAttention) and not each.attention.window for each in model.kinds)
    if not (plain and said and isinstance(wanted.tp, int) and wanted.pp == 1):
        return
    gib, tokens = float(said[-1][0]), int(said[-1][1])
    types = [wanted.kv] if wanted.kv in ELEMENT_BYTES else ["", "fp8"]
    known = [ModelOnGpus(model, engine="tensorrt_llm", tp=wanted.tp, kv_dtype=kv).kv_bytes_per_token for kv in types]
    if not any(abs(tokens * size / GIB - gib) <= _PRINTED for size in known):
        raise ScenarioError(
            f"kv.log: {path} says {gib:g} GiB for {tokens:,} tokens, {gib * GIB / max(tokens, 1):,.0f} B a token, of"
            f" which {model.name} keeps {' or '.join(f'{size:,}' for size in known)} B on each of {wanted.tp} GPUs."
            " Give its own log."
        )


def _check_pool(text: str, tokens: Sequence[int], path: Path, block_size: int, version: str) -> None:
    """ScenarioError where `tokens` of vLLM's lines are no whole number of blocks, or other numbers of longest requests
    fit than these blocks hold: they are then of several groups of layers."""
    said = [(int(length.replace(",", "")), float(count)) for length, count in FULL.findall(text)]
    for at, own in enumerate(tokens):
        length, count = said[min(at, len(said) - 1)] if said else (0, 0.0)
        blocks = own // block_size if not own % block_size else None
        if length and release(version) >= (0, 21) and (version or blocks is None):
            most = ceil(length / block_size)  # blocks of a longest request
            whole = ceil(own * most / length)
            blocks = whole if int(whole * length / most) == own else None
        if blocks is None:
            raise ScenarioError(
                f"kv.log: {path} says {own:,} tokens, no whole number of blocks of {block_size}: of other blocks, or"
                " of a model whose layers keep unlike numbers of tokens. Write kv.block_size, or kv: {tokens: N}."
            )
        if length and abs(blocks / ceil(length / block_size) - count) > 0.0051:
            raise ScenarioError(
                f"kv.log: {path} says {own:,} tokens, and that {count:g} requests of {length:,} fit, which are"
                f" {length * count:,.0f}: of a model whose layers keep unlike numbers of tokens, so that neither is one"
                " pool. Give the log of your model, or write kv: {tokens: N}."
            )


def _least(tokens: Sequence[int], path: Path) -> int:
    least, most = min(tokens), max(tokens)
    if not most:
        raise ScenarioError(f"kv.log: {path} says that 0 tokens of KV fit. Give the log of an engine that came up.")
    if least < (1 - ALIKE) * most:
        raise ScenarioError(
            f"kv.log: {path} says {len(tokens)} times how many tokens of KV fit, from {least:,} to {most:,}: these are"
            " several engines or starts. Keep the lines of one, or write kv: {tokens: N}."
        )
    return least
