"""What vLLM keeps of its share of a GPU besides weights and KV, by its version.

vLLM runs its largest step and its sampler once when it starts, and counts the bytes that these had in use at their
peak, what stays of them, and what is outside of PyTorch. The form is of its source (0.19.0, 0.33.0), the constants are
of 31 public start-ups of 0.19.0 on H100 (github.com/llm-d-incubation/llm-d-planner pull request 205), whose KV memory
is found within 1 %, with a median error of 0.01 %, from their logged weights. `python -m tools.kv_memory` prints them.

0.21 to 0.25 add an estimate of CUDA graphs, within 0.13 GiB on average of what the same logs estimate. From
0.25.1 (dense models) and 0.29 (all) another model runner is the default, which counts buffers that stay: that part is
of its source alone, and no start-up was found to hold it against.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from batchsim.deployment.layers import Experts, Layers, Split
from batchsim.deployment.model import ModelSpec

GIB, MIB = 2**30, 2**20

WORKSPACE_BYTES = 35 * MIB
"""Bytes that stay after the first step: cuBLAS's workspace of 32 MiB, and 3 MiB. Fitted: the start-ups have
a median of 34.9 MiB beyond the other terms."""

OUTSIDE_BYTES = {1: int(0.25 * GIB), 2: int(2.07 * GIB), 4: int(2.15 * GIB)}
"""Bytes on each GPU outside of PyTorch, CUDA's context and NCCL's buffers, by the GPUs that share a layer, the medians
of the start-ups; more than four are taken as four."""
STAGE_BYTES = int(0.07 * GIB)
"""The same where a stage of a pipeline has one GPU."""

CAPTURED = 102
"""CUDA graphs that the start-ups captured, to which the estimate of `graph_bytes` was fitted."""


class Start(NamedTuple):
    """What an engine is started with, on each GPU of one stage of a pipeline.

    `layers` are the stage's. `mlp_type` and `experts_type` are the types of matrices, by their names in
    `ELEMENT_BYTES`. `multiprocessors`: of the GPU. The largest step has `step_tokens` tokens of `step_requests`
    requests.
    """

    version: str
    model: ModelSpec
    layers: tuple[Layers, ...]
    split: Split
    step_tokens: int
    step_requests: int
    is_first: bool = True
    is_last: bool = True
    mlp_type: str = ""
    experts_type: str = ""
    multiprocessors: int = 132

    @property
    def release(self) -> tuple[int, ...]:
        return release(self.version)

    @property
    def num_gpus(self) -> int:
        """GPUs that share the layers of the stage."""
        return max(self.split.tp, self.split.ep * self.split.moe_tp)

    @property
    def has_experts(self) -> bool:
        return any(isinstance(each.mlp, Experts) for each in self.layers)


def release(version: str) -> tuple[int, ...]:
    """`0.25.1rc0` and `0.25.1` as (0, 25, 1), `0.21` as (0, 21, 0); of "" the newest there can be, so that what engines
    do today is taken."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", re.split(r"(?:a|b|rc|\.post|\.dev)\d", version)[0])[:3])
    return (*numbers, 0, 0)[:3] if version else (10**6,)


def needs(start: Start) -> tuple[tuple[str, int], ...]:
    """(name in reports, bytes) of each part that vLLM 0.12 and later keeps on a GPU of the stage."""
    graphs = (("graphs", graph_bytes(start)),) if _counts_graphs(start) else ()
    outside = STAGE_BYTES if start.num_gpus == 1 and not (start.is_first and start.is_last) else OUTSIDE_BYTES[1]
    several = max(OUTSIDE_BYTES[n] for n in OUTSIDE_BYTES if n <= start.num_gpus) - OUTSIDE_BYTES[1]
    communication = (("communication", several),) if several else ()
    return (("activations", activation_bytes(start)), *graphs, *communication, ("engine", outside))


def activation_bytes(start: Start) -> int:
    """Bytes of PyTorch's tensors at their peak, weights left out: the widest layer of the largest step, or the sampler
    where that needs more, with what stays allocated."""
    hidden_row = start.step_tokens * start.model.hidden_size * start.model.dtype_bytes
    received = 0 if start.is_first else 2 * hidden_row
    sampler = _sampler_bytes(start) if start.is_last else 0
    stays = WORKSPACE_BYTES + _expert_workspace(start) + _penalty_counts(start) + _encoder_bytes(start) + received
    return stays + max(_forward_bytes(start), sampler)


