"""The sayings, where they come from, how each is read, and the conditions under which it is tested.

A range is what the saying promises: `up to 24x` is read as at least 24, for the question is where that is reached.
"""

from __future__ import annotations

from tools.claims.measures import (
    LATENCY_BOUND_S,
    next_step_share,
    p50_saved,
    padded_share,
    rate_ratio,
    speed_gained,
    speed_ratio,
    throughput_gained,
    time_lost,
)
from tools.claims.measures import throughput_ratio as ratio
from tools.claims.nouns import Claim, Condition

# 40 GB × 0.90 less 26 GB of weights, over 0.82 MB of KV a token: LLaMA-13B, without grouped heads, on an A100 40 GB.
_KV_2023 = ("kv.tokens=12000",)
_SAME = ("workload.lengths={prompt: {kind: fixed, tokens: 161}, output: {kind: fixed, tokens: 338}}",)
_SPREAD = ("workload.lengths.output={kind: lognormal, mean: 338, cv: 2, max: 1800}",)
_NARROW = (
    "workload.lengths={prompt: {kind: fixed, tokens: 161}, output: {kind: lognormal, mean: 338, cv: 0.3, max: 1024}}",
)
_CODE = (  # means and CVs of the Azure 2023 code trace
    "workload.lengths={prompt: {kind: lognormal, mean: 2048, cv: 0.96, max: 7437},"
    " output: {kind: lognormal, mean: 28, cv: 2.1, max: 1000}}",
    "max_model_len=8448",
)
_MIX = (
    "workload.classes={short: {share: 50%, lengths: {prompt: {kind: uniform, min: 16, max: 64},"
    " output: {kind: uniform, min: 8, max: 64}}}, long: {share: 50%, lengths: {prompt: {kind: lognormal, mean: 4000,"
    " cv: 0.8, max: 15000}, output: {kind: lognormal, mean: 338, cv: 0.74, max: 1024}}}}",
    "max_model_len=16384",
)
STATIC = ("transformers 8", "transformers 32", "transformers 128")


def online(*rates_rps: float, seeds: int = 3) -> tuple[str, ...]:
    """The overrides for Poisson arrivals at these rates for five minutes, instead of all requests at once."""
    listed = ", ".join(f"{rate:g}/s" for rate in rates_rps)
    window = ("requests=null", "duration=5min", "warmup=30s", "drain=1min", "arrivals={kind: poisson, mean_rate: 1/s}")
    return (*(f"workload.{key}" for key in window), f"load={{mean_rate: [{listed}]}}", f"seeds={seeds}")


_RATES = online(0.25, 1, 2, 4)
_SWEEP = online(0.5, 0.7, 1, 1.4, 2, 2.8, 4, 5.6, 8, 11, 16, 22, 32, seeds=1)
_MIXED = (*online(1, 3), *_MIX)

NAIVE = Claim(
    name="24x",
    said="up to 24x the throughput of naive Transformers",
    source="announcement of vLLM, June 2023: LLaMA-7B on an A10G, LLaMA-13B on an A100 40 GB, ShareGPT lengths",
    reading="requests/s of vllm / of hf_static over a pile of 1,000 requests; at least 24",
    unit="×",
    low=24,
    high=None,
    conditions=(
        Condition("one request at a time", ratio, against=("transformers 1",)),
        Condition("batches of 8", ratio, against=("transformers 8",)),
        Condition("batches of 32", ratio, against=("transformers 32",)),
        Condition("batches of 128", ratio, against=("transformers 128",)),
        Condition("batches of 8, all lengths equal", ratio, _SAME, ("transformers 8",)),
        Condition("batches of 8, KV for 12,000 tokens", ratio, _KV_2023, ("transformers 8",)),
        Condition("one at a time, arrivals at 0.25/s", ratio, _RATES, ("transformers 1",), load=0.25),
    ),
)

