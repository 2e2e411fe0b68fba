"""Reads from an engine's own start-up log how many tokens of KV it has room for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from batchsim.base.errors import ScenarioError
from batchsim.base.files import read_text, reason_text

_LINES = {
    "vllm": re.compile(r"GPU KV cache size: (\d[\d,]{0,20}) tokens"),
    "sglang": re.compile(r"\bmax_total_num_tokens=(\d{1,18})\b"),
    "tensorrt_llm": re.compile(r"Allocated [\d.]+ GiB for max tokens in paged KV cache \((\d{1,18})\)"),
}
"""The line of each engine: of vLLM one from each worker or engine core, of SGLang one from each scheduler, of
TensorRT-LLM one for each cache that it makes, of which the last stays."""

ALIKE = 0.05
"""Workers of one engine differ by what else is on their GPUs; by more than this share they are of several."""


_TP = re.compile(r"\btensor_parallel_size=(\d+)")  # in what vLLM says of its configuration


def read_kv_tokens(path: Path, engine: str = "", tp: object = None) -> int:
    """The tokens that the engine whose start-up log is at `path` has room for: the least of its workers'.

    ScenarioError, in one line, where there is no such file, no line of a known engine, or those of several; and where
    the log is of another engine than `engine`, or vLLM's of another number of GPUs than `tp`, where these are known.
    """
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise ScenarioError(f"kv.log: {path} cannot be read: {reason_text(error)}. Give a start-up log.") from None
    found = {engine: [int(n.replace(",", "")) for n in line.findall(text)] for engine, line in _LINES.items()}
    engines = [engine for engine, tokens in found.items() if tokens]
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
    tokens = found[engines[0]]
    return tokens[-1] if engines[0] == "tensorrt_llm" else _least(tokens, path)


def _least(tokens: Sequence[int], path: Path) -> int:
    least, most = min(tokens), max(tokens)
    if least < (1 - ALIKE) * most or not least:
        raise ScenarioError(
            f"kv.log: {path} says {len(tokens)} times how many tokens of KV fit, from {least:,} to {most:,}: these are"
            " several engines or starts. Keep the lines of one, or write kv: {tokens: N}."
        )
    return least
