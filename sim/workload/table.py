"""Requests as columns, before they become arrivals one by one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class TraceRows:
    """The usable rows of a trace, in arrival order; all columns of one length.

    `arrival_ns` counts from the first row, or is None where the trace has no times. `notes` says, a line each, what was
    dropped, changed or left unused, with counts.
    """

    arrival_ns: Ints | None
    prompt_tokens: Ints
    output_tokens: Ints
    source: str
    format: str
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.prompt_tokens)
