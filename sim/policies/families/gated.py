"""Gated batching: waiting requests are admitted together when the gate opens; later ones wait for the next opening.

Rule: one FIFO before a gate, which is open in a step that starts with `open_at` or fewer running sequences, by
default none. Then all waiting ones come in, in order, up to `max_num_seqs` and while KV for prompt and output cap is
there, so nothing is ever preempted. Their prompts are computed in that order beside the decodes, in as many steps as
`max_num_batched_tokens` asks for. Each leaves at its own end; its slot stays empty until the gate opens.
Source: gated service of polling models (Takagi, Analysis of Polling Systems, MIT Press 1986), applied to batching.
Simplifies: the gate takes no time to open; prompts are always chunked. Rejects what cannot fit the pool.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchsim.base.ranges import NonNegativeInt, PositiveInt
from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.policy_config import PolicyConfig, Traits
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Sequence
from batchsim.policies.families.first_come import FirstCome


@dataclass(frozen=True)
class GatedConfig(PolicyConfig):
    """Knobs. The default limits are those of the continuous family in the shipped scenarios."""

    max_num_seqs: PositiveInt = 256
    """The most sequences that run at once."""
    max_num_batched_tokens: PositiveInt = 8192
    """The most tokens of a step."""
    open_at: NonNegativeInt = 0
    """The gate opens for new requests where no more requests than this run."""

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
            kv_groups=True,
        )


class Gated(FirstCome):
    """The scheduler. A step costs O(prompts in it), whatever the number of sequences that decode."""

    evidence = "family"

    def __init__(self, config: GatedConfig, context: PolicyContext) -> None:
        super().__init__(context)
        self.config = config

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        reason, stopped = self._let_in(), None
        left = self.config.max_num_batched_tokens - len(self.group.members)
        chunks: list[tuple[Sequence, int]] = []
        for seq, lacking in self.partial.items():
            if left == 0:  # inside the gate, and nothing of its prompt computed yet
                reason, stopped = "token_budget", seq
                break
            n = min(lacking, left)
            self.partial[seq] = lacking - n
            chunks.append((seq, n))
            left -= n
        self.note_blocked(reason, who=stopped)
        return Batch(self.group, chunks, sum(n for _, n in chunks)) if self.running else IDLE

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        # Until a sequence ends, the gate stays as it is, and so do the slots and blocks behind it.
        batch.again()
        return True

    def _let_in(self) -> str:
        """Admits the waiting if the gate is open; returns the reason why the rest stays, "" if none does."""
        if len(self.running) > self.config.open_at:
            return "gate"
        while self.waiting and len(self.running) < self.config.max_num_seqs:
            if not self.kv.allocate(self.waiting[0], self.most_tokens(self.waiting[0])):
                return "kv_blocks"
            seq = self.waiting.popleft()
            self.start_running(seq, seq.num_tokens - seq.num_computed_tokens)
        return "no_slot"
