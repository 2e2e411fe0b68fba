"""Which LoRA adapter each request asks for: drawn by popularity, or as the rows of a trace say it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchsim.workload.loras import Loras
from batchsim.workload.traces.trace_rows import TraceRows
from batchsim.workload.workload_config import WorkloadConfig


class AdapterDraws:
    """Which LoRA adapter each request asks for. `names` are those of the adapters, by number.

    `of_classes` has, for each class of requests, the adapters that it asks for, and under which name it draws them;
    classes of one name draw the same. `stated`: the names of those of a trace, whose rows say it; None: no rows do.
    """

    def __init__(self, of_classes: list[tuple[str, Loras | None]], stated: tuple[str, ...] | None) -> None:
        own = {name: loras.count or 0 for name, loras in of_classes if loras is not None}
        drawn = tuple(f"{name or 'lora'}-{k + 1}" for name, count in own.items() for k in range(count))
        self._of_classes = of_classes if stated is None and own else []
        self._first = {name: sum(list(own.values())[:k]) for k, name in enumerate(own)}
        self.names = drawn if stated is None else stated

    @classmethod
    def of(cls, config: WorkloadConfig, rows: TraceRows | None) -> AdapterDraws:
        """The draws of a workload whose trace has the usable `rows`; classes without adapters of their own draw its."""
        classes = {name: each.loras for name, each in config.classes.items()} or {"": None}
        own = [(name if loras is not None else "", loras or config.loras) for name, loras in classes.items()]
        names = () if rows is None else rows.texts.get("lora", ())
        return cls(own, names if config.rows_tell_loras else None)

    def drawn(self, request_class: NDArray[np.int64], stream: Callable[[str], np.random.Generator]) -> dict[str, Any]:
        """The column `adapter`: the number of each request's adapter, counted over all classes, -1: the base model; no
        column where none is drawn.

        `request_class` is the index of each request's class, `stream` returns the random numbers of a purpose.
        """
        if not self._of_classes:
            return {}
        adapter = np.full(len(request_class), -1)
        for index, (name, loras) in enumerate(self._of_classes):
            if loras is not None:
                drawn = loras.drawn(stream(f"lora/{name}").random(len(request_class)))
                own = np.where(drawn < 0, -1, self._first[name] + drawn)
                adapter = np.where(request_class == index, own, adapter)
        return {"adapter": adapter}
