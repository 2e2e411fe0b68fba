"""The executor's state of the sequences it computes, one by one and as arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from batchsim.kernel.types import DecodeGroup, Sequence

Int64s = NDArray[np.int64]


NONE = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class Text:
    """What the thread that runs steps knows of a sequence with drafts: the first `size` of `tokens`, which has room for
    prompt and target, the `drafts` that may follow, and whether it has `ended`. It `listens` as its LiveSequence."""

    tokens: Int64s
    size: int
    listens: bool
    drafts: Int64s = field(default_factory=lambda: NONE)
    ended: bool = False

    @classmethod
    def of(cls, prompt: Int64s, target: int, listens: bool) -> Text:
        """The text that is the prompt alone."""
        return cls(np.concatenate([prompt, np.zeros(target, np.int64)]), len(prompt), listens)

    @property
    def known(self) -> Int64s:
        """The tokens of prompt and output."""
        return self.tokens[: self.size]


@dataclass(slots=True)
class LiveSequence:
    """The executor's state of one sequence. `row` is the row of its KV in the mirror, None without KV.

    `target` is the number of output tokens at which it stops, or before at an end-of-sequence token if it `listens`.
    Once it has `ended`, tokens of steps in flight are computed in vain. `text` is kept up where drafts are verified.
    """

    prompt: Int64s
    target: int
    listens: bool
    generated: list[int] = field(default_factory=list)
    row: int | None = None
    slots: list[int] | None = None  # swap slots, while its KV is in host memory
    ended: bool = False
    text: Text = field(default_factory=lambda: Text(NONE, 0, False))

    def known(self, start: int, end: int) -> Int64s:
        """Token ids from position `start` to `end` of prompt and output."""
        size = len(self.prompt)
        if end <= size:
            return self.prompt[start:end]
        answer = np.array(self.generated[max(start - size, 0) : end - size], dtype=np.int64)
        return np.concatenate([self.prompt[start:], answer]) if start < size else answer


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The members of a decode group as arrays, in the group's order; valid until a member joins or leaves.

    `base` + the group's step is a member's position, `made` + the step the number of tokens it has generated.
    """

    group: DecodeGroup | None
    members: list[Sequence]
    lives: list[LiveSequence]
    rows: Int64s
    base: Int64s
    made: Int64s
    targets: Int64s
    listens: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """The chunks of a batch: mirror row, computed tokens and length of each; `ids` are the tokens of all in a row."""

    rows: Int64s
    computed: Int64s
    lens: Int64s
    ids: Int64s

    @property
    def positions(self) -> Int64s:
        """Position in its sequence of each token."""
        first = np.cumsum(self.lens) - self.lens
        return np.arange(len(self.ids)) + np.repeat(self.computed - first, self.lens)


NO_ROWS = DecodeRows(None, [], [], NONE, NONE, NONE, NONE, np.empty(0, dtype=np.bool_))
