"""The knobs of a policy that is the scheduler of an installed engine."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from batchsim.base.plain import LEFT_OUT
from batchsim.kernel.policy_config import Traits
from batchsim.policies.systems.vllm.vllm_config import VllmConfig

PASSED = (
    "enable_prefix_caching",
    "max_num_seqs",
    "max_num_batched_tokens",
    "policy",
    "enable_chunked_prefill",
    "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
    "scheduler_reserve_full_isl",
    "watermark",
    "max_num_active_seqs",
    "max_num_scheduled_tokens",
    "prefill_schedule_interval",
)
"""The knobs that the real scheduler gets as they are; async_scheduling says which of its two classes it is."""
WITHOUT: dict[str, Any] = {
    "long_prefill_token_threshold_adaptive": False,
    "scheduler_reserve_full_isl": False,
    "watermark": 0.0,
    "max_num_active_seqs": None,
    "max_num_scheduled_tokens": None,
    "prefill_schedule_interval": 1,
}
"""What a version does that does not have the knob yet."""


@dataclass(frozen=True)
class EngineConfig(VllmConfig):
    """vLLM's knobs, which its own scheduler gets, with the defaults of the policy `vllm`."""

    engine: Literal["vllm"] = "vllm"
    """The engine whose scheduler it is."""
    python: str | None = field(default=None, metadata=LEFT_OUT)
    """The interpreter that has the engine installed; null: the one that runs batchsim. A scenario that names one needs
    --allow-code."""
    scheduler_cls: str | None = field(default=None, metadata=LEFT_OUT)
    """A scheduler of your own instead of vLLM's, by its import path (`--scheduler-cls`). Needs --allow-code."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for each in fields(VllmConfig):
            if each.name not in (*PASSED, "async_scheduling") and getattr(self, each.name) != each.default:
                value = getattr(self, each.name)
                raise ValueError(f"{each.name} {value} is not passed to an engine's own scheduler. Drop it")

    @property
    def traits(self) -> Traits:
        return replace(
            super().traits, pipelines=False, adapters=None, takes_items=False, kv_groups=False, masks="", knobs=()
        )

    @property
    def passed(self) -> dict[str, Any]:
        """The knobs for the real scheduler, by their names."""
        return {name: getattr(self, name) for name in PASSED}
