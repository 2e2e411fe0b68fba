"""Sequences that decode in lockstep share one step counter, so that a step of the group costs O(1).

A member's counters are derived from the group's: it joined at some step with some tokens, and has gained one
token a step since. The members whose next token starts a new KV block are known without a walk: a member with C
computed tokens needs a block when C is a multiple of the block size, so members are kept by the residue of the step at
which that happens. Members that gain different numbers of tokens are in a group of `batchsim.kernel.draft_group`.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchsim.kernel.types import Sequence


class DecodeGroup:
    """The sequences of one engine that decode together.

    `step` counts the decode steps the group has made. `total_context_tokens` is the sum of `num_computed_tokens`
    over the members, the KV tokens the next decode step reads. Join and leave are O(1); only EngineCore advances. When
    a member joined is the group's own affair: others ask what it has `gained`.
    `joined` and `left` hold what changed since the last batch took them; who left again at once is in both.
    """

    __slots__ = ("_by_phase", "_due", "block_size", "joined", "left", "members", "step", "total_context_tokens")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.step = 0
        self.total_context_tokens = 0
        self.members: dict[Sequence, None] = {}
        self.joined: dict[Sequence, None] = {}
        self.left: list[Sequence] = []
        self._by_phase: list[dict[Sequence, None]] = [{} for _ in range(block_size)]
        self._due = [0] * block_size  # members by phase

    def __len__(self) -> int:
        return len(self.members)

    def join(self, seq: Sequence) -> None:
        """Lets `seq` take part from the next decode step on. It must have exactly one known token uncomputed."""
        if seq.group is not None or seq.num_tokens - seq.num_computed_tokens != 1:
            raise ValueError(f"request {seq.request.id} cannot join the decode group: {seq!r}")
        computed = seq.settled_computed_tokens
        seq.group = self
        seq.joined_step = self.step
        seq.phase = phase = (self.step - computed) % self.block_size
        self.members[seq] = None
        self._by_phase[phase][seq] = None
        self._due[phase] += 1
        self.total_context_tokens += computed
        self.joined[seq] = None

    def leave(self, seq: Sequence) -> None:
        """Settles the counters of `seq` and takes it out; also how a decode sits out a step."""
        gained = self.gained(seq)
        seq.settled_computed_tokens += gained
        seq.settled_output_tokens += gained
        seq.group = None
        seq.last_group, seq.left_step = self, self.step
        seq.epoch += 1
        del self.members[seq]
        del self._by_phase[seq.phase][seq]
        self._due[seq.phase] -= 1
        self.total_context_tokens -= seq.settled_computed_tokens
        self.left.append(seq)

    def blocks_due(self) -> int:
        """How many members need one more KV block for the next decode step. O(1)."""
        return self._due[self.step % self.block_size]

    def members_due(self, ahead: int = 0) -> list[Sequence]:
        """The members that need one more KV block `ahead` steps after the next one, in the order they joined."""
        return list(self._by_phase[(self.step + ahead) % self.block_size])

    def blocks_due_in_turn(self, ahead: int = 0) -> list[int]:
        """How many members need one more KV block `ahead` steps after the next one, for that behind it and on, until it
        is their turn again."""
        first = (self.step + ahead) % self.block_size
        return self._due[first:] + self._due[:first]

    def members_due_over(self, num_steps: int, ahead: int = 0) -> list[Sequence]:
        """`members_due` of so many steps, one after the other, from `ahead` steps after the next one on; with `ahead`
        below 0, of steps that the group has made, with the same members."""
        first = (self.step + ahead) % self.block_size
        turns = self._by_phase[first : first + num_steps]
        while (more := num_steps - len(turns)) > 0:
            turns += self._by_phase[:more]
        return list(chain.from_iterable(turns))

    def gained(self, seq: Sequence) -> int:
        """Output tokens that the member `seq` has got since it joined, as many as were computed of it since."""
        return self.step - seq.joined_step

    def blocks_held(self, seq: Sequence) -> int:
        """KV blocks that the member `seq` holds where no manager keeps their ids."""
        return max(seq.num_blocks, -(-seq.num_computed_tokens // self.block_size))

    def advance(self) -> None:
        """One decode step done: every member has one more computed and one more output token. O(1). EngineCore only."""
        self.step += 1
        self.total_context_tokens += len(self.members)

    def advance_by(self, num_steps: int) -> None:
        """As many steps done, as by `advance`."""
        self.step += num_steps
        self.total_context_tokens += num_steps * len(self.members)
