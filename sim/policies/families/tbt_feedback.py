"""A limit moved by measured times between tokens: a constant up while they keep an objective, a factor down if not.

Rule: a step counts that computes decodes and, where the limit is the token budget, tokens of prompts. One longer than
`tbt` multiplies the limit by `backoff`; one at most `1 - hysteresis` of it that used the limit up (no token left, or
all slots taken while requests wait) adds `increase`; in between nothing changes. The limit stays between `least` and
the knob that it `steers`.
Source: additive increase, multiplicative decrease (Chiu and Jain, 1989), on limits of continuous batching; a rule of
our own. The SLA mode of dynamic batching (arXiv 2503.05248) narrows a bracket by the same feedback; its text was not
read. Simplifies: a step's time is that between two tokens of every sequence in it. A limit of slots stops nothing that
runs; beside the decodes prompts have at least one token of a step. The rest: see `controlled.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from batchsim.base.ranges import PositiveInt
from batchsim.base.units import PartialShare, PositiveDuration
from batchsim.kernel.batch import Batch
from batchsim.kernel.policy_config import Traits
from batchsim.kernel.protocols import PolicyContext
from batchsim.policies.families.aimd import BackOff
from batchsim.policies.families.controlled import Controlled, ControlledConfig


@dataclass(frozen=True)
class TbtFeedbackConfig(ControlledConfig):
    """Knobs beside those of the preemptive family."""

    tbt: PositiveDuration = 50_000_000
    """How long a step with decodes is to take at most: the objective of the time between two tokens."""
    steers: Literal["max_num_batched_tokens", "max_num_seqs"] = "max_num_batched_tokens"
    """The limit that moves; the knob's value is the most that it comes to, and the first."""
    least: PositiveInt = 16
    """The least that the limit comes to."""
    increase: PositiveInt = 16
    """What a step within the objective adds to the limit."""
    backoff: BackOff = 0.7
    """Factor on the limit behind a step that took longer."""
    hysteresis: PartialShare = 0.1
    """Part of the objective below it in which the limit stays as it is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > self.most:
            raise ValueError(f"least {self.least} must be at most {self.steers} {self.most}, which it bounds")

    @property
    def most(self) -> int:
        """The most that the limit comes to."""
        return self.max_num_seqs if self.steers == "max_num_seqs" else self.max_num_batched_tokens

    @property
    def traits(self) -> Traits:
        return replace(super().traits, knobs=("max_num_seqs", "tbt"))


class TbtFeedback(Controlled):
    """The scheduler. `limit` is what moves; whole tokens or slots of it are used."""

    def __init__(self, config: TbtFeedbackConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        self.limit = float(config.most)
        self._config = config
        self._of_slots = config.steers == "max_num_seqs"
        self._calm_ns = int(config.tbt * (1 - config.hysteresis))

    def steer(self, now_ns: int) -> None:
        if self._of_slots:
            self.slots = int(self.limit)
        else:
            self.budget = min(max(int(self.limit), len(self.group.members) + 1), self._config.most)

    def is_settled(self) -> bool:
        # Of decodes alone a limit of tokens learns nothing, and a head that waits beside them lacks a slot or blocks.
        return not self._of_slots or super().is_settled()

    def observe(self, batch: Batch, step_ns: int) -> None:
        if not batch.num_decode or not (self._of_slots or batch.chunks):
            return
        config = self._config
        if step_ns > config.tbt:
            self.limit = max(float(config.least), self.limit * config.backoff)
        elif step_ns <= self._calm_ns and self._is_used_up(batch):
            self.limit = min(self.limit + config.increase, float(config.most))

    def _is_used_up(self, batch: Batch) -> bool:
        if self._of_slots:
            return bool(self.waiting or self.swapped) and len(self.running) >= int(self.limit)
        return batch.num_decode + batch.num_prefill_tokens >= int(self.limit)
