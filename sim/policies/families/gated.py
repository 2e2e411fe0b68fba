"""Gated batching: those who wait come in together when the gate opens; who comes later waits for the next opening.

Rule: one FIFO before a gate, which is open in a step that starts with `open_at` or fewer running sequences, by
default none. Then all who wait come in, in order, up to `max_num_seqs` and while KV for prompt and output cap is there,
so nothing is ever preempted. Their prompts are computed in that order beside the decodes, in as many steps as
`max_num_batched_tokens` asks for. Each leaves at its own end; its slot stays empty until the gate opens.
Source: gated service of polling models (Takagi, Analysis of Polling Systems, MIT Press 1986), applied to batching.
Simplifies: the gate takes no time to open; prompts are always chunked. Rejects what cannot fit the pool.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from batchsim.base.ranges import NonNegativeInt, PositiveInt
from batchsim.kernel.decode import DecodeGroup
from batchsim.kernel.kv_blocks import never_fits
from batchsim.kernel.policy_config import PolicyConfig, Traits
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import IDLE, Batch, Event, Idle, Sequence


@dataclass(frozen=True)
class GatedConfig(PolicyConfig):
    """Knobs. The default limits are those of the continuous family in the shipped scenarios."""

    max_num_seqs: PositiveInt = 256
    max_num_batched_tokens: PositiveInt = 8192
    open_at: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        # All running sequences may decode in one step, a token each; a gate that never shuts is continuous batching.
        low, seqs, tokens = self.open_at, self.max_num_seqs, self.max_num_batched_tokens
        if not low < seqs <= tokens:
            raise ValueError(f"must be open_at {low} < max_num_seqs {seqs} <= max_num_batched_tokens {tokens}")

    @property
    def traits(self) -> Traits:
        return Traits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            knobs=("max_num_seqs", "max_num_batched_tokens"),
        )


class Gated:
    """The scheduler. A step costs O(prompts in it), whatever the number of sequences that decode."""

    evidence = "family"
    streams = True

    def __init__(self, config: GatedConfig, context: PolicyContext) -> None:
        self.config = config
        self.kv = context.kv
        self.max_model_len = context.max_model_len
        self.events: list[Event] = []
        self.group = DecodeGroup(context.kv.block_size)
        self.waiting: deque[Sequence] = deque()
        self.partial: dict[Sequence, int] = {}  # in, not decoding yet: prompt tokens lacking after the step in flight
        self._admitted = 0
        self._blocked: tuple[Sequence, str] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.group.members) + len(self.partial)

    def add(self, seq: Sequence, now_ns: int) -> None:
        refusal = never_fits(self.kv, seq, self.max_model_len)
        if refusal is not None:
            self.events.append(refusal)
        else:
            self.waiting.append(seq)

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        if seq.group is not None or seq in self.partial:
            self._release(seq)
        else:
            self.waiting.remove(seq)
        return []

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        reason = self._let_in()
        blocked = (self.waiting[0], reason) if self.waiting else None
        left = self.config.max_num_batched_tokens - len(self.group.members)
        chunks: list[tuple[Sequence, int]] = []
        for seq, lacking in self.partial.items():
            if left == 0:  # inside the gate, and nothing of its prompt computed yet
                blocked = (seq, "token_budget")
                break
            n = min(lacking, left)
            self.partial[seq] = lacking - n
            chunks.append((seq, n))
            left -= n
        if blocked is not None and blocked != self._blocked:
            self.events.append(Event("blocked", *blocked))
        self._blocked = blocked
        return Batch(self.group, chunks, sum(n for _, n in chunks)) if self.num_running else IDLE

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        # While all decode and nobody ends, the gate stays as it is, and so do the slots and blocks behind it.
        if not batch.chunks:
            batch.again()
        return not batch.chunks

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        for seq in finished:
            self._release(seq)
        for seq in batch.sampled:
            if self.partial.pop(seq, None) is not None:  # None: it ended with its prompt
                self.group.join(seq)
        return finished

    def _let_in(self) -> str:
        """Admits the waiting if the gate is open; returns what stops those who stay, "" if nobody does."""
        if self.num_running > self.config.open_at:
            return "gate"
        while self.waiting and self.num_running < self.config.max_num_seqs:
            request = self.waiting[0].request
            # The last output token is never computed.
            most_tokens = min(request.prompt_tokens + request.max_output_tokens, self.max_model_len) - 1
            if not self.kv.allocate(self.waiting[0], most_tokens):
                return "kv_blocks"
            seq = self.waiting.popleft()
            seq.order = self._admitted
            self._admitted += 1
            self.partial[seq] = request.prompt_tokens
        return "no_slot"

    def _release(self, seq: Sequence) -> None:
        self.kv.free(seq)
        if self.partial.pop(seq, None) is None:
            self.group.leave(seq)
