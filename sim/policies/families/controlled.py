"""What controllers of a preemptive engine have in common: limits that move between steps, and times of steps.

A controlled policy is the preemptive family (`preemptive.py`) with `slots`, the sequences that may run, or `budget`,
the tokens of a step, set anew before each step. It knows what a scheduler in front of a real engine knows: counts, KV
blocks, when it was asked for a step and when that was over. Limits bound what is let in and computed of prompts; what
runs is never stopped by one.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchsim.base.ranges import PositiveInt
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Sequence
from batchsim.policies.families.preemption import PreemptiveConfig
from batchsim.policies.families.preemptive import Preemptive


@dataclass(frozen=True)
class ControlledConfig(PreemptiveConfig):
    """Knobs. Those of the preemptive family are the outermost limits; prompts are chunked, behind the decodes."""

    max_num_batched_tokens: PositiveInt
    """The most tokens of a step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.chunked_prefill or self.order != "decode_first":
            raise ValueError(
                f"chunked_prefill {str(self.chunked_prefill).lower()}, order {self.order}: a controller moves what"
                " prompts have beside the decodes. Set chunked_prefill: true and order: decode_first"
            )


class Controlled(Preemptive):
    """A preemptive scheduler that sees how long each of its steps takes, and may change its limits before the next."""

    def __init__(self, config: ControlledConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        self._asked_ns = 0  # when the latest step was scheduled

    def steer(self, now_ns: int) -> None:
        """Sets the limits of the step that begins at `now_ns`."""

    def observe(self, batch: Batch, step_ns: int) -> None:
        """Takes note that the step `batch` took `step_ns`."""

    def is_settled(self) -> bool:
        """Whether a step of decodes alone may be repeated without steering: no limit that it moves would matter."""
        return not (self.waiting or self.swapped)

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        self.steer(now_ns)
        self._asked_ns = now_ns
        return super().schedule(now_ns, drain)

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        if not self.is_settled() or not super().repeat(batch, now_ns):
            return False
        self.observe(batch, now_ns - self._asked_ns)
        self._asked_ns = now_ns
        return True

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        self.observe(batch, now_ns - self._asked_ns)
        return super().complete(batch, finished, now_ns)
