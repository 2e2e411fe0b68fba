"""The types of a deployment as the kernel tables name them: which kernels an engine has for a type on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from batchsim.base.errors import CalibrationError
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.model import ModelSpec

PACKAGE = "aiconfigurator-core"

_GEMM = {"bfloat16": ("bfloat16",), "float16": ("bfloat16",), "fp8": ("fp8", "fp8_static"), "fp8_block": ("fp8_block",),
         "int8": ("sq", "int8_wo"), "int4": ("int4_wo",), "nvfp4": ("nvfp4", "nvfp4_wo", "w4a16_nvfp4"),
         "w4a16_nvfp4": ("w4a16_nvfp4",), "mxfp4": ("bfloat16",)}  # fmt: skip
_MOE = {"bfloat16": ("bfloat16",), "float16": ("bfloat16",), "fp8": ("fp8",), "fp8_block": ("fp8_block",),
        "int4": ("int4_wo",), "nvfp4": ("nvfp4", "nvfp4_wo"), "w4a16_nvfp4": ("nvfp4_wo",),
        "mxfp4": ("w4a8_mxfp4_mxfp8", "w4a16_mxfp4", "w4a16_mxfp4_cutlass", "w4a8_mxfp4_mxfp8_trtllm")}  # fmt: skip
_KV = {"bfloat16": ("bfloat16",), "float16": ("bfloat16",), "fp8": ("fp8",), "int8": ("int8",)}
"""Modes of the tables for a type of weights, of experts and of the KV cache, the likeliest first: the first for which
there is data is what the engine has kernels for on that GPU. Checkpoints in mxfp4 keep all but experts in 16 bits."""
_FMHA = {"fp8": ("bfloat16", "fp8")}
"""Types in which attention computes over a KV cache of that type; bfloat16 elsewhere. Engines convert keys of 8 bits on
reading unless their kernels attend in 8 bits, as SGLang's do; for latent attention in fp8 the tables have no data."""


class NoTablesError(CalibrationError):
    """The tables do not answer for this deployment, for a `reason` in a clause."""

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason or text


WAYS_OUT = (
    "Ways out: a GPU's sheet (cost: {kind: roofline, gpu: ...}), stated times (cost: {kind: linear, ...}), or a profile"
    " of your own engine (batchsim calibrate)."
)


@dataclass(frozen=True)
class Modes:
    """How the tables name the types of a deployment: matmuls, experts, KV cache, and in what attention computes."""

    gemm: str
    moe: str
    kv: str
    fmha: str

    def __str__(self) -> str:
        return f"gemm {self.gemm}, moe {self.moe}, kv {self.kv}, attention in {self.fmha}"


def has_experts(model: ModelSpec) -> bool:
    return any(kind.mlp.kind == "experts" for kind in model.kinds)


def gemm_dtype(deployment: Deployment) -> str:
    """The type of the matrices through which all tokens go: of the MLPs, where there are such, else of attention."""
    mlps = any(kind.mlp.kind == "dense" or kind.mlp.shared_width for kind in deployment.model.kinds)
    return deployment.types.mlp if mlps else deployment.types.attention


def modes_of(deployment: Deployment) -> Iterator[Modes]:
    """The modes of the tables that the deployment's types may mean, the likeliest first."""
    weights, experts, kv = gemm_dtype(deployment), deployment.types.experts, deployment.types.kv
    asked = [("weights", weights, _GEMM), ("kv", kv, _KV)]
    asked += [("moe", experts, _MOE)] if has_experts(deployment.model) else []
    for what, dtype, known in asked:
        if dtype not in known:
            types = ", ".join(known)
            raise NoTablesError(f"deployment.{what}: no kernel tables of {dtype}. Known are {types}. {WAYS_OUT}")
    choices = (_GEMM[weights], _MOE.get(experts, ("bfloat16",)), _KV[kv], _FMHA.get(kv, ("bfloat16",)))
    for gemm, moe, cached, fmha in product(*choices):
        yield Modes(gemm, moe, cached, fmha)
