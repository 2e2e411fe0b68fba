"""The ceilings of a device: copies, matmuls, the host link. Measured step times are judged by them.

Operands are random, since multiplying zeros draws less power and runs faster than any model does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_REPEATS = 9
_AT_ONCE = {"cuda": 10, "cpu": 1}  # runs between two looks at the clock, so that a launch's latency does not count
_WARM_S = {"cuda": 0.5, "cpu": 0.05}  # seconds under load until the clocks are up
# (bytes copied, side of the square matmul) by device: large enough to be bound by bandwidth and by arithmetic.
_SIZES = {"cuda": (2**31, 8192), "cpu": (2**26, 512)}
_LINK_BYTES = 2**29


def probe(device: str) -> dict[str, float]:
    """Ceilings of `device` by name, each the median of repeated runs.

    `copy_bytes_per_s` counts reads and writes, `matmul_flops` is of 16-bit (CPU: 32-bit) square matrices; on CUDA also
    `host_to_device_bytes_per_s` and `device_to_host_bytes_per_s` of pinned memory.
    """
    copied, side = _SIZES[device]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    source = torch.ones(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found = {"copy_bytes_per_s": 2 * copied / _median_s(lambda: target.copy_(source), device)}
    left, right = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    found["matmul_flops"] = 2 * side**3 / _median_s(lambda: left @ right, device)
    if device == "cuda":
        host = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device)
        up = _median_s(lambda: there.copy_(host, non_blocking=True), device)
        down = _median_s(lambda: host.copy_(there, non_blocking=True), device)
        found["host_to_device_bytes_per_s"] = _LINK_BYTES / up
        found["device_to_host_bytes_per_s"] = _LINK_BYTES / down
    return found


def _median_s(run: Callable[[], object], device: str) -> float:
    """Median duration in seconds of `run` under load, timed to its end on the device."""
    warm_until_s = time.perf_counter() + _WARM_S[device]
    while time.perf_counter() < warm_until_s:
        _timed_s(run, device)
    return statistics.median(_timed_s(run, device) for _ in range(_REPEATS))


def _timed_s(run: Callable[[], object], device: str) -> float:
    start_s = time.perf_counter()
    for _ in range(_AT_ONCE[device]):
        run()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start_s) / _AT_ONCE[device]
