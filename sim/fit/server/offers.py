"""What a server says of itself: its models, version and metrics, under the names of vLLM, SGLang or llama.cpp."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchsim.base.errors import MeasuredError, shown
from batchsim.fit.server.client import Client
from batchsim.fit.server.refusals import RequestError, refused

_LINE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+([^\s]+)")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')

GAUGES = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred"),
    "kv_share": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
}
"""Of a moment: requests that run and wait, and the share of KV in use."""
COUNTERS = {
    "preemptions": (
        "vllm:num_preemptions_total",
        "sglang:num_retracted_requests_total",
        "sglang:num_retractions_total",
    ),
    "steps": ("vllm:iteration_tokens_total_count", "llamacpp:n_decode_total"),
    "step_tokens": ("vllm:iteration_tokens_total_sum",),
    "cached_tokens": ("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total"),
    "prompt_tokens": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total", "llamacpp:prompt_tokens_total"),
    "output_tokens": (
        "vllm:generation_tokens_total",
        "sglang:generation_tokens_total",
        "llamacpp:tokens_predicted_total",
    ),
}
"""Since the server began: preempted requests, steps and their tokens, prompt tokens found cached, tokens in and out."""


@dataclass(frozen=True)
class Metrics:
    """The metrics at one time: `values` by name, summed over labels, and the `cache` settings that vLLM exports."""

    values: Mapping[str, float]
    cache: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def parse(cls, text: str) -> Metrics:
        """Prometheus' text form. Lines that are not of it are passed over: metrics are a help, not a measurement."""
        values: dict[str, float] = {}
        cache: dict[str, str] = {}
        for line in text.splitlines():
            if (match := _LINE.match(line)) is None:
                continue
            name, labels, number = match.groups()
            try:
                value = float(number)
            except ValueError:
                continue
            values[name] = values.get(name, 0.0) + value
            if name == "vllm:cache_config_info":
                cache = dict(_LABEL.findall(labels or ""))
        return cls(values, cache)

    def known(self, names: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
        """Values of GAUGES or COUNTERS (`names`) that this server exports, by our name."""
        values = {name: next((self.values[one] for one in theirs if one in self.values), None)
                  for name, theirs in names.items()}  # fmt: skip
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Offer:
    """A server: the `model` to ask for, the most tokens of a request (None: unknown), `engine` and `version` where it
    reports them, and its metrics at the start, None where it has none."""

    model: str
    max_model_len: int | None
    engine: str
    version: str
    metrics: Metrics | None


async def ask_offer(client: Client, model: str | None) -> Offer:
    """What the server at `client` offers. MeasuredError where it cannot be reached, lists no models, or not `model`."""
    try:
        status, text = await client.get("/v1/models")
        if status != 200:
            raise RequestError(f"GET /v1/models: it answers {status}", status)
        models = _models(text)
        status, text = await client.get("/version")
        version = _version(text) if status == 200 else ""
    except RequestError as failed:
        raise refused(client.url, failed) from None
    names = [name for name, _ in models]
    if model is None and len(names) > 1:
        raise MeasuredError(f"{client.url}: serves {', '.join(names)}. Say which one with --model.")
    if model is not None and model not in names:
        raise MeasuredError(f"{client.url}: serves {', '.join(names)}, not {shown(model)}. Correct --model.")
    chosen = model or names[0]
    metrics = await read_metrics(client)
    prefix = next((name.partition(":")[0] for name in (metrics.values if metrics else ()) if ":" in name), "")
    engine = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp"}.get(prefix, "")
    return Offer(chosen, dict(models)[chosen], engine, version, metrics)


async def read_metrics(client: Client) -> Metrics | None:
    """The server's metrics now; None where it has none."""
    try:
        status, text = await client.get("/metrics")
    except RequestError:
        return None
    metrics = Metrics.parse(text) if status == 200 else Metrics({})
    return metrics if metrics.values else None


def _models(text: str) -> list[tuple[str, int | None]]:
    try:
        rows: Any = json.loads(text)["data"]
        models = [(str(row["id"]), row.get("max_model_len")) for row in rows]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RequestError(f"GET /v1/models: no list of models: {shown(text)}") from None
    if not models:
        raise RequestError("GET /v1/models: it serves no model")
    return [(name, most if type(most) is int and most > 0 else None) for name, most in models]


def _version(text: str) -> str:
    try:
        return str(json.loads(text)["version"])[:80]
    except (ValueError, KeyError, TypeError):
        return ""
