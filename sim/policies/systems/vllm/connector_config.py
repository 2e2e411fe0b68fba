"""The knobs of vLLM 0.33 with a KV connector."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from batchsim.kernel.policy_config import Traits
from batchsim.policies.systems.vllm.vllm_config import VllmConfig

KvRole = Literal["kv_producer", "kv_consumer", "kv_both"]
OnFailure = Literal["fail", "recompute"]


@dataclass(frozen=True)
class VllmConnectorConfig(VllmConfig):
    """Knobs of an engine that pulls KV from others, or keeps it for them."""

    kv_role: KvRole = "kv_both"
    """Whether KV is kept for other engines, pulled from them, or both (`--kv-transfer-config`)."""
    kv_load_failure_policy: OnFailure = "fail"
    """Whether a request whose KV could not be pulled ends, or has its prompt computed here."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.speculative_config is not None:
            raise ValueError("speculative_config with KV passed between engines is not simulated. Leave it out")
        if self.is_older:
            raise ValueError(f"version {self.version} with KV passed between engines is not simulated. Drop it")
        if self.prefill_schedule_interval != 1:
            raise ValueError(
                f"prefill_schedule_interval {self.prefill_schedule_interval} with KV passed between engines is not"
                " simulated. Set it to 1"
            )
        if self.runner == "pooling":
            raise ValueError("runner: pooling with KV passed between engines is not simulated. Leave one of them out")

    @classmethod
    def of(cls, config: VllmConfig, kv_role: KvRole, kv_load_failure_policy: OnFailure) -> VllmConnectorConfig:
        """`config` of an engine with a connector."""
        knobs = {f.name: getattr(config, f.name) for f in fields(VllmConfig)}
        return cls(**knobs, kv_role=kv_role, kv_load_failure_policy=kv_load_failure_policy)

    @property
    def traits(self) -> Traits:
        """Those of an engine without one, whose loop has empty steps in the synchronous mode too: they notice
        transfers."""
        traits = super().traits
        return replace(
            traits,
            loop=replace(traits.loop, kind="batch_queue"),
            pipelines=False,
            knobs=(),
            adapters=None,
            takes_items=False,
            kv_groups=False,
            masks="",
        )

    @property
    def delivers(self) -> bool:
        """Whether KV is kept for other engines (`requires_kv_delivery`)."""
        return self.kv_role != "kv_consumer"

    @property
    def defers(self) -> bool:
        """Whether blocks that a step in flight may write are not used by others before (`defer_block_free`)."""
        return self.kv_role != "kv_producer" and self.async_scheduling
