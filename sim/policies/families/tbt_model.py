"""A token budget from the cost model: as many tokens of prompts beside the decodes as a step within an objective holds.

Rule: before each step, while any sequence decodes and a prompt waits or is begun, the budget is the largest one under
which the step is expected to take `tbt` at most: the decodes, with their context, and one chunk, of the prompt begun or
else from the start of a new one. At least `min_prefill_tokens` are left to prompts, so that they do not starve, and at
most `max_num_batched_tokens` are in a step. With nothing to decode the whole budget is the prompts'.
Source: a rule of our own, after the token budget of Sarathi-Serve (Agrawal et al., OSDI 2024), which is profiled for an
objective beforehand; times are asked of the step costs of the scenario.
Simplifies: what is left behind the prompt begun counts as one chunk, which overstates the attention of several short
ones and leaves out what each sequence costs; decodes are counted before any is preempted. A step costs O(log budget)
estimates. The rest: see `controlled.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from batchsim.base.errors import ScenarioError
from batchsim.base.ranges import PositiveInt
from batchsim.base.units import PositiveDuration
from batchsim.kernel.batch import Batch
from batchsim.kernel.policy_config import Traits
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Request, Sequence
from batchsim.policies.families.controlled import Controlled, ControlledConfig


@dataclass(frozen=True)
class TbtModelConfig(ControlledConfig):
    """Knobs beside those of the preemptive family."""

    tbt: PositiveDuration = 50_000_000
    """How long a step with decodes is to take at most: the objective of the time between two tokens."""
    min_prefill_tokens: PositiveInt = 16
    """Tokens that are left to prompts in any step."""

    @property
    def traits(self) -> Traits:
        return replace(super().traits, knobs=("max_num_seqs", "tbt"))


class TbtModel(Controlled):
    """The scheduler."""

    def __init__(self, config: TbtModelConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        if context.estimator is None:
            raise ScenarioError("tbt_model: its budget needs estimates of step times. Use tbt_feedback.")
        self.estimates = context.estimator
        self._tbt_ns = config.tbt
        self._least = config.min_prefill_tokens
        self._most = config.max_num_batched_tokens
        self._new = Sequence(Request(0, 0, self._most, 1))  # stands for prompts of which nothing is computed

    def steer(self, now_ns: int) -> None:
        decodes = len(self.group.members)
        self.budget = self._most
        if not decodes or not (self.partial or self.waiting or self.swapped):
            return
        room = self._most - decodes
        within = bisect_right(range(1, room + 1), self._tbt_ns, key=self._step_ns)
        self.budget = decodes + min(max(within, self._least), room)

    def is_settled(self) -> bool:
        return True  # a head that waits beside decodes alone lacks a slot or blocks, not tokens

    def _step_ns(self, prefill_tokens: int) -> int:
        """ns that the next step is expected to take with that number of tokens of prompts."""
        chunks: list[tuple[Sequence, int]] = []
        left = prefill_tokens
        for seq, lacking in self.partial.items():
            chunks.append((seq, min(lacking, left)))
            left -= min(lacking, left)
        if left:
            chunks.append((self._new, left))
        step = Batch(None, chunks, prefill_tokens)
        step.num_decode = step.num_decode_tokens = len(self.group.members)
        step.context_tokens = self.group.total_context_tokens
        return self.estimates.step_ns(step)
