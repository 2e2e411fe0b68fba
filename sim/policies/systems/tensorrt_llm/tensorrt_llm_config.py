"""The knobs of the TensorRT-LLM scheduler, by the names of its LLM API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from batchsim.base.ranges import PositiveInt, Range
from batchsim.kernel.engine_loop import OVERLAP, SYNC
from batchsim.kernel.policy_config import PolicyConfig, Traits
from batchsim.policies.systems.tensorrt_llm.decoding_config import DecodingConfig


@dataclass(frozen=True)
class TensorrtLlmConfig(PolicyConfig):
    """Knobs by TensorRT-LLM's names, with its defaults but for `enable_partial_reuse`, which is on there and not
    simulated.

    With the PyTorch runtime scheduling may overlap with the GPU's work, blocks are found again chunk by chunk and a
    paused request keeps its tokens; with the C++ one never, with the prompt's end, and as far as one step computes them
    anew.
    """

    capacity_scheduler_policy: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"] = "GUARANTEED_NO_EVICT"
    """Which requests are let in by their KV memory."""
    max_batch_size: PositiveInt = 2048
    """Requests of a step at most."""
    max_num_tokens: PositiveInt = 8192
    """Tokens of a step at most."""
    enable_chunked_prefill: bool = False
    """Whether a prompt may be computed over several steps."""
    context_chunking_policy: Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"] | None = None
    """Which prompts have a step's tokens; needs chunked prefill; null: FIRST_COME_FIRST_SERVED with it."""
    enable_block_reuse: bool = True
    """Whether blocks of prompts are found again."""
    enable_prefix_aware_scheduling: bool | None = None
    """Whether a request waits for a prompt that is being computed; needs block reuse; null: on with it. The versions of
    2025 have no such knob and always wait."""
    enable_partial_reuse: bool = False
    """Whether a part of a block is found again: on in TensorRT-LLM, and not simulated."""
    host_cache_size: Annotated[int, Range(0, 10**15)] = 0
    """Cache in host memory: 0 in TensorRT-LLM too, and more is not simulated."""
    disable_overlap_scheduler: bool | None = None
    """Whether scheduling waits for the GPU's work, with which the PyTorch runtime overlaps it else."""
    speculative_config: DecodingConfig | None = None
    """How drafts are made, which decodes verify; null: no drafts."""
    backend: Literal["pytorch", "tensorrt"] = "pytorch"
    """The PyTorch runtime, which `trtllm-serve` starts, or the C++ one of TensorRT engines."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enable_partial_reuse:
            raise ValueError(
                "enable_partial_reuse: true is not simulated: only whole blocks are found again. Set it to false, here"
                " and in the engine"
            )
        if self.host_cache_size:
            raise ValueError(
                f"host_cache_size {self.host_cache_size} is not simulated: what leaves GPU memory is lost. Set it to 0,"
                " here and in the engine"
            )
        if self.context_chunking_policy is not None and not self.enable_chunked_prefill:
            raise ValueError(
                f"context_chunking_policy {self.context_chunking_policy} needs enable_chunked_prefill: true"
            )
        if self.enable_prefix_aware_scheduling and not self.enable_block_reuse:
            raise ValueError("enable_prefix_aware_scheduling: true needs enable_block_reuse: true")
        drafting = self.speculative_config
        if self.backend == "tensorrt":
            if self.disable_overlap_scheduler is False:
                raise ValueError("disable_overlap_scheduler: false: backend tensorrt never overlaps. Leave it out")
            if drafting is not None:
                raise ValueError("speculative_config: drafts are not simulated of backend tensorrt. Leave one out")
        if drafting is None:
            return
        if not self.disable_overlap_scheduler:
            drafting.refuse_overlap()
        if self.max_num_tokens <= drafting.num_drafts:
            raise ValueError(
                f"max_num_tokens {self.max_num_tokens} must be at least {1 + drafting.num_drafts}, the tokens of a"
                " decode and its drafts"
            )

    @property
    def traits(self) -> Traits:
        return Traits(
            max_num_seqs=self.max_batch_size,
            prefix_cache="reuse" if self.enable_block_reuse else "",
            knobs=("max_batch_size", "max_num_tokens"),
            loop=SYNC if self.disable_overlap_scheduler or self.backend == "tensorrt" else OVERLAP,
            speculation=None if self.speculative_config is None else self.speculative_config.speculation,
        )

    @property
    def waits_for_prefixes(self) -> bool:
        """Whether a prompt whose next block another prompt is about to make waits for it. A static batch never does."""
        static = self.capacity_scheduler_policy == "STATIC_BATCH"
        return self.enable_block_reuse and self.enable_prefix_aware_scheduling is not False and not static
