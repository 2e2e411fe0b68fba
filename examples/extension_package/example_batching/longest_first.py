"""Continuous batching that admits the longest prompt first: fewer steps hold a chunk of one."""

from __future__ import annotations

from collections import deque

from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.protocols import PolicyContext
from batchsim.policies.families.continuous import Continuous, ContinuousConfig


class LongestFirst(Continuous):
    def __init__(self, config: ContinuousConfig, context: PolicyContext) -> None:
        super().__init__(config, context)

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        turns = sorted(self.waiting, key=lambda seq: (-seq.request.prompt_tokens, seq.request.id))
        self.waiting = deque(turns)
        return super().schedule(now_ns, drain)
