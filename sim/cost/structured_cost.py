"""What a scenario says of the host time that answers constrained by grammars take: `structured_cost:`."""

from __future__ import annotations

from dataclasses import dataclass

from batchsim.base.ranges import Config
from batchsim.base.units import HostDuration, PartDuration, format_duration


@dataclass(frozen=True)
class StructuredCost(Config):
    """Host time in which the masks of allowed tokens are filled for a step, which its sampling waits for."""

    step: HostDuration = 0
    """Time of each step with a constrained answer in it."""
    per_request: PartDuration = 0
    """Time for each constrained answer of the step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.step or self.per_request):
            raise ValueError("structured_cost takes no time. Write step: 100us, per_request: 20us, say, or drop it")

    def __str__(self) -> str:
        return f"masks {format_duration(self.step)} a step + {format_duration(self.per_request)} an answer"
