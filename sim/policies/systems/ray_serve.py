"""Ray Serve's `@serve.batch` in front of a generative model: Ray 2.60.0, one replica, one decorated method.

Rule: the replica takes in at most `max_ongoing_requests`, the others wait at the proxy. A loop takes the first request
from its queue, starts a timer then, takes what is queued and what arrives until it has `max_batch_size` or
`batch_wait_timeout_s` is over, seals the batch and at once begins the next, whether or not the model is free. Sealed
batches run one after the other to their end and are not topped up. With a `batch_size_fn` a request that would pass
the limit goes to the back of the queue and the batch is closed; one that passes it alone fails (`item_too_large`). A
cancelled request keeps its place until its batch starts. Answers leave with the batch, or are streamed.
Source: python/ray/serve/batching.py of the 2.60.0 wheel.
Simplifies: one replica and one model id (no sub-batches); what arrives at the instant a timer ends is still taken in;
the queue at the proxy has no bound. The model pads prompts to the longest. KV shortage: see `closed_batches.py`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar, Literal

from batchsim.base.ranges import PositiveInt
from batchsim.base.units import NS_PER_S, Seconds
from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.kv_blocks import never_fits
from batchsim.kernel.policy_config import PolicyConfig, Traits
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Event, Sequence
from batchsim.policies.families.closed_batches import ClosedBatches
from batchsim.policies.families.padded_batch import WholeBatches


@dataclass(frozen=True)
class RayServeConfig(PolicyConfig):
    """Knobs by Ray's names, with its defaults."""

    max_batch_size: PositiveInt = 10
    """Requests of a batch, or its prompt tokens with a `batch_size_fn`."""
    batch_wait_timeout_s: Seconds = 0.01
    """Seconds that the oldest request waits for a fuller batch."""
    max_concurrent_batches: Literal[1] | PositiveInt = 1
    """Batches in flight at a time; more than 1 is not simulated."""
    batch_size_fn: Literal["prompt_tokens"] | None = None
    """What a batch is counted in: prompt tokens of its requests, or requests unless given."""
    max_ongoing_requests: PositiveInt = 5
    """Requests of the deployment at a time; below `max_batch_size` no batch ever fills, of which Ray only warns."""
    stream: bool = False
    """Whether the handler is a generator: a list of tokens an iteration, and each answer closes with its row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_concurrent_batches > 1:
            raise ValueError(
                f"max_concurrent_batches {self.max_concurrent_batches}: more than one batch in flight is not simulated"
                " yet. Set it to 1, here and in the deployment"
            )

    @property
    def traits(self) -> Traits:
        return Traits(
            max_num_seqs=self.max_batch_size if self.batch_size_fn is None else None,
            knobs=("max_batch_size",),
        )


class RayServe(WholeBatches):
    """The scheduler. A decode step and an arrival are O(1), a batch O(batch log batch)."""

    evidence = "hand-derived"
    deviations: ClassVar[dict[str, str]] = {"no_idling": "waits batch_wait_timeout_s for a full batch"}

    def __init__(self, config: RayServeConfig, context: PolicyContext) -> None:
        self.closed = ClosedBatches(context, padding="longest", respond="row_end" if config.stream else "batch_end")
        super().__init__(context, self.closed.running)
        self.config = config
        self.loop = _Loop(config)
        self.outside: dict[Sequence, None] = {}  # at the proxy
        self.failed: dict[Sequence, None] = {}  # too large for any batch, not reported yet
        self._ongoing = 0  # at the replica: not answered yet
        self._left = 0  # of these, gone at `_left_ns`, the last step boundary, before what arrived since is let in
        self._left_ns = 0

    @property
    def num_waiting(self) -> int:
        return self.closed.num_waiting + self.loop.num_waiting + len(self.outside) + len(self.failed)

    def add(self, seq: Sequence, now_ns: int) -> None:
        refusal = never_fits(self.kv, seq, self.max_model_len)
        if refusal is not None:
            self.events.append(refusal)
            return
        arrival_ns = seq.request.arrival_ns
        if arrival_ns >= self._left_ns:
            self._let_in()
        self.outside[seq] = None
        self._enter(arrival_ns)

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        for gone in (self.outside, self.failed):
            if seq in gone:
                del gone[seq]
                return []
        responses: list[Sequence] = []
        if not (self.loop.cancel(seq) or self.closed.discard(seq)):
            responses = self.batch.cancel(seq)
        self._note_left(1 + len(responses), now_ns)
        return responses

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        self._let_in()
        self._run_loop(now_ns + 1)
        if self.failed:
            self._reject_failed()
        work: Batch | Idle = IDLE
        if self.closed.is_running:
            work = self.batch.step()
        elif self.closed.batches:
            work = self.closed.start()
        elif self.loop.due_ns is not None:
            work = Idle(self.loop.due_ns)
        head = self.closed.head or self.loop.head
        self.note_blocked(head or next(iter(self.outside), None), "" if head else "no_slot")
        return work

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        responses = super().complete(batch, finished, now_ns)
        self._note_left(len(responses), now_ns)
        return responses

    # ---- in and out of the replica

    def _note_left(self, count: int, now_ns: int) -> None:
        self._left += count
        self._left_ns = now_ns

    def _let_in(self) -> None:
        """Admits requests at the proxy to the places of requests that have left the replica."""
        if self._left:
            self._ongoing -= self._left
            self._left = 0
            self._enter(self._left_ns)

    def _enter(self, at_ns: int) -> None:
        while self.outside and self._ongoing < self.config.max_ongoing_requests:
            seq = next(iter(self.outside))
            del self.outside[seq]
            self._ongoing += 1
            if at_ns > self.loop.at_ns:
                self._run_loop(at_ns)
            self.loop.put(seq, at_ns)

    def _run_loop(self, until_ns: int) -> None:
        """Does all that the loop does before `until_ns`, and takes over the batches it made and what failed."""
        loop = self.loop
        while True:
            loop.run(until_ns)
            for rows in loop.closed:
                self.closed.put(rows)
            failed, loop.closed, loop.failed = loop.failed, [], []
            if not failed:
                return
            self.failed |= dict.fromkeys(failed)
            self._ongoing -= len(failed)
            self._enter(loop.at_ns)

    def _reject_failed(self) -> None:
        for seq in self.failed:
            detail = f"batch_size_fn gives {seq.request.prompt_tokens}, max_batch_size {self.loop.limit}"
            self.events.append(Event("rejected", seq, "item_too_large", detail=detail))
        self.failed = {}


class _Loop:
    """Ray's loop that forms batches, replayed: it acts at each arrival and when its timer ends, and at no other time.

    `closed` are the batches closed, `failed` the requests too large for one, since these lists were last taken.
    `due_ns` is when the timer of the open batch ends; None without one.
    """

    def __init__(self, config: RayServeConfig) -> None:
        self.limit = config.max_batch_size
        self.timeout_ns = round(config.batch_wait_timeout_s * NS_PER_S)
        self.counts_tokens = config.batch_size_fn is not None
        self.at_ns = 0  # the instant up to which all is done, but for what is queued
        self.due_ns: int | None = None
        self.closed: list[list[Sequence]] = []
        self.failed: list[Sequence] = []
        self._members: dict[Sequence, None] = {}  # queued or in the batch, and not cancelled
        self._queue: deque[Sequence] = deque()  # arrived at `at_ns`
        self._batch: list[Sequence] = []
        self._size = 0

    @property
    def num_waiting(self) -> int:
        return len(self._members)

    @property
    def head(self) -> Sequence | None:
        """The first request that is in no closed batch yet."""
        return next(iter(self._members), None)

    def put(self, seq: Sequence, at_ns: int) -> None:
        """Queues `seq` at `at_ns`, or at the loop's own time if that is later. The loop must have run up to then."""
        self.at_ns = max(self.at_ns, at_ns)
        self._queue.append(seq)
        self._members[seq] = None

    def cancel(self, seq: Sequence) -> bool:
        """Marks `seq` as cancelled, which keeps its place; False if it is not queued or in the open batch."""
        if seq not in self._members:
            return False
        del self._members[seq]
        return True

    def run(self, until_ns: int) -> None:
        """Does what is due before `until_ns`."""
        while self._queue:
            self._take()
        if self.due_ns is not None and self.due_ns < until_ns:
            self.at_ns = max(self.at_ns, self.due_ns)
            self._seal()

    def _take(self) -> None:
        """Takes what is queued at this instant, until a batch is closed or a request fails."""
        queue = self._queue
        if not self._batch:
            first = queue.popleft()
            self._size = self._size_of(first)
            if self._size > self.limit:
                if first in self._members:
                    del self._members[first]
                    self.failed.append(first)
                return
            self._batch = [first]
            self.due_ns = self.at_ns + self.timeout_ns
        while queue and self._size < self.limit:
            seq = queue.popleft()
            size = self._size_of(seq)
            if self._size + size > self.limit:
                queue.append(seq)
                break
            self._batch.append(seq)
            self._size += size
        else:
            if self._size < self.limit:
                return
        self._seal()

    def _size_of(self, seq: Sequence) -> int:
        return seq.request.prompt_tokens if self.counts_tokens else 1

    def _seal(self) -> None:
        rows = [seq for seq in self._batch if seq in self._members]
        for seq in rows:
            del self._members[seq]
        self.closed.append(rows)
        self._batch = []
        self._size = 0
        self.due_ns = None
