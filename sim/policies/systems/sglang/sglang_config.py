"""The knobs of SGLang 0.5.23's scheduler that are simulated, and what it refuses.

Source: python/sglang/srt/arg_groups/fields/schedule.py, memory_hook.py and validation_hook.py of the 0.5.23 wheel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from batchsim.base.kv_pools import WindowDemand
from batchsim.base.plain import LEFT_OUT
from batchsim.base.ranges import INT32_MAX, NonNegative, PositiveInt, Priority, Range
from batchsim.kernel.engine_loop import OVERLAP, SYNC
from batchsim.kernel.policy_config import AdapterMemory, Device, PolicyConfig, Traits
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
    H100 or H200 where none is known."""

    schedule_policy: Literal[
        "fcfs", "lpm", "shortest-prefill-first", "dfs-weight", "hrrn", "lof", "random", "routing-key", "priority"
    ] = "fcfs"
    """Order of the waiting queue (`--schedule-policy`)."""
    max_running_requests: PositiveInt | None = None
    """The most requests that run, cut to half the KV tokens; null: 512 times the KV tokens by max_model_len, from 2048
    to 4096, and 48 with a `speculative_algorithm`."""
    max_prefill_tokens: PositiveInt = 16384
    """Prompt tokens of a batch (`--max-prefill-tokens`)."""
    chunked_prefill_size: Annotated[int, Range(-1, INT32_MAX)] = 8192
    """Tokens of a prompt in a step, a multiple of the KV block; -1 (or 0): whole prompts; by the GPU unless given."""
    enable_mixed_chunk: bool = False
    """Whether chunks and decodes share a step (`--enable-mixed-chunk`)."""
    prefill_max_requests: PositiveInt | None = None
    """Prompts of a batch at most; no limit unless given."""
    schedule_conservativeness: NonNegative = 1.0
    """Factor on the part of outputs that is reserved (`--schedule-conservativeness`)."""
    disable_radix_cache: bool = False
    """Switches the prefix cache off (`--disable-radix-cache`)."""
    retraction_policy: Literal["length", "priority"] = "length"
    """What chooses the request that is retracted where KV is short: output length alone, or priority first."""
    enable_priority_scheduling: bool = False
    """Whether requests have priorities."""
    disable_priority_preemption: bool = False
    """Whether a higher priority preempts no one."""
    schedule_low_priority_values_first: bool = False
    """Whether low values go first."""
    priority_scheduling_preemption_threshold: Priority = 10
    """Difference of priorities above which one request preempts another."""
    disable_overlap_schedule: bool = False
    """Whether scheduling waits for the GPU's work, with which it overlaps else."""
    disable_consecutive_prefill_overlap: bool | None = None
    """Whether it waits between two steps with prompts: an environment variable of SGLang's; null: false."""
    scheduler_recv_interval: PositiveInt = 1
    """Arrivals are taken in only after as many steps of decodes, or after a step with a prompt."""
    speculative_algorithm: (
        Literal["EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "FROZEN_KV_MTP", "DFLASH", "DSPARK", "UNO"] | None
    ) = None
    """How drafts are made; null: no drafts."""
    speculative_num_steps: DraftTokens | None = None
    """Passes of the drafter in a step."""
    speculative_eagle_topk: DraftTokens | None = None
    """Branches of its tree."""
    speculative_num_draft_tokens: DraftTokens | None = None
    """Tokens that each decode verifies in a step, its own among them."""
    acceptance: Laws | None = None
    """A law of accepted drafts, assumed in a simulation, or one by request class, "" being all others."""
    max_loras_per_batch: PositiveInt | None = field(default=None, metadata=LEFT_OUT)
    """The most LoRA adapters of the requests that run, the base model being one (`--max-loras-per-batch`); null: 8."""
    max_loaded_loras: PositiveInt | None = field(default=None, metadata=LEFT_OUT)
    """LoRA adapters in host memory (`--max-loaded-loras`); null: all."""
    lora_eviction_policy: Literal["lru", "fifo"] | None = field(default=None, metadata=LEFT_OUT)
    """Which adapter leaves the GPU for another: the one used, or loaded, longest ago; null: lru."""
    enable_lora_overlap_loading: bool | None = field(default=None, metadata=LEFT_OUT)
    """Whether adapters are copied onto the GPU beside steps; null: false."""
    lora_drain_wait_threshold: Annotated[float, Range(0, 1e6)] | None = field(default=None, metadata=LEFT_OUT)
    """Seconds of waiting from which on a running adapter is drained for one that waits; 0 or null: never."""
    vlm_cache_size_mb: Annotated[int, Range(0, 2**20)] | None = field(default=None, metadata=LEFT_OUT)
    """MiB of the cache of embeddings of images, videos and audios (`SGLANG_VLM_CACHE_SIZE_MB`); null: 100."""
    is_embedding: bool | None = field(default=None, metadata=LEFT_OUT)
    """Whether the model is one of embeddings, which ends each request with its prompt (`--is-embedding`);
    disable_overlap_schedule is then true. null: false."""

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
        if self.is_embedding:
            self._check_embedding()
        speculation_of(self._speculative_args)  # refuses arguments that do not go together
        if self.max_loaded_loras is not None and self.max_loaded_loras < self.lora_slots:
            raise ValueError(
                f"max_loaded_loras {self.max_loaded_loras} must be at least max_loras_per_batch {self.lora_slots}"
            )

    def _check_embedding(self) -> None:
        """ValueError for knobs that do not go with a model that makes no tokens."""
        if not self.disable_overlap_schedule:
            raise ValueError("disable_overlap_schedule: SGLang does not overlap with is_embedding. Set it to true")
        if self.speculative_algorithm is not None:
            raise ValueError("speculative_algorithm: with is_embedding there are no tokens to draft. Drop it")
        if self.vlm_cache_size_mb is not None:
            raise ValueError("vlm_cache_size_mb: images with is_embedding are not simulated. Drop it")

    @classmethod
    def stated_defaults(cls, stated: Mapping[str, Any]) -> dict[str, Any]:
        """What differs for models of embeddings.

        Source: python/sglang/srt/managers/scheduler.py of the 0.5.23 wheel.
        """
        if stated.get("is_embedding") is not True or "disable_overlap_schedule" in stated:
            return {}
        return {"disable_overlap_schedule": True}

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
            adapters=AdapterMemory(
                self.lora_slots,
                most=self.max_loaded_loras,
                eviction=self.lora_eviction_policy or "lru",
                pooled=True,
                overlaps=bool(self.enable_lora_overlap_loading),
            ),
            takes_items=not self.is_embedding,
            pooling=bool(self.is_embedding),
            kv_pools=self.speculative_algorithm is None,
            windows=self._window_demand,
            masks="" if self.is_embedding or self.disable_consecutive_prefill_overlap else "all",
        )

    @property
    def _window_demand(self) -> WindowDemand | None:
        """What bounds the other pools; None with a radix cache, or where max_running_requests is not stated."""
        if not self.disable_radix_cache or self.max_running_requests is None:
            return None
        steps = 1 if self.disable_overlap_schedule else 2
        return WindowDemand(self.max_running_requests, steps * max(self.chunked_prefill_size, 0))

    @property
    def lora_slots(self) -> int:
        """The most LoRA adapters of running requests, the base model being one."""
        return 8 if self.max_loras_per_batch is None else self.max_loras_per_batch

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
