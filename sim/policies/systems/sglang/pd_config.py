"""The knobs of SGLang 0.5.23 where prefill and decode are apart (`--disaggregation-mode`), and what it refuses.

Source: python/sglang/srt/arg_groups/fields/disagg.py and pd_disaggregation_hook.py of the 0.5.23 wheel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from batchsim.base.ranges import INT32_MAX, PositiveInt, Range
from batchsim.kernel.policy_config import Traits
from batchsim.policies.systems.sglang.sglang_config import SglangConfig

PdMode = Literal["prefill", "decode"]
_SMALL = 32  # the most running requests for which there are extra slots
_OF_DECODE = (
    "num_reserved_decode_tokens",
    "disaggregation_decode_extra_slots",
    "disaggregation_decode_polling_interval",
    "disaggregation_decode_retraction_backup",
    "disaggregation_decode_enable_radix_cache",
)


@dataclass(frozen=True)
class SglangPdConfig(SglangConfig):
    """Knobs of an engine that computes prompts for others, or decodes what others have computed."""

    disaggregation_mode: PdMode = "decode"
    """Whether the engine computes prompts, or decodes (`--disaggregation-mode`)."""
    disaggregation_decode_allocation_policy: Literal["early", "prefill_complete"] = "early"
    """When decode takes blocks for a prompt: before it is computed, or once it is."""
    optimistic_prefill_attempts: Annotated[int, Range(0, INT32_MAX)] = 0
    """How often a prompt may be computed before decode has blocks for it."""
    num_reserved_decode_tokens: Annotated[int, Range(0, INT32_MAX)] = 512
    """KV tokens that decode sets aside for each request it has (`--num-reserved-decode-tokens`)."""
    disaggregation_decode_extra_slots: Annotated[int, Range(0, INT32_MAX)] | None = None
    """Slots beyond max_running_requests for requests whose KV is on its way; null: twice that if it is stated and at
    most 32, else 0."""
    disaggregation_decode_polling_interval: PositiveInt = 1
    """Decode looks at transfers, and takes blocks for prompts, at every N-th call."""
    disaggregation_decode_retraction_backup: Literal["cpu_tensor", "host_pool", "none"] = "cpu_tensor"
    """Where the KV of a retracted request goes: to the host, or nowhere, which ends it with an error."""
    disaggregation_decode_enable_radix_cache: bool = False
    """Whether decode has a prefix cache, whose tokens are not sent."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refused = {
            "disaggregation_decode_allocation_policy: prefill_complete": (
                self.disaggregation_decode_allocation_policy != "early"
            ),
            f"optimistic_prefill_attempts: {self.optimistic_prefill_attempts}": self.optimistic_prefill_attempts > 0,
            "disaggregation_decode_retraction_backup: host_pool": (
                self.disaggregation_decode_retraction_backup == "host_pool"
            ),
            "disaggregation_decode_enable_radix_cache: true": self.disaggregation_decode_enable_radix_cache,
            f"speculative_algorithm: {self.speculative_algorithm}": self.speculative_algorithm is not None,
            "enable_mixed_chunk: true": self.enable_mixed_chunk,
            f"scheduler_recv_interval: {self.scheduler_recv_interval}": self.scheduler_recv_interval > 1,
            "is_embedding: true": bool(self.is_embedding),
        }
        for what in (what for what, asked in refused.items() if asked):
            raise ValueError(f"{what} where prefill and decode are apart is not simulated. Leave it out")

    @classmethod
    def of(cls, config: SglangConfig, mode: PdMode, stated: Mapping[str, Any]) -> SglangPdConfig:
        """`config` of an engine in `mode`, which alone has the knobs `stated`. ValueError for one of them that this
        mode does not read."""
        knobs = {f.name: getattr(config, f.name) for f in fields(config)}
        if stated.get("disaggregation_mode", mode) != mode:
            raise ValueError(f"disaggregation_mode {stated['disaggregation_mode']}: this side is {mode}. Leave it out")
        if mode == "prefill" and (name := next((name for name in _OF_DECODE if name in stated), "")):
            raise ValueError(f"{name} is a knob of decode. Write it there")
        if mode == "decode" and stated.get("disable_radix_cache") is False:
            raise ValueError("disable_radix_cache: false: SGLang has no radix cache where it decodes. Leave it out")
        own: dict[str, Any] = {"disaggregation_mode": mode}
        if mode == "decode":
            own["disable_radix_cache"] = True
            if "schedule_policy" not in stated:
                own["schedule_policy"] = "fcfs"  # nothing is cached by which another would order
        return cls(**(knobs | own))

    @property
    def traits(self) -> Traits:
        """Those of an engine that does both, without what is not simulated apart."""
        return replace(
            super().traits, knobs=(), adapters=None, takes_items=False, kv_pools=False, windows=None, masks=""
        )

    @property
    def extra_slots(self) -> int:
        """Slots beyond those of running requests."""
        if self.disaggregation_decode_extra_slots is not None:
            return self.disaggregation_decode_extra_slots
        most = self.max_running_requests
        return 2 * most if most is not None and most <= _SMALL else 0
