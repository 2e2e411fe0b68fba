"""Helpers of the tests of the SGLang policy: one run in one line, and prompts that share tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from batchsim.kernel.engine_loop import OVERLAP
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.tokens import TokenIds, prompt_stream
from batchsim.kernel.types import Arrival, Request
from batchsim.kv.radix_cache import RadixKV
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.policies.systems.sglang.sglang_drafts import SglangWithDrafts
from tests.support.stepping import HostCost, Run, run_alike
from tests.support.whole_batches import requests


def timeline(
    arrivals: str | list[Arrival], *, page: int = 4, tokens: int = 4000, max_model_len: int = 1000, **knobs: Any
) -> Run:
    """One run with a pool of `tokens` in pages of `page`, without chunks unless told; leaping must change nothing."""
    config = SglangConfig(**{"chunked_prefill_size": -1, **knobs})
    setting: dict[str, Any] = {"blocks": tokens // page, "block_size": page, "max_model_len": max_model_len}
    setting["kv"] = RadixKV if config.traits.prefix_cache else CountingKV
    return run_alike(SglangWithDrafts, config, arrivals, "live", "leap", **setting)


def overlapped(
    arrivals: str | list[Arrival], *, page: int = 4, tokens: int = 4000, max_model_len: int = 1000, **knobs: Any
) -> Run:
    """As `timeline`, with overlap and HostCost; every driver must leave the same records."""
    config = SglangConfig(**{"chunked_prefill_size": -1, **knobs})
    setting: dict[str, Any] = {"blocks": tokens // page, "block_size": page, "max_model_len": max_model_len}
    setting |= {"kv": RadixKV if config.traits.prefix_cache else CountingKV, "loop": OVERLAP, "cost": HostCost()}
    return run_alike(SglangWithDrafts, config, arrivals, **setting)


def steps(done: Run) -> list[tuple[int, list[tuple[int, int]]]]:
    return [(row.start_ns, row.items) for row in done.log]


def ignoring(text: str, *ids: int) -> list[Arrival]:
    """The requests of `text`; those of `ids` ignore the end of their text."""
    return [replace(a, request=replace(a.request, ignore_eos=a.request.id in ids)) for a in requests(text)]


def sharing(text: str, *prompts: tuple[tuple[int, int], ...]) -> list[Arrival]:
    """The requests of `text`, their prompts made of `(stream, tokens)` parts, each from the start of its stream."""
    shared = []
    for arrival, parts in zip(requests(text), prompts, strict=True):
        r = arrival.request
        tokens = TokenIds.of([(prompt_stream(stream), 0, length) for stream, length in parts])
        assert tokens.num_tokens == r.prompt_tokens
        request = Request(r.id, r.arrival_ns, r.prompt_tokens, r.max_output_tokens, r.priority, tokens=tokens)
        shared.append(Arrival(request, arrival.output_tokens))
    return shared
