"""Batches whose size grows by a constant while they keep a latency objective and shrinks by a factor when they do not.

Rule: an idle engine takes up to `size` requests, first come first served, once that many wait or the oldest has waited
`batch_delay`. A batch that took longer than `latency_objective`, from its start to its end, multiplies the size by
`backoff`; one of the full size that kept it adds `increase`. The size is kept between 1 and `max_batch_size`, and used
without its fraction.
Source: Crankshaw et al., Clipper (NSDI 2017), adaptive batching and delayed batching; the back-off of 10 % from memory.
Clipper's code has another rule (`clipper`). Simplifies: a batch that could not be filled says nothing of a larger one,
so it adds nothing; one that a cancel ended changes nothing. A drain waits for no delay. Padding and KV memory: see
`padded_batch.py`; where KV is short, a batch has the rows that fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Annotated, ClassVar

from batchsim.base.ranges import PositiveInt, Range
from batchsim.base.units import Duration, PositiveDuration
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.policy_config import PolicyConfig, Traits
from batchsim.kernel.protocols import PolicyContext
from batchsim.policies.families.padded_batch import FinishedRows, PaddedBatch, Padding, Respond, WholeBatchesInOrder

BackOff = Annotated[float, Range(0, 1, above=True, below=True)]


@dataclass(frozen=True)
class AimdConfig(PolicyConfig):
    """Knobs."""

    latency_objective: PositiveDuration
    """How long a batch may take, from its start to its end."""
    increase: PositiveInt = 1
    """Requests that a batch within the objective adds to the size."""
    backoff: BackOff = 0.9
    """Factor on the size behind a batch that took longer."""
    initial_batch_size: PositiveInt = 1
    """The size of the first batch."""
    max_batch_size: PositiveInt | None = None
    """The largest size; null: no limit."""
    batch_delay: Duration = 0
    """How long the oldest request waits for a fuller batch."""
    padding: Padding = "longest"
    """How prompts of a batch are padded."""
    finished_rows: FinishedRows = "hold"
    """hold: ended rows compute on to the batch's end; drop: they leave."""
    respond: Respond = "batch_end"
    """batch_end: answers are whole, at the batch's end; row_end: they stream."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_batch_size is not None and self.initial_batch_size > self.max_batch_size:
            raise ValueError(
                f"initial_batch_size {self.initial_batch_size} must be at most max_batch_size {self.max_batch_size}"
            )

    @property
    def traits(self) -> Traits:
        return Traits(max_num_seqs=self.max_batch_size, knobs=("latency_objective", "batch_delay"))


class Aimd(WholeBatchesInOrder):
    """The scheduler. A decode step is O(1), a start O(batch log batch)."""

    evidence = "family"
    deviations: ClassVar[dict[str, str]] = {"no_idling": "waits batch_delay for more requests"}

    def __init__(self, config: AimdConfig, context: PolicyContext) -> None:
        batch = PaddedBatch(context, padding=config.padding, finished_rows=config.finished_rows, respond=config.respond)
        super().__init__(context, batch)
        self.config = config
        self.size = float(config.initial_batch_size)
        self._is_full = False  # whether the latest batch has the full size

    def ended(self, batch_ns: int) -> None:
        if batch_ns > self.config.latency_objective:
            self.size = max(1.0, self.size * self.config.backoff)
        elif self._is_full:
            self.size = min(self.size + self.config.increase, self.config.max_batch_size or inf)

    def next_batch(self, now_ns: int, drain: bool) -> Batch | Idle:
        size = int(self.size)
        asked = list(islice(self.waiting, size))
        due_ns = asked[0].request.arrival_ns + self.config.batch_delay
        count = self.batch.fitting(asked)
        if count == len(asked) < size and now_ns < due_ns and not drain:
            return Idle(due_ns)
        self._is_full = count == size
        return self.start(asked[:count], asked[count:], now_ns)
