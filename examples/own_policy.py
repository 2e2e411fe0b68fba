"""A policy of one's own: the shortest prompt of those who wait goes first, but before it who has waited for `patience`.

    policies: {shortest: {kind: "own_policy:ShortestFirst", max_num_seqs: 64, max_num_batched_tokens: 2048}}

with this folder on PYTHONPATH and --allow-code. All else is as in the continuous family.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from batchsim.base.units import Duration
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Sequence
from batchsim.policies.families.continuous import Continuous, ContinuousConfig


@dataclass(frozen=True)
class ShortestFirstConfig(ContinuousConfig):
    patience: Duration = 2_000_000_000  # ns; a scenario writes 2s


class ShortestFirst(Continuous):
    def __init__(self, config: ShortestFirstConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        self.patience_ns = config.patience

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        def turn(seq: Sequence) -> tuple[int, int, int]:
            arrival_ns = seq.request.arrival_ns
            late = now_ns - arrival_ns >= self.patience_ns
            return 0 if late else seq.request.prompt_tokens, arrival_ns, seq.request.id

        self.waiting = deque(sorted(self.waiting, key=turn))
        return super().schedule(now_ns, drain)

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        return not self.waiting and super().repeat(batch, now_ns)  # time alone may bring another to the head
