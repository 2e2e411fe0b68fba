"""An agent that chooses the size of whole batches: a class to derive from, for rules of one's own and trained ones.

Rule: whenever the engine is idle and requests wait, `decide` sees an observation and says how many of them, first come
first served, run as a batch: at most `max_batch_size` and as fit the KV memory. 0 waits for the next arrival, for at
most `max_wait`. A drain, in which nothing else will come, serves what `decide` would keep waiting.
Source: the decision process of a batch server (Xu, Zhou and Niu, arXiv 2301.12865). `batchsim.gym` has the environment
in which it is trained, with the same observations. Padding and KV memory: see `padded_batch.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from itertools import islice
from math import log1p

from batchsim.base.errors import ScenarioError
from batchsim.base.ranges import PositiveInt
from batchsim.base.units import PositiveDuration
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.policy_config import PolicyConfig, Traits
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Sequence
from batchsim.policies.families.observed import ArrivalRates, Quantity, observation
from batchsim.policies.families.padded_batch import FinishedRows, PaddedBatch, Padding, Respond, WholeBatchesInOrder

BATCH_OBSERVED = (
    Quantity("log of 1 + requests that wait", 20),
    Quantity("log of 1 + their prompt tokens", 30),
    Quantity("s for which the oldest has waited", 600),
    Quantity("log of 1 + arrivals a second, of 1 s", 20),
    Quantity("log of 1 + arrivals a second, of 10 s", 20),
    Quantity("s that the latest batch took", 600),
    Quantity("its requests by max_batch_size", 1),
    Quantity("the latest decision by max_batch_size", 1),
)
"""What an agent of whole batches sees, in this order."""


@dataclass(frozen=True)
class BatchAgentConfig(PolicyConfig):
    """Knobs."""

    max_batch_size: PositiveInt = 32
    """The most requests of a batch: decisions are 0 to this."""
    max_wait: PositiveDuration = 10_000_000
    """How long a decision to wait lasts, unless a request arrives."""
    padding: Padding = "longest"
    """How prompts of a batch are padded."""
    finished_rows: FinishedRows = "hold"
    """hold: ended rows compute on to the batch's end; drop: they leave."""
    respond: Respond = "batch_end"
    """batch_end: answers are whole, at the batch's end; row_end: they stream."""

    @property
    def traits(self) -> Traits:
        return Traits(max_num_seqs=self.max_batch_size, knobs=("max_batch_size",))


class BatchAgent(WholeBatchesInOrder):
    """The scheduler. A start is O(requests that wait)."""

    evidence = "family"

    def __init__(self, config: BatchAgentConfig, context: PolicyContext) -> None:
        batch = PaddedBatch(context, padding=config.padding, finished_rows=config.finished_rows, respond=config.respond)
        super().__init__(context, batch)
        self.config = config
        self.rates = ArrivalRates()
        self._prompt_tokens = 0
        self._latest_ns = self._latest_size = self._decision = 0  # what the latest batch took, its requests

    @abstractmethod
    def decide(self, observed: tuple[float, ...]) -> int:
        """How many requests run now, 0 to `max_batch_size`; 0: none. `observed`: see `BATCH_OBSERVED`."""

    def is_due(self, now_ns: int) -> bool:
        """Whether `decide` is asked in a call of `schedule` at `now_ns`."""
        return bool(self.waiting) and not self.batch.rows

    def observed(self, now_ns: int) -> tuple[float, ...]:
        """What `decide` sees at `now_ns`."""
        most = self.config.max_batch_size
        oldest = next(iter(self.waiting), None)
        values = (
            log1p(len(self.waiting)),
            log1p(self._prompt_tokens),
            0.0 if oldest is None else (now_ns - oldest.request.arrival_ns) / 1e9,
            *self.rates.logs(now_ns),
            self._latest_ns / 1e9,
            self._latest_size / most,
            self._decision / most,
        )
        return observation(BATCH_OBSERVED, values)

    def add(self, seq: Sequence, now_ns: int) -> None:
        self.rates.arrived(seq.request.arrival_ns)
        super().add(seq, now_ns)
        if seq in self.waiting:
            self._prompt_tokens += seq.request.prompt_tokens

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        if seq in self.waiting:
            self._prompt_tokens -= seq.request.prompt_tokens
        return super().cancel(seq, now_ns)

    def next_batch(self, now_ns: int, drain: bool) -> Batch | Idle:
        size = self.decide(self.observed(now_ns))
        if not 0 <= size <= self.config.max_batch_size:
            raise ScenarioError(
                f"{type(self).__name__}.decide returned {size!r}. It must be a number from 0 to max_batch_size"
                f" {self.config.max_batch_size}."
            )
        self._decision = size
        if size == 0 and drain:
            size = self.config.max_batch_size
        if size == 0:
            return Idle(now_ns + self.config.max_wait)
        asked = list(islice(self.waiting, size))
        count = self._latest_size = self.batch.fitting(asked)
        self._prompt_tokens -= sum(seq.request.prompt_tokens for seq in asked[:count])
        return self.start(asked[:count], asked[count:], now_ns)

    def ended(self, batch_ns: int) -> None:
        self._latest_ns = batch_ns
