"""The knobs of vLLM 0.33 with KV offloaded to the memory of the host."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from batchsim.base.ranges import NonNegativeInt, PositiveInt
from batchsim.policies.systems.vllm.connector_config import VllmConnectorConfig
from batchsim.policies.systems.vllm.vllm_config import VllmConfig


@dataclass(frozen=True)
class VllmOffloadConfig(VllmConnectorConfig):
    """Knobs of an engine with vLLM's OffloadingConnector, by its names, with its defaults."""

    cpu_chunks: PositiveInt = 1
    """Chunks that the host's memory holds: vLLM's size in bytes over that of a chunk."""
    blocks_per_chunk: PositiveInt = 1
    """GPU blocks of a chunk."""
    eviction_policy: Literal["lru", "arc"] = "lru"
    """Which chunks are given up for others."""
    store_threshold: NonNegativeInt = 0
    """At which of its offers a chunk is stored; 0 and 1: at the first."""
    max_tracker_size: PositiveInt = 64_000
    """Of how many chunks it is counted how often they were offered, where that matters."""
    offload_prompt_only: bool = True
    """Whether chunks of generated tokens are not stored."""

    @classmethod
    def tier(cls, config: VllmConfig, **knobs: Any) -> VllmOffloadConfig:
        """`config` of an engine with a tier of these `knobs`."""
        return cls(**{f.name: getattr(config, f.name) for f in fields(VllmConfig)}, **knobs)

    @property
    def delivers(self) -> bool:
        return False
