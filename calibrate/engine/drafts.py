"""Draft tokens on a model: found by n-grams in what a sequence has said so far, verified, kept as far as it agrees.

Where the engine's loop is ahead, a step is prepared before it is known how many drafts of the step before are right. So
the device's own thread says where the rows of each sequence begin and which drafts they are, as soon as that step is
over; the host has seen to it that there are KV blocks for all cases, and learns the result as it lands.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchsim.calibrate.engine.inputs import Int32s, StepInputs
from batchsim.calibrate.engine.sequences import NONE, Int64s, LiveSequence, Text
from batchsim.kernel.acceptance import DraftCounts
from batchsim.kernel.draft_group import Verified
from batchsim.kernel.policy_config import PromptLookup
from batchsim.kernel.types import Sequence

Ints = NDArray[Any]


def proposed(tokens: Int64s, lookup: PromptLookup, most: int) -> Int64s:
    """The drafts that follow `tokens`, at most `most`: what came after the earliest place of the longest n-gram that
    ends them and stands in them before; none without one. O(tokens). Source: vllm/v1/spec_decode/ngram_proposer.py.
    """
    last = len(tokens) - 1
    ends, length = np.arange(last), 0  # where in `tokens` the last `length` of them end too
    while length < lookup.longest:
        longer = ends[ends >= length]
        longer = longer[tokens[longer - length] == tokens[last - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    if length < lookup.shortest:
        return NONE
    first = int(ends[0]) + 1
    return tokens[first : first + max(min(lookup.num_drafts, most), 0)]


class Drafter:
    """Proposes drafts by `lookup` and judges them by the tokens of a model. `eos` are its end-of-sequence tokens."""

    def __init__(self, lookup: PromptLookup, max_model_len: int, eos: Int64s) -> None:
        self.counts = DraftCounts([0] * lookup.num_drafts)
        self._lookup = lookup
        self._max_model_len = max_model_len
        self._eos = eos

    def said(self, text: Text, tokens: Int64s) -> int:
        """Appends to `text`, as far as it goes on, the `tokens` that the model said, and has drafts follow; returns how
        many were appended."""
        tokens = tokens[: len(text.tokens) - text.size]
        if text.listens and len(ends := np.flatnonzero(np.isin(tokens, self._eos))):
            tokens, text.ended = tokens[: ends[0] + 1], True
        text.tokens[text.size : text.size + len(tokens)] = tokens
        text.size += len(tokens)
        text.ended = text.ended or text.size == len(text.tokens)
        text.drafts = NONE if text.ended else proposed(text.known, self._lookup, self._max_model_len - text.size)
        return len(tokens)


Sampled = tuple[Sequence, LiveSequence, int]
"""A sequence whose chunk samples, and its row of logits."""


@dataclass(slots=True)
class DraftedRows:
    """The decode rows of a step that verifies drafts: `counts` of each of `members`, in the group's order.

    `upto` are a member's tokens with these rows, at most. `first` is the place of its first row among the step's tokens
    and rows of logits, `place` that of its context among the contexts. `sampled` are those whose prompt ends. What came
    of each member: the `drafts` that it had, those `accepted`, the tokens `gained`, which `begun` tokens precede, and
    whether it has `ended` by them.
    """

    drafter: Drafter
    members: list[Sequence]
    lives: list[LiveSequence]
    counts: Int64s
    upto: Int64s
    first: Int64s = field(default_factory=lambda: NONE)
    place: Int64s = field(default_factory=lambda: NONE)
    sampled: list[Sampled] = field(default_factory=list[Sampled])
    begun: list[int] = field(default_factory=list[int])
    drafts: list[int] = field(default_factory=list[int])
    accepted: list[int] = field(default_factory=list[int])
    gained: list[int] = field(default_factory=list[int])
    ended: list[bool] = field(default_factory=list[bool])

    def beside(self, step: StepInputs, tables: Int32s) -> StepInputs:
        """`step`, of padding and chunks, with these rows too, yet to be filled in by `begin`; `tables` are the members'
        device blocks. A row without drafts is a decode, others are chunks, so that each reads its context once."""
        at, alone = step.num_decode, self.counts == 1
        singles, drafted = np.flatnonzero(alone), np.flatnonzero(~alone)
        lens = self.counts[drafted]

        def put(ones: Ints, others: Ints, beside: Ints) -> Ints:
            return np.concatenate([ones, beside[:at], others, beside[at:]])

        zeros = np.zeros(len(singles), np.int64), np.zeros(lens.sum(), np.int64)
        width = max(tables.shape[1], step.block_tables.shape[1])
        tables, others = (np.pad(some, ((0, 0), (0, width - some.shape[1]))) for some in (tables, step.block_tables))
        upto = self.upto.astype(np.int32)
        self.first, self.place = np.empty_like(self.counts), np.empty_like(self.counts)
        self.first[singles] = self.place[singles] = np.arange(len(singles))
        self.first[drafted] = len(singles) + at + np.cumsum(lens) - lens
        self.place[drafted] = len(singles) + at + np.arange(len(drafted))
        return replace(
            step,
            ids=put(*zeros, step.ids),
            positions=put(*zeros, step.positions),
            slots=put(*zeros, step.slots),
            num_decode=len(singles) + at,
            chunk_lens=np.concatenate([lens.astype(np.int32), step.chunk_lens]),
            seq_lens=put(upto[singles], upto[drafted], step.seq_lens),
            block_tables=put(tables[singles], tables[drafted], others),
            num_drafted=len(drafted),
        )

    def begin(self, inputs: StepInputs, block_size: int) -> None:
        """Fills in tokens, positions and slots, all results of earlier steps being there. A row for which no draft was
        found has some token, which is never accepted."""
        places = zip(self.lives, self.counts.tolist(), self.first.tolist(), self.place.tolist(), strict=True)
        for live, count, first, place in places:
            text = live.text
            positions = np.arange(text.size - 1, text.size - 1 + count)
            drafts = text.drafts[: count - 1]
            self.begun.append(text.size)
            self.drafts.append(len(drafts))
            rows = slice(first, first + count)
            inputs.ids[rows] = text.tokens[text.size - 1]
            inputs.ids[first + 1 : first + 1 + len(drafts)] = drafts
            inputs.positions[rows] = positions
            blocks = inputs.block_tables[place, positions // block_size].astype(np.int64)
            inputs.slots[rows] = blocks * block_size + positions % block_size
            inputs.seq_lens[place] = text.size - 1 + count

    def judge(self, inputs: StepInputs, tokens: Int64s) -> None:
        """Accepts the drafts with which `tokens`, the model's after each row, agree from the first on, and one more of
        the model's; has drafts follow."""
        drafter = self.drafter
        for live, num_drafts, first in zip(self.lives, self.drafts, self.first.tolist(), strict=True):
            accepted = gained = 0
            if not live.text.ended:
                said = tokens[first : first + 1 + num_drafts]
                wrong = np.flatnonzero(said[:-1] != inputs.ids[first + 1 : first + 1 + num_drafts])
                accepted = int(wrong[0]) if len(wrong) else num_drafts
                gained = drafter.said(live.text, said[: accepted + 1])
                drafter.counts.note(num_drafts, accepted)
            self.accepted.append(accepted)
            self.gained.append(gained)
            self.ended.append(gained > 0 and live.text.ended)
        for _, live, row in self.sampled:
            drafter.said(live.text, tokens[row : row + 1])

    def emit(self) -> list[Sequence]:
        """Gives the tokens gained to the members that have not ended; returns the members that end with them."""
        finished: list[Sequence] = []
        for i, live in enumerate(self.lives):
            if live.ended:
                continue
            begun = self.begun[i]
            live.generated += live.text.tokens[begun : begun + self.gained[i]].tolist()
            if self.ended[i]:
                finished.append(self.members[i])
        return finished

    def verified(self, *, ahead: bool) -> Verified:
        """The result for the scheduler; `ahead` of results it plans for all drafts, however many were found."""
        accepted, gained = np.array(self.accepted, np.int64), np.array(self.gained, np.int64)
        if ahead:
            return Verified(gained, accepted)
        drafts = np.array([len(live.text.drafts) for live in self.lives], np.int64)
        return Verified(gained, accepted, drafts, {seq: len(live.text.drafts) for seq, live, _ in self.sampled})
