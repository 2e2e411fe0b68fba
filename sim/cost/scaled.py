"""A cost whose every step takes a stated number of times as long: how results move with what is not known of a cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchsim.cost.base import Cost, EncoderTime, HostPart
from batchsim.cost.work import TIME_TERMS, Columns, Terms
from batchsim.cost.wrapped import Wrapped
from batchsim.kernel.batch import Batch


@dataclass(frozen=True, slots=True)
class Scaled(Wrapped):
    """The cost model `cost` with all its times, swaps and estimates too, multiplied by `factor`.

    `anchor`: the measured point that the factor was fitted to; "": it is stated in the scenario, or `is_end` of the
    error that the cost may have.
    """

    cost: Cost
    factor: float
    anchor: str = ""
    is_end: bool = False

    def step_ns(self, batch: Batch) -> int:
        return round(self.factor * self.cost.step_ns(batch)) or 1

    def recompute_ns(self, num_tokens: int) -> int:
        return round(self.factor * self.cost.recompute_ns(num_tokens))

    def swap_ns(self, num_blocks: int) -> int:
        return round(self.factor * self.cost.swap_ns(num_blocks))

    def explain(self, columns: Columns) -> Terms:
        """The terms of `cost`: the times multiplied by `factor`, `flops` and `bytes` as they are."""
        terms = self.cost.explain(columns)
        return {name: ns * self.factor if name in TIME_TERMS else ns for name, ns in terms.items()}

    def describe(self) -> str:
        why = f"anchored to {self.anchor}" if self.anchor else "every step's time stretched"
        text, mark, doubts = self.cost.describe().partition(" · ! ")
        return f"{text} × {self.factor:.4g}: {why}{mark}{doubts}"

    def sources(self) -> list[str]:
        why = f"anchor: every step's time × {self.factor:.4g}, fitted to {self.anchor}"
        stated = f"cost_factor: every step's time × {self.factor:g}, as stated in the scenario"
        if self.is_end:
            stated = f"every step's time × {self.factor:.4g}, an end of what the cost may be off by"
        return [*self.cost.sources(), why if self.anchor else stated]

    @property
    def host_part(self) -> HostPart:
        return self.cost.host_part * self.factor

    @property
    def encoder_time(self) -> EncoderTime | None:
        own = self.cost.encoder_time
        return None if own is None else own * self.factor

    def without_host(self) -> Cost:
        return replace(self, cost=self.cost.without_host())

    def head_ns(self, rows: int) -> float:
        return self.factor * self.cost.head_ns(rows)

    def transfer_ns(self, tokens: int) -> float:
        return self.factor * self.cost.transfer_ns(tokens)

    def experts_ns(self, tokens: int, *, decodes: bool) -> float:
        return self.factor * self.cost.experts_ns(tokens, decodes=decodes)
