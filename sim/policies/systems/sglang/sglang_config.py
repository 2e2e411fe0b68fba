"""The knobs of SGLang 0.5.23's scheduler that are simulated, and what it refuses.

Source: python/sglang/srt/arg_groups/fields/schedule.py, memory_hook.py and validation_hook.py of the 0.5.23 wheel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from batchsim.base.ranges import INT32_MAX, NonNegative, PositiveInt, Priority, Range
from batchsim.kernel.engine_loop import OVERLAP, SYNC
from batchsim.kernel.policy_config import Device, PolicyConfig, Traits
from batchsim.policies.systems.acceptance_law import MAX_DRAFTS, Laws
from batchsim.policies.systems.sglang.speculative_args import (
    MAX_RUNNING_REQUESTS,
    Drafting,
    SpeculativeArgs,
    drafting_of,
    speculation_of,
)

DraftTokens = Annotated[int, Range(1, MAX_DRAFTS)]
_CHUNKS = ((20, 2048), (60, 4096), (160, 8192))
"""(GiB, tokens): prompt tokens that a step computes on a GPU with less memory than that. Above all: 16,384."""
SIMULATED = ("fcfs", "lpm", "shortest-prefill-first")


@dataclass(frozen=True)
class SglangConfig(PolicyConfig):
    """Knobs by SGLang's names, with its defaults; `chunked_prefill_size` by the GPU (`device_defaults`), and that of an
    H100 or H200 where none is known.

    `chunked_prefill_size` -1 (or 0): off; else a multiple of the KV block. `max_running_requests` null: 512 times the
    KV tokens by max_model_len, from 2048 to 4096; any value is cut to half the KV tokens. Scheduling overlaps with the
    GPU's work unless `disable_overlap_schedule`; `disable_consecutive_prefill_overlap` is an environment variable of
    SGLang's, null: unset, which is false. Preemption for priority needs a difference above
    `priority_scheduling_preemption_threshold`. With `scheduler_recv_interval` above 1 arrivals are taken in only after
    that many steps of decodes, or after a step with a prompt.

    With a `speculative_algorithm` each decode verifies `speculative_num_draft_tokens` tokens a step, its own among
    them, and `max_running_requests` null is 48. Assumed in a simulation: `acceptance`, a law, or one by request class,
    in which "" stands for all other classes.
    """

    schedule_policy: Literal[
        "fcfs", "lpm", "shortest-prefill-first", "dfs-weight", "hrrn", "lof", "random", "routing-key", "priority"
    ] = "fcfs"
    max_running_requests: PositiveInt | None = None
    max_prefill_tokens: PositiveInt = 16384
    chunked_prefill_size: Annotated[int, Range(-1, INT32_MAX)] = 8192
    enable_mixed_chunk: bool = False
    prefill_max_requests: PositiveInt | None = None
    schedule_conservativeness: NonNegative = 1.0
    disable_radix_cache: bool = False
    retraction_policy: Literal["length", "priority"] = "length"
    enable_priority_scheduling: bool = False
    disable_priority_preemption: bool = False
    schedule_low_priority_values_first: bool = False
    priority_scheduling_preemption_threshold: Priority = 10
    disable_overlap_schedule: bool = False
    disable_consecutive_prefill_overlap: bool | None = None
    scheduler_recv_interval: PositiveInt = 1
    speculative_algorithm: (
        Literal["EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "FROZEN_KV_MTP", "DFLASH", "DSPARK", "UNO"] | None
    ) = None
    speculative_num_steps: DraftTokens | None = None
    speculative_eagle_topk: DraftTokens | None = None
    speculative_num_draft_tokens: DraftTokens | None = None
    acceptance: Laws | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule_policy not in SIMULATED:
            raise ValueError(
                f"schedule_policy: {self.schedule_policy} is not simulated yet. Choose from {', '.join(SIMULATED)}"
            )
        if self.enable_priority_scheduling and self.schedule_policy != "fcfs":
            raise ValueError(
                "To use priority scheduling, schedule_policy must be fcfs or lof;"
                f" {self.schedule_policy} is not supported"
            )
        if self.schedule_policy == "shortest-prefill-first" and self.disable_radix_cache:
            raise ValueError("shortest-prefill-first requires prefix caching. Remove disable_radix_cache: true")
        if self.disable_overlap_schedule and self.disable_consecutive_prefill_overlap:
            raise ValueError(
                "disable_consecutive_prefill_overlap: true has no effect with disable_overlap_schedule. Remove one"
            )
        speculation_of(self._speculative_args)  # refuses arguments that do not go together

    @classmethod
    def device_defaults(cls, device: Device, stated: Mapping[str, Any]) -> dict[str, Any]:
        """`chunked_prefill_size` on `device`, unless stated.

        Source: python/sglang/srt/arg_groups/memory_hook.py of the 0.5.23 wheel, `handle_gpu_memory_settings`.
        """
        tokens = next((size for gib, size in _CHUNKS if device.memory_bytes < gib * 2**30), 16384)
        return {} if "chunked_prefill_size" in stated else {"chunked_prefill_size": tokens}

    @property
    def traits(self) -> Traits:
        return Traits(
            prefix_cache="" if self.disable_radix_cache else "radix",
            knobs=("chunked_prefill_size", "max_prefill_tokens", "max_running_requests"),
            loop=SYNC if self.disable_overlap_schedule else OVERLAP,
            speculation=speculation_of(self._speculative_args),
        )

    @property
    def drafting(self) -> Drafting | None:
        """How decodes draft and verify; None if they do not."""
        return drafting_of(self._speculative_args)

    @property
    def _speculative_args(self) -> SpeculativeArgs:
        return SpeculativeArgs(
            self.speculative_algorithm,
            self.speculative_num_steps,
            self.speculative_eagle_topk,
            self.speculative_num_draft_tokens,
            self.acceptance,
            self.enable_mixed_chunk,
        )

    @property
    def asked_running_requests(self) -> int | None:
        """The most requests that run, before it is cut to the KV tokens; None: by these and max_model_len."""
        if self.max_running_requests is None and self.speculative_algorithm is not None:
            return MAX_RUNNING_REQUESTS
        return self.max_running_requests

    @property
    def preempts(self) -> bool:
        """Whether a request that waits may take the place of less important ones."""
        return self.enable_priority_scheduling and not self.disable_priority_preemption

    @property
    def mixes(self) -> bool:
        """Whether decodes ride along with prefills."""
        return self.enable_mixed_chunk and self.chunked_prefill_size > 0
