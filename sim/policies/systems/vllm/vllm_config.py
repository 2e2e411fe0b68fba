"""The knobs of vLLM 0.33, and the loops of its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from batchsim.base.ranges import NonNegativeInt, PositiveInt, ShareBelowOne
from batchsim.kernel.engine_loop import EngineLoop
from batchsim.kernel.policy_config import Device, PolicyConfig, Traits
from batchsim.policies.systems.vllm.speculative_config import SpeculativeConfig

ASYNCHRONOUS = EngineLoop("batch_queue", depth=2, nap_ns=1_000_000)
"""vLLM's queue of batches: one in flight while the next is scheduled, and 1 ms of sleep after a call that had nothing
to run."""
SYNCHRONOUS = replace(ASYNCHRONOUS, kind="sync", depth=1)
"""vLLM's queue of batches with a place for one, and for one more a stage of a pipeline beyond the first."""


_GIB = 2**30


@dataclass(frozen=True)
class VllmConfig(PolicyConfig):
    """Knobs by vLLM's names, with its defaults for an online server: `max_num_batched_tokens` and `max_num_seqs` by the
    GPU (`device_defaults`), and those of an H100 or H200 where none is known.

    `prefill_schedule_interval` may be more than 1 in vLLM, which is not simulated. None stands for
    max_num_batched_tokens in `max_num_scheduled_tokens`, the tokens of a step, and for max_num_seqs in
    `max_num_active_seqs`, the requests that run. `watermark` is a share of the KV blocks, 0 to 1. `speculative_config`
    None: no drafts.
    """

    enable_prefix_caching: bool = True
    async_scheduling: bool = True
    max_num_seqs: PositiveInt = 1024
    max_num_batched_tokens: PositiveInt = 8192
    policy: Literal["fcfs", "priority"] = "fcfs"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: NonNegativeInt = 0
    long_prefill_token_threshold_adaptive: bool = False
    scheduler_reserve_full_isl: bool = True
    watermark: ShareBelowOne = 0.0
    max_num_active_seqs: PositiveInt | None = None
    max_num_scheduled_tokens: PositiveInt | None = None
    prefill_schedule_interval: PositiveInt = 1
    speculative_config: SpeculativeConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefill_schedule_interval != 1:
            raise ValueError(
                f"prefill_schedule_interval {self.prefill_schedule_interval} is not simulated. Set it to 1"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} must be at least max_num_seqs"
                f" {self.max_num_seqs}"
            )
        if self.slots > self.max_num_seqs:
            raise ValueError(
                f"max_num_active_seqs {self.max_num_active_seqs} must be at most max_num_seqs {self.max_num_seqs}"
            )
        if self.step_tokens > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_scheduled_tokens {self.max_num_scheduled_tokens} must be at most max_num_batched_tokens"
                f" {self.max_num_batched_tokens}"
            )

    @classmethod
    def device_defaults(cls, device: Device, stated: Mapping[str, Any]) -> dict[str, Any]:
        """`max_num_batched_tokens` and `max_num_seqs` of an online server on `device`, those not `stated`.

        Source: vllm/engine/arg_utils.py of the 0.33.0 wheel, `get_batch_defaults` and its caller.
        """
        gpu, memory = device.name.lower(), device.memory_bytes
        tokens, seqs = 2048, 256
        if memory >= 160 * _GIB:
            tokens, seqs = 16384, 1024
        elif memory >= 70 * _GIB and "a100" not in gpu and "gb10" not in gpu:
            tokens, seqs = 8192, 1024
        tokens, seqs = stated.get("max_num_batched_tokens", tokens), stated.get("max_num_seqs", seqs)
        if not (type(tokens) is type(seqs) is int and tokens > 0 < seqs):
            return {}  # what is stated will be refused
        if "max_num_batched_tokens" not in stated:
            least = device.max_model_len if stated.get("enable_chunked_prefill") is False else 0
            tokens = min(max(tokens, least), seqs * device.max_model_len)
        defaults = {"max_num_batched_tokens": tokens, "max_num_seqs": min(seqs, tokens)}
        return {name: value for name, value in defaults.items() if name not in stated}

    @property
    def traits(self) -> Traits:
        return Traits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            prefix_cache="blocks" if self.enable_prefix_caching else "",
            knobs=("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold"),
            loop=ASYNCHRONOUS if self.async_scheduling else SYNCHRONOUS,
            pipelines=True,
            speculation=None if self.speculative_config is None else self.speculative_config.speculation,
        )

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step."""
        return self.max_num_batched_tokens if self.max_num_scheduled_tokens is None else self.max_num_scheduled_tokens

    @property
    def slots(self) -> int:
        """Most requests that run."""
        return self.max_num_seqs if self.max_num_active_seqs is None else self.max_num_active_seqs
