"""The lines of engines' start-up logs, and what a scenario says of the engine whose log it names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from batchsim.base.kv_groups import KvLayout
from batchsim.base.kv_pools import KvPools

LINES = {
    "vllm": re.compile(r"GPU KV cache size: (\d[\d,]{0,20}) tokens"),
    "sglang": re.compile(r"\bmax_total_num_tokens=(\d{1,18})\b(?=.|\n)"),
    "tensorrt_llm": re.compile(r"Allocated [\d.]+ GiB for max tokens in paged KV cache \((\d{1,18})\)"),
}
"""The line of each engine: of vLLM one from each worker or engine core, of SGLang one from each scheduler, of
TensorRT-LLM one for each cache that it makes, of which the last stays. A number at which a log ends may be cut."""

ALLOCATED = re.compile(r"Allocated (\d{1,6}(?:\.\d{1,4})?) GiB for max tokens in paged KV cache \((\d{1,18})\)")
ALIKE = 0.05
"""Workers of one engine differ by what else is on their GPUs; by more than this share they are of several."""

FULL = re.compile(r"Maximum concurrency for (\d[\d,]{0,15}) tokens per request: (\d{1,12}(?:\.\d{1,6})?)x")
MODEL = re.compile(r"\b(?:model|model_path)(?:'?: |=)'([^']{1,300})'")
FP8 = re.compile(r"\bkv_cache_dtype(?:'?: |=)'?fp8")
DEGREES = {
    "tp": re.compile(r"\b(?:tensor_parallel_size|tp_size)(?:'?: |=)(\d{1,4})\b"),
    "pp": re.compile(r"\b(?:pipeline_parallel_size|pp_size)(?:'?: |=)(\d{1,4})\b"),
}
VERSION = re.compile(
    r"(?:LLM engine \(v|vLLM API server version |TensorRT-LLM version:? ?|SGLang version:? ?)(\d[\w.+]{0,40})"
)
BLOCK = re.compile(r"'block_size': (\d{1,6})\b")
DRAFTS = re.compile(r"\bspeculative_config(?:'?: |=)(None|\{|Spec)")
DRAFTER = re.compile(r"\bspeculative_config(?:'?: |=)(?:\{[^}]*\}|\w+\([^)]*\))")
STEP = re.compile(r"\bmax_num_batched_tokens(?:'?: |=)(\d{1,9})\b")
STATES = re.compile(
    r"etting attention block size to \d+ tokens|Mamba Cache is allocated|(?:qwen3[._][5-9]|qwen3-next"
    r"|kimi-(?:linear|k3)|nemotron-(?:h|3|nano-9b-v2)|deepseek-v4|jamba|bamba|zamba|falcon-h1|lfm2|granite-4[\w.]*-h|plamo2)[\w.-]*'",
    re.IGNORECASE,
)
"""Lines and names of models with layers that keep a request's state, or compressed KV, in the place of its tokens."""
DRAFT_TOKENS = re.compile(r"\bnum_(?:speculative|spec)_tokens(?:'?: |=)(\d{1,3})\b")
GROWN = re.compile(r"etting attention block size to (\d{1,6}) tokens")
CACHES = re.compile(r"\benable_prefix_caching(?:'?: |=)(True|False)\b")
RUNNING = re.compile(r"\bmax_running_requests=(\d{1,9})\b(?=.|\n)")
TWO_POOLS = re.compile(r"full_layer_tokens=(\d+), swa_layer_tokens=(\d+)")
FAILED = re.compile(
    r"EngineCore failed to start|Engine core initialization failed|WorkerProc initialization failed|CUDA out of memory"
    r"|OutOfMemoryError|To serve at least one request with|Scheduler hit an exception|Received sigquit from a child"
    r"|Executor worker returned error|insufficient GPU memory|Traceback \(most recent call last\)"
)
SERVES = re.compile(r"Application startup complete|fired up and ready to roll|Uvicorn running on")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a scenario says of the engine whose log it names; "" and None where it does not. `kv`: the type of KV.
    `drafts`: whether a policy drafts with a model. `max_num_seqs`: the most requests that a policy runs at once, where
    all state it."""

    engine: str = ""
    version: str = ""
    tp: object = None
    pp: object = None
    model: str = ""
    kv: str = ""
    block_size: int = 16
    drafts: bool | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None


class Logged(NamedTuple):
    """What a log says: `tokens` of one pool, or, where layers keep unlike numbers of tokens, bytes of KV on each GPU,
    or the `layout` of groups that share `num_blocks` blocks, the null block among them; `pools`: those beside that of
    `tokens`. `source`: the log and what it is of, in words."""

    tokens: int | None
    memory_bytes: int | None
    source: str
    layout: KvLayout | None = None
    num_blocks: int | None = None
    pools: KvPools | None = None
