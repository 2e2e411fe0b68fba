"""What Vidur's schedulers have in common: when the head of their queue comes in, and how the running get blocks.

A strict queue: nobody overtakes its head. Decodes grow by one block when the last one is full, but each needs a free
block even if its last one has room (rule of `vllm` and `sarathi`); for want of it the last admitted running sequence
is preempted by recompute and returns to the front of the queue.
Where this parts from Vidur: with nothing running the watermark is waived, since Vidur would wait for ever; and a prompt
preempted half-way is computed anew in full, where Vidur forgets the part not computed yet.
"""

from __future__ import annotations

from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Batch, Event, Sequence
from batchsim.policies.families.first_come import FirstCome


class VidurScheduler(FirstCome):
    """The queue, the running and the blocks of one engine."""

    def __init__(self, context: PolicyContext, batch_size_cap: int, watermark_blocks_fraction: float = 0.0) -> None:
        super().__init__(context)
        self.batch_size_cap = batch_size_cap
        self.watermark_blocks = int(watermark_blocks_fraction * context.kv.num_blocks)

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
                preempted.append(Event("preempted", victim, "kv_blocks", seq.request.id))
                self.release(victim)
                victim.reset_computed()
                self.waiting.appendleft(victim)
                if victim is seq:
                    break
            else:
                kv.allocate(seq, seq.num_computed_tokens + 1)
                i += 1
        return preempted

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        """One more step of decodes alone, if every one finds a free block. A blocked head stays blocked meanwhile."""
        if batch.preempted or self.partial or self.kv.num_free <= self.group.blocks_due():
            return False
        self.kv.grow_group(self.group)
        batch.again()
        return True
