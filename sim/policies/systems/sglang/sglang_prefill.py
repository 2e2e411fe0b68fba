"""SGLang 0.5.23 that computes prompts for engines which decode (`--disaggregation-mode prefill`).

Rule, beside that of `sglang`:

1. A request waits in the bootstrap queue until the decode engine has blocks for its prompt, and until a metadata buffer
   is free, of which there are two for each of max_running_requests. Each call looks at all of them, in order.
2. Each request is asked for one token. All steps are prompts; the flag that no prefill is tried falls at each call.
3. A computed part is sent, in whole pages, with the launch of the step behind it, once it is computed; where no such
   step follows, as its results are processed, and without overlap as the next step is scheduled. So is what the radix
   cache has, with the launch of the request's first step. The rest of the last page goes with the first token.
4. The blocks of a prompt are kept, and its slot, until a call finds that all of it was sent.

Source: python/sglang/srt/disaggregation/prefill.py and managers/scheduler.py of the 0.5.23 wheel.
Simplifies: no optimistic prefills, timeouts or continuous polling of inputs; a cancel frees blocks that are being sent.
"""

from __future__ import annotations

from collections import deque

from batchsim.base.errors import ScenarioError
from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.kv_rooms import RoomConnector
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Event, Sequence
from batchsim.policies.systems.sglang.pd_config import SglangPdConfig
from batchsim.policies.systems.sglang.prefill_adder import Prefill
from batchsim.policies.systems.sglang.sglang import Sglang

NO_BLOCKS, NO_BUFFER = "waiting_decode_blocks", "no_metadata_buffer"
"""Why a request waits in the bootstrap queue."""


