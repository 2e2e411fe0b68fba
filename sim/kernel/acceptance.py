"""How many draft tokens turn out right: drawn by request and position, so that all policies see the same luck."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from batchsim.kernel.draft_group import DraftGroup, Ints
from batchsim.kernel.types import Sequence

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_STEP = 0x9E3779B97F4A7C15
_FOUND = 0xD1B54A32D192ED03  # tells the draws of whether there are drafts at all from those of what they are worth
_MASK = (1 << 64) - 1


class DraftLuck(Protocol):
    """What the world knows of drafts, for a SimExecutor; a scheduler is told afterwards."""

    def key(self, seq: Sequence) -> int:
        """The number that stands in the column `luck` of its group for `seq`."""
        ...

    def accepted(self, group: DraftGroup, drafts: Ints) -> Ints:
        """How many of the first `drafts` of each member are right, up to the first that is not."""
        ...

    def proposed(
        self, group: DraftGroup, tokens: Ints, seqs: list[Sequence]
    ) -> tuple[Ints, dict[Sequence, int]] | None:
        """How many drafts follow for each member, which then has `tokens` tokens, and for each of `seqs`, whose prompt
        ends; None: as many as the engine asks for."""
        ...


class DrawnLuck:
    """Luck by a law: `positions`, by request class, are the shares of steps in which the first, second, ... draft is
    accepted, none larger than the one before; "" stands for all other classes. `found`: the share of steps for which
    the drafter finds any.

    A draw depends on the seed, the request and the position of the token in its sequence alone.
    """

    def __init__(self, seed: int, positions: Mapping[str, tuple[float, ...]], found: float = 1.0) -> None:
        self._classes = {name: number for number, name in enumerate(positions)}
        shares = np.array(list(positions.values()))
        before = np.concatenate((np.ones((len(shares), 1)), shares[:, :-1]), axis=1)
        given = np.divide(shares, before, out=np.zeros_like(shares), where=before > 0)
        self._given = _threshold(given)  # that a draft is right where those before it are
        self._found = found
        self._num_drafts = shares.shape[1]
        self._seed = _mix(np.array([seed], np.uint64) * np.uint64(_STEP & _MASK))[0] >> np.uint64(8)
        self._ahead = np.arange(self._num_drafts, dtype=np.uint64)

    def key(self, seq: Sequence) -> int:
        request = seq.request
        number = self._classes.get(request.request_class, self._classes.get("", -1))
        assert number >= 0, f"a class without a law: {request.request_class}"
        return (request.id << 8) + number

    def accepted(self, group: DraftGroup, drafts: Ints) -> Ints:
        luck = group.luck
        given = self._given if len(self._given) == 1 else self._given[luck & 255]
        at = (group.computed - group.rejected).astype(np.uint64)[:, None] + self._ahead
        right = self._draw(luck, at) < given
        right &= self._ahead.astype(np.int64) < drafts[:, None]
        return np.logical_and.accumulate(right, axis=1).sum(axis=1)

    def proposed(
        self, group: DraftGroup, tokens: Ints, seqs: list[Sequence]
    ) -> tuple[Ints, dict[Sequence, int]] | None:
        if self._found == 1:
            return None
        keys = np.array([self.key(seq) for seq in seqs], np.int64)
        at = np.array([seq.num_tokens for seq in seqs], np.int64)
        first = dict(zip(seqs, self._proposed(keys, at).tolist(), strict=True)) if seqs else {}
        return self._proposed(group.luck, tokens), first

    def _proposed(self, luck: Ints, tokens: Ints) -> Ints:
        drawn = self._draw(luck, tokens.astype(np.uint64)[:, None] ^ np.uint64(_FOUND))[:, 0]
        return np.where(drawn < _threshold(np.array(self._found)), self._num_drafts, 0)

    def _draw(self, luck: Ints, at: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Numbers below 2**53, an element for each of `at`."""
        request = _mix((luck >> 8).astype(np.uint64) * np.uint64(_STEP) ^ self._seed)
        return _mix(request[:, None] + at * np.uint64(_STEP)) >> np.uint64(11)


def outcome(luck: DraftLuck, group: DraftGroup) -> tuple[Ints, Ints, list[Sequence]]:
    """What becomes of the rows asked of `group`: drafts accepted and tokens gained of each member, and those whose last
    token is among them."""
    room = group.ends - (group.computed - group.rejected)
    accepted = np.where(room > 0, luck.accepted(group, group.rows - 1), 0)
    gained = np.minimum(accepted + 1, room.clip(0))
    last = np.flatnonzero((gained == room) & (room > 0))
    return accepted, gained, [group.sequences[place] for place in last.tolist()]


def _threshold(share: NDArray[np.float64]) -> NDArray[np.uint64]:
    return (share * 2.0**53).astype(np.uint64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): every bit of the result depends on every bit of `x`."""
    x = (x ^ (x >> np.uint64(30))) * _MIX[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    return x ^ (x >> np.uint64(31))
