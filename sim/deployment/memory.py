"""How engines share a GPU's memory: the reserves of each besides weights and KV, and its share of the memory.

Every engine measures its own needs when it starts; here they are derived, and each constant names its source. A number
from a start-up log is better and takes the place of all this. Errors: `python -m tools.kv_memory` prints them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from batchsim.base.kv_groups import KvLayout
from batchsim.base.kv_pools import KvPools
from batchsim.deployment.layers import Experts, Split
from batchsim.deployment.model import GpuSpec, ModelSpec
from batchsim.deployment.vllm_memory import Start, needs, release, rotary_bytes

RESERVE_BYTES = 2_600_000_000
"""Bytes of each GPU that an unnamed engine needs besides weights and KV: CUDA context, workspaces, the activations and
logits of its largest step. Assumed, and the same for every model: with it Llama-3.1-8B in bf16 has 55.8k blocks of 16
on an H200 at 0.90, as expected of a measured engine there."""

STEP_TOKENS = 8192
STEP_REQUESTS = 256
"""Tokens and requests of the largest step of an engine, unless stated."""

SAMPLER_BYTES = 47
"""Bytes that the sampler of vLLM up to 0.11 needs at once for each request and word of the vocabulary when it is tried
at the start: logits in 16 and 32 bits, sorted, their indices, probabilities and sums. Fitted to three start-ups of 0.8
to 0.11 of results/reference/kv."""

CONTEXT_BYTES = {"vllm": 300_000_000, "sglang": 800_000_000, "tensorrt_llm": 800_000_000}
"""Bytes that CUDA's context and libraries take on a GPU. SGLang: 0.75 GiB of 49,140 MiB were gone before any weight
(github.com/xorbitsai/inference issue 3481); TensorRT-LLM assumed alike. vLLM, up to 0.11, counts most of it to what its
share leaves over; the rest is assumed."""

COMMUNICATION_BYTES = 2_200_000_000
"""Bytes of buffers with which GPUs talk to each other. From two start-ups, of vLLM and SGLang, with Qwen3-235B-A22B-FP8
on four H100 (github.com/vllm-project/vllm issue 21348): what is missing there, 2 to 3 GiB, after all else. vLLM from
0.12 on has constants of its own (`vllm_memory`)."""

PROFILED = (0, 12)
"""The release of vLLM from which on `vllm_memory` has its rule."""


@dataclass(frozen=True, slots=True)
class KvBudget:
    """KV blocks of one engine, and in `terms` the sum they come from. With `tp` GPUs each has a part of every block."""

    num_blocks: int
    block_size: int
    terms: str
    layout: KvLayout | None = None
    """Groups of layers that share the blocks, of which `num_blocks` can be given out; None: one of full attention."""
    pools: KvPools | None = None
    """Pools beside that of the blocks, which is then of the layers that keep all tokens; None: there is none."""

    @property
    def tokens(self) -> int:
        """Tokens for which there is room; with several groups those of one request alone."""
        layout = self.layout
        if layout is None or not layout.blocks_per_token:
            return self.num_blocks * self.block_size
        return max(int((self.num_blocks - layout.fixed_blocks) / layout.blocks_per_token), 0)

    @property
    def alignment(self) -> int:
        """Tokens at whose multiples a prefix can be found again."""
        return self.block_size if self.layout is None else self.layout.alignment

    def __str__(self) -> str:
        if (layout := self.layout) is not None:
            count = len(layout.groups)
            of = f"{count} group{'s'[: count != 1]} of layers ({layout}; {self.terms})"
            return f"KV {self.num_blocks:,} blocks for {of}: {layout.per_request}"
        beside = "" if self.pools is None else f", and beside them {self.pools}"
        return f"KV {self.tokens:,} tokens ({self.num_blocks:,} blocks of {self.block_size}: {self.terms}){beside}"


class Reserve(NamedTuple):
    """Bytes of each GPU that an engine keeps besides weights and KV. `before`: in use before it reads the free memory;
    `after`: taken from its own share. Each is (name in reports, bytes)."""

    before: tuple[tuple[str, int], ...] = ()
    after: tuple[tuple[str, int], ...] = ()

    @classmethod
    def stated(cls, size: int) -> Reserve:
        """A reserve of `size` bytes, of unspecified use."""
        return cls(after=(("reserve", size),))


def activation_bytes(model: ModelSpec, split: Split, step_tokens: int) -> int:
    """Bytes of the activations that live at once in the widest layer for a step of `step_tokens` tokens, on each GPU.

    Residual, normed and result rows of the hidden size, and of an MLP its gate, up and activated rows; of experts, for
    each that a token goes to, these and a row of the hidden size.
    """
    hidden, widest = model.hidden_size, 0
    for each in model.kinds:
        mlp = each.mlp
        if isinstance(mlp, Experts):
            inner = mlp.width // split.moe_tp
            rows = mlp.per_token * (max(2 * inner, hidden) + inner) + 3 * mlp.shared_width // split.tp
        else:
            rows = 3 * mlp.width // split.tp
        widest = max(widest, 3 * hidden + rows)
    return step_tokens * widest * model.dtype_bytes


def _parted(split: Split) -> tuple[tuple[str, int], ...]:
    return (("communication", COMMUNICATION_BYTES),) if split.tp * split.ep * split.moe_tp > 1 else ()


def _vllm_reserve(start: Start) -> Reserve:
    """vLLM runs its largest step and sampler once when it starts, and counts what they leave in use."""
    if start.release >= PROFILED:
        return Reserve(after=needs(start))
    sampler = start.step_requests * start.model.vocab_size * SAMPLER_BYTES
    activations = max(activation_bytes(start.model, start.split, start.step_tokens), sampler)
    return Reserve(
        after=(("activations", activations), *_parted(start.split), ("engine", CONTEXT_BYTES["vllm"])),
    )


def _sglang_reserve(start: Start) -> Reserve:
    """SGLang reads how much is free once its GPUs are connected; activations and graphs go beside its share."""
    return Reserve(before=(*_parted(start.split), ("engine", CONTEXT_BYTES["sglang"])))


def _tensorrt_llm_reserve(start: Start) -> Reserve:
    """TensorRT-LLM runs its largest step when it starts and takes a share of what is free then."""
    activations = ("activations", activation_bytes(start.model, start.split, start.step_tokens))
    return Reserve(before=(activations, *_parted(start.split), ("engine", CONTEXT_BYTES["tensorrt_llm"])))


def _any_reserve(start: Start) -> Reserve:
    return Reserve.stated(RESERVE_BYTES)


def _vllm_share(version: str, memory_bytes: int, num_gpus: int) -> float:
    """`gpu_memory_utilization`: 0.92 from 0.22 on. Source: vllm/config/cache.py of 0.14 to 0.25."""
    return 0.92 if release(version) >= (0, 22) else 0.90


def _sglang_share(version: str, memory_bytes: int, num_gpus: int) -> float:
    """`mem_fraction_static`: all but what SGLang expects of activations, other GPUs and graphs, in MiB.

    Source: ServerArgs of 0.5.16, as aiconfigurator-core 0.12.0 states it in sdk/backends/sglang_backend.py.
    """
    total = memory_bytes / 2**20
    tiers = ((20, 2048, 8, 8), (35, 2048, 24, 80), (60, 4096, 32, 160), (160, 8192, 256, 512))
    tier_sizes = next((tier[1:] for tier in tiers if total < tier[0] * 1024), (16384, 512, 512))
    chunk, graph = tier_sizes[0], tier_sizes[1] if num_gpus < 4 else tier_sizes[2]
    kept = 512 + 1.5 * chunk + num_gpus * 128 + 2 * graph
    return round(1 - max(kept, 10 * 1024 if total > 60 * 1024 else 0) / total, 3)


class EngineRule(NamedTuple):
    """How one engine finds the bytes for KV. `of_free`: its share is of what weights and reserves leave, not of all.

    `default_share(version, memory_bytes, num_gpus)` is the share that it takes where none is stated.
    """

    knob: str
    of_free: bool
    default_share: Callable[[str, int, int], float]
    reserve: Callable[[Start], Reserve]
    keeps_windows: bool = False

    def memory_bytes(self, gpu: GpuSpec, version: str) -> int:
        """The bytes of `gpu` that the engine's share is of: vLLM from 0.12 on by what CUDA gives a program, which was
        measured; the others by the board's memory, to which their reserves were fitted."""
        profiled = self.knob == "gpu_memory_utilization" and release(version) >= PROFILED
        return gpu.program_bytes if profiled else gpu.memory_bytes

    def loaded_bytes(self, weight_bytes: int, model: ModelSpec, version: str) -> int:
        """`weight_bytes` with what the engine counts to them: vLLM from 0.12 on its table of rotations."""
        profiled = self.knob == "gpu_memory_utilization" and release(version) >= PROFILED
        return weight_bytes + (rotary_bytes(model) if profiled else 0)

    def room(self, memory_bytes: int, share: float, weight_bytes: int, reserve: Reserve) -> int:
        """Bytes for KV on one GPU; negative where there are none."""
        there, kept = memory_bytes - sum(size for _, size in reserve.before), sum(size for _, size in reserve.after)
        if self.of_free:
            return int((there - weight_bytes - kept) * share)
        return int(there * share) - weight_bytes - kept

    def terms(self, memory_bytes: int, share: float, weight_bytes: int, reserve: Reserve) -> str:
        """The sum of `room` in words, in GB."""
        there = f"{memory_bytes / 1e9:.1f} GB{_less(reserve.before)}"
        digits = f"{share:.2f}" if round(share, 2) == share else f"{share:.3f}"
        if self.of_free:
            return f"({there} − {weight_bytes / 1e9:.1f} weights{_less(reserve.after)}) × {digits}"
        whole = f"({there})" if reserve.before else there
        return f"{whole} × {digits} − {weight_bytes / 1e9:.1f} weights{_less(reserve.after)}"


def _less(parts: Iterable[tuple[str, int]]) -> str:
    return "".join(f" − {size / 1e9:.1f} {name}" for name, size in parts)


ENGINES: dict[str, EngineRule] = {
    "": EngineRule("utilisation", False, lambda version, memory_bytes, num_gpus: 0.90, _any_reserve),
    "vllm": EngineRule("gpu_memory_utilization", False, _vllm_share, _vllm_reserve),
    "sglang": EngineRule("mem_fraction_static", False, _sglang_share, _sglang_reserve),
    "tensorrt_llm": EngineRule(
        "free_gpu_memory_fraction", True, lambda version, memory_bytes, num_gpus: 0.90, _tensorrt_llm_reserve, True
    ),
}
"""The rules by the names of engines; "" for those without one."""
