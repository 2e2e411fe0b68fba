"""What schedulers with a strict queue have in common: the queue, the running in order of admission, how these end."""

from __future__ import annotations

from collections import deque

from batchsim.kernel.batch import Batch
from batchsim.kernel.kv_blocks import never_fits
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import DecodeGroup, Event, Sequence


class FirstCome:
    """A queue whose head is never overtaken, and the running sequences of one engine.

    `partial` are the running whose prompt or recompute is not done, each with a number of tokens: of the known, those
    left or the next chunk, as each scheduler counts.
    """

    streams = True

    def __init__(self, context: PolicyContext) -> None:
        self.kv = context.kv
        self.max_model_len = context.max_model_len
        self.events: list[Event] = []
        self.group = DecodeGroup(context.kv.block_size)
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}
        self.partial: dict[Sequence, int] = {}
        self._admitted = 0
        self._blocked: tuple[Sequence, str] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    def refusal(self, seq: Sequence) -> Event | None:
        """The rejection of a sequence that can never run; None if it can. By default of one that cannot fit the KV."""
        return never_fits(self.kv, seq, self.max_model_len)

    def add(self, seq: Sequence, now_ns: int) -> None:
        """Queues a sequence, or rejects it."""
        refusal = self.refusal(seq)
        if refusal is None:
            self.waiting.append(seq)
        else:
            self.events.append(refusal)

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        """Forgets a waiting or running sequence and frees its blocks."""
        if seq in self.running:
            self.release(seq)
        else:
            self.waiting.remove(seq)
        return []

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        """Frees the finished, lets done prompts decode; returns the finished, whose responses are sent now."""
        for seq in finished:
            self.release(seq)
        for seq in batch.sampled:
            if seq in self.running:
                del self.partial[seq]
                self.group.join(seq)
        return finished

    def most_tokens(self, seq: Sequence) -> int:
        """The most tokens of `seq` that can ever be in the KV cache: the last one is never computed."""
        request = seq.request
        return min(request.prompt_tokens + request.max_output_tokens, self.max_model_len) - 1

    def start_running(self, seq: Sequence, num_tokens: int) -> None:
        """Makes `seq` the last of the running, with `num_tokens` as its entry in `partial`."""
        seq.order = self._admitted
        self._admitted += 1
        self.running[seq] = None
        self.partial[seq] = num_tokens

    def release(self, seq: Sequence) -> None:
        """Takes `seq` out of the running and frees its blocks."""
        self.kv.free(seq)
        if seq.group is not None:
            seq.group.leave(seq)
        self.partial.pop(seq, None)
        del self.running[seq]

    def note_blocked(self, reason: str, ahead: int | None = None, who: Sequence | None = None) -> None:
        """Adds a `blocked` event if the head of the queue, or `who` is stopped before it, or its `reason` is a new one;
        `ahead` is the id of the request in its way."""
        head = who or (self.waiting[0] if self.waiting else None)
        blocked = None if head is None else (head, reason)
        if blocked is not None and blocked != self._blocked:
            self.events.append(Event("blocked", *blocked, blocker=ahead))
        self._blocked = blocked
