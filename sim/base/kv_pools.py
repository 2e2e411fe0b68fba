"""Pools of KV beside that of layers that keep all tokens, as SGLang keeps a model whose layers are of several kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from batchsim.base.ranges import INT32_MAX, Config, PositiveInt, Range, check_ranges

SLIDE_EVERY = 128
"""Tokens out of its window after which a decode lets go of them: `SGLANG_SWA_EVICTION_INTERVAL` of SGLang 0.5.23."""
STATE_GRID = 64
"""Tokens from where a step began at whose multiples a state can be kept within it, with an extra buffer."""
STATE_TRACKED = 256
"""Tokens at whose multiples an answer's states are kept, with an extra buffer: SGLang's `mamba_track_interval`."""


class WindowDemand(NamedTuple):
    """What bounds the other pools of an engine that finds no prefixes again: `requests` that run at once, and the
    tokens of prompts in its steps in flight, 0 where prompts are not cut."""

    requests: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class KvPools(Config):
    """What is beside the pool of `kv.tokens`: that of layers with a window, or of states of linear layers."""

    window: Annotated[int, Range(2, INT32_MAX)] | None = None
    """Tokens that a layer with a window attends to, its own among them."""
    window_tokens: PositiveInt | None = None
    """Tokens for which the pool of these layers has room (`swa_layer_tokens`)."""
    slide_every: PositiveInt = SLIDE_EVERY
    """Tokens out of the window after which a decode lets go of them."""
    states: PositiveInt | None = None
    """States of linear layers that fit (`max_mamba_cache_size`)."""
    extra_buffer: bool = False
    """Whether states are kept within steps, in slots beside a request's own (`mamba_scheduler_strategy`)."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if (self.window is None) != (self.window_tokens is None):
            raise ValueError("window and window_tokens go together. Write both")
        if (self.window is None) == (self.states is None):
            raise ValueError("pools are of windows or of states. Write window and window_tokens, or states")
        if self.states is None and self.extra_buffer:
            raise ValueError("extra_buffer is of states, and there are none. Leave it out")
        if self.window is None and self.slide_every != SLIDE_EVERY:
            raise ValueError("slide_every is of windows, and there are none. Leave it out")

    def __str__(self) -> str:
        if self.states is not None:
            return f"{self.states:,} states{' with an extra buffer' if self.extra_buffer else ''}"
        return f"windows of {self.window:,}: {self.window_tokens:,} tokens"
