"""Ahead-of-time compilation of what `TritonBackend` launches, on a machine without a GPU.

The backend runs on meta tensors (shapes without memory) while its kernels only note their arguments; each noted launch
is then compiled and assembled with the tools in Triton's own wheel.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from batchsim.calibrate.engine import kernels, triton_backend

POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}


@dataclass(frozen=True)
class Launch:
    """A kernel with the arguments it was called with."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, int]

    @property
    def name(self) -> str:
        """The kernel's name in calibrate/engine/kernels.py."""
        return self.kernel.__name__

    def compile(self, capability: int = 90) -> Any:
        """The kernel compiled for sm_90 or another capability, specialised as Triton would at this launch.

        Pointers and strides are divisible by 16, but for those that the kernel excepts.
        """
        signature, constants, attrs = {}, {}, {}
        for i, (param, arg) in enumerate(zip(self.kernel.params, self.args, strict=True)):
            specialised = type(arg) is int and not param.do_not_specialize
            if param.is_constexpr or arg is None or (specialised and arg == 1):
                signature[param.name], constants[(i,)] = "constexpr", arg
                continue
            signature[param.name] = _type(arg)
            aligned = isinstance(arg, torch.Tensor) and not param.do_not_specialize_on_alignment
            if aligned or (specialised and arg % 16 == 0):
                attrs[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=attrs)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=self.options)


def _type(arg: Any) -> str:
    if isinstance(arg, torch.Tensor):
        return POINTERS[arg.dtype]
    return "i32" if isinstance(arg, int) else "fp32"


def launches(work: Callable[[triton_backend.TritonBackend], None], monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Every kernel that `work` makes a backend launch, none of which runs."""
    found: list[Launch] = []

    class Note:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            assert all(n > 0 for n in grid)
            return lambda *args, **options: found.append(Launch(self.kernel, args, options))

    names = ("rms_norm", "silu_mul", "rope_store", "prefill", "decode", "combine")
    noted = SimpleNamespace(**{name: Note(getattr(kernels, name)) for name in names})
    with monkeypatch.context() as patch:
        patch.setattr(triton_backend, "kernels", noted)
        work(triton_backend.TritonBackend(num_programs=264))
    return found


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """{"REG": registers a thread, "STACK": bytes of stack (spills) a thread, ...} of an assembled kernel."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton brings no cuobjdump to read the kernel's registers with")
    report = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", report)}
