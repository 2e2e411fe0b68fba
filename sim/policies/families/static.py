"""Static batching: wait for a full batch, pad it, run it until its longest output ends; no request joins meanwhile.

Rule: one FIFO. An idle engine starts when `batch_size` requests wait, or fewer that fill the KV; without
`wait_for_full` with whatever waits. The wait is bounded by `max_wait` of the oldest, and a drained run flushes it. A
batch takes the oldest requests until KV is short. With `group_by_length` it takes the oldest one and those of nearest
prompt length among all that wait: the oldest always goes, so no request starves. Responses go out whole at the batch's
end, or under `respond: row_end` as a stream that closes with its row. Padding and KV: see `padded_batch.py`.
Source: request-level batching as in FasterTransformer and in `generate` of Hugging Face; the baseline of Yu et al.,
Orca (OSDI 2022), section 3. With `reserve_tokens` it is Vidur's `faster_transformer`, its leak of blocks fixed.
Simplifies: lengths are prompt lengths, outputs are not predicted; the cost model sees padded tokens, not their pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice
from typing import ClassVar

from batchsim.base.errors import ScenarioError
from batchsim.base.ranges import PositiveInt
from batchsim.base.units import Duration
from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.policy_config import PolicyConfig, Traits
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Event, Sequence
from batchsim.policies.families.padded_batch import FinishedRows, PaddedBatch, Padding, Respond, WholeBatchesInOrder


@dataclass(frozen=True)
class StaticConfig(PolicyConfig):
    """Knobs."""

    batch_size: PositiveInt
    """Requests of a batch."""
    wait_for_full: bool = True
    """Whether a batch waits until it is full."""
    max_wait: Duration | None = None
    """How long the oldest request waits for a full batch; without bound unless given."""
    padding: Padding = "longest"
    """How prompts of a batch are padded."""
    finished_rows: FinishedRows = "hold"
    """hold: ended rows compute on to the batch's end; drop: they leave."""
    respond: Respond = "batch_end"
    """batch_end: answers are whole, at the batch's end; row_end: they stream."""
    group_by_length: bool = False
    """Whether requests of like lengths are put into a batch together."""
    reserve_tokens: PositiveInt | None = None
    """A fixed KV slot for each row, in tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_wait is not None and not self.wait_for_full:
            raise ValueError(f"max_wait {self.max_wait} ns needs wait_for_full: true")
        if self.reserve_tokens is not None and (self.padding != "none" or self.finished_rows != "drop"):
            raise ValueError(
                f"reserve_tokens {self.reserve_tokens} holds one unpadded request: set padding: none and"
                " finished_rows: drop"
            )

    @property
    def traits(self) -> Traits:
        return Traits(
            max_num_seqs=self.batch_size,
            waits_for=self.batch_size if self.wait_for_full and self.max_wait is None else None,
            knobs=("batch_size", "max_wait"),
            kv_groups=True,
        )


class Static(WholeBatchesInOrder):
    """The scheduler. A decode step is O(1); a start is O(batch log batch), with grouping O(waiting) on top."""

    evidence = "family"
    deviations: ClassVar[dict[str, str]] = {"no_idling": "waits for a full batch, or for max_wait"}

    def __init__(self, config: StaticConfig, context: PolicyContext) -> None:
        slot = config.reserve_tokens
        if slot is not None and context.kv.blocks_for(slot) > context.kv.num_blocks:
            raise ScenarioError(
                f"static: reserve_tokens {slot} needs {context.kv.blocks_for(slot)} KV blocks, {context.kv.num_blocks}"
                " in the pool. Lower it."
            )
        batch = PaddedBatch(
            context,
            padding=config.padding,
            finished_rows=config.finished_rows,
            respond=config.respond,
            row_tokens=slot,
        )
        super().__init__(context, batch)
        self.config = config

    def next_batch(self, now_ns: int, drain: bool) -> Batch | Idle:
        config = self.config
        candidates = self._candidates()
        count = self.batch.fitting(candidates)
        full = count == config.batch_size or count < len(candidates)
        if config.wait_for_full and not (full or drain):
            if config.max_wait is None:
                return IDLE
            due_ns = next(iter(self.waiting)).request.arrival_ns + config.max_wait
            if now_ns < due_ns:
                return Idle(due_ns)
        rows = candidates[:count]
        if config.group_by_length:
            rows.sort(key=_by_arrival)
        return self.start(rows, candidates[count:], now_ns)

    def _candidates(self) -> list[Sequence]:
        """The sequences of the next batch, should KV take them all: by arrival, or by nearness in prompt length to the
        oldest."""
        size = self.config.batch_size
        if not self.config.group_by_length:
            return list(islice(self.waiting, size))
        length = next(iter(self.waiting)).request.prompt_tokens
        return nsmallest(
            size, self.waiting, key=lambda seq: abs(seq.request.prompt_tokens - length)
        )  # ties: the oldest

    def refused(self, seq: Sequence) -> Event | None:
        return super().refused(seq) or self._exceeds_slot(seq)

    def _exceeds_slot(self, seq: Sequence) -> Event | None:
        slot = self.config.reserve_tokens
        request = seq.request
        tokens = min(request.prompt_tokens + request.max_output_tokens, self.max_model_len) - 1
        if slot is None or tokens <= slot:
            return None
        return Event("rejected", seq, "never_fits", detail=f"{tokens} tokens need KV, reserve_tokens {slot}")


def _by_arrival(seq: Sequence) -> tuple[int, int]:
    return seq.request.arrival_ns, seq.request.id
