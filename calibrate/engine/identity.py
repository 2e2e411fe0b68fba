"""The machine and the software that ran the measurements, as plain values that a profile carries."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from batchsim.base.errors import CalibrationError
from batchsim.base.version import VERSION

# Names that the driver reports, and those of the catalog, which knows the SXM boards only.
_CATALOG = {
    "NVIDIA H200": "h200",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 4090": "rtx4090",
}


def identity(device: str) -> dict[str, dict[str, Any]]:
    """`hardware` and `software` of this machine as JSON values. CalibrationError where `device` is not there."""
    check_device(device)
    return {"hardware": _hardware(device), "software": _software(device)}


def check_device(device: str) -> None:
    """CalibrationError unless this machine can run on `device`, cpu or cuda."""
    if device not in ("cpu", "cuda"):
        raise CalibrationError(f"--device {device}: not known. Write cpu or cuda.")
    if device == "cuda" and not torch.cuda.is_available():
        built = f"torch {torch.__version__} sees no CUDA device"
        raise CalibrationError(f"--device cuda: {built}. Use --device cpu, or a machine with a GPU and its driver.")


def set_cpu_threads(count: int) -> None:
    """Sets how many CPU threads torch uses in this process. A profile says on how many it was measured."""
    torch.set_num_threads(count)


def catalog_gpu(hardware: dict[str, Any]) -> str | None:
    """The catalog's name of the GPU in `hardware`; None for a CPU, or a GPU that the catalog lacks."""
    return _CATALOG.get(str(hardware.get("gpu")))


def _hardware(device: str) -> dict[str, Any]:
    hardware: dict[str, Any] = {
        "device": device,
        "cpu": _cpu_name(),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        hardware |= {
            "gpu": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "compute_capability": f"{properties.major}.{properties.minor}",
        }
    return hardware


def _software(device: str) -> dict[str, Any]:
    software: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.system(),
        "torch": torch.__version__,
        "numpy": _version("numpy"),
        "batchsim": VERSION,
        "commit": source_commit(),
    }
    if device == "cuda":
        software |= {"cuda": torch.version.cuda, "triton": _version("triton"), "driver": _driver()}
    return software


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def source_commit() -> str | None:
    """The git commit of a source checkout; None elsewhere."""
    return _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12")


def _driver() -> str | None:
    text = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return None if text is None else text.splitlines()[0]


def _output(*command: str) -> str | None:
    """What the command prints; None if it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