def _forward_bytes(start: Start) -> int:
    """The widest layer: four rows of the hidden size a token and three of its MLP, of experts of what all tokens go
    through; rows in 8 bits beside them where matrices are multiplied so."""
    model, tp = start.model, start.split.tp
    in_stage = [each.mlp for each in start.layers]
    widths = [mlp.shared_width if isinstance(mlp, Experts) else mlp.width for mlp in in_stage]
    own = max(widths) // tp
    embedded = 0 if start.is_last or not start.is_first else 3 * model.hidden_size
    size = start.step_tokens * model.dtype_bytes * (3 * own + 4 * model.hidden_size + embedded)
    dense = max((mlp.width for mlp in in_stage if not isinstance(mlp, Experts)), default=0)
    in_8_bits = start.mlp_type in ("fp8", "fp8_block", "int8")
    return size + (start.step_tokens * dense // tp if in_8_bits else 0)


def _expert_workspace(start: Start) -> int:
    """Two buffers of Triton's kernel for experts, which stay: rows in and between of every expert that a token goes
    through. None for MXFP4, whose kernel is another."""
    if start.experts_type == "mxfp4":
        return 0
    widest = 0
    for each in start.layers:
        if isinstance(mlp := each.mlp, Experts):
            width, rows = mlp.width // start.split.moe_tp, mlp.latent_width or start.model.hidden_size
            inner = 2 * width if mlp.gated else width
            widest = max(widest, mlp.per_token * (max(width, rows) + max(inner, rows)))
    return start.step_tokens * start.model.dtype_bytes * widest


def _encoder_bytes(start: Start) -> int:
    """Pixels, and rows of the hidden size, of as many of a seeing model's largest images as a step has tokens for; of
    one, where that has more."""
    tokens, pixels = start.model.image
    if not tokens or (_newer_runner(start) and start.release < (0, 27)):  # whose first releases did not try encoders
        return 0
    budget = max(start.step_tokens, tokens)
    return budget // tokens * pixels * 2 + budget * start.model.hidden_size * start.model.dtype_bytes


def _sampler_bytes(start: Start) -> int:
    """The sampler's dummy run with a request of each slot.

    Logits in the model's type and in 32 bits, probabilities and draws in 32 bits, one row a multiprocessor in 32 bits,
    hidden states, the sampled ones and random ones. Of the newer runner the logits in both types, and about 8 bytes
    more of FlashInfer's sampler.
    """
    model, requests = start.model, min(start.step_requests, start.step_tokens)
    words, element = requests * model.vocab_size, model.dtype_bytes
    rows = (start.step_tokens + 2 * requests) * model.hidden_size * element
    return words * (element + 12) + 4 * model.vocab_size * start.multiprocessors + rows


def _penalty_counts(start: Start) -> int:
    """Counts of every word for every slot, and a bit beside each, which the newer runner keeps."""
    requests = min(start.step_requests, start.step_tokens)
    return requests * start.model.vocab_size * 33 // 8 if _newer_runner(start) and start.is_last else 0


def _newer_runner(start: Start) -> bool:
    return start.release >= ((0, 29) if start.has_experts else (0, 25, 1))


def _counts_graphs(start: Start) -> bool:
    """Whether CUDA graphs are estimated and counted: from 0.21 on, in the newer runner from 0.29 on."""
    return start.release >= ((0, 29) if _newer_runner(start) else (0, 21))


def graph_bytes(start: Start) -> int:
    """vLLM's estimate of its CUDA graphs, by a line through the estimates of 31 start-ups."""
    layers = sum(each.count for each in start.layers)
    several, experts = start.num_gpus > 1, start.has_experts
    gib = 0.64 + layers * (0.006 + 0.0075 * several + 0.005 * experts)
    return int(gib * GIB * 2 * len(capture_sizes(start)) / CAPTURED)


def capture_sizes(start: Start) -> list[int]:
    """The batch sizes of CUDA graphs, each captured in two modes: up to twice the slots, and 512; gpt-oss has 1024."""
    most = min(1024 if start.model.model_type == "gpt_oss" else 512, 2 * start.step_requests, start.step_tokens)
    sizes = [1, 2, 4, *range(8, min(most + 1, 256), 8), *range(256, most + 1, 16)]
    return [size for size in sizes if size <= most]


def rotary_bytes(model: ModelSpec) -> int:
    """Bytes of the table of cosines and sines of all positions, which vLLM counts to its weights."""
    if (dim := model.rotary_dim) is None:
        kept = [each.attention for each in model.kinds if each.attention.kind not in ("none", "gdn", "kda", "mamba2")]
        dim = next((getattr(each, "rope_dim", 0) or getattr(each, "head_dim", 0) for each in kept), 0)
    return model.max_position_embeddings * dim * model.dtype_bytes
