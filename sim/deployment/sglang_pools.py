"""How SGLang divides its memory for KV where layers are of several kinds: pools apart, each with slots of its own.

Source: python/sglang/srt/mem_cache and model_executor/pool_configurator.py of the 0.5.23 wheel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchsim.base.errors import ScenarioError
from batchsim.base.kv_pools import SLIDE_EVERY
from batchsim.deployment.layers import Layers, LinearAttention
from batchsim.deployment.model import ModelSpec

STATES_SHARE = 0.9
"""`mamba_full_memory_ratio`: bytes of states for each byte of KV."""
WINDOW_SHARE = 0.8
"""`swa_full_tokens_ratio`: tokens of layers with a window for each token of full ones; of DeepSeek-V4 0.1."""
BUFFERED = ("qwen3_5", "qwen3_5_moe")
"""Model types whose states have buffers beside (`extra_buffer`) where nothing is said, as their class allows."""


@dataclass(frozen=True, slots=True)
class SglangPools:
    """Slots of each pool: `full_tokens` (`max_total_num_tokens`) of layers that keep all tokens, `window_tokens` of
    those with a window, `states` of linear layers, of which a running request has `slots`; None where there is no such
    pool."""

    full_tokens: int
    window_tokens: int | None = None
    states: int | None = None
    slots: int = 1

    @property
    def max_running_requests(self) -> int | None:
        """Requests that can run at once, for their states' sake; None where there are none."""
        return None if self.states is None else self.states // self.slots


def slots_of(model: ModelSpec, *, radix_cache: bool = True, overlap: bool = True) -> int:
    """States that SGLang sets aside for a running request: one without its radix cache, else three, and with buffers
    one more, or two where the next step is scheduled while one runs."""
    if not radix_cache:
        return 1
    return 3 + (1 + overlap if model.model_type in BUFFERED else 0)


def state_bytes(layers: Sequence[Layers], tp: int, element: int) -> int:
    """Bytes of one state of all linear layers on each of `tp` GPUs, with `element` bytes an element of the model."""
    size = 0
    for each in layers:
        if isinstance(each.attention, LinearAttention):
            size += each.count * each.attention.state_bytes(tp, element)
    return size


def pools_with_states(
    room: int,
    token_bytes: float,
    state: int,
    slots: int,
    *,
    share: float = STATES_SHARE,
    drafts: int = 0,
    asked: int | None = None,
) -> SglangPools:
    """The pools of a model with states of `state` bytes in `room` bytes of a GPU, where a token has `token_bytes`.

    `slots`: states of a running request; each has one more of `drafts` draft tokens, and a slot is for padding.
    ScenarioError where there is no room for one request.
    """
    for_states = room * share / (1 + share) if asked is None else float(state * (asked + 1))
    states = asked if asked is not None else int((for_states - state * (1 + drafts)) // (state * (1 + drafts / slots)))
    pools = SglangPools(int((room - for_states) // token_bytes), None, states, slots)
    if states < slots or pools.full_tokens < 1:
        raise ScenarioError(
            f"{room / 1e9:.1f} GB hold {max(states, 0)} states of {state / 1e6:.1f} MB, and a request has {slots}. Use"
            " more GPUs, or a smaller model."
        )
    return pools


def pools_with_windows(
    room: int, full_bytes: float, window_bytes: float, *, share: float = WINDOW_SHARE, window_cap: int | None = None
) -> SglangPools:
    """The pools of a model with windows in `room` bytes of a GPU, where a token has `full_bytes` in layers that keep it
    and `window_bytes` in those with a window. `window_cap`: the tokens of the latter, as by `window_tokens`."""
    if window_cap is not None:
        return SglangPools(int((room - window_cap * window_bytes) // full_bytes), window_cap)
    full = int(room // (full_bytes + share * window_bytes))
    return SglangPools(full, int(share * full))


def window_tokens(requests: int, window: int, *, chunks: int, page: int = 1, every: int = SLIDE_EVERY) -> int:
    """The most tokens that windows of `requests` requests take, where no radix cache keeps more: the `window` tokens
    before a token's own, the `every` that decode until blocks are let go, and `chunks`, the tokens of prompts in the
    steps in flight."""
    return requests * (window + every + 2 * page) + chunks + page
