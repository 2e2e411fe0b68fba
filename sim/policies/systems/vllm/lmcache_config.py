"""The knobs of vLLM 0.33 with LMCache 0.5.6 as its KV connector."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from batchsim.base.ranges import NonNegativeInt, PositiveInt
from batchsim.policies.systems.vllm.vllm_config import VllmConfig


@dataclass(frozen=True)
class VllmLmcacheConfig(VllmConfig):
    """Knobs of an engine with LMCache in its process, and how fast the link between each GPU and its host is."""

    cpu_chunks: PositiveInt = 1
    """Chunks that the host's memory holds: LMCache's `max_local_cpu_size` over the bytes of a chunk."""
    chunk_size: PositiveInt = 256
    """Tokens of a chunk."""
    copy_ns: NonNegativeInt = 0
    """What the copies of a step take each way beside their bytes, ns."""
    load_ns: NonNegativeInt = 0
    """What a chunk takes from the host, ns."""
    store_ns: NonNegativeInt = 0
    """What a chunk takes to the host, ns."""
    num_layers: NonNegativeInt = 0
    """Layers of a step beside which its copies are made, each layer's by itself (`use_layerwise`); 0: copies are made
    whole, before and behind the step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.runner == "pooling":
            raise ValueError("runner: pooling with LMCache is not simulated. Leave one of them out")

    @classmethod
    def tier(cls, config: VllmConfig, **knobs: Any) -> VllmLmcacheConfig:
        """`config` of an engine with a tier of these `knobs`."""
        return cls(**{f.name: getattr(config, f.name) for f in fields(VllmConfig)}, **knobs)
