"""Sarathi's scheduler as Vidur has it: `sarathi` of commit 7d47513a.

Rule: decodes first, then the prompt in progress, then new ones from the head of a strict first-come queue. All decodes
run, a token each; prompts share what is left of `chunk_size`. A new one comes in when the blocks of its whole prompt
leave `watermark_blocks_fraction` of the pool free, under `batch_size_cap` running. Each decode needs a free block, else
the last admitted one is preempted by recompute, at last itself; it may come back in the very same step.
Source: vidur/scheduler/replica_scheduler/sarathi_replica_scheduler.py, equal to a recording of it (`batchsim conform`);
the rule is that of Agrawal et al., Sarathi-Serve (OSDI 2024).
In a pipeline a batch takes decodes up to `batch_size_cap` shared out among the stages, then the ready prompts begun,
whose number nothing bounds; new ones come in unless it has just that many members.
`dynamic_chunking` is Sarathi-Serve's own (sarathi_scheduler.py, 96f9911), not Vidur's and not recorded: the tokens of a
step go by how far a prompt is, large at first, so that a step takes as long while its attention grows.
Simplifies: see `vidur_scheduler.py` for where Vidur would wait for ever. Under a schedule of chunks a prompt whose
stage leaves it no token waits, where Sarathi-Serve would count below 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchsim.base.ranges import Config, PositiveInt, ShareBelowOne
from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.engine_loop import EVENTS
from batchsim.kernel.policy_config import PolicyConfig, Traits
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Event, Sequence
from batchsim.policies.systems.vidur.micro_batches import MicroBatches, micro_batch_size
from batchsim.policies.systems.vidur.vidur_scheduler import VidurScheduler


@dataclass(frozen=True)
class ChunkSchedule(Config):
    """Tokens of a step by how far its prompt is, by Sarathi-Serve's names: even steps from high to low."""

    low_chunk_size: PositiveInt
    """Tokens of a step in the last stage, a multiple of 32."""
    high_chunk_size: PositiveInt
    """Tokens of a step in the first stage, a multiple of 32."""
    chunk_schedule_max_tokens: PositiveInt
    """Tokens of a prompt over which the stages are shared out; what may come to more is rejected."""
    chunk_schedule_stages: PositiveInt
    """The number of stages."""

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.low_chunk_size, self.high_chunk_size
        if low % 32 or high % 32 or low > high:
            raise ValueError(
                f"low_chunk_size {low} and high_chunk_size {high} must be multiples of 32, the low one not above the"
                " high one"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of a step by the stage of its prompt, the first one first."""
        low, high, stages = self.low_chunk_size, self.high_chunk_size, self.chunk_schedule_stages
        even = [int(low + (high - low) * i / (stages - 1)) for i in range(stages)] if stages > 1 else [low]
        return tuple(round(size / 32) * 32 for size in reversed(even))

    @property
    def tokens_per_stage(self) -> int:
        """Tokens of a prompt in each stage."""
        return -(-self.chunk_schedule_max_tokens // self.chunk_schedule_stages)


@dataclass(frozen=True)
class SarathiConfig(PolicyConfig):
    """Knobs by Vidur's names, with its defaults."""

    batch_size_cap: PositiveInt = 128
    """The most requests of a micro-batch."""
    chunk_size: PositiveInt = 512
    """Tokens of a step."""
    watermark_blocks_fraction: ShareBelowOne = 0.01
    """Part of the KV blocks that admission leaves free, 0 to 1."""
    dynamic_chunking: ChunkSchedule | None = None
    """Sarathi-Serve's schedule of chunks, in place of `chunk_size`; null: none."""

    @property
    def traits(self) -> Traits:
        return Traits(max_num_seqs=self.batch_size_cap, loop=EVENTS, pipelines=True)


class Sarathi(VidurScheduler):
    """The scheduler. A decode-only step with blocks to spare is O(1) in the number of sequences.

    Without a schedule of chunks at most one prompt is in progress. It is the last admitted, with what the budget had
    left, so that since then fewer than `chunk_size` decode and it never sits out.
    """

    evidence = "recorded"

    def __init__(self, config: SarathiConfig, context: PolicyContext) -> None:
        super().__init__(context, config.batch_size_cap, config.watermark_blocks_fraction)
        self.config = config
        schedule = config.dynamic_chunking
        self._sizes, self._per_stage = (schedule.sizes, schedule.tokens_per_stage) if schedule is not None else ((), 1)
        self._most = micro_batch_size("sarathi", config.batch_size_cap, context.loop.stages)

    def refusal(self, seq: Sequence) -> Event | None:
        """Besides what Vidur cannot run, a sequence with more tokens than Sarathi-Serve's schedule has stages for."""
        tokens, staged = self.most_tokens(seq), self._per_stage * len(self._sizes)
        if not staged or tokens <= staged:
            return super().refusal(seq)
        detail = f"up to {tokens} tokens to compute, stages for {staged} by chunk_schedule_max_tokens"
        return Event("rejected", seq, "over_chunk_schedule", detail=detail)

    def _chunk(self, seq: Sequence, others: int) -> int:
        """How many of the lacking tokens of `seq` fit a step that has `others` already; may be below 0."""
        computed = seq.settled_computed_tokens
        size = self._sizes[computed // self._per_stage] if self._sizes else self.config.chunk_size
        return min(seq.num_tokens - computed, size - others)

    def next_batch(self) -> Batch | Idle:
        preemptions = self.grow_decodes()
        self.events += preemptions
        chunks: list[tuple[Sequence, int]] = []
        tokens = len(self.group)
        for seq in self.partial:
            n = self._chunk(seq, tokens)
            if n > 0:
                chunks.append((seq, n))
                tokens += n
        self._admit(chunks, tokens)
        if not (chunks or preemptions or self.group.members):
            return IDLE
        preempted = [event.seq for event in preemptions]
        return Batch(self.group, chunks, sum([n for _, n in chunks]), preempted=preempted)

    def next_micro_batch(self, micro: MicroBatches) -> Batch:
        decodes, begun, preempted = self.take_ready(micro, self._most)
        tokens = len(decodes)
        chunks: list[tuple[Sequence, int]] = []
        late: list[Sequence] = []
        for seq in begun:
            n = self._chunk(seq, tokens)
            if n < 1:
                late.append(seq)
            else:
                chunks.append((seq, n))
                tokens += n
        self.events += [Event("sat_out", seq, "no_slot") for seq in micro.ready if seq in self.partial]
        self.events += [Event("sat_out", seq, "token_budget") for seq in late]
        micro.ready.extendleft(reversed(late))
        micro.by_arrival()
        self._admit(chunks, tokens, len(decodes))
        return micro.launch(decodes, chunks, preempted)

    def _admit(self, chunks: list[tuple[Sequence, int]], in_step: int, num_decodes: int = -1) -> None:
        """Admits from the head of the queue, into `chunks`, what fits a step that has `in_step` tokens; in a pipeline,
        beside `num_decodes` decodes."""
        reason = ""
        while self.waiting:
            tokens = self.waiting[0].num_tokens
            # Vidur asks whether there are as many: prompts begun may have made them more, and then nothing stops it.
            full = num_decodes >= 0 and num_decodes + len(chunks) == self._most
            n = self._chunk(self.waiting[0], in_step)
            reason = self.obstacle(tokens) or ("no_slot" if full else "" if n > 0 else "token_budget")
            if reason:
                break
            chunks.append((self.admit(tokens), n))
            in_step += n
        self.note_blocked(reason)
