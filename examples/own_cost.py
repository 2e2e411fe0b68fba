"""A cost of one's own: a GPU that throttles, whose every step takes `slowdown` times as long above so many sequences.

    cost: {kind: "own_cost:Throttled", base: 8ms, per_token: 20us, above: 64, slowdown: 1.3}
    kv: {tokens: 400000}

with this folder on PYTHONPATH and --allow-code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from batchsim.base.ranges import PositiveInt, Range
from batchsim.base.units import PartDuration, StepDuration
from batchsim.cost.own_cost import OwnCost
from batchsim.cost.work import StepWork


@dataclass(frozen=True)
class Throttled(OwnCost):
    base: StepDuration
    per_token: PartDuration
    above: PositiveInt
    slowdown: Annotated[float, Range(1, 10)] = 1.0

    def step_ns(self, step: StepWork) -> int:
        ns = self.base + self.per_token * (step.num_decode_tokens + step.num_prefill_tokens)
        throttled = step.num_decode + step.num_chunks > self.above
        return round(ns * self.slowdown) if throttled else ns
