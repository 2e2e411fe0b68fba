"""The memory that a model's runner needs, checked against what model and device have before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from batchsim.base.errors import CalibrationError
from batchsim.calibrate.engine.backend import SPARE_BLOCKS
from batchsim.deployment.model import ModelSpec

MEMINFO = Path("/proc/meminfo")
GB = 1e9


@dataclass(frozen=True)
class StepLimits:
    """The largest step that a runner takes: sequences (padding rows and draft tokens too), tokens, and tokens of one
    sequence."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


def check_limits(spec: ModelSpec, limits: StepLimits, num_blocks: int, block_size: int) -> None:
    """CalibrationError for a count below 1, or sequences longer than the model supports."""
    counts = {"num_blocks": num_blocks, "block_size": block_size} | vars(limits)
    for name, count in counts.items():
        if count < 1:
            raise CalibrationError(f"{name} {count} must be at least 1.")
    if limits.max_model_len > spec.max_position_embeddings:
        raise CalibrationError(
            f"max_model_len {limits.max_model_len} is beyond the {spec.max_position_embeddings} positions of"
            f" {spec.name}. Lower it."
        )


def find_device(name: str, spec: ModelSpec) -> torch.device:
    """The device `cpu`, `cuda` or `cuda:N`. CalibrationError unless it is there and computes in the model's dtype."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise CalibrationError(f"device {name}: only cpu and cuda are known. Use one of them.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CalibrationError(f"device {name}: torch {torch.__version__} sees no CUDA device here. Use --device cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise CalibrationError(
            f"device {device}: there are {torch.cuda.device_count()} CUDA devices. Use a smaller index."
        )
    if spec.dtype == "float16" and device.type == "cpu":
        raise CalibrationError(f"{spec.name}: float16 is not run on cpu. Use bfloat16 or float32 there.")
    if spec.dtype == "bfloat16" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        gpu = torch.cuda.get_device_name(device)
        raise CalibrationError(f"{spec.name}: {gpu} does not compute in bfloat16. Use float16 or float32 there.")
    return device


def step_bytes(spec: ModelSpec, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Bytes that the largest step needs, about: the widest layer's activations, and logits also in fp32."""
    widths = 4 * spec.hidden_size + 2 * (spec.q_size + 2 * spec.kv_size) + 3 * spec.intermediate_size
    activations = max_num_batched_tokens * widths * spec.dtype_bytes
    return activations + max_num_seqs * spec.vocab_size * (spec.dtype_bytes + 4)


def check_memory(
    spec: ModelSpec, device: torch.device, *, num_blocks: int, block_size: int, num_swap_blocks: int, step: int
) -> None:
    """CalibrationError, with what is missing and what would fit, if weights, KV and `step` bytes do not fit."""
    block_bytes = block_size * spec.kv_bytes_per_token
    free_bytes = _free_bytes(device)
    host_bytes = num_swap_blocks * block_bytes
    if device.type == "cpu":
        step += host_bytes
    elif (host_free := _free_bytes(torch.device("cpu"))) is not None and host_bytes > host_free:
        raise CalibrationError(
            f"{num_swap_blocks} swap blocks take {host_bytes / GB:.1f} GB of host memory, {host_free / GB:.1f} GB are"
            f" free. {host_free // block_bytes} would fit."
        )
    if free_bytes is None:
        return
    need = spec.weight_bytes + (num_blocks + SPARE_BLOCKS) * block_bytes + step
    if need <= free_bytes:
        return
    fitting = (free_bytes - spec.weight_bytes - step) // block_bytes - SPARE_BLOCKS
    advice = f"{fitting} KV blocks would fit." if fitting > 0 else "No KV block would fit: use a smaller model."
    raise CalibrationError(
        f"{spec.name} on {device}: {(need - free_bytes) / GB:.1f} GB short: {free_bytes / GB:.1f} GB free,"
        f" {spec.weight_bytes / GB:.1f} GB weights, {num_blocks} KV blocks of {block_bytes / 1e6:.2f} MB,"
        f" {step / GB:.1f} GB for the largest step. {advice}"
    )


def _free_bytes(device: torch.device) -> int | None:
    """Bytes free on the device; None where the host does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if not MEMINFO.is_file():
        return None
    for line in MEMINFO.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def gpus_seen() -> list[str]:
    """The names of the GPUs that torch can use."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_name(number) for number in range(count)]
