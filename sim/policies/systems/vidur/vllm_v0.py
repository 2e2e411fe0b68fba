"""vLLM's first scheduler as Vidur has it: `vllm` of commit 7d47513a.

Rule: a step is prompts only if any can come in, else decodes only. New ones come from the head of a strict first-come
queue with their whole prompts while its blocks leave `watermark_blocks_fraction` of the pool free, the count of the
step's prompts times the longest of them stays within `max_tokens_in_batch`, and fewer than `batch_size_cap` run.
Each decode needs a free block, else the last admitted one is preempted by recompute, at last itself.
Source: vidur/scheduler/replica_scheduler/vllm_replica_scheduler.py, equal to a recording of it (`batchsim conform`);
the rule is that of Kwon et al., PagedAttention (SOSP 2023).
In a pipeline a batch has at most `batch_size_cap` shared out among the stages; decodes come in order of arrival.
Simplifies: no swapping; see `sim/policies/systems/vidur/vidur_scheduler.py` for where Vidur would wait for ever. So it
would for a preempted one that has outgrown `max_tokens_in_batch`: here it comes in when nothing else runs.
Rejected: a prompt longer than `max_tokens_in_batch` (`over_token_budget`), and what cannot fit the pool (`never_fits`).
"""

from __future__ import annotations

from dataclasses import dataclass

from batchsim.base.ranges import PositiveInt, ShareBelowOne
from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.engine_loop import EVENTS
from batchsim.kernel.policy_config import PolicyConfig, Traits
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Event, Sequence
from batchsim.policies.systems.vidur.micro_batches import MicroBatches, micro_batch_size
from batchsim.policies.systems.vidur.vidur_scheduler import VidurScheduler


@dataclass(frozen=True)
class VllmV0Config(PolicyConfig):
    """Knobs by Vidur's names, with its defaults."""

    batch_size_cap: PositiveInt = 128
    """The most requests of a micro-batch."""
    max_tokens_in_batch: PositiveInt = 4096
    """Tokens of a step at most."""
    watermark_blocks_fraction: ShareBelowOne = 0.01
    """Part of the KV blocks that admission leaves free, 0 to 1."""

    @property
    def traits(self) -> Traits:
        return Traits(max_num_seqs=self.batch_size_cap, loop=EVENTS, pipelines=True)


class VllmV0(VidurScheduler):
    """The scheduler. A decode step with blocks to spare is O(1) in the number of sequences."""

    evidence = "recorded"

    def __init__(self, config: VllmV0Config, context: PolicyContext) -> None:
        super().__init__(context, config.batch_size_cap, config.watermark_blocks_fraction)
        self.config = config
        self._most = micro_batch_size("vllm_v0", config.batch_size_cap, context.loop.stages)

    def refusal(self, seq: Sequence) -> Event | None:
        """The rejection of a sequence that could not end even alone, or whose prompt no step holds."""
        prompt, most = seq.request.prompt_tokens, self.config.max_tokens_in_batch
        detail = f"prompt of {prompt} tokens in one step, max_tokens_in_batch {most}"
        too_long = Event("rejected", seq, "over_token_budget", detail=detail) if prompt > most else None
        return super().refusal(seq) or too_long

    def next_batch(self) -> Batch | Idle:
        chunks: list[tuple[Sequence, int]] = []
        reason = self._admit(chunks)
        if chunks:
            self.note_blocked(reason)
            return Batch(None, chunks, sum([n for _, n in chunks]))
        preemptions = self.grow_decodes()
        self.events += preemptions
        self.note_blocked("preemption" if preemptions else reason)
        if not (preemptions or self.group.members):
            return IDLE
        return Batch(self.group, [], 0, preempted=[event.seq for event in preemptions])

    def next_micro_batch(self, micro: MicroBatches) -> Batch:
        chunks: list[tuple[Sequence, int]] = []
        reason = self._admit(chunks)
        if chunks:
            self.note_blocked(reason)
            return micro.launch([], chunks, [])
        micro.by_arrival()
        decodes, _, preempted = self.take_ready(micro, self._most)
        self.note_blocked("preemption" if preempted else reason)
        return micro.launch(decodes, [], preempted)

    def _admit(self, chunks: list[tuple[Sequence, int]]) -> str:
        """Admits from the head of the queue, into `chunks`; returns why the next one does not fit, "" if the queue is
        empty."""
        longest = 0
        while self.waiting:
            tokens = self.waiting[0].num_tokens
            reason = self.obstacle(tokens) or ("no_slot" if len(chunks) == self._most else "")
            if reason:
                return reason
            longest = max(longest, tokens)
            if (len(chunks) + 1) * longest > self.config.max_tokens_in_batch and self.running:
                return "token_budget"
            chunks.append((self.admit(tokens), tokens))
        return ""
