"""Energy-aware batching: an idle engine waits for a batch worth its power, and may rest to keep a mean power.

Rule: gated batching (`gated.py`) under a control limit: with nothing running the gate opens when `control_limit`
requests wait, when the oldest has waited `max_hold`, or when the run drains; while some run it stays shut. Under a
`power_budget` a step starts only while no energy is owed: a step owes its time at `step_power`, rest its time at
`idle_power`, and the budget pays all the time, saving up for at most `window`. So the mean power of any stretch is the
budget, one window of it and one step at most, if steps draw no more than `step_power`.
Source: the control limit is the form of the optimal policy of a batch server with energy (Xu, Zhou and Niu, arXiv
2301.12865); the budget is a leaky bucket in joules.
Simplifies: the engine knows the power of a step as one number; a resting engine takes no time to go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from batchsim.base.ranges import PositiveInt
from batchsim.base.units import PositiveDuration, Watts
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.policy_config import PolicyConfig, Traits
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Sequence
from batchsim.policies.families.gated import Gated, GatedConfig


@dataclass(frozen=True)
class EnergyAwareConfig(PolicyConfig):
    """Knobs. The default limits are those of gated batching."""

    max_num_seqs: PositiveInt = 256
    """The most sequences that run at once."""
    max_num_batched_tokens: PositiveInt = 8192
    """The most tokens of a step."""
    control_limit: PositiveInt = 1
    """Requests that an idle engine waits for before it starts."""
    max_hold: PositiveDuration = 1_000_000_000
    """How long the oldest of them waits at most."""
    power_budget: Watts | None = None
    """Mean power that the engine's GPUs keep to by resting between steps; null: none."""
    step_power: Watts | None = None
    """What the engine's GPUs draw in a step; to be stated with a budget."""
    idle_power: Watts | None = None
    """What they draw at rest; to be stated with a budget."""
    window: PositiveDuration = 1_000_000_000
    """For how long a budget that is not drawn is saved up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs {self.max_num_seqs} is above max_num_batched_tokens {self.max_num_batched_tokens}: all"
                " that run may decode in one step"
            )
        if self.control_limit > self.max_num_seqs:
            raise ValueError(
                f"control_limit {self.control_limit} is above max_num_seqs {self.max_num_seqs}, the most that start"
            )
        budget, step, idle = self.power_budget, self.step_power, self.idle_power
        if len({each is None for each in (budget, step, idle)}) > 1:
            raise ValueError("power_budget, step_power and idle_power belong together: write all three, or none")
        if budget is not None and step is not None and idle is not None and not idle < budget <= step:
            raise ValueError(
                f"power_budget {budget:g} W must be above idle_power {idle:g} W and at most step_power {step:g} W"
            )

    @property
    def traits(self) -> Traits:
        return Traits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            knobs=("max_num_seqs", "max_num_batched_tokens", "control_limit"),
        )


class EnergyAware(Gated):
    """The scheduler. A step costs what one of gated batching does."""

    deviations: ClassVar[dict[str, str]] = {"no_idling": "holds requests for control_limit or max_hold"}

    def __init__(self, config: EnergyAwareConfig, context: PolicyContext) -> None:
        super().__init__(GatedConfig(config.max_num_seqs, config.max_num_batched_tokens), context)
        self.limits = config
        watts = (config.power_budget, config.step_power, config.idle_power)
        self._budget, self._step, self._idle = (round(1000 * (each or 0)) for each in watts)  # mW: sums are exact
        self._saved = self._most = self._budget * config.window  # in mW ns
        self._as_of_ns = 0
        self._in_step = False

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        held_ns = 0 if self.running or drain else self._held_until_ns()
        if held_ns > now_ns:
            self.note_blocked("batch_window")
            return Idle(held_ns)
        if self._budget and (self.running or self.waiting):
            due_ns = self._due_ns(now_ns)
            if due_ns > now_ns:
                self.note_blocked("power_budget")
                return Idle(due_ns)
        work = super().schedule(now_ns, drain)
        self._in_step = isinstance(work, Batch)
        return work

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        return not (self._budget and self._due_ns(now_ns) > now_ns) and super().repeat(batch, now_ns)

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        self._settle(now_ns)
        self._in_step = False
        return super().complete(batch, finished, now_ns)

    def _held_until_ns(self) -> int:
        """When an idle engine starts what waits, if no request comes before; 0: at once."""
        if not 0 < len(self.waiting) < self.limits.control_limit:
            return 0
        return self.waiting[0].request.arrival_ns + self.limits.max_hold

    def _settle(self, now_ns: int) -> None:
        """Draws from the savings what was drawn since they were last settled, and adds what the budget paid."""
        rate = self._budget - (self._step if self._in_step else self._idle)
        self._saved = min(self._saved + rate * (now_ns - self._as_of_ns), self._most)
        self._as_of_ns = now_ns

    def _due_ns(self, now_ns: int) -> int:
        """From when on a step may start: no energy is owed then."""
        self._settle(now_ns)
        owed = max(-self._saved, 0)
        return now_ns + -(-owed // (self._budget - self._idle))
