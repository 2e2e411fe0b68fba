"""A cost on a machine that runs slower, or faster, than when the cost was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sim.cost.work import TIME_TERMS, Columns, Terms
from sim.types import Batch


class _Cost(Protocol):
    def step_ns(self, batch: Batch) -> int: ...
    def recompute_ns(self, num_tokens: int) -> int: ...
    def swap_ns(self, num_blocks: int) -> int: ...
    def explain(self, columns: Columns) -> Terms: ...


@dataclass(frozen=True, slots=True)
class Slower:
    """`cost` with every time multiplied by `factor`; work stays as it is."""

    cost: _Cost
    factor: float

    def step_ns(self, batch: Batch) -> int:
        return max(round(self.cost.step_ns(batch) * self.factor), 1)

    def recompute_ns(self, num_tokens: int) -> int:
        """A step that computes `num_tokens` of one sequence and nothing else."""
        return round(self.cost.recompute_ns(num_tokens) * self.factor)

    def swap_ns(self, num_blocks: int) -> int:
        """Moving `num_blocks` over the host link, one way."""
        return round(self.cost.swap_ns(num_blocks) * self.factor)

    def explain(self, columns: Columns) -> Terms:
        """The terms of `cost`, those of time multiplied."""
        terms = self.cost.explain(columns)
        return {name: value * self.factor if name in TIME_TERMS else value for name, value in terms.items()}
