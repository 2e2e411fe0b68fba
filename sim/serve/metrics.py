"""What the endpoint counts of each engine, under vLLM's names for Prometheus or SGLang's.

Names, types, labels and buckets are those of vllm/v1/metrics/{loggers,buckets}.py of vLLM 0.32.0 and of
sglang/srt/observability/metrics_collector.py of SGLang 0.5.23, as far as a simulated engine has what they count. Times
are simulated ones. Hits of the prefix cache and preemptions count when their request ends.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from batchsim.base.units import NS_PER_S
from batchsim.kernel.core import EngineCore
from batchsim.kernel.record import CANCELLED, FINISHED
from batchsim.kernel.types import MISSING

Names = Literal["vllm", "sglang"]
Labels = dict[str, str]

_TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_CHOICES = (1, 2, 5, 10, 20)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_SGLANG_TTFT = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_SGLANG_E2E = (*_SGLANG_TTFT, 600, 1200, 1800, 2400)
_SGLANG_ITL = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8),
    *(1, 2, 4, 6, 8),
)
_LATE = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)


def tokens_buckets(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to `most`, as vLLM has it of counts of tokens."""
    bounds = (digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(number for number in bounds if number <= most)


class Histogram:
    """Counts of values by buckets, whose upper `bounds` are included, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def samples(self, name: str, labels: Labels) -> Iterator[str]:
        """The lines of the histogram, buckets cumulative."""
        for bound, count in zip([*self.bounds, float("inf")], accumulate(self.counts), strict=True):
            le = "+Inf" if bound == float("inf") else repr(float(bound))
            yield _sample(f"{name}_bucket", labels | {"le": le}, count)
        yield _sample(f"{name}_count", labels, sum(self.counts))
        yield _sample(f"{name}_sum", labels, self.sum)


@dataclass(frozen=True)
class Life:
    """A request that has ended, as its row in the records has it; times in ns, below 0 where it never came so far."""

    outcome: int
    by_length: bool
    prompt_tokens: int
    output_tokens: int
    max_output_tokens: int
    arrival_ns: int
    scheduled_ns: int
    first_token_ns: int
    last_token_ns: int
    num_preemptions: int
    cached_tokens: int


class Tally:
    """What is counted of one engine, a replica, from its start on and over its failures."""

    def __init__(self, names: Names, max_model_len: int) -> None:
        is_vllm = names == "vllm"
        tokens = tokens_buckets(max_model_len)
        itl, e2e = (_ITL, _LATENCY) if is_vllm else (_SGLANG_ITL, _SGLANG_E2E)
        self.ttft = Histogram(_TTFT if is_vllm else _SGLANG_TTFT)
        self.itl, self.tpot, self.e2e = Histogram(itl), Histogram(itl), Histogram(e2e)
        self.queue, self.inference, self.prefill, self.decode = (Histogram(_LATENCY) for _ in range(4))
        self.prompt, self.generation, self.max_tokens, self.computed = (Histogram(tokens) for _ in range(4))
        self.choices, self.preempted = Histogram(_CHOICES), Histogram(_PREEMPTIONS)
        self.step_tokens = Histogram(_STEP_TOKENS)
        self.prompt_tokens = self.generation_tokens = self.preemptions = self.queries = self.hits = 0
        self.ended = {"stop": 0, "length": 0, "abort": 0, "error": 0, "repetition": 0}

    def first_token(self, ttft_ns: int, prompt_tokens: int) -> None:
        """Counts a first token, by which the prompt is done."""
        self.ttft.observe(ttft_ns / NS_PER_S)
        self.prompt_tokens += prompt_tokens

    def next_tokens(self, gap_ns: int, requests: int) -> None:
        """Counts a step that brought `requests` requests tokens after their first, `gap_ns` after the latest."""
        self.itl.observe(gap_ns / NS_PER_S, requests)

    def step(self, num_tokens: int, output_tokens: int) -> None:
        """Counts a step that brought `output_tokens`; `num_tokens` with the prompts that it completed."""
        self.generation_tokens += output_tokens
        self.step_tokens.observe(num_tokens)

    def end(self, life: Life, e2e_ns: int, caches: bool) -> None:
        """Counts a request that has ended; `caches`: the engine looks for prefixes."""
        self.preemptions += life.num_preemptions
        if caches and life.scheduled_ns >= 0:
            self.queries += life.prompt_tokens
            self.hits += life.cached_tokens
        if life.outcome != FINISHED:
            self.ended["abort" if life.outcome == CANCELLED else "error"] += 1
            return
        self.ended["length" if life.by_length else "stop"] += 1
        if life.first_token_ns < 0:  # of a pooling model
            self.e2e.observe(e2e_ns / NS_PER_S)
            self.queue.observe((life.scheduled_ns - life.arrival_ns) / NS_PER_S)
            self.prompt_tokens += life.prompt_tokens
            self.prompt.observe(life.prompt_tokens)
            return
        decode_ns = life.last_token_ns - life.first_token_ns
        self.e2e.observe(e2e_ns / NS_PER_S)
        self.queue.observe((life.scheduled_ns - life.arrival_ns) / NS_PER_S)
        self.prefill.observe((life.first_token_ns - life.scheduled_ns) / NS_PER_S)
        self.decode.observe(decode_ns / NS_PER_S)
        self.inference.observe((life.last_token_ns - life.scheduled_ns) / NS_PER_S)
        self.tpot.observe(decode_ns / (life.output_tokens - 1) / NS_PER_S if life.output_tokens > 1 else 0.0)
        self.prompt.observe(life.prompt_tokens)
        self.generation.observe(life.output_tokens)
        self.max_tokens.observe(life.max_output_tokens)
        self.computed.observe(life.prompt_tokens - life.cached_tokens)
        self.preempted.observe(life.num_preemptions)
        self.choices.observe(1)


@dataclass
class Metrics:
    """The tallies by replica, and by how many seconds steps were handled after their time."""

    names: Names
    model: str
    max_model_len: int
    by_replica: dict[int, Tally] = field(default_factory=dict[int, Tally])
    late: Histogram = field(default_factory=lambda: Histogram(_LATE))
    max_lora: int | None = None  # adapters of running requests; None: adapters are not served

    def of(self, replica: int) -> Tally:
        if replica not in self.by_replica:
            self.by_replica[replica] = Tally(self.names, self.max_model_len)
        return self.by_replica[replica]

    def text(self, engines: dict[int, EngineCore], sleep_level: int | None = None, num_held: int = 0) -> str:
        """All of it in Prometheus' text form; `engines` are the replicas that are up.

        `sleep_level`: None while they are awake. `num_held` requests wait for them to wake, which counts at the first.
        """
        families = _Families()
        first = min(engines, default=0)
        for replica in sorted({*self.by_replica, *engines}):
            tally, core = self.of(replica), engines.get(replica)
            held = num_held if replica == first else 0
            if self.names == "vllm":
                labels = {"engine": str(replica), "model_name": self.model}
                _vllm(families, tally, core, labels, sleep_level, held)
            else:
                _sglang(families, tally, core, {"model_name": self.model}, replica, held)
        if self.max_lora is not None and self.names == "vllm":
            _loras(families, self.max_lora, engines)
        families.add("batchsim:lateness_seconds", "histogram", "Seconds from when a step ended to its tokens.")
        families.lines["batchsim:lateness_seconds"] += self.late.samples("batchsim:lateness_seconds", {})
        return families.text()


class _Families:
    """The lines of all metrics, each family with its head, in the order of their first coming."""

    def __init__(self) -> None:
        self.lines: dict[str, list[str]] = {}

    def add(self, name: str, kind: str, text: str) -> list[str]:
        if name not in self.lines:
            self.lines[name] = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        return self.lines[name]

    def gauge(self, name: str, text: str, value: float, labels: Labels) -> None:
        self.add(name, "gauge", text).append(_sample(name, labels, value))

    def counter(self, name: str, text: str, value: float, labels: Labels) -> None:
        self.add(name, "counter", text).append(_sample(name, labels, value))

    def histogram(self, name: str, text: str, value: Histogram, labels: Labels) -> None:
        self.add(name, "histogram", text).extend(value.samples(name, labels))

    def text(self) -> str:
        return "".join(f"{line}\n" for lines in self.lines.values() for line in lines)


def _sample(name: str, labels: Labels, value: float) -> str:
    inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{inner}}} {float(value)!r}" if inner else f"{name} {float(value)!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _vllm(
    families: _Families, tally: Tally, core: EngineCore | None, labels: Labels, sleep_level: int | None, held: int
) -> None:
    gauge, counter, histogram = families.gauge, families.counter, families.histogram
    if core is not None:
        scheduler, kv = core.scheduler, core.scheduler.kv
        waiting = core.num_waiting + held
        gauge("vllm:num_requests_running", "Requests in execution.", scheduler.num_running, labels)
        gauge("vllm:num_requests_waiting", "Requests that wait.", waiting, labels)
        for reason, count in (("capacity", waiting), ("deferred", 0)):
            name = "vllm:num_requests_waiting_by_reason"
            gauge(name, "Requests that wait, by reason.", count, labels | {"reason": reason})
        for state, level in (("awake", None), ("weights_offloaded", 1), ("discard_all", 2)):
            name = "vllm:engine_sleep_state"
            gauge(name, "1 for the state that the engine is in.", sleep_level == level, labels | {"sleep_state": state})
        gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use.", 1 - kv.num_free / kv.num_blocks, labels)
        config = {"block_size": str(kv.block_size), "num_gpu_blocks": str(kv.num_blocks), "engine": labels["engine"]}
        gauge("vllm:cache_config_info", "How the KV cache is made.", 1, config)
    counter("vllm:prefix_cache_queries_total", "Tokens looked up in the prefix cache.", tally.queries, labels)
    counter("vllm:prefix_cache_hits_total", "Tokens found in the prefix cache.", tally.hits, labels)
    counter("vllm:num_preemptions_total", "Preemptions.", tally.preemptions, labels)
    counter("vllm:prompt_tokens_total", "Tokens of prompts processed.", tally.prompt_tokens, labels)
    counter("vllm:prompt_tokens_cached_total", "Tokens of prompts found in a cache.", tally.hits, labels)
    counter("vllm:generation_tokens_total", "Tokens generated.", tally.generation_tokens, labels)
    for reason, count in tally.ended.items():
        name = "vllm:request_success_total"
        counter(name, "Requests that ended, by reason.", count, labels | {"finished_reason": reason})
    for name, text, tallied in (
        ("request_prompt_tokens", "Tokens of a prompt.", tally.prompt),
        ("request_generation_tokens", "Tokens of an answer.", tally.generation),
        ("iteration_tokens_total", "Tokens of a step.", tally.step_tokens),
        ("request_max_num_generation_tokens", "Most tokens asked for.", tally.max_tokens),
        ("request_params_n", "Answers asked for.", tally.choices),
        ("request_params_max_tokens", "The parameter max_tokens.", tally.max_tokens),
        ("time_to_first_token_seconds", "Seconds to the first token.", tally.ttft),
        ("inter_token_latency_seconds", "Seconds between tokens.", tally.itl),
        ("request_time_per_output_token_seconds", "Mean seconds between tokens of a request.", tally.tpot),
        ("e2e_request_latency_seconds", "Seconds from request to last token.", tally.e2e),
        ("request_queue_time_seconds", "Seconds of waiting.", tally.queue),
        ("request_inference_time_seconds", "Seconds of running.", tally.inference),
        ("request_prefill_time_seconds", "Seconds of prefill.", tally.prefill),
        ("request_decode_time_seconds", "Seconds of decode.", tally.decode),
        ("request_num_preemptions", "Preemptions of a request.", tally.preempted),
        ("request_prefill_kv_computed_tokens", "Tokens of a prompt that were computed.", tally.computed),
    ):
        histogram(f"vllm:{name}", text, tallied, labels)


def _loras(families: _Families, max_lora: int, engines: dict[int, EngineCore]) -> None:
    """The adapters that requests wait for and run with, over all engines; as in vLLM the value is the time."""
    waiting, running = dict[str, None](), dict[str, None]()
    for core in engines.values():
        for life in core.journal.lives.values():
            if (number := life.arrival.request.adapter) != MISSING:
                (waiting if life.scheduled_ns < 0 else running)[core.journal.adapter_names[number]] = None
    adapters = {"waiting_lora_adapters": ",".join(waiting), "running_lora_adapters": ",".join(running)}
    text = "Adapters of requests, at this time."
    families.gauge("vllm:lora_requests_info", text, time.time(), {"max_lora": str(max_lora)} | adapters)


def _sglang(families: _Families, tally: Tally, core: EngineCore | None, model: Labels, replica: int, held: int) -> None:
    gauge, counter, histogram = families.gauge, families.counter, families.histogram
    ranks = {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0", "dp_rank": str(replica)}
    labels = model | ranks
    if core is not None:
        scheduler, kv = core.scheduler, core.scheduler.kv
        used = (kv.num_blocks - kv.num_free) * kv.block_size
        gauge("sglang:num_running_reqs", "Requests that run.", scheduler.num_running, labels)
        gauge("sglang:num_queue_reqs", "Requests that wait.", core.num_waiting + held, labels)
        gauge("sglang:token_usage", "Share of KV tokens in use.", 1 - kv.num_free / kv.num_blocks, labels)
        gauge("sglang:num_used_tokens", "KV tokens in use.", used, labels)
        hit_rate = tally.hits / tally.queries if tally.queries else 0.0
        gauge("sglang:cache_hit_rate", "Share of prompt tokens found in the cache.", hit_rate, labels)
    counter("sglang:num_retracted_requests_total", "Retractions.", tally.preemptions, labels)
    of_replica = model | {"dp_rank": str(replica)}
    counter("sglang:prompt_tokens_total", "Tokens of prompts processed.", tally.prompt_tokens, of_replica)
    counter("sglang:generation_tokens_total", "Tokens generated.", tally.generation_tokens, of_replica)
    counter(
        "sglang:cached_tokens_total", "Tokens found in the cache.", tally.hits, of_replica | {"cache_source": "device"}
    )
    ended = tally.ended["stop"] + tally.ended["length"]
    counter("sglang:num_requests_total", "Requests processed.", ended, of_replica)
    counter("sglang:num_aborted_requests_total", "Requests aborted.", tally.ended["abort"], of_replica)
    for name, text, tallied in (
        ("time_to_first_token_seconds", "Seconds to the first token.", tally.ttft),
        ("inter_token_latency_seconds", "Seconds between tokens.", tally.itl),
        ("request_time_per_output_token_seconds", "Mean seconds between tokens of a request.", tally.tpot),
        ("e2e_request_latency_seconds", "Seconds from request to last token.", tally.e2e),
    ):
        histogram(f"sglang:{name}", text, tallied, of_replica)
