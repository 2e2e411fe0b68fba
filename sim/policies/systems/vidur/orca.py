"""Orca's scheduler as Vidur has it: `orca` of commit 7d47513a.

Rule: selection for every iteration. A step holds all running sequences, one token each, then new ones from the head of
a strict first-come queue, each with its whole prompt, up to `batch_size_cap` members. A new one comes in when a KV slot
of `max_tokens_per_request` tokens is free, which it keeps to its end: there is no token cap and no preemption.
Source: vidur/scheduler/replica_scheduler/orca_replica_scheduler.py, equal to a recording of it (`batchsim conform`);
the rule is that of Yu et al., Orca (OSDI 2022), section 4.
In a pipeline each stage has a batch of up to `batch_size_cap`, so that the slots alone bound how many run.
Simplifies: a slot is rounded up to whole blocks, where Vidur rounds down and writes beyond it.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchsim.base.errors import ScenarioError
from batchsim.base.ranges import PositiveInt
from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.engine_loop import EVENTS
from batchsim.kernel.policy_config import PolicyConfig, Traits
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Event, Sequence
from batchsim.policies.systems.vidur.micro_batches import MicroBatches
from batchsim.policies.systems.vidur.vidur_scheduler import VidurScheduler


@dataclass(frozen=True)
class OrcaConfig(PolicyConfig):
    """Knobs by Vidur's names, with its defaults."""

    batch_size_cap: PositiveInt = 128
    """The most requests of a micro-batch."""
    max_tokens_per_request: PositiveInt | None = None
    """Tokens of KV that each request reserves; max_model_len unless given, as in Vidur."""

    @property
    def traits(self) -> Traits:
        return Traits(max_num_seqs=self.batch_size_cap, loop=EVENTS, pipelines=True)


class Orca(VidurScheduler):
    """The scheduler. A step costs O(prompts in it), whatever the number of sequences that decode."""

    evidence = "recorded"

    def __init__(self, config: OrcaConfig, context: PolicyContext) -> None:
        super().__init__(context, config.batch_size_cap)
        kv = context.kv
        self.slot_tokens = config.max_tokens_per_request or context.max_model_len
        if kv.blocks_for(self.slot_tokens) > kv.num_blocks:
            raise ScenarioError(
                f"orca: max_tokens_per_request {self.slot_tokens} takes {kv.blocks_for(self.slot_tokens)} KV blocks,"
                f" {kv.num_blocks} are in the pool. Lower it (or max_model_len) or give the engine more KV."
            )

    def refusal(self, seq: Sequence) -> Event | None:
        """The rejection of a sequence that a slot cannot hold."""
        tokens = self.most_tokens(seq)
        detail = f"{tokens} tokens need KV, max_tokens_per_request {self.slot_tokens}"
        return Event("rejected", seq, "never_fits", detail=detail) if tokens > self.slot_tokens else None

    def next_batch(self) -> Batch | Idle:
        chunks: list[tuple[Sequence, int]] = []
        reason = ""
        while self.waiting and not (reason := self.obstacle(self.slot_tokens)):
            seq = self.admit(self.slot_tokens)
            chunks.append((seq, seq.request.prompt_tokens))
        self.note_blocked(reason)
        if not (chunks or self.group.members):
            return IDLE
        return Batch(self.group, chunks, sum([n for _, n in chunks]))

    def next_micro_batch(self, micro: MicroBatches) -> Batch:
        ready, cap = micro.ready, self.batch_size_cap
        decodes = [ready.popleft() for _ in range(min(cap, len(ready)))]
        chunks: list[tuple[Sequence, int]] = []
        reason = ""
        while self.waiting:
            reason = "no_slot" if len(decodes) + len(chunks) == cap else self.kv_obstacle(self.slot_tokens)
            if reason:
                break
            seq = self.admit(self.slot_tokens)
            chunks.append((seq, seq.request.prompt_tokens))
        self.note_blocked(reason)
        return micro.launch(decodes, chunks, [])

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        batch.again()  # slots stay as they are until a sequence ends, so a blocked head stays blocked
        return True
