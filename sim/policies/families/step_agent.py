"""An agent that moves the limits of continuous batching: a class to derive from, for rules of one's own and trained
ones.

Rule: `every` so often, before a step, `decide` sees an observation and chooses the token budget out of `budgets` and
the most sequences that may run out of `caps`; both are held until the next decision. Beside the decodes prompts have at
least one token of a step, and what runs is never stopped. A decision is due only while requests wait or run.
Source: token budget and slots as the actions of a semi-Markov decision process; our own. `batchsim.gym` has the
environment in which it is trained, with the same observations. The rest: see `controlled.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Numbers
from dataclasses import dataclass
from math import log1p

from batchsim.base.errors import ScenarioError
from batchsim.base.ranges import PositiveInt
from batchsim.base.units import PositiveDuration
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Sequence
from batchsim.policies.families.controlled import Controlled, ControlledConfig
from batchsim.policies.families.observed import ArrivalRates, Quantity, observation

STEP_OBSERVED = (
    Quantity("log of 1 + requests that wait", 20),
    Quantity("s for which the oldest has waited", 600),
    Quantity("requests that run, by max_num_seqs", 1),
    Quantity("share of the KV blocks in use", 1),
    Quantity("prompts begun, by max_num_seqs", 1),
    Quantity("log of 1 + tokens left of them", 30),
    Quantity("log of 1 + context tokens of the decodes", 30),
    Quantity("log of 1 + arrivals a second, of 1 s", 20),
    Quantity("log of 1 + arrivals a second, of 10 s", 20),
    Quantity("s that the latest step took", 60),
    Quantity("its tokens by max_num_batched_tokens", 1),
    Quantity("s since a request was let in", 600),
    Quantity("the place of the budget in its list, 0 to 1", 1),
    Quantity("the place of the cap in its list, 0 to 1", 1),
)
"""What an agent of steps sees, in this order."""


@dataclass(frozen=True)
class StepAgentConfig(ControlledConfig):
    """Knobs beside those of the preemptive family."""

    budgets: tuple[PositiveInt, ...] = (256, 512, 1024, 2048, 4096, 8192)
    """Token budgets to choose from, rising to `max_num_batched_tokens` at most."""
    caps: tuple[PositiveInt, ...] = (16, 32, 64, 128, 256)
    """Numbers of sequences to choose from, rising to `max_num_seqs` at most."""
    every: PositiveDuration = 500_000_000
    """How long a decision is held, to the end of a step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, levels, most_name, most in (
            ("budgets", self.budgets, "max_num_batched_tokens", self.max_num_batched_tokens),
            ("caps", self.caps, "max_num_seqs", self.max_num_seqs),
        ):
            if not levels or list(levels) != sorted(set(levels)) or levels[-1] > most:
                raise ValueError(f"{name} {list(levels)} must rise, to {most_name} {most} at most")


class StepAgent(Controlled):
    """The scheduler."""

    def __init__(self, config: StepAgentConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        self.limits = config
        self.rates = ArrivalRates()
        self.places = (len(config.budgets) - 1, len(config.caps) - 1)  # of the latest decision in its lists
        self._decides_ns = 0
        self._step_ns = self._step_tokens = 0  # of the latest step
        self._seen_admitted: int = 0
        self._admission_ns: int = 0

    @abstractmethod
    def decide(self, observed: tuple[float, ...]) -> Numbers[int]:
        """The places in `budgets` and in `caps` of the limits from now on. `observed`: see `STEP_OBSERVED`."""

    def is_due(self, now_ns: int) -> bool:
        """Whether `decide` is asked in a call of `schedule` at `now_ns`."""
        return now_ns >= self._decides_ns and bool(self.running or self.waiting or self.swapped)

    def observed(self, now_ns: int) -> tuple[float, ...]:
        """What `decide` sees at `now_ns`."""
        limits, waiting = self.limits, self.waiting
        most = limits.max_num_seqs
        values = (
            log1p(self.num_waiting),
            (now_ns - waiting.head().request.arrival_ns) / 1e9 if waiting else 0.0,
            len(self.running) / most,
            1 - self.kv.num_free / self.kv.num_blocks,
            len(self.partial) / most,
            log1p(sum(self.partial.values())),
            log1p(self.group.total_context_tokens),
            *self.rates.logs(now_ns),
            self._step_ns / 1e9,
            self._step_tokens / limits.max_num_batched_tokens,
            (now_ns - self._admission_ns) / 1e9,
            self.places[0] / max(len(limits.budgets) - 1, 1),
            self.places[1] / max(len(limits.caps) - 1, 1),
        )
        return observation(STEP_OBSERVED, values)

    def steer(self, now_ns: int) -> None:
        limits = self.limits
        if self.is_due(now_ns):
            budget, cap = self.decide(self.observed(now_ns))
            if not (0 <= budget < len(limits.budgets) and 0 <= cap < len(limits.caps)):
                raise ScenarioError(
                    f"{type(self).__name__}.decide returned ({budget}, {cap}). They must be places in"
                    f" {len(limits.budgets)} budgets and in {len(limits.caps)} caps, from 0."
                )
            self.places = (int(budget), int(cap))
            self._decides_ns = now_ns + limits.every
        least = len(self.group.members) + 1
        self.budget = min(max(limits.budgets[self.places[0]], least), limits.max_num_batched_tokens)
        self.slots = limits.caps[self.places[1]]

    def observe(self, batch: Batch, step_ns: int) -> None:
        self._step_ns, self._step_tokens = step_ns, batch.num_decode + batch.num_prefill_tokens

    def is_settled(self) -> bool:
        return True  # a head that waits beside decodes alone lacks a slot or blocks, and limits stay until they are due

    def add(self, seq: Sequence, now_ns: int) -> None:
        self.rates.arrived(seq.request.arrival_ns)
        super().add(seq, now_ns)

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        work = super().schedule(now_ns, drain)
        if self._admitted != self._seen_admitted:
            self._seen_admitted, self._admission_ns = self._admitted, now_ns
        return work

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        return now_ns < self._decides_ns and super().repeat(batch, now_ns)
