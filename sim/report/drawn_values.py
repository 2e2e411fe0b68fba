"""What pictures and pages draw alike, as numbers; nothing here needs a library that draws."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from batchsim.drive.fleet.fleet_plan import ReplicaSpan
from batchsim.report.reading import Floats

USER, GPU = "user_tokens_per_s_p50", "output_tokens_per_s_per_gpu"
"""The axes of what a GPU delivers against what its users get: columns of the summary."""


def log_ends(y: Floats, half: Floats) -> tuple[Floats, Floats]:
    """(low, high) of intervals on a logarithmic axis: up to `y` + `half`, and down by the same factor, since one that
    reached 0 or below would have no lower end there."""
    return y - half * (y / (y + half)), y + half  # in this form rounding puts no lower end above `y`


def counted(spans: Sequence[ReplicaSpan], states: Collection[str], edges_ns: Floats) -> Floats:
    """How many replicas were in one of `states`, as an average over each interval of `edges_ns`."""
    total = np.zeros(len(edges_ns) - 1)
    for span in spans:
        if span.state in states:
            total += np.diff(np.clip(edges_ns, span.start_ns, span.end_ns))
    return total / np.diff(edges_ns)
