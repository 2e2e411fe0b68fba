"""Which answers a grammar constrains: a share of the requests, or those of which a trace's rows say so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from batchsim.base.later import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from batchsim.workload.traces.trace_rows import Ints
    from batchsim.workload.workload_config import WorkloadConfig


def is_structured(workload: WorkloadConfig) -> bool:
    """Whether a grammar may constrain any answer. ValueError where that is said twice."""
    columns = None if workload.trace is None else workload.trace.columns
    by_rows = columns is not None and columns.structured is not None
    stated = [each.structured for each in (workload, *workload.classes.values()) if each.structured is not None]
    if by_rows and stated:
        raise ValueError(
            "structured: the rows of the trace say which answers are constrained. Drop it, or trace.columns.structured."
        )
    return by_rows or any(stated)


def draw_constrained(
    shares: Sequence[tuple[str, float | None]], request_class: Ints, stream: Callable[[str], np.random.Generator]
) -> Ints:
    """1 for each request whose answer is constrained, else 0: of the classes `request_class`, each with the name under
    which it draws and the share of its requests; None: none."""
    constrained = np.zeros(len(request_class), np.int64)
    for index, (name, share) in enumerate(shares):
        if share is not None:
            drawn: NDArray[np.bool_] = stream(f"structured/{name}").random(len(request_class)) < share
            constrained = np.where(request_class == index, drawn.astype(np.int64), constrained)
    return constrained
