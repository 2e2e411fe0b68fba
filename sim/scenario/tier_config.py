"""What a scenario says of memory for KV beyond the GPU's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from batchsim.base.plain import LEFT_OUT
from batchsim.base.ranges import Config, NonNegativeInt, PositiveInt, Range
from batchsim.base.units import Bandwidth, Duration, Size
from batchsim.kv import WritePolicy


@dataclass(frozen=True)
class TierConfig(Config):
    """The memory of the host, or a disk below it, as vLLM's OffloadingConnector, LMCache, SGLang's HiCache or
    TensorRT-LLM's host cache uses it for KV; names and defaults are theirs."""

    size: Size | None = None
    """Bytes for the KV of all GPUs of an engine together, like vLLM's `--kv-offloading-size`; TensorRT-LLM's
    `host_cache_size` is that of each; `sglang` does without: `ratio`."""
    kind: Literal["host", "disk"] = "host"
    """Where it is: `host`, its memory; `disk`, below that of vLLM's connector, which has no `size`, as nothing on it is
    given up. Remote stores are not simulated."""
    bandwidth: Bandwidth | None = None
    """What each GPU's link to its host carries, one way; by default what the data sheet of the GPU says. Of a disk:
    what is read from it for all GPUs together."""
    store_bandwidth: Bandwidth | None = None
    """The same from the GPU to the host, where it carries more or less that way."""
    latency: Duration = 0
    """What each transfer takes beside its bytes, like 20us."""
    blocks_per_chunk: PositiveInt = 1
    """GPU blocks of a chunk, in which KV is kept, stored and loaded."""
    eviction_policy: Literal["lru", "arc"] = "lru"
    """Which chunks are given up for others."""
    store_threshold: NonNegativeInt = 0
    """At which of its offers a chunk is stored; 0 and 1: at the first."""
    max_tracker_size: PositiveInt = 64_000
    """Of how many chunks it is counted how often they were offered, where that matters."""
    offload_prompt_only: bool = True
    """Whether chunks of generated tokens are not stored."""
    ratio: Annotated[float, Range(0, 1e6, above=True)] | None = field(default=None, metadata=LEFT_OUT)
    """Under `sglang`, in the place of `size`: how many times the tokens of the GPU (`--hicache-ratio`); null: 2."""
    connector: Literal["offloading", "lmcache"] = field(default="offloading", metadata=LEFT_OUT)
    """Under `vllm`, whose connector it is: vLLM's OffloadingConnector, or LMCache's."""
    chunk_size: PositiveInt | None = field(default=None, metadata=LEFT_OUT)
    """With `connector: lmcache`: tokens of a chunk; null: 256."""
    use_layerwise: bool = field(default=False, metadata=LEFT_OUT)
    """With `connector: lmcache`: whether KV is copied layer by layer beside the step, and not whole before and behind
    it."""
    write_policy: WritePolicy | None = field(default=None, metadata=LEFT_OUT)
    """Under `sglang`: whether pages are stored as a first request inserts them, as a second one does, or as the GPU
    gives them up (`--hicache-write-policy`); null: write_through."""
