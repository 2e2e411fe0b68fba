"""The times of steps for engines whose host works while the GPU does: the host's part and the device's, apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from batchsim.cost.work import TIME_TERMS, Columns, padded_work
from batchsim.kernel.batch import Batch

if TYPE_CHECKING:
    from batchsim.cost.base import Cost


@dataclass(frozen=True, slots=True)
class HostPart:
    """ns of the host in every step, for each of its sequences and for each token of prompts."""

    base: float = 0
    per_sequence: float = 0
    per_token: float = 0

    def ns(self, batch: Batch) -> int:
        """ns of the host for the step `batch`; padding counts as sequences."""
        rows = batch.num_decode + batch.pad_decode_rows + len(batch.chunks) + batch.pad_prefill_rows
        return int(self.base + self.per_sequence * rows + self.per_token * batch.num_prefill_tokens)

    def of(self, columns: Columns) -> NDArray[np.float64]:
        """ns of the host for each recorded step: `ns`, not rounded."""
        rows = padded_work(columns).sequences
        return self.base + self.per_sequence * rows + self.per_token * columns["num_prefill_tokens"]

    def __mul__(self, factor: float) -> HostPart:
        return HostPart(self.base * factor, self.per_sequence * factor, self.per_token * factor)


class Lanes:
    """The times of steps by `cost`, taken apart. Half of the host's part of a step comes before its launch, half after
    its end: assumed.

    With several `stages` each holds an equal part of the layers, the last one the output matmul too, and what goes from
    one to the next takes its time on the links between them.
    """

    def __init__(self, cost: Cost, stages: int) -> None:
        self.cost = cost.without_host()
        self.step_ns = self.device_ns = self.cost.step_ns
        self.decode_line = self.cost.decode_line
        self._host = cost.host_part
        self._stages = stages
        self._host_of_decodes: dict[int, tuple[int, int]] = {}  # by rows of a step of decodes
        self._of_decodes: dict[int, tuple[float, int]] = {}  # by rows of a step of decodes: its head, its transfer

    def host_ns(self, batch: Batch | None) -> tuple[int, int]:
        """ns of the host before the launch of `batch` and after its end; zeros for a call that scheduled nothing."""
        if batch is None:
            return 0, 0
        if batch.chunks or batch.pad_prefill_rows or batch.num_prefill_tokens:
            return _halves(self._host.ns(batch))
        rows = batch.num_decode + batch.pad_decode_rows
        found = self._host_of_decodes.get(rows)
        if found is None:
            found = self._host_of_decodes[rows] = _halves(self._host.ns(batch))
        return found

    def stages_of(self, columns: Columns) -> NDArray[np.int64]:
        """ns of each stage for recorded steps, a row a step, a column a stage: `stages_ns`, but for the rounding."""
        cost, stages, work, terms = self.cost, self._stages, padded_work(columns), self.cost.explain(columns)
        whole = sum((terms[name] for name in TIME_TERMS), np.zeros(len(work.rows)))
        head = np.array([cost.head_ns(rows) for rows in work.rows.tolist()])
        between = np.array([int(cost.transfer_ns(tokens)) for tokens in work.tokens.tolist()], np.int64)
        each = ((whole - head) / stages).astype(np.int64)
        found = np.stack([each + between] * (stages - 1) + [(each + head).astype(np.int64)], axis=1)
        return np.maximum(found, 1)

    def stages_ns(self, batch: Batch) -> tuple[int, ...]:
        """ns of the step `batch` in each stage, the transfer to the next one included."""
        cost, stages = self.cost, self._stages
        rows = batch.num_decode_tokens + batch.pad_decode_rows
        if batch.chunks or batch.pad_prefill_tokens or batch.pad_prefill_rows:
            tokens = rows + batch.num_prefill_tokens + batch.pad_prefill_tokens
            head_ns = cost.head_ns(rows + len(batch.chunks) + batch.pad_prefill_rows)
            between = int(cost.transfer_ns(tokens))
        elif rows in self._of_decodes:
            head_ns, between = self._of_decodes[rows]
        else:
            head_ns, between = self._of_decodes[rows] = cost.head_ns(rows), int(cost.transfer_ns(rows))
        each = int((cost.step_ns(batch) - head_ns) / stages)
        return ((each + between or 1),) * (stages - 1) + (int(each + head_ns) or 1,)


def _halves(ns: int) -> tuple[int, int]:
    return ns // 2, ns - ns // 2