STATIC_CLAIM = Claim(
    name="2-4x",
    said="2-4x over static batching",
    source="Kwon et al., SOSP 2023: at equal latency, over Orca and FasterTransformer, OPT and LLaMA-13B, A100 40 GB",
    reading="requests/s of vllm / of the best of hf_static batches of 8, 32 and 128, or of orca; from 2 to 4",
    unit="×",
    low=2,
    high=4,
    conditions=(
        Condition("chat lengths (output CV 0.7)", ratio, against=STATIC),
        Condition("all lengths equal", ratio, _SAME, STATIC),
        Condition("output CV 2", ratio, _SPREAD, STATIC),
        Condition("long prompts, short answers", ratio, _CODE, STATIC),
        Condition("KV for 12,000 tokens", ratio, _KV_2023, STATIC),
        Condition("KV for 12,000, all lengths equal", ratio, (*_KV_2023, *_SAME), STATIC),
        Condition(f"rates at {LATENCY_BOUND_S:g} s/token", rate_ratio, _SWEEP, STATIC),
        Condition("over orca, KV for 12,000 tokens", ratio, _KV_2023, ("orca",)),
        Condition("over orca", ratio, against=("orca",)),
    ),
)

PADDING = Claim(
    name="padding",
    said="30-50 % of FLOPs wasted on padding",
    source="posts and course material on continuous batching, from 30 to 80 %, none with its lengths and batch size",
    reading="padded token rows / all, as matmul FLOPs go with rows; last, the throughput it costs; from 30 to 50 %",
    unit="%",
    low=0.3,
    high=0.5,
    conditions=(
        Condition("batches of 8", padded_share, policy="transformers 8"),
        Condition("batches of 32", padded_share, policy="transformers 32"),
        Condition("batches of 128", padded_share, policy="transformers 128"),
        Condition("batches of 32, all lengths equal", padded_share, _SAME, policy="transformers 32"),
        Condition("batches of 32, equal prompts, output CV 0.3", padded_share, _NARROW, policy="transformers 32"),
        Condition("batches of 32, output CV 2", padded_share, _SPREAD, policy="transformers 32"),
        Condition("batches of 32, prompts only", padded_share, policy="prompts padded 32"),
        Condition("throughput lost, batches of 8", time_lost, against=("unpadded 8",), policy="transformers 8"),
        Condition("throughput lost, batches of 128", time_lost, against=("unpadded 128",), policy="transformers 128"),
    ),
)

ONE_TOKEN = Claim(
    name="one-token",
    said="a short request waits at most one token",
    source="iteration-level scheduling: Yu et al., Orca, OSDI 2022; told since of all continuous batching",
    reading="share of short requests (half of all, prompts up to 64) in the first step after arrival; all of them",
    unit="%",
    low=1,
    high=None,
    conditions=(
        Condition("vllm, 1/s", next_step_share, _MIXED, load=1.0),
        Condition("vllm, 3/s", next_step_share, _MIXED, load=3.0),
        Condition("vllm, 3/s, 16 slots", next_step_share, (*_MIXED, "policies.vllm.max_num_seqs=16"), load=3.0),
        Condition("vllm, 1/s, KV for 40,000 tokens", next_step_share, (*_MIXED, "kv.tokens=40000"), load=1.0),
        Condition("orca, 1/s", next_step_share, _MIXED, load=1.0, policy="orca"),
        Condition("sglang, 3/s", next_step_share, _MIXED, load=3.0, policy="sglang"),
        Condition("static batches of 32, 1/s", next_step_share, _MIXED, load=1.0, policy="transformers 32"),
    ),
)

MEDIAN = Claim(
    name="p50",
    said="p50 latency −60 %",
    source="a figure told of continuous batching; Cade et al., Anyscale 2023, claim a lower p50 and state no share",
    reading="1 − median E2E of vllm / of the best stable of hf_static batches of 8, 32 and 128; at least 60 %",
    unit="%",
    low=0.6,
    high=None,
    conditions=(
        Condition("0.25/s", p50_saved, _RATES, STATIC, 0.25),
        Condition("1/s", p50_saved, _RATES, STATIC, 1.0),
        Condition("2/s", p50_saved, _RATES, STATIC, 2.0),
        Condition("4/s", p50_saved, _RATES, STATIC, 4.0),
        Condition("1/s, all lengths equal", p50_saved, (*online(1), *_SAME), STATIC, 1.0),
        Condition("0.5/s, KV for 12,000 tokens", p50_saved, (*online(0.5), *_KV_2023), STATIC, 0.5),
    ),
)

