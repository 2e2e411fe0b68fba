"""How many draft tokens turn out right: drawn by request and position, so that all policies see the same luck."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from batchsim.kernel.draft_group import DraftGroup, Ints
from batchsim.kernel.types import Sequence

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FOUND = np.int64(1 << 40)  # beyond all positions: whether there are drafts at all is drawn apart from their worth
_SHIFTS = (np.uint64(30), np.uint64(27))
_CLASS = 255  # the bits of the column `luck` that hold the number of the class


class DraftLuck(Protocol):
    """What the world knows of drafts, for a SimExecutor; a scheduler is told afterwards."""

    def key(self, seq: Sequence) -> int:
        """The number that stands in the column `luck` of its group for `seq`."""
        ...

    def accepted(self, group: DraftGroup, drafts: Ints) -> Ints:
        """How many of the first `drafts` of each member are right, up to the first that is not."""
        ...

    def proposed(
        self, group: DraftGroup, gained: Ints, seqs: list[Sequence]
    ) -> tuple[Ints, dict[Sequence, int]] | None:
        """How many drafts follow for each member, which has `gained` so many tokens, and for each of `seqs`, whose
        prompt ends; None: as many as the engine asks for."""
        ...


class DrawnLuck:
    """Luck by a law: `positions`, by request class, are the shares of steps in which the first, second, ... draft is
    accepted, none larger than the one before; "" stands for all other classes. `found`: the share of steps for which
    the drafter finds any.

    A draw depends on the seed, the request and the number of its tokens at that step alone: one number, below which
    lie the shares of all positions accepted.
    """

    def __init__(self, seed: int, positions: Mapping[str, tuple[float, ...]], found: float = 1.0) -> None:
        self._classes = {name: number for number, name in enumerate(positions)}
        self._shares = _threshold(np.array(list(positions.values()))[:, ::-1])  # a row a class, the last position first
        self._found = found
        self._seed = seed

    def key(self, seq: Sequence) -> int:
        request = seq.request
        number = self._classes.get(request.request_class, self._classes.get("", -1))
        assert 0 <= number <= _CLASS, f"class {request.request_class!r} has no law, or one of too many"
        of_seed = _mix(np.array([self._seed + 1], np.uint64) * _STEP)
        mixed = int(_mix((of_seed ^ np.uint64(request.id)) * _STEP)[0])
        return ((mixed >> 1) & ~_CLASS) | number

    def accepted(self, group: DraftGroup, drafts: Ints) -> Ints:
        luck, shares = group.luck, self._shares
        drawn = _draw(luck, group.context)
        if len(shares) == 1:
            right = shares.shape[1] - shares[0].searchsorted(drawn, "right")
        else:
            right = (drawn[:, None] < shares[luck & _CLASS]).sum(axis=1)
        return np.minimum(right, drafts, out=right)

    def proposed(
        self, group: DraftGroup, gained: Ints, seqs: list[Sequence]
    ) -> tuple[Ints, dict[Sequence, int]] | None:
        if self._found == 1:
            return None
        keys = np.array([self.key(seq) for seq in seqs], np.int64)
        first = self._proposed(keys, np.array([seq.num_tokens + 1 for seq in seqs], np.int64))
        return self._proposed(group.luck, group.computed + gained + 1), dict(zip(seqs, first.tolist(), strict=True))

    def _proposed(self, luck: Ints, tokens: Ints) -> Ints:
        some = _draw(luck, tokens + _FOUND) < _threshold(np.array(self._found))
        return np.where(some, self._shares.shape[1], 0)


def outcome(luck: DraftLuck, group: DraftGroup) -> tuple[Ints, Ints, list[Sequence]]:
    """What becomes of the rows asked of `group`: drafts accepted and tokens gained of each member, and those whose last
    token is among them."""
    room = group.ends - group.context
    accepted = luck.accepted(group, group.rows - 1)
    gained = accepted + 1
    over = (room <= gained).nonzero()[0]
    if not len(over):
        return accepted, gained, []
    accepted[room <= 0] = 0  # ended by a step in flight: nothing comes any more
    gained = np.minimum(accepted + 1, room.clip(0))
    return accepted, gained, [group.sequences[place] for place in over.tolist() if room[place] > 0]


def _draw(luck: Ints, at: Ints) -> NDArray[np.uint64]:
    """Numbers below 2**64, an element for each of `luck` at the position `at`."""
    x = at.view(np.uint64) * _STEP
    x += luck.view(np.uint64)
    return _mix(x)


def _threshold(share: NDArray[np.float64]) -> NDArray[np.uint64]:
    return np.minimum(share * 2.0**53, 2.0**53 - 1).astype(np.uint64) << np.uint64(11)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014) without its last shift, in place: the upper bits are random."""
    x ^= x >> _SHIFTS[0]
    x *= _MIX[0]
    x ^= x >> _SHIFTS[1]
    x *= _MIX[1]
    return x
