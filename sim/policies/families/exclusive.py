"""Steps of prompts alone or of decodes alone, by a threshold: prompts are let in when few enough sequences decode.

Rule: in the phase of prompts the step holds prompts only, as many as slots, tokens and KV blocks allow; when none can
be computed any more, the phase of decodes begins. It lasts until at most `threshold` of `max_num_seqs` decode, and,
while requests wait, until then none is let in.
Source: threshold-based exclusive batching (arXiv 2606.00516), of which the abstract was read: exclusive phases that a
threshold on the occupancy of decodes ends. Its closed-form crossover to mixed phases is not here: compare with
`preemptive`.
Simplifies: memory as in the preemptive family (`preemptive.py`); sequences swapped out return in the phase of prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchsim.base.units import Share
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.protocols import PolicyContext
from batchsim.policies.families.preemption import PreemptiveConfig
from batchsim.policies.families.preemptive import Preemptive


@dataclass(frozen=True)
class ExclusiveConfig(PreemptiveConfig):
    """Knobs beside those of the preemptive family."""

    threshold: Share = 0.5
    """Part of `max_num_seqs`: prompts are let in again where no more sequences decode."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order != "decode_first" or self.preempt_after is not None:
            raise ValueError(
                "order and preempt_after: phases are exclusive already, and a phase of decodes lets nothing in. Remove"
                " both"
            )


class Exclusive(Preemptive):
    """The scheduler."""

    def __init__(self, config: ExclusiveConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        self._prefill_first = True
        self._most = config.max_num_seqs
        self._low = int(config.threshold * config.max_num_seqs)
        self._closes = False  # whether the latest step ended a phase of prompts

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        if len(self.group.members) <= self._low or self.partial:
            self.slots = self._most
        was_open = self.slots > 0
        work = super().schedule(now_ns, drain)
        if isinstance(work, Batch) and not work.chunks:
            self.slots = 0
        self._closes = was_open and self.slots == 0
        return work

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        if self._closes and (self.waiting or self.swapped):
            return False  # the head stays out for another reason from now on
        return super().repeat(batch, now_ns)
