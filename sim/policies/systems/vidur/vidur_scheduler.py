"""What Vidur's schedulers have in common: when the head of their queue comes in, and how the running get blocks.

A strict queue: its head is never overtaken. Decodes grow by one block when the last one is full, but each needs a free
block even if its last one has room (rule of `vllm` and `sarathi`); for want of it the last admitted running sequence is
preempted by recompute and returns to the front of the queue.
Where this parts from Vidur: with nothing running the watermark is waived, since Vidur would wait for ever; and a prompt
preempted half-way is computed anew in full, where Vidur forgets the part not computed yet.
In a pipeline (`MicroBatches`) a batch is scheduled for each stage, and only sequences outside the batches in flight are
preempted. Host time is the cost model's, once a step; Vidur has it in each stage.
"""

from __future__ import annotations

from abc import abstractmethod

from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Event, Sequence
from batchsim.policies.families.first_come import FirstCome
from batchsim.policies.systems.vidur.micro_batches import MicroBatches


class VidurScheduler(FirstCome):
    """The queue, the running and the blocks of one engine."""

    def __init__(self, context: PolicyContext, batch_size_cap: int, watermark_blocks_fraction: float = 0.0) -> None:
        super().__init__(context)
        self.batch_size_cap = batch_size_cap
        self.watermark_blocks = int(watermark_blocks_fraction * context.kv.num_blocks)
        stages = context.loop.stages
        self.micro = MicroBatches(stages, context.kv.block_size) if stages > 1 else None

    def add(self, seq: Sequence, now_ns: int) -> None:
        super().add(seq, now_ns)
        self._happened()

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        self._happened()
        return super().cancel(seq, now_ns)

    def _happened(self) -> None:
        if self.micro is not None:
            self.micro.vain = False

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        micro = self.micro
        if micro is None:
            return super().complete(batch, finished, now_ns)
        for seq in finished:
            self.release(seq)
        for seq in batch.sampled:
            self.partial.pop(seq, None)
        micro.land(self.running)
        micro.vain = False
        return finished

    def release(self, seq: Sequence) -> None:
        super().release(seq)
        if self.micro is not None:
            self.micro.forget(seq)

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        micro = self.micro
        if micro is None:
            return self.next_batch()
        if micro.vain:
            return IDLE
        batch = self.next_micro_batch(micro)
        micro.vain = not (batch.chunks or batch.num_decode)
        return batch if batch.preempted or not micro.vain else IDLE

    @abstractmethod
    def next_batch(self) -> Batch | Idle:
        """The next step of an engine of one stage."""

    @abstractmethod
    def next_micro_batch(self, micro: MicroBatches) -> Batch:
        """The next step of a pipeline of which not all stages have a batch; without rows if there is none."""

    def refusal(self, seq: Sequence) -> Event | None:
        """The rejection of a sequence that could not end even alone; None if it could.

        Even then a sequence needs a free block before its last decode step, whatever room its last block has.
        """
        refusal = super().refusal(seq)
        tokens = self.most_tokens(seq)
        if refusal is not None or tokens == seq.request.prompt_tokens:
            return refusal
        need = self.kv.blocks_for(tokens - 1) + 1
        if need <= self.kv.num_blocks:
            return None
        detail = f"{need} KV blocks needed with the one that each decode finds free, {self.kv.num_blocks} in the pool"
        return Event("rejected", seq, "never_fits", detail=detail)

    def obstacle(self, num_tokens: int) -> str:
        """Why the head, with blocks for `num_tokens`, cannot come in; "" if it can."""
        if len(self.running) >= self.batch_size_cap:
            return "no_slot"
        return self.kv_obstacle(num_tokens)

    def kv_obstacle(self, num_tokens: int) -> str:
        """As `obstacle`, of the blocks alone."""
        watermark = self.watermark_blocks if self.running else 0
        return "kv_blocks" if self.kv.num_free - self.kv.blocks_for(num_tokens) < watermark else ""

    def admit(self, num_tokens: int) -> Sequence:
        """Moves the head, for which no obstacle is left, to the running, with blocks for `num_tokens`."""
        seq = self.waiting.popleft()
        room = self.kv.allocate(seq, num_tokens)
        assert room, "obstacle() counted the same blocks"
        self.start_running(seq, num_tokens)
        return seq

    def grow_decodes(self) -> list[Event]:
        """Takes a block for every decode that needs one; returns the preemptions for that, in order. O(1) where blocks
        are ample."""
        kv, group = self.kv, self.group
        if kv.num_free > group.blocks_due():  # then each decode finds a free block, needed or not
            kv.grow_group(group)
            return []
        rows = list(self.running)
        preempted: list[Event] = []
        i = 0
        while i < len(rows) and rows[i].group is not None:
            seq = rows[i]
            while not kv.num_free:
                victim = rows.pop()
                preempted.append(self._preempt(victim, seq))
                if victim is seq:
                    break
            else:
                kv.allocate(seq, seq.num_computed_tokens + 1)
                i += 1
        return preempted

    def take_ready(self, micro: MicroBatches, most: int) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
        """Removes from `ready`, from the first on, up to `most` decodes that find a free block each. Returns (these,
        the begun prompts passed before the last of them, the sequences preempted for them).

        The last of the ready are preempted, at last the one that needs the block.
        """
        decodes: list[Sequence] = []
        begun: list[Sequence] = []
        preempted: list[Sequence] = []
        ready = micro.ready
        while ready and len(decodes) < most:
            seq = ready.popleft()
            if seq in self.partial:
                begun.append(seq)
                continue
            while not self.kv.num_free:
                victim = ready.pop() if ready else seq
                self.events.append(self._preempt(victim, seq))
                preempted.append(victim)
                if victim is seq:
                    break
            else:
                self.kv.allocate(seq, seq.num_computed_tokens + 1)
                decodes.append(seq)
        return decodes, begun, preempted

    def _preempt(self, victim: Sequence, seq: Sequence) -> Event:
        """Sends `victim` back to the front of the queue, to give `seq` a block."""
        self.release(victim)
        victim.reset_computed()
        self.waiting.appendleft(victim)
        return Event("preempted", victim, "kv_blocks", seq.request.id)

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        """One more step of decodes alone, if every one finds a free block. A blocked head stays blocked meanwhile."""
        if batch.preempted or self.partial or self.kv.num_free <= self.group.blocks_due():
            return False
        self.kv.grow_group(self.group)
        batch.again()
        return True
