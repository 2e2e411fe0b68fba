"""Sequences that decode together and verify draft tokens, so that each gains a number of tokens of its own in a step.

Counters are columns with an element a member, so that a step of the group is a few operations on whole columns. Where
the engine schedules ahead of results a step counts at once as if all its drafts were accepted; `land` takes off, when
its results are there, what was rejected.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchsim.kernel.types import DecodeGroup, Sequence

Ints = NDArray[np.int64]
MAX_GAIN = 128  # tokens of a sequence in a step, drafts among them


class Verified:
    """Verification result of one step's drafts; arrays have one element per member, in the order of
    `DraftGroup.sequences`.

    `gained`: output tokens got; `accepted`: draft tokens accepted; defaults to `gained - 1`, which is right unless the
    sequence ends on a draft. `drafts`: what the drafter proposes for each in the next step, and `first_drafts` for
    those whose prompt ends with this one; None: the engine's fixed number, for engines that cannot wait for the
    drafter. `num_accepted` and `num_gained` are totals.
    """

    __slots__ = ("_accepted", "drafts", "first_drafts", "gained", "num_accepted", "num_gained")

    def __init__(
        self,
        gained: Ints,
        accepted: Ints | None = None,
        drafts: Ints | None = None,
        first_drafts: dict[Sequence, int] | None = None,
        *,
        num_gained: int | None = None,
    ) -> None:
        self.gained, self._accepted = gained, accepted
        self.drafts, self.first_drafts = drafts, first_drafts
        self.num_gained = number = int(np.add.reduce(gained)) if num_gained is None else num_gained
        self.num_accepted = number - len(gained) if accepted is None else int(np.add.reduce(accepted))

    @property
    def accepted(self) -> Ints:
        return self.gained - 1 if self._accepted is None else self._accepted


@dataclass(slots=True)
class DraftRows:
    """The rows of one step: how many each of `sequences` computes, its draft tokens one less.

    `padding`: the dummy drafts, always rejected, by the sequence whose last prompt token they follow. `verified` is
    filled in as the step is launched, or where that is known only then as it lands; `changes`, at the launch, is the
    group's count of joins and leaves. `num_rows`: rows of all together.
    """

    sequences: list[Sequence]
    rows: Ints
    padding: dict[Sequence, int]
    changes: int = 0
    verified: Verified | None = None
    num_rows: int = -1

    def __post_init__(self) -> None:
        if self.num_rows < 0:
            self.num_rows = int(np.add.reduce(self.rows))


class DraftGroup(DecodeGroup):
    """A DecodeGroup whose members gain different numbers of tokens.

    Columns, in the order of `sequences`: `computed` tokens; `rejected`, those of them that steps in flight counted and
    that will be taken off, as far as the executor has said; `unknown`, the tokens that steps in flight make or verify;
    `drafts` waiting to be verified; `room`, the tokens that the KV blocks held can take; `published`, the number of
    these blocks reported full; `limit`, the tokens at which the client's cap ends the sequence; `ends` and `luck`, the
    executor's: the computed tokens with which it ends, and what its acceptance is drawn by. `rows` are those of the
    step in the making, set by `ask`: `num_rows` together, `even_rows` of each member, 0 where they differ.
    `nearest_end`, the executor's, is a number of tokens that ends no member; 0 if it has to be recomputed.
    """

    __slots__ = (
        "_alike", "_alike_each", "_block", "_columns", "_each", "_full", "_held", "_late", "_longest", "_mask",
        "_num_due", "_places_due", "_round_up", "_same", "_same_rows", "_tight", "_tokens_due", "changes", "computed",
        "drafts", "ends", "even_rows", "limit", "luck", "nearest_end", "num_rows", "published", "rejected", "room",
        "rows", "sequences", "unknown",
    )  # fmt: skip

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.sequences: list[Sequence] = []
        self._columns = np.zeros((9, 64), np.int64)
        self.changes = 0  # counts joins and leaves
        self._late = False  # whether a step was ever launched ahead of results
        self.rows = self._places_due = self._same_rows = self._alike = np.zeros(0, np.int64)
        self._tokens_due = self._block = np.array(block_size)  # an element for each place due, or one for all
        self._each = self._alike_each = self._num_due = self._longest = 0
        self.even_rows = self.num_rows = self.nearest_end = 0
        self._full: Ints | None = None  # the room of each once it has the blocks due, where that is of all
        self._tight = 0  # the tokens beyond its computed ones for which no member holds a block too many; 0: unknown
        self._held = 0  # the room of all together, where `_tight`
        self._mask = np.array(-block_size) if block_size & (block_size - 1) == 0 else None
        self._round_up = np.array(0)
        self._same: int | None = 0  # how many drafts wait for each member, if all have as many
        self._resize()

    def _resize(self) -> None:
        """Makes the columns as long as there are members."""
        self.changes += 1
        self._tight = 0
        columns = self._columns[:, : len(self.sequences)]
        self.computed, self.rejected, self.unknown, self.drafts, self.room = columns[:5]
        self.published, self.limit, self.ends, self.luck = columns[5:]

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
        self.sequences = [*self.sequences, seq]  # anew, since steps in flight keep the list they had
        self._longest = max(self._longest, seq.settled_computed_tokens)
        if drafts != self._same:
            self._same = None if place else drafts
        limit = seq.request.prompt_tokens + seq.max_output_tokens
        rejected, seq.num_rejected_tokens = seq.num_rejected_tokens, 0
        self._columns[:, place] = (
            seq.settled_computed_tokens, rejected, unknown, drafts, seq.num_blocks * self.block_size, 0, limit, 0, 0
        )  # fmt: skip
        self.total_context_tokens += seq.settled_computed_tokens - rejected
        self.nearest_end = 0
        seq.phase = place
        seq.joined_step = self.step
        seq.group = self
        self.members[seq] = None
        self.joined[seq] = None
        self._resize()

    def leave(self, seq: Sequence) -> None:
        gained, place, last = self.gained(seq), seq.phase, len(self.sequences) - 1
        seq.num_rejected_tokens = int(self._columns[1, place])
        self.total_context_tokens -= int(self._columns[0, place]) - seq.num_rejected_tokens
        seq.settled_computed_tokens += gained
        seq.settled_output_tokens += gained
        seq.group = None
        seq.last_group, seq.left_step = self, self.step
        seq.epoch += 1
        self.sequences, moved = self.sequences[:-1], self.sequences[-1]
        if moved is not seq:
            self.sequences[place] = moved
            moved.phase = place
            self._columns[:, place] = self._columns[:, last]
        del self.members[seq]
        self.left.append(seq)
        self._resize()

    def in_window(self, window: int) -> int:
        """As `DecodeGroup.in_window`, in O(members)."""
        return int(np.minimum(self.computed - self.rejected, window).sum())

    def gained(self, seq: Sequence) -> int:
        return int(self._columns[0, seq.phase]) - seq.settled_computed_tokens

    # ---- a step

    def wanted(self, most: int, max_model_len: int) -> Ints:
        """How many rows each member would compute: one, and one for each draft that waits, but at most `most`. The
        array is not to be changed."""
        if self._same is not None and most > self._same and self._is_short(self._same + 1, max_model_len):
            if len(self._same_rows) != len(self.sequences) or self._each != 1 + self._same:
                self._each = 1 + self._same
                self._same_rows = np.full(len(self.sequences), self._each)
            return self._same_rows
        return np.minimum(np.minimum(self.drafts + 1, max_model_len - 1 - self.computed), most)

    def alike(self, rows: int) -> Ints:
        """As many `rows` for each member, whatever waits for it; not to be changed."""
        if len(self._alike) != len(self.sequences) or self._alike_each != rows:
            self._alike, self._alike_each = np.full(len(self.sequences), rows), rows
        return self._alike

    def take_alike(self, rows: int) -> None:
        """Sets every member to compute `rows` rows in the next step; all KV blocks are there already."""
        self.rows = self.alike(rows)
        self.num_rows, self.even_rows = rows * len(self.sequences), rows

    def _is_short(self, rows: int, max_model_len: int) -> bool:
        """Whether all members are still shorter than `max_model_len` after `rows` more tokens."""
        if self._longest + rows >= max_model_len and self.sequences:
            self._longest = int(self.computed.max())
        return self._longest + rows < max_model_len

    def sum_and_least(self, rows: Ints) -> tuple[int, int]:
        """The sum of `rows` and the least of them; 1 without any, and where that alone is possible."""
        if rows is self._same_rows and len(rows):
            return self._each * len(rows), self._each
        return int(np.add.reduce(rows)), int(np.minimum.reduce(rows)) if self._late and len(rows) else 1

    def last_in_flight(self) -> list[Sequence]:
        """The members whose last token, by the client's cap, is surely in flight: even if all drafts are rejected one
        token comes, with which these reach it."""
        last = (self.unknown > 0) & (self.computed + 2 - self.unknown >= self.limit)
        return [self.sequences[place] for place in np.flatnonzero(last).tolist()] if last.any() else []

    def give_drafts(self, most: int, proposed: Ints | None = None) -> None:
        """Sets the drafts waiting for each member to `most`, or to the `proposed` number where that is smaller;
        replaces the previous drafts."""
        if proposed is not None:
            self._same = None
            np.minimum(proposed, most, out=self.drafts)
        elif self._same != most:
            self._same = most
            self.drafts[:] = most

    def take_rows(self, rows: dict[Sequence, int]) -> None:
        """Sets how many rows each member computes in the next step, for which all KV blocks are there."""
        self.rows = np.array([rows[seq] for seq in self.sequences], np.int64)
        self.num_rows, self.even_rows = int(np.add.reduce(self.rows)), 0

    def hold(self, seq: Sequence) -> None:
        """Notes that the member `seq` holds its `num_blocks` KV blocks."""
        self.room[seq.phase] = seq.num_blocks * self.block_size
        self._tight = 0

    def ask(self, rows: Ints, lookahead: int, max_model_len: int, base: Ints | None = None) -> None:
        """Sets how many rows each member computes in the next step, and the KV blocks that these need, with room for
        `lookahead` tokens more; beyond the `base` tokens of each, or its computed ones."""
        self.rows, self._full = rows, None
        if not len(rows):
            self._places_due, self._tokens_due, self._num_due = rows, self._block, 0
            self.num_rows = self.even_rows = 0
            return
        if rows is self._same_rows:
            self.num_rows, self.even_rows = self._each * len(rows), self._each
            more = self._each + lookahead
            if self._is_short(more, max_model_len):
                if self._ask_all(more):
                    return
                if more <= self.block_size:
                    # The blocks held have room for what is computed, so that whoever needs any needs one.
                    due = (self.computed + np.array(more) > self.room).nonzero()[0]
                    self._places_due, self._tokens_due, self._num_due = due, self._block, len(due)
                    return
        elif rows is self._alike:
            self.num_rows, self.even_rows = self._alike_each * len(rows), self._alike_each
        else:
            self.num_rows, self.even_rows = int(np.add.reduce(rows)), 0
        tokens = (self.computed if base is None else base) + (rows + lookahead)
        due = (tokens > self.room).nonzero()[0]
        most = np.minimum(tokens[due], max_model_len)
        need = np.maximum(most - self.room[due] + self.block_size - 1, 0) // self.block_size
        self._places_due, self._tokens_due = due, need * self.block_size
        self._num_due = int(np.add.reduce(need))

    def _ask_all(self, more: int) -> bool:
        """Asks for room for `more` tokens beyond the computed ones of each member. Returns False, and asks for nothing,
        if a member holds a block beyond that; else the new room of each is its tokens rounded up to a block."""
        if self._late or self._mask is None:
            return False
        if self._tight != more:
            self._round_up = np.array(more + self.block_size - 1)
        full = self.computed + self._round_up
        full &= self._mask
        if self._tight != more:
            if (full < self.room).any():
                return False
            self._tight, self._held = more, int(np.add.reduce(self.room))
        self._full, self._num_due = full, (int(np.add.reduce(full)) - self._held) // self.block_size
        return True

    @property
    def drafts_asked(self) -> Ints:
        """The draft tokens among the rows asked for, of each member; not to be changed."""
        return self.drafts if self.rows is self._same_rows else self.rows - 1

    def blocks_due(self) -> int:
        """How many KV blocks the members need for the rows asked for."""
        return self._num_due

    def members_due(self, ahead: int = 0) -> list[Sequence]:
        """The members that need blocks for the rows asked for, each as often as it needs one."""
        if self._full is not None:
            due, counts = np.arange(len(self.sequences)), (self._full - self.room) // self.block_size
        else:
            due = self._places_due
            counts = np.broadcast_to(self._tokens_due // self.block_size, due.shape)
        return [self.sequences[place] for place in due.repeat(counts).tolist()]

    def take_due(self) -> None:
        """Notes that the members have got the blocks due."""
        if self._full is not None:
            if self._num_due:
                self.room[:] = self._full
                self._held += self._num_due * self.block_size
            self._full = None
        elif self._num_due:
            self.room[self._places_due] += self._tokens_due
            self._tight = 0
        self._places_due, self._num_due, self._tokens_due = self._places_due[:0], 0, self._block

    def rewind(self, lookahead: int) -> list[tuple[Sequence, int]]:
        """Takes from the members the room beyond their computed tokens and `lookahead` more, in whole KV blocks.

        Returns (sequence, blocks to give back), in the engine's order.
        """
        spare = (self.room - self.computed - lookahead) // self.block_size
        places = spare.nonzero()[0]
        if not len(places):
            return []
        self.room[places] -= spare[places] * self.block_size
        self._tight = 0
        given = [(self.sequences[p], n) for p, n in zip(places.tolist(), spare[places].tolist(), strict=True)]
        return sorted(given, key=lambda of: of[0].order)

    def blocks_held(self, seq: Sequence) -> int:
        return int(self._columns[4, seq.phase]) // self.block_size

    def filled(self, more: int) -> list[tuple[Sequence, int]]:
        """The members with full KV blocks that no call has returned yet, each with the number of its computed
        and known tokens, and `more`."""
        tokens = self.computed - self.unknown + more
        full = tokens // self.block_size
        places = np.flatnonzero(full > self.published)
        self.published[places] = full[places]
        return [(self.sequences[p], n) for p, n in zip(places.tolist(), tokens[places].tolist(), strict=True)]

    @property
    def context(self) -> Ints:
        """Computed tokens of each member, excluding drafts that will be rejected. The array is not to be changed."""
        return self.computed - self.rejected if self._late else self.computed

    def sum_to_come(self, most: int) -> int:
        """Tokens that the members may still get by the client's caps and what is known, at most `most` each, summed
        over members."""
        return int(np.add.reduce(np.minimum(self.limit - self.computed + self.unknown - 1, most)))

    def verify(self, drafting: DraftRows, verified: Verified | None, *, ahead: bool) -> None:
        """The step asked for is launched; with `ahead` its drafts count as accepted until it lands. EngineCore only.

        `verified` None, with `ahead` alone: the result follows with `learn`.
        """
        drafting.verified, drafting.changes = verified, self.changes
        self.step += 1
        self._longest += MAX_GAIN
        self.total_context_tokens += drafting.num_rows if verified is None else verified.num_gained
        if not ahead:
            assert verified is not None, "a step that is waited for says what it made of its drafts"
            self.computed += verified.gained
            return
        self._late = True
        self.computed += self.rows
        self.unknown += self.rows
        if verified is not None:
            self.rejected += self.rows - verified.gained

    def learn(self, drafting: DraftRows, verified: Verified) -> None:
        """A launched step, about to land, says what became of its drafts. EngineCore only."""
        drafting.verified = verified
        rejected = drafting.rows - verified.gained
        if drafting.changes == self.changes:
            self.rejected += rejected
            self.total_context_tokens -= int(np.add.reduce(rejected))
            return
        for seq, count in zip(drafting.sequences, rejected.tolist(), strict=True):
            if seq.group is self:
                self.rejected[seq.phase] += count
                self.total_context_tokens -= count
            else:
                seq.num_rejected_tokens += count

    def land(self, drafting: DraftRows, sampled: Iterable[Sequence], lost: Container[Sequence] = ()) -> None:
        """Takes off what a step, whose results are there, rejected, also of members that have left. EngineCore only.

        `sampled`: the sequences whose prompt ended with the step, one token each, after padding. `lost`: those whose
        tokens of the step were taken off as they were preempted.
        """
        sequences, rows, verified = drafting.sequences, drafting.rows, drafting.verified
        assert verified is not None, "it was launched"
        rejected = rows - verified.gained
        if drafting.changes == self.changes:
            self._take_off(slice(len(sequences)), rejected, rows)
        else:
            places = [i for i, seq in enumerate(sequences) if seq.group is self]
            self._take_off([sequences[i].phase for i in places], rejected[places], rows[places])
            taken = zip(sequences, rejected.tolist(), strict=True)
            self._take_off_left((seq, n) for seq, n in taken if n and seq not in lost)
        for seq in sampled:
            more = drafting.padding.get(seq, 0)
            if seq.group is self:
                self._take_off([seq.phase], np.array([more]), np.array([1 + more]))
            elif more and seq.num_rejected_tokens:
                self._take_off_left([(seq, more)])

    def land_first(self, seq: Sequence) -> None:
        """Notes that the token with which the prompt of the member `seq` ended, in a step without decodes, is known.
        EngineCore only."""
        self.unknown[seq.phase] -= 1

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