class SglangPrefill(Sglang):
    """The scheduler."""

    evidence = "hand-derived"

    def __init__(self, config: SglangPdConfig, context: PolicyContext) -> None:
        if not isinstance(context.connector, RoomConnector):
            raise ScenarioError("sglang: prompts are computed for others by an engine that has a RoomConnector.")
        super().__init__(config, context)
        self.connector = context.connector
        self._slots = self._most_running()
        self._bootstrap: dict[Sequence, str] = {}  # and why each waits, as is on record
        self._apart: dict[Sequence, str] = {}  # of the waiting, those that waited there, and why each waits now
        self._sent: dict[Sequence, int] = {}  # tokens sent of those not kept yet
        self._parts: deque[tuple[Batch, Sequence, int]] = deque()  # with how many tokens a part in flight ends

    @property
    def num_waiting(self) -> int:
        return super().num_waiting + len(self._bootstrap)

    def notice(self) -> None:
        """Does nothing: what is over is asked by `schedule`."""

    def leapt(self, batches: list[Batch]) -> None:
        """Does nothing: there are no leaps over prompts."""

    def _enter(self, seq: Sequence) -> None:
        seq.max_output_tokens = 1
        self._bootstrap[seq] = ""

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        if seq in self._bootstrap:
            del self._bootstrap[seq]
            return []
        return super().cancel(seq, now_ns)

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        self._now_ns = now_ns
        self._free_sent(now_ns)
        self._leave_bootstrap(now_ns)
        last = self._last
        self._take_in_last()
        self.free_blocks_asked = self.kv.num_free
        made = self._prefill([])
        while not (made.chunks or last is not None or self.connector.kept or self.adder.chunked) and len(self.waiting):
            if not self._never_fits(self.waiting.head()):
                break
            self._forget(self.waiting.pop())
            made = self._prefill([])
        self._note_blocked()
        self._note_apart()
        if not made.chunks:
            over = [self.connector.rooms[seq.request.id].over_ns for seq in self.connector.kept]
            return Idle(min(over)) if over else IDLE
        work = self._last = self._work(made, [])
        for seq, n in made.chunks:
            self._send_early(seq)
            if seq.settled_computed_tokens + n < seq.num_tokens:
                self._parts.append((work, seq, seq.settled_computed_tokens + n))
        if self.config.disable_consecutive_prefill_overlap and last is not None:
            work.apart = True
        return work

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        self._now_ns = now_ns
        ended = set(finished)
        for seq, _ in batch.chunks:
            if seq in ended and seq in self.running:
                self._finish(seq)
            elif self._parts and self._parts[0][:2] == (batch, seq):
                _, _, tokens = self._parts.popleft()
                if self._ahead and seq in self.running:
                    self._send(seq, tokens)
        if not self._ahead:
            self._take_in_last()
        return finished

    # ---- one call

    def _free_sent(self, now_ns: int) -> None:
        """Gives back the blocks of prompts all of whose KV is with others, or wanted no more."""
        kept, rooms = self.connector.kept, self.connector.rooms
        for seq in [seq for seq in kept if rooms[seq.request.id].over_ns <= now_ns]:
            del kept[seq], rooms[seq.request.id]
            self._insert_ended(seq, seq.request.prompt_tokens)
            self.kv.free(seq)

    def _leave_bootstrap(self, now_ns: int) -> None:
        """Lets those into the queue for which there are blocks at the decode engine and a buffer here."""
        num_buffers = 2 * self._slots - len(self.waiting) - len(self.running) - len(self.connector.kept)
        for seq, reason in list(self._bootstrap.items()):
            room = self.connector.rooms[seq.request.id]
            if room.refused:
                del self._bootstrap[seq]
                self.events.append(Event("rejected", seq, "never_fits", detail=room.refused))
            elif room.addressed and num_buffers > 0:
                del self._bootstrap[seq]
                self.waiting.push(seq)
                num_buffers -= 1
                if reason:
                    self._apart[seq] = reason
            elif reason != (now := NO_BUFFER if room.addressed else NO_BLOCKS):
                self._bootstrap[seq] = now
                self.events.append(Event("waits", seq, now))

    def _take_in_last(self) -> bool:
        """Puts the computed part of the prompt in the making into the tree, and sends it where that is not left to the
        processing of its results."""
        last, chunked, self._last = self._last, self.adder.chunked, None
        if last is not None and chunked is not None:
            if self._cache is not None:
                self._cache.insert(chunked)
            if not self._ahead:
                self._send(chunked, chunked.settled_computed_tokens)
        return False

    def _prefill(self, preempted: list[Sequence]) -> Prefill:
        taken = len(self.connector.kept) + len(self.running) - (self.adder.chunked is not None)
        self.adder.slots = self._slots - taken
        return super()._prefill(preempted)

    def _note_apart(self) -> None:
        """Puts on record why those wait now that waited in the bootstrap queue before: for what holds the queue."""
        for seq, reason in list(self._apart.items()):
            if seq in self.running:
                del self._apart[seq]
            elif self.adder.why not in ("", reason):
                self._apart[seq] = self.adder.why
                self.events.append(Event("waits", seq, self.adder.why))

    # ---- sending

    def _send_early(self, seq: Sequence) -> None:
        """Has what is computed of `seq`, about to be computed further, sent with the launch of that step."""
        computed, sent = seq.settled_computed_tokens, self._sent.get(seq, 0)
        if computed > sent and computed % self.kv.block_size == 0:
            self._sent[seq] = computed
            self.connector.pulling.append((seq, computed - sent, (computed - sent) // self.kv.block_size))

    def _send(self, seq: Sequence, tokens: int, *, last: bool = False) -> None:
        """Sends now what was not sent of the first `tokens` tokens of `seq`, but for a last page that is not full
        unless it is the `last` one."""
        page, sent = self.kv.block_size, self._sent.get(seq, 0)
        if not last:
            tokens -= tokens % page
        room = self.connector.rooms.get(seq.request.id)  # none where the run was cut
        if tokens > sent and room is not None:
            self._sent[seq] = tokens
            self.connector.carrier.send(room, -(-tokens // page) - sent // page, self._now_ns, last=last)

    def _finish(self, seq: Sequence) -> None:
        """Sends the rest of a prompt that is computed, with its first token, and keeps its blocks."""
        tokens = seq.request.prompt_tokens
        if self._cache is not None:
            self._cache.insert(seq, tokens)
        self._send(seq, tokens, last=True)
        seq.num_blocks = self.kv.held(seq)
        self.connector.kept[seq] = seq.num_blocks
        del self.running[seq]
        self._forget(seq)

    def _forget(self, seq: Sequence) -> None:
        self._sent.pop(seq, None)
        self._apart.pop(seq, None)
        super()._forget(seq)
