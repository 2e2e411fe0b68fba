"""TensorFlow Serving's batch scheduler in front of a generative model: serving commit 9d981c5c, one signature.

Rule: one FIFO of batches, of which the last is open. A request joins the open batch; where that is full it is closed
and a new one opened, or the request is rejected (`queue_full`) if `max_enqueued_batches` are there. A free thread takes
the front batch if it is closed; the open one only if it is full, or its first request came `batch_timeout_micros` ago.
So a batch goes on filling while the thread is busy. A batch of a size that is not allowed is padded to the next one
with copies of its last row, or under BATCH_DOWN gives up what passes the last one, if it was open when taken. It runs
to its end, and all its answers leave then. Without `pad_variable_length_inputs` a batch of unequal prompts fails.
Source: batching_session.cc there; tensorflow/core/kernels/batching_util/shared_batch_scheduler.h, commit de307979.
Simplifies: a timeout is seen at once, not within 1 ms; a cancelled request leaves its batch, where it would be computed
to its end; requests of one row, so that splitting only sets the size of a batch; copies hold no KV. KV shortage:
see `closed_batches.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import ClassVar, Literal

from batchsim.base.ranges import PositiveInt
from batchsim.base.units import Microseconds
from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.kv_blocks import never_fits
from batchsim.kernel.policy_config import PolicyConfig, Traits
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Event, Sequence
from batchsim.policies.families.closed_batches import ClosedBatches
from batchsim.policies.families.padded_batch import WholeBatches


@dataclass(frozen=True)
class TfServingConfig(PolicyConfig):
    """Knobs by the names of TensorFlow Serving's batching parameters, with its defaults."""

    num_batch_threads: Literal[1] | PositiveInt
    """Batches in flight; the number of CPUs by its default, here to be stated as 1, since more is not simulated."""
    max_batch_size: PositiveInt = 1000
    """Requests of a batch at most; of one as it comes in, where `max_execution_batch_size` is given."""
    batch_timeout_micros: Microseconds = 0
    """How long the oldest request waits for a fuller batch."""
    max_enqueued_batches: PositiveInt = 10
    """Batches that wait at most; beyond, requests are rejected."""
    allowed_batch_sizes: tuple[PositiveInt, ...] = ()
    """Sizes to which batches are padded."""
    batch_padding_policy: Literal["PAD_UP", "BATCH_DOWN", "MINIMIZE_TPU_COST_PER_REQUEST"] = "PAD_UP"
    """PAD_UP: to the next size; BATCH_DOWN: cut to the one below, where that has no padding."""
    pad_variable_length_inputs: bool = False
    """Whether prompts of other lengths share a batch, padded."""
    enable_large_batch_splitting: bool = False
    """Whether a request larger than a batch is split."""
    max_execution_batch_size: PositiveInt | None = None
    """Requests of a batch as it is computed; `max_batch_size` unless given."""
    enable_priority_queue: bool = False
    """Refused where true: not simulated."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_batch_threads != 1:
            raise ValueError(
                f"num_batch_threads {self.num_batch_threads}: more than one batch in flight is not simulated yet. Set"
                " it to 1, here and in the server"
            )
        if self.enable_priority_queue or self.batch_padding_policy == "MINIMIZE_TPU_COST_PER_REQUEST":
            raise ValueError(
                f"enable_priority_queue {self.enable_priority_queue} and batch_padding_policy"
                f" {self.batch_padding_policy}: low-priority queues and TPU costs are not simulated yet. Set false, and"
                " PAD_UP or BATCH_DOWN"
            )
        size, splits = self.max_execution_batch_size, self.enable_large_batch_splitting
        if size is not None and (size > self.max_batch_size or (size < self.max_batch_size and not splits)):
            raise ValueError(
                f"max_execution_batch_size {size} must be at most max_batch_size {self.max_batch_size}, and equal to"
                " it without enable_large_batch_splitting"
            )
        allowed, name = self.allowed_batch_sizes, "max_execution_batch_size" if splits else "max_batch_size"
        if allowed and (list(allowed) != sorted(set(allowed)) or allowed[-1] != self.rows):
            raise ValueError(
                f"allowed_batch_sizes {list(allowed)} must be increasing, and the last one equal {name} {self.rows}"
            )

    @property
    def traits(self) -> Traits:
        return Traits(max_num_seqs=self.rows, knobs=("max_batch_size",))

    @property
    def rows(self) -> int:
        """The number of rows of a full batch."""
        return self.max_execution_batch_size or self.max_batch_size


class TfServing(WholeBatches):
    """The scheduler. A decode step and an arrival are O(1), a batch O(batch log batch)."""

    evidence = "hand-derived"
    deviations: ClassVar[dict[str, str]] = {"no_idling": "waits batch_timeout_micros for a full batch"}

    def __init__(self, config: TfServingConfig, context: PolicyContext) -> None:
        pads = config.pad_variable_length_inputs
        self.closed = ClosedBatches(
            context, padding="longest" if pads else "none", allowed_sizes=config.allowed_batch_sizes
        )
        super().__init__(context, self.closed.running)
        self.config = config
        self.open: dict[Sequence, None] = {}
        self._open_since_ns = 0  # when its first task came

    @property
    def num_waiting(self) -> int:
        return self.closed.num_waiting + len(self.open)

    def add(self, seq: Sequence, now_ns: int) -> None:
        refusal = never_fits(self.kv, seq, self.max_model_len)
        enqueued, most = len(self.closed.batches) + 1, self.config.max_enqueued_batches
        if refusal is None and len(self.open) >= self.config.rows:
            if enqueued >= most:
                detail = f"{enqueued} batches enqueued, max_enqueued_batches {most}"
                refusal = Event("rejected", seq, "queue_full", detail=detail)
            else:
                self._close()
        if refusal is not None:
            self.events.append(refusal)
            return
        if not self.open:
            self._open_since_ns = seq.request.arrival_ns
        self.open[seq] = None

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        if seq in self.open:
            del self.open[seq]
            return []
        return [] if self.closed.discard(seq) else self.batch.cancel(seq)

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        work: Batch | Idle = self.batch.step() if self.closed.is_running else self._take(now_ns)
        self.note_blocked(self.closed.head or next(iter(self.open), None))
        return work

    # ---- what the thread does

    def _take(self, now_ns: int) -> Batch | Idle:
        """The prefill step of the next batch that can run, or the wait for the timeout of the open one."""
        while True:
            if not self.closed.batches:
                if not self.open:
                    return IDLE
                due_ns = self._open_since_ns + 1000 * self.config.batch_timeout_micros
                if len(self.open) < self.config.rows and now_ns < due_ns:
                    return Idle(due_ns)
                self._trim(now_ns)
            if self.config.pad_variable_length_inputs or not self._reject_unequal():
                return self.closed.start()

    def _trim(self, now_ns: int) -> None:
        """Closes the open batch; under BATCH_DOWN the rows beyond the largest allowed size in it open the next one."""
        allowed, size = self.config.allowed_batch_sizes, len(self.open)
        at = bisect_right(allowed, size)
        if self.config.batch_padding_policy != "BATCH_DOWN" or not at or allowed[at - 1] == size:
            self._close()
            return
        rows, kept = list(self.open), allowed[at - 1]
        self.closed.put(rows[:kept])
        self.open = dict.fromkeys(rows[kept:])
        # As if its requests had come at an even rate: the server keeps no time of each.
        self._open_since_ns += (now_ns - self._open_since_ns) * kept // size

    def _close(self) -> None:
        self.closed.put(self.open)
        self.open = {}

    def _reject_unequal(self) -> bool:
        """Rejects the front batch if its prompts differ in length; returns whether it did."""
        lengths = {seq.request.prompt_tokens for seq in self.closed.batches[0].rows}
        if len(lengths) == 1:
            return False
        detail = f"prompts of {min(lengths)} to {max(lengths)} tokens in a batch, pad_variable_length_inputs: false"
        for seq in self.closed.pop():
            self.events.append(Event("rejected", seq, "unequal_lengths", detail=detail))
        return True
