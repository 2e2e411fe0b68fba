"""What a device failing in the middle of something becomes: one line, with a reason that the records keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sim.errors import ExecutorError

_NO_MEMORY = ("allocate memory", "not enough memory")  # what the CPU's allocators say, in a plain RuntimeError


@contextmanager
def device_errors(what: str) -> Iterator[None]:
    """ExecutorError for what torch raises when the device fails; `what` was being done."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one of them
        text = (str(error).splitlines() or [type(error).__name__])[0]
        if isinstance(error, torch.OutOfMemoryError) or any(words in text for words in _NO_MEMORY):
            message = f"{what}: out of memory: {text} Use fewer KV blocks or smaller steps."
            raise ExecutorError(message, "out_of_memory") from error
        raise ExecutorError(f"{what}: the device failed: {text}", "step_failed") from error
