"""Sarathi's scheduler as Vidur has it: `sarathi` of commit 7d47513a.

Rule: decodes first, then the prompt in progress, then new ones from the head of a strict first-come queue. All decodes
run, a token each; prompts share what is left of `chunk_size`. A new one comes in when the blocks of its whole prompt
leave `watermark_blocks_fraction` of the pool free, under `batch_size_cap` running. Each decode needs a free block, else
the last admitted one is preempted by recompute, at last itself; it may come back in the very same step.
Source: vidur/scheduler/replica_scheduler/sarathi_replica_scheduler.py, equal to a recording of it (`batchsim conform`);
the rule is that of Agrawal et al., Sarathi-Serve (OSDI 2024).
In a pipeline a batch takes decodes up to `batch_size_cap` shared out among the stages, then the ready prompts begun,
whose number nothing bounds; new ones come in unless it has just that many members.
Simplifies: see `sim/policies/systems/vidur/vidur_scheduler.py` for where Vidur would wait for ever.
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
class SarathiConfig(PolicyConfig):
    """Knobs by Vidur's names, with its defaults. `watermark_blocks_fraction` is a share of the KV blocks, 0 to 1."""

    batch_size_cap: PositiveInt = 128
    chunk_size: PositiveInt = 512
    watermark_blocks_fraction: ShareBelowOne = 0.01

    @property
    def traits(self) -> Traits:
        return Traits(max_num_seqs=self.batch_size_cap, loop=EVENTS, pipelines=True)


class Sarathi(VidurScheduler):
    """The scheduler. A decode-only step with blocks to spare is O(1) in the number of sequences.

    At most one prompt is in progress. It is the last admitted, with what the budget had left, so that since then fewer
    than `chunk_size` decode and it never sits out.
    """

    evidence = "recorded"

    def __init__(self, config: SarathiConfig, context: PolicyContext) -> None:
        super().__init__(context, config.batch_size_cap, config.watermark_blocks_fraction)
        self.config = config
        self._most = micro_batch_size("sarathi", config.batch_size_cap, context.loop.stages)

    def next_batch(self) -> Batch | Idle:
        preemptions = self.grow_decodes()
        self.events += preemptions
        left = self.config.chunk_size - len(self.group)
        chunks = [(seq, min(seq.num_tokens - seq.settled_computed_tokens, left)) for seq in self.partial]
        left -= sum([n for _, n in chunks])
        self._admit(chunks, left)
        if not (chunks or preemptions or self.group.members):
            return IDLE
        preempted = [event.seq for event in preemptions]
        return Batch(self.group, chunks, sum([n for _, n in chunks]), preempted=preempted)

    def next_micro_batch(self, micro: MicroBatches) -> Batch:
        decodes, begun, preempted = self.take_ready(micro, self._most)
        left = self.config.chunk_size - len(decodes)
        chunks: list[tuple[Sequence, int]] = []
        late: list[Sequence] = []
        for seq in begun:
            n = min(seq.num_tokens - seq.settled_computed_tokens, left)
            if n < 1:
                late.append(seq)
            else:
                chunks.append((seq, n))
                left -= n
        self.events += [Event("sat_out", seq, "no_slot") for seq in micro.ready if seq in self.partial]
        self.events += [Event("sat_out", seq, "token_budget") for seq in late]
        micro.ready.extendleft(reversed(late))
        micro.by_arrival()
        self._admit(chunks, left, len(decodes))
        return micro.launch(decodes, chunks, preempted)

    def _admit(self, chunks: list[tuple[Sequence, int]], left: int, num_decodes: int = -1) -> None:
        """Admits from the head of the queue, into `chunks`, what `left` tokens allow; in a pipeline, beside
        `num_decodes` decodes."""
        reason = ""
        while self.waiting:
            tokens = self.waiting[0].num_tokens
            # Vidur asks whether there are as many: prompts begun may have made them more, and then nothing stops it.
            full = num_decodes >= 0 and num_decodes + len(chunks) == self._most
            reason = self.obstacle(tokens) or ("no_slot" if full else "" if left > 0 else "token_budget")
            if reason:
                break
            seq, n = self.admit(tokens), min(tokens, left)
            chunks.append((seq, n))
            left -= n
        self.note_blocked(reason)
