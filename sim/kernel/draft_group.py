"""Sequences that decode together and verify draft tokens, so that each gains a number of tokens of its own in a step.

Counters are columns with an element a member, so that a step of the group is a few operations on whole columns. Where
the engine schedules ahead of results a step counts at once as if all its drafts were accepted; `land` takes off, when
its results are there, what was rejected.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchsim.kernel.decode import DecodeGroup
from batchsim.kernel.types import Sequence

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Verified:
    """What a step made of its drafts, an element a member of the group, in the order of `DraftGroup.sequences`.

    `accepted`: draft tokens accepted; `gained`: output tokens got, fewer than accepted ones and one more where the
    sequence ends among them. `drafts`: what the drafter proposes for each in the next step, and `first_drafts` for
    those whose prompt ends with this one; None: as many as the engine asks for, which may not wait to be told.
    """

    accepted: Ints
    gained: Ints
    drafts: Ints | None = None
    first_drafts: dict[Sequence, int] | None = None


@dataclass(slots=True)
class DraftRows:
    """The rows of one step: how many each of `sequences` computes, its draft tokens one less.

    `padding`: the dummy drafts, always rejected, by the sequence whose last prompt token they follow. `verified` is
    filled in as the step is launched, after which `changes` is the group's count of joins and leaves.
    """

    sequences: list[Sequence]
    rows: Ints
    padding: dict[Sequence, int]
    changes: int = 0
    verified: Verified | None = None


class DraftGroup(DecodeGroup):
    """A DecodeGroup whose members gain different numbers of tokens.

    Columns, in the order of `sequences`: `computed` tokens; `rejected`, those of them that steps in flight counted and
    that will be taken off; `unknown`, the tokens that steps in flight make or verify; `drafts` waiting to be verified;
    `blocks` of KV held; `published`, of these; `limit`, the tokens at which the client's cap ends the sequence; `ends`
    and `luck`, the executor's: the computed tokens with which it ends, and what its acceptance is drawn by. `rows` are
    those of the step in the making, `need` its KV blocks: set by `ask`.
    """

    __slots__ = ("_columns", "changes", "need", "rows", "sequences")

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.sequences: list[Sequence] = []
        self._columns = np.zeros((9, 64), np.int64)
        self.changes = 0  # counts joins and leaves
        self.rows = self.need = np.zeros(0, np.int64)

    @property
    def computed(self) -> Ints:
        return self._columns[0, : len(self.sequences)]

    @property
    def rejected(self) -> Ints:
        return self._columns[1, : len(self.sequences)]

    @property
    def unknown(self) -> Ints:
        return self._columns[2, : len(self.sequences)]

    @property
    def drafts(self) -> Ints:
        return self._columns[3, : len(self.sequences)]

    @property
    def blocks(self) -> Ints:
        return self._columns[4, : len(self.sequences)]

    @property
    def published(self) -> Ints:
        return self._columns[5, : len(self.sequences)]

    @property
    def limit(self) -> Ints:
        return self._columns[6, : len(self.sequences)]

    @property
    def ends(self) -> Ints:
        return self._columns[7, : len(self.sequences)]

    @property
    def luck(self) -> Ints:
        return self._columns[8, : len(self.sequences)]

    # ---- membership

    def join(self, seq: Sequence, drafts: int = 0, unknown: int = 0) -> None:
        """As `DecodeGroup.join`, with `drafts` to verify and `unknown` tokens in flight, of which all but one count as
        accepted drafts that are rejected."""
        if seq.group is not None or seq.num_tokens - seq.num_computed_tokens != 1:
            raise ValueError(f"request {seq.request.id} cannot join the decode group: {seq!r}")
        padding = max(unknown - 1, 0)
        seq.settled_computed_tokens += padding
        seq.settled_output_tokens += padding
        seq.num_rejected_tokens += padding
        place = len(self.sequences)
        if place == self._columns.shape[1]:
            self._columns = np.concatenate((self._columns, np.zeros_like(self._columns)), axis=1)
        self.sequences.append(seq)
        limit = seq.request.prompt_tokens + seq.max_output_tokens
        rejected, seq.num_rejected_tokens = seq.num_rejected_tokens, 0
        self._columns[:, place] = (
            seq.settled_computed_tokens, rejected, unknown, drafts, seq.num_blocks, 0, limit, 0, 0
        )  # fmt: skip
        seq.phase = place
        seq.joined_step = self.step
        seq.group = self
        self.members[seq] = None
        self.joined[seq] = None
        self.changes += 1

    def leave(self, seq: Sequence) -> None:
        gained, place, last = self.gained(seq), seq.phase, len(self.sequences) - 1
        seq.num_rejected_tokens = int(self._columns[1, place])
        seq.settled_computed_tokens += gained
        seq.settled_output_tokens += gained
        seq.group = None
        seq.last_group, seq.left_step = self, self.step
        seq.epoch += 1
        moved = self.sequences.pop()
        if moved is not seq:
            self.sequences[place] = moved
            moved.phase = place
            self._columns[:, place] = self._columns[:, last]
        del self.members[seq]
        self.left.append(seq)
        self.changes += 1

    def gained(self, seq: Sequence) -> int:
        return int(self._columns[0, seq.phase]) - seq.settled_computed_tokens

    # ---- a step

    def wanted(self, most: int, max_model_len: int) -> Ints:
        """How many rows each member would compute: one, and one for each draft that waits, but at most `most`."""
        return np.minimum(1 + self.drafts, np.minimum(max_model_len - 1 - self.computed, most))

    def last_in_flight(self) -> list[Sequence]:
        """The members whose last token, by the client's cap, is surely in flight: even if all drafts are rejected one
        token comes, with which these reach it."""
        last = (self.unknown > 0) & (self.computed + 2 - self.unknown >= self.limit)
        return [self.sequences[place] for place in np.flatnonzero(last).tolist()] if last.any() else []

    def give_drafts(self, most: int, proposed: Ints | None = None) -> None:
        """Lets so many drafts wait for each member, or `most` where more are `proposed`; the drafts before are gone."""
        self.drafts[:] = most if proposed is None else np.minimum(proposed, most)

    def take_rows(self, rows: dict[Sequence, int]) -> None:
        """Says how many rows each member computes in the next step, all blocks being there."""
        self.rows = np.array([rows[seq] for seq in self.sequences], np.int64)

    def ask(self, rows: Ints, lookahead: int, max_model_len: int) -> None:
        """Says how many rows each member computes in the next step, and needs room for with `lookahead` tokens more."""
        self.rows = rows
        tokens = np.minimum(self.computed + (rows + lookahead), max_model_len)
        self.need = np.maximum(-(-tokens // self.block_size) - self.blocks, 0)

    def blocks_due(self) -> int:
        """How many KV blocks the members need for the rows asked for."""
        return int(self.need.sum())

    def members_due(self, ahead: int = 0) -> list[Sequence]:
        """The members that need blocks for the rows asked for, each as often as it needs one."""
        sequences, due = self.sequences, np.flatnonzero(self.need)
        counts = self.need[due].tolist()
        return [sequences[place] for place, count in zip(due.tolist(), counts, strict=True) for _ in range(count)]

    def take_due(self) -> None:
        """Notes that the members have got the blocks due."""
        self.blocks[:] += self.need
        due = np.flatnonzero(self.need)
        for place, held in zip(due.tolist(), self.blocks[due].tolist(), strict=True):
            self.sequences[place].num_blocks = held
        self.need = np.zeros(len(self.sequences), np.int64)

    def filled(self, more: int) -> list[tuple[Sequence, int]]:
        """The members with full blocks not said before, with `more` tokens beyond the computed and known ones: these
        and that number of tokens."""
        tokens = self.computed - self.unknown + more
        full = tokens // self.block_size
        places = np.flatnonzero(full > self.published)
        self.published[places] = full[places]
        return [(self.sequences[p], n) for p, n in zip(places.tolist(), tokens[places].tolist(), strict=True)]

    def sum_context(self) -> int:
        """Tokens in the KV cache that the members' next rows read, summed over members."""
        self.total_context_tokens = int(self.computed.sum() - self.rejected.sum())
        return self.total_context_tokens

    def verify(self, drafting: DraftRows, verified: Verified, *, ahead: bool) -> None:
        """The step asked for is launched; with `ahead` its drafts count as accepted until it lands. EngineCore only."""
        drafting.verified, drafting.changes = verified, self.changes
        self.step += 1
        if not ahead:
            self.computed[:] += verified.gained
            return
        self.computed[:] += self.rows
        self.unknown[:] += self.rows
        self.rejected[:] += self.rows - verified.gained

    def land(self, drafting: DraftRows, sampled: Iterable[Sequence]) -> None:
        """The results of a step are there: takes off what was rejected, also of those who left. EngineCore only.

        `sampled` are those whose prompt ended with it: one token each, after padding.
        """
        sequences, rows, verified = drafting.sequences, drafting.rows, drafting.verified
        assert verified is not None, "it was launched"
        rejected = rows - verified.gained
        if drafting.changes == self.changes:
            self._take_off(slice(len(sequences)), rejected, rows)
        else:
            mine = [i for i, seq in enumerate(sequences) if seq.group is self]
            self._take_off([sequences[i].phase for i in mine], rejected[mine], rows[mine])
            self._take_off_left((seq, n) for seq, n in zip(sequences, rejected.tolist(), strict=True) if n)
        for seq in sampled:
            more = drafting.padding.get(seq, 0)
            if seq.group is self:
                self._take_off([seq.phase], np.array([more]), np.array([1 + more]))
            elif more and seq.num_rejected_tokens:
                self._take_off_left([(seq, more)])

    def _take_off(self, places: slice | list[int], rejected: Ints, rows: Ints) -> None:
        self.computed[places] -= rejected
        self.rejected[places] -= rejected
        self.unknown[places] -= rows

    def _take_off_left(self, rejected: Iterable[tuple[Sequence, int]]) -> None:
        for seq, count in rejected:
            if seq.group is None:
                seq.num_rejected_tokens -= count
                seq.settled_output_tokens -= count
                if seq.settled_computed_tokens:  # else it was preempted, and begins anew
                    seq.settled_computed_tokens -= count
