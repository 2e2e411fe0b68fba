"""Reads from an engine's own start-up log how many tokens of KV it has room for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from batchsim.base.errors import ScenarioError
from batchsim.base.files import read_text, reason_text
from batchsim.deployment.models import checkpoint_names, read_model

_LINES = {
    "vllm": re.compile(r"GPU KV cache size: (\d[\d,]{0,20}) tokens"),
    "sglang": re.compile(r"\bmax_total_num_tokens=(\d{1,18})\b"),
    "tensorrt_llm": re.compile(r"Allocated [\d.]+ GiB for max tokens in paged KV cache \((\d{1,18})\)"),
}
"""The line of each engine: of vLLM one from each worker or engine core, of SGLang one from each scheduler, of
TensorRT-LLM one for each cache that it makes, of which the last stays."""

ALIKE = 0.05
"""Workers of one engine differ by what else is on their GPUs; by more than this share they are of several."""


HYBRID = 0.02
"""The share by which full contexts that fit, times their length, differ from the tokens where every layer keeps all:
blocks are whole. (vLLM prints both.)"""
_FULL = re.compile(r"Maximum concurrency for (\d[\d,]{0,15}) tokens per request: (\d{1,12}(?:\.\d{1,6})?)x")
_MODEL = re.compile(r"\b(?:model|model_path)='([^']{1,300})'")
_FP8 = re.compile(r"\bkv_cache_dtype='?fp8")
_TP = re.compile(r"\btensor_parallel_size=(\d+)")  # in what vLLM says of its configuration


def read_kv_tokens(path: Path, engine: str = "", tp: object = None, *, model: str = "", kv: str = "") -> int:
    """The tokens that the engine whose start-up log is at `path` has room for: the least of its workers'.

    ScenarioError, in one line, where there is no such file, no line of a known engine, or those of several; where the
    log is of another engine than `engine`, another model than `model`, another type of KV than `kv`, or vLLM's of
    another number of GPUs than `tp`, where these are known; and where it says that layers keep unlike numbers of
    tokens.
    """
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise ScenarioError(f"kv.log: {path} cannot be read: {reason_text(error)}. Give a start-up log.") from None
    by_engine = {engine: [int(n.replace(",", "")) for n in line.findall(text)] for engine, line in _LINES.items()}
    engines = [engine for engine, tokens in by_engine.items() if tokens]
    if not engines:
        raise ScenarioError(
            f"kv.log: {path} has no line that says how many tokens of KV fit: of vLLM 'GPU KV cache size: N tokens', of"
            " SGLang 'max_total_num_tokens=N', of TensorRT-LLM '... for max tokens in paged KV cache (N)'. Write kv:"
            " {tokens: N}."
        )
    if len(engines) > 1:
        raise ScenarioError(f"kv.log: {path} has lines of {' and '.join(engines)}. Keep those of one engine.")
    if engine in _LINES and engines[0] != engine:
        raise ScenarioError(f"kv.log: {path} is of {engines[0]}, and the deployment is of {engine}. Give its own log.")
    others = [n for n in _TP.findall(text) if tp is not None and n != str(tp)]
    if others:
        raise ScenarioError(f"kv.log: {path} is of tp {others[0]}, and the deployment has tp {tp}. Give its own log.")
    _check_model(text, path, model)
    if kv and (fp8 := bool(_FP8.search(text))) != kv.startswith("fp8"):
        logged, ours = ("fp8", kv) if fp8 else ("another type", kv)
        raise ScenarioError(
            f"kv.log: {path} is of KV in {logged}, and the deployment's is {ours}. Correct deployment.kv."
        )
    tokens = by_engine[engines[0]]
    _check_whole(text, tokens, path)
    return tokens[-1] if engines[0] == "tensorrt_llm" else _least(tokens, path)


def _check_model(text: str, path: Path, model: str) -> None:
    """ScenarioError where the log names a known model whose layers keep other KV than those of `model`."""
    known = {name.lower(): name for name in checkpoint_names()}
    by_end = {name.lower().rpartition("/")[2]: name for name in checkpoint_names()}
    for written in dict.fromkeys(_MODEL.findall(text)):
        name = written.lower().rstrip("/")
        if (config := known.get(name, by_end.get(name.rpartition("/")[2]))) is None or not model:
            continue
        theirs, ours = read_model(config), read_model(model)
        if [(each.count, each.attention) for each in theirs.kinds] != [
            (each.count, each.attention) for each in ours.kinds
        ]:
            raise ScenarioError(f"kv.log: {path} is of {written}, and the model is {ours.name}. Give its own log.")


def _check_whole(text: str, tokens: Sequence[int], path: Path) -> None:
    """ScenarioError where other numbers of full contexts fit than `tokens` hold, since layers keep unlike numbers of
    their tokens: one pool of `tokens` is then wrong for long requests."""
    for at, (length, count) in enumerate(_FULL.findall(text)):
        own, full = tokens[min(at, len(tokens) - 1)], int(length.replace(",", "")) * float(count)
        if abs(full - own) > HYBRID * own:
            raise ScenarioError(
                f"kv.log: {path} says {own:,} tokens, and that {count} requests of {length} fit, which are"
                f" {full:,.0f}: of a model whose layers keep unlike numbers of tokens. Write kv: {{tokens: N}}, {own:,}"
                f" for short requests, {full:,.0f} for such long ones."
            )


def _least(tokens: Sequence[int], path: Path) -> int:
    least, most = min(tokens), max(tokens)
    if least < (1 - ALIKE) * most or not least:
        raise ScenarioError(
            f"kv.log: {path} says {len(tokens)} times how many tokens of KV fit, from {least:,} to {most:,}: these are"
            " several engines or starts. Keep the lines of one, or write kv: {tokens: N}."
        )
    return least
