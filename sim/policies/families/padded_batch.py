"""The running batch of a policy that runs whole batches to their end: no sequence joins, KV is held until the last row
ends.

Rows are prefilled in one step and then decode in lockstep. KV is reserved at the start: every row gets its prompt
(the longest prompt of the batch under `padding: longest`) plus the largest output cap of the batch, less the last
token, which is never computed. Under `finished_rows: hold` the row of an ended or cancelled sequence computes on
as padding; under `drop` it leaves the compute. Its KV stays reserved either way.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from typing import Literal

from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.kv_blocks import never_fits
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import DecodeGroup, Event, Sequence

Padding = Literal["longest", "none"]
FinishedRows = Literal["hold", "drop"]
Respond = Literal["batch_end", "row_end"]


class PaddedBatch:
    """The running batch, padded to one shape, its KV too: `rows` are its sequences in batch order, ended ones
    included; empty when no batch runs.

    `row_tokens` reserves that many tokens a row instead; the policy then admits only what fits.
    """

    def __init__(
        self,
        context: PolicyContext,
        *,
        padding: Padding,
        finished_rows: FinishedRows,
        respond: Respond,
        row_tokens: int | None = None,
    ) -> None:
        self.kv = context.kv
        self.max_model_len = context.max_model_len
        self.pads = padding == "longest"
        self.holds_rows = finished_rows == "hold"
        self.holds_responses = respond == "batch_end"
        self.row_tokens = row_tokens
        self.group = DecodeGroup(context.kv.block_size)
        self.rows: list[Sequence] = []
        self._cut: list[Sequence] = []  # would be rows, had KV sufficed
        self._held: list[Sequence] = []  # ended, response not sent
        self._admitted = 0
        self._pad_to = 0  # the longest prompt under padding, else 0
        self._first_step = 0  # of the group in this batch
        self._pad_live = 0  # padding in the prompts of the live rows
        self._num_ended = 0
        self._ended_widths = 0  # prompts of the ended rows, padded

    @property
    def num_running(self) -> int:
        """Rows that have not ended. While rows exist and none decodes, all of them are in the prefill step."""
        return len(self.group.members) or len(self.rows)

    def fitting(self, candidates: list[Sequence]) -> int:
        """How many of `candidates`, from the first on, the free KV takes as one batch. O(n log n)."""

        def blocks(count: int) -> int:
            return sum(map(self.kv.blocks_for, self._reserved_tokens(candidates[:count])))

        return bisect_right(range(1, len(candidates) + 1), self.kv.num_free, key=blocks)

    def why_not(self, head: Sequence) -> str:
        """The reason, for the records, for which `head`, the first in the queue, waits."""
        if not self.rows:
            return "batch_window"
        return "kv_blocks" if head in self._cut else "batch_running"

    def start(self, rows: list[Sequence], cut: list[Sequence], copies: int = 0) -> Batch:
        """Reserves the KV of `rows`, which must fit, and returns their prefill step. `cut` found no KV and wait.

        `copies` further rows, of the last one's prompt, compute until the batch ends and hold no KV: for systems that
        pad the number of rows. Under `finished_rows: hold` only, and for rows of one length, by padding or as they are.
        """
        for seq, tokens in zip(rows, self._reserved_tokens(rows), strict=True):
            self.kv.allocate(seq, tokens)  # never False: `fitting` counted the same tokens
            seq.order = self._admitted
            self._admitted += 1
        prompts = [seq.request.prompt_tokens for seq in rows]
        useful = sum(prompts)
        self.rows, self._cut = rows, cut
        self._pad_to = max(prompts) if self.pads else 0
        self._pad_live = len(rows) * self._pad_to - useful if self.pads else 0
        # A copy is from the first step on what a row that has ended is: padding of its prompt's width.
        self._num_ended = copies
        self._ended_widths = copies * max(prompts[-1], self._pad_to)
        return Batch(
            self.group,
            list(zip(rows, prompts, strict=True)),
            useful,
            pad_prefill_tokens=self._pad_live + self._ended_widths,
            pad_prefill_rows=copies,
        )

    def step(self) -> Batch:
        """The next decode step. O(1)."""
        if not self.holds_rows:
            return Batch(self.group, [], 0, pad_context_tokens=self._pad_live)
        steps = self.group.step - self._first_step
        return Batch(
            self.group,
            [],
            0,
            pad_decode_rows=self._num_ended,
            pad_context_tokens=self._pad_live + self._ended_widths + self._num_ended * steps,
        )

    def complete(self, batch: Batch, finished: list[Sequence]) -> list[Sequence]:
        """Ends a step; returns the responses sent now, and at the end of the batch frees its KV."""
        if batch.chunks:
            ended = set(finished)
            for seq, _ in batch.chunks:
                if seq not in ended:
                    self.group.join(seq)
            self._first_step = self.group.step
        for seq in finished:
            self._end_row(seq)
        if not self.holds_responses:
            self._free_if_over()
            return finished
        self._held += finished
        return self._free_if_over()

    def cancel(self, seq: Sequence) -> list[Sequence]:
        """Ends the row of `seq`; if it was the last to run, the batch ends and its held responses are returned."""
        self._end_row(seq)
        return self._free_if_over()

    def _reserved_tokens(self, rows: list[Sequence]) -> list[int]:
        """Tokens of KV for each of `rows` as one batch."""
        if self.row_tokens is not None:
            return [self.row_tokens] * len(rows)
        requests = [seq.request for seq in rows]
        output = max(min(r.max_output_tokens, self.max_model_len - r.prompt_tokens) for r in requests)
        if self.pads:
            return [max(r.prompt_tokens for r in requests) + output - 1] * len(rows)
        return [r.prompt_tokens + output - 1 for r in requests]

    def _end_row(self, seq: Sequence) -> None:
        if seq.group is not None:  # None: it ended with its prefill
            self.group.leave(seq)
        prompt = seq.request.prompt_tokens
        width = max(prompt, self._pad_to)
        self._pad_live -= width - prompt
        self._num_ended += 1
        self._ended_widths += width

    def _free_if_over(self) -> list[Sequence]:
        """Ends the batch if no row runs; returns the responses held until then."""
        if self.group.members or not self.rows:
            return []
        for seq in self.rows:
            self.kv.free(seq)
        self.rows = []
        held, self._held = self._held, []
        return held


class WholeBatches:
    """What the schedulers have in common that run one batch after the other to its end: `batch` is the one that runs.

    A scheduler has the queue, and calls `note_blocked` in every `schedule`.
    """

    def __init__(self, context: PolicyContext, batch: PaddedBatch) -> None:
        self.kv = context.kv
        self.max_model_len = context.max_model_len
        self.events: list[Event] = []
        self.batch = batch
        self.streams = not batch.holds_responses
        self._blocked: tuple[Sequence, str] | None = None

    @property
    def num_running(self) -> int:
        return self.batch.num_running

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        """True after any decode step: the reserved KV needs no growth and no sequence joins."""
        batch.again()
        return True

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        """The responses that are sent now: of whole answers, those of the batch that ended."""
        return self.batch.complete(batch, finished)

    def note_blocked(self, head: Sequence | None, reason: str = "") -> None:
        """Adds a `blocked` event if `head`, the first of all that wait, or its reason has changed; by default that for
        which the batch of `head` waits."""
        blocked = None if head is None else (head, reason or self.batch.why_not(head))
        if blocked is not None and blocked != self._blocked:
            self.events.append(Event("blocked", *blocked))
        self._blocked = blocked


class WholeBatchesInOrder(WholeBatches):
    """Schedulers of whole batches with one queue in order of arrival: `waiting`, an ordered set.

    A scheduler says in `next_batch` what an idle engine does.
    """

    def __init__(self, context: PolicyContext, batch: PaddedBatch) -> None:
        super().__init__(context, batch)
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        self._started_ns: int | None = None  # of the running batch

    @abstractmethod
    def next_batch(self, now_ns: int, drain: bool) -> Batch | Idle:
        """The first step of the next batch, or for how long an idle engine waits for requests beside the ones that
        are `waiting`."""

    def ended(self, batch_ns: int) -> None:
        """Takes note that a batch took `batch_ns`; not called for one that a cancel ended."""

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def refused(self, seq: Sequence) -> Event | None:
        """Why `seq` can never run; None where it can."""
        return never_fits(self.kv, seq, self.max_model_len)

    def add(self, seq: Sequence, now_ns: int) -> None:
        refusal = self.refused(seq)
        if refusal is not None:
            self.events.append(refusal)
            return
        self.waiting[seq] = None

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        if seq in self.waiting:
            del self.waiting[seq]
            return []
        return self.batch.cancel(seq)

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        work: Batch | Idle = IDLE
        if self.batch.rows:
            work = self.batch.step()
        elif self.waiting:
            work = self.next_batch(now_ns, drain)
        self.note_blocked(next(iter(self.waiting), None))
        return work

    def start(self, rows: list[Sequence], cut: list[Sequence], now_ns: int, copies: int = 0) -> Batch:
        """Takes `rows` out of the queue and starts them as a batch; see `PaddedBatch.start`."""
        for seq in rows:
            del self.waiting[seq]
        self._started_ns = now_ns
        return self.batch.start(rows, cut, copies)

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        responses = super().complete(batch, finished, now_ns)
        if not self.batch.rows and self._started_ns is not None:
            self.ended(now_ns - self._started_ns)
            self._started_ns = None
        return responses
