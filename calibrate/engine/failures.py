"""Turns a device's failure amid some work into one line, with a reason that the records keep."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from batchsim.base.errors import ExecutorError

_NO_MEMORY = ("allocate memory", "not enough memory")  # what the CPU's allocators say, in a plain RuntimeError


@contextmanager
def device_errors(what: str) -> Iterator[None]:
    """Turns what torch and Triton raise when the device fails into ExecutorError; `what` names the work."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, RuntimeError) and not _is_tritons(error):  # torch.OutOfMemoryError is a RuntimeError
            raise
        text = (str(error).splitlines() or [type(error).__name__])[0]
        if not isinstance(error, RuntimeError):  # Triton says where in a kernel it failed before it says why
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if isinstance(error, torch.OutOfMemoryError) or any(words in text for words in _NO_MEMORY):
            message = f"{what}: out of memory: {text} Use fewer KV blocks or smaller steps."
            raise ExecutorError(message, "out_of_memory") from error
        raise ExecutorError(f"{what}: the device failed: {text}", "step_failed") from error


def _is_tritons(error: Exception) -> bool:
    """Whether `error` is Triton's, for a kernel that did not compile or launch. Without Triton imported none is."""
    triton = sys.modules.get("triton.errors")
    return triton is not None and isinstance(error, triton.TritonError)
