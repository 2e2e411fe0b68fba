"""Pools of KV beside that of layers that keep all tokens, as SGLang keeps a model whose layers are of several kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from batchsim.base.ranges import INT32_MAX, Config, PositiveInt, Range, check_ranges

SLIDE_EVERY = 128
"""Tokens out of its window after which a decode lets go of them: `SGLANG_SWA_EVICTION_INTERVAL` of SGLang 0.5.23."""


class WindowDemand(NamedTuple):
    """What bounds the windows of an engine that finds no prefixes again: `requests` that run at once, and the tokens
    of prompts in its steps in flight."""

    requests: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class KvPools(Config):
    """What is beside the pool of `kv.tokens`, in pages of the same size: that of layers with a window."""

    window: Annotated[int, Range(2, INT32_MAX)]
    """Tokens that a layer with a window attends to, its own among them."""
    window_tokens: PositiveInt
    """Tokens for which the pool of these layers has room (`swa_layer_tokens`)."""
    slide_every: PositiveInt = SLIDE_EVERY
    """Tokens out of the window after which a decode lets go of them."""

    def __post_init__(self) -> None:
        check_ranges(self)

    def __str__(self) -> str:
        return f"windows of {self.window:,}: {self.window_tokens:,} tokens"
