"""llama.cpp's server: slots with continuous batching, of commit 001d906a.

Rule: a request takes the free slot that was used longest ago, of slots never used the last one; while none is free it
waits, first come, first served. A step takes a token of every slot that decodes, then prompt tokens slot by slot in the
order of their numbers, not of arrival, until the step has `n_batch` tokens. A prompt done gives its first token in the
same step. Each slot has an equal share of the KV memory of its own, so there is no preemption.
Source: tools/server/server-context.cpp, `get_available_slot` and `pre_decode`.
Simplifies: no prompt cache (`--no-cache-prompt`; so no slot is chosen by its similarity), no KV memory that slots share
(`--no-kv-unified`), no context shift, no speculation, no checkpoints of models with sliding windows. A request whose
output could outgrow its slot is refused, where llama.cpp cuts it there. A step is one call of llama_decode, which
takes several passes through the model where slots lie apart or prompts are long (`passes`). A fitted cost
(`batchsim calibrate`) counts them; to others a step is one pass.
"""

from __future__ import annotations

from collections import deque

from batchsim.base.errors import ScenarioError
from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Event, Sequence
from batchsim.policies.families.first_come import FirstCome
from batchsim.policies.systems.llama_cpp.llama_cpp_config import LlamaCppConfig
from batchsim.policies.systems.llama_cpp.passes import passes_of


class LlamaCpp(FirstCome):
    """The scheduler. A decode step costs O(1) while no prompt is in progress and no slot is free for a waiting
    request."""

    evidence = "hand-derived"

    def __init__(self, config: LlamaCppConfig, context: PolicyContext) -> None:
        super().__init__(context)
        self.config = config
        self.slot_blocks = context.kv.num_blocks // config.n_parallel
        if self.slot_blocks < 1:
            raise ScenarioError(
                f"llama_cpp: {context.kv.num_blocks} KV blocks leave none for each of n_parallel {config.n_parallel}"
                " slots. Lower it or give the engine more KV."
            )
        self._free = deque(reversed(range(config.n_parallel)))  # the slot to take next first
        self._slots: dict[Sequence, int] = {}

    def refusal(self, seq: Sequence) -> Event | None:
        """The rejection of a sequence that could outgrow a slot; None if it fits."""
        tokens = self.most_tokens(seq)
        need = self.kv.blocks_for(tokens)
        if need <= self.slot_blocks:
            return None
        detail = (
            f"{need} KV blocks needed for {tokens} tokens, a slot of {self.config.n_parallel} has {self.slot_blocks}"
        )
        return Event("rejected", seq, "never_fits", detail=detail)

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        while self.waiting and self._free:
            seq = self.waiting.popleft()
            self._slots[seq] = self._free.popleft()
            room = self.kv.allocate(seq, self.most_tokens(seq))
            assert room, "every slot has its share"
            self.start_running(seq, seq.num_tokens)
        self.note_blocked("no_slot")
        if not self.running:
            return IDLE
        left = self.config.n_batch - len(self.group)
        chunks: list[tuple[Sequence, int]] = []
        for seq in sorted(self.partial, key=self._slots.__getitem__):
            n = min(seq.num_tokens - seq.num_computed_tokens, left)
            if n:
                chunks.append((seq, n))
                left -= n
            else:
                self.events.append(Event("sat_out", seq, "token_budget"))
        return self._split(Batch(self.group, chunks, sum([n for _, n in chunks])))

    def _split(self, batch: Batch) -> Batch:
        """Says how many passes `batch` takes."""
        decoding = sorted([self._slots[seq] for seq in self.group.members])
        rows = [(slot, 1) for slot in decoding] + [(self._slots[seq], n) for seq, n in batch.chunks]
        passes = passes_of(rows, min(self.config.n_ubatch, self.config.n_batch))
        batch.num_passes, batch.num_wide_passes = len(passes), sum([tokens > 1 for tokens in passes])
        return batch

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        """One more step of decodes alone: the slots' KV memory is theirs already."""
        if self.partial or (self.waiting and self._free):
            return False
        batch.again()
        return True

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        return super().complete(batch, sorted(finished, key=self._slots.__getitem__), now_ns)

    def release(self, seq: Sequence) -> None:
        self._free.append(self._slots.pop(seq))
        super().release(seq)