_LOOPS = (
    "policies={ahead: {kind: vllm, enable_prefix_caching: false},"
    " lockstep: {kind: vllm, enable_prefix_caching: false, async_scheduling: false}}",
)


def _slots(count: int) -> tuple[str, ...]:
    """The overrides for at most so many requests at a time, under both loops."""
    return (*_LOOPS, *(f"policies.{policy}.max_num_seqs={count}" for policy in ("ahead", "lockstep")))


def _ahead(text: str, overrides: tuple[str, ...] = _LOOPS) -> Condition:
    return Condition(text, throughput_gained, overrides, ("lockstep",), policy="ahead")


_LARGE = ("model=llama-3.1-70b", "cost={kind: roofline, gpu: a100, tp: 4}")
OVERLAP = Claim(
    name="overlap",
    said="1.1x the throughput by scheduling beside the GPU",
    source="announcement of SGLang v0.4, December 2024, of its zero-overhead batch scheduler",
    reading="requests/s gained by vllm as shipped over async_scheduling: false, a pile of 1,000; at least 10 %",
    unit="%",
    low=0.1,
    high=None,
    conditions=(
        _ahead("one at a time", _slots(1)),
        _ahead("8 at a time", _slots(8)),
        _ahead("64 at a time", _slots(64)),
        _ahead("as many as fit"),
        _ahead("64 at a time, a host of 3 ms a step", (*_slots(64), "cost.host={base: 3ms, per_sequence: 2us}")),
        _ahead("64 at a time, long prompts, short answers", (*_slots(64), *_CODE)),
        _ahead("64 at a time, 70B on four GPUs", (*_slots(64), *_LARGE)),
        Condition(
            "speed of a token, arrivals at 1/s", speed_gained, (*online(1), *_LOOPS), ("lockstep",), 1.0, "ahead"
        ),
    ),
)

_EAGLE = "{method: eagle3, num_speculative_tokens: 3, acceptance: ACCEPTED}"
_DRAFTS = (
    "policies={plain: {kind: vllm, enable_prefix_caching: false}, drafts: {kind: vllm, enable_prefix_caching: false,"
    f" speculative_config: {_EAGLE.replace('ACCEPTED', '[0.7296, 0.5208, 0.3545]')}}}, poor: {{kind: vllm,"
    f" enable_prefix_caching: false, speculative_config: {_EAGLE.replace('ACCEPTED', '0.3')}}}}}",
    "cost.draft={eagle3: {layers: 1, draft_vocab_size: 32000}}",
    "workload.arrivals={kind: closed_loop, users: 1, think_time: 0s}",
    "workload.requests=null",
    "workload.warmup=15s",
)
_SHORT = ("workload.duration=1min", "load={users: [1, 16, 64, 256]}")
_LONG = (
    "workload.duration=3min",
    "load={users: [16]}",
    "workload.lengths.prompt={kind: fixed, tokens: 16000}",
    "max_model_len=17408",
)


def _drafted(text: str, users: float, overrides: tuple[str, ...] = _SHORT, policy: str = "drafts") -> Condition:
    return Condition(text, speed_ratio, (*_DRAFTS, *overrides), ("plain",), users, policy)


DRAFTS = Claim(
    name="drafts",
    said="2-3x faster by speculative decoding",
    source="Leviathan et al., ICML 2023: T5-XXL, one request at a time; told since of serving in general",
    reading="s/token of vllm / with 3 EAGLE-3 drafts, 2.6 tokens a step (`speculative` has the source); from 2 to 3",
    unit="×",
    low=2,
    high=3,
    conditions=(
        _drafted("one user", 1),
        _drafted("16 users", 16),
        _drafted("64 users", 64),
        _drafted("256 users", 256),
        _drafted("one user, poor drafts (0.3 each)", 1, policy="poor"),
        _drafted("64 users, poor drafts", 64, policy="poor"),
        _drafted("16 users, prompts of 16,000", 16, _LONG),
    ),
)

FOLKLORE = (NAIVE, STATIC_CLAIM, PADDING, ONE_TOKEN, MEDIAN, OVERLAP, DRAFTS)
