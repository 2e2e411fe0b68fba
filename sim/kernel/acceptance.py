"""How many draft tokens turn out right: drawn by request and position, so that all policies see the same luck; and what
was counted of it where a model decided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from batchsim.kernel.draft_group import MAX_GAIN, DraftGroup, Ints, Verified
from batchsim.kernel.types import Request, Sequence

# Arrays without an axis, since numpy takes twice as long for a scalar beside a short column.
_MIX_1, _MIX_2 = np.array(0xBF58476D1CE4E5B9, np.uint64), np.array(0x94D049BB133111EB, np.uint64)
_STEP = np.array(0x9E3779B97F4A7C15, np.uint64)
_FOUND = np.int64(1 << 40)  # beyond all positions: whether there are drafts at all is drawn apart from their worth
_SHIFT_30, _SHIFT_27 = np.array(30, np.uint64), np.array(27, np.uint64)
_ONE = np.array(1)
_MAX_WIDTH = 256  # positions of a member in a table
_STEPS = np.arange(_MAX_WIDTH, dtype=np.uint64) * _STEP
_FAR = 1 << 62  # tokens
_CLASS = 255  # the bits of the column `luck` that hold the number of the class
_STEADY_STEPS = 4  # after which the members of a group are expected to stay for as many more as a table pays off in
_TABLE_SIZE = 16_384  # elements, which a CPU's cache holds
LEVELS = 250
"""Number of equal steps to which a request's own acceptance probability is rounded; each level is one request class."""


class DraftLuck(Protocol):
    """Which draft tokens are accepted in a simulation, for its SimExecutor; the scheduler learns the result
    afterwards."""

    def key(self, seq: Sequence) -> int:
        """The number that stands in the column `luck` of its group for `seq`."""
        ...

    def accepted(self, group: DraftGroup, drafts: Ints) -> Ints:
        """How many of the first `drafts` draft tokens of each member are accepted, those before the first wrong one."""
        ...

    def foreseen(self, group: DraftGroup) -> tuple[Ints, int] | None:
        """One token more than `accepted` of each member in the step asked for, not to be changed, and the sum; None
        where that was not worked out for several steps at once, and `accepted` is to be asked."""
        ...

    def proposed(
        self, group: DraftGroup, gained: Ints, seqs: list[Sequence]
    ) -> tuple[Ints, dict[Sequence, int]] | None:
        """Draft counts for the next step: an array with one element per group member, given the tokens that each
        `gained` in this step, and a dict for `seqs`, whose prompts end with this step. None: the engine's fixed number.
        """
        ...


class DrawnLuck:
    """Luck by a law: `positions`, by request class, are the shares of steps in which the first, second, ... draft is
    accepted, none larger than the one before; "" stands for all other classes. `share_found`: the share of steps for
    which the drafter finds any.

    A draw depends on the seed, the request and the number of its tokens at that step alone: one number, below which
    lie the shares of all positions accepted.
    """

    def __init__(
        self,
        seed: int,
        positions: Mapping[str, tuple[float, ...]],
        share_found: float = 1.0,
        own: Callable[[Request], float] | None = None,
    ) -> None:
        self._classes = {name: number for number, name in enumerate(positions)}
        self._shares = _threshold(np.array(list(positions.values()))[:, ::-1])  # a row a class, the last position first
        self._right = np.arange(self._shares.shape[1], -1, -1)  # drafts right, by how many of the shares are not above
        self._share_found = share_found
        self._seed = seed
        self._own = own
        self._seen: dict[DraftGroup, _Foresight] = {}

    @classmethod
    def of_requests(
        cls, seed: int, num_drafts: int, own: Callable[[Request], float], share_found: float = 1.0
    ) -> DrawnLuck:
        """Luck in which `own` maps each request to its acceptance probability: that a draft is right if those before it
        are."""
        levels = [level / LEVELS for level in range(LEVELS + 1)]
        return cls(seed, {f"{p}": tuple(p**n for n in range(1, num_drafts + 1)) for p in levels}, share_found, own)

    def key(self, seq: Sequence) -> int:
        request = seq.request
        if self._own is not None:
            number = round(self._own(request) * LEVELS)
        else:
            number = self._classes.get(request.request_class, self._classes.get("", -1))
        assert 0 <= number <= _CLASS, f"class {request.request_class!r} has no law, or one of too many"
        of_seed = _mix(np.array([self._seed + 1], np.uint64) * _STEP)
        mixed = int(_mix((of_seed ^ np.uint64(request.id)) * _STEP)[0])
        return ((mixed >> 1) & ~_CLASS) | number

    def accepted(self, group: DraftGroup, drafts: Ints) -> Ints:
        right = self._right_at(group.luck, group.context)
        if self._share_found != 1:  # where the engine asked for drafts before it knew that there are none
            right = np.minimum(right, self._proposed(group.luck, group.context + 1))
        return np.minimum(right, drafts, out=right)

    def _right_at(self, luck: Ints, at: Ints) -> Ints:
        """How many drafts in a row are right, an element for each of `luck` at the position `at`."""
        drawn, shares = _draw(luck, at), self._shares
        if len(shares) == 1:
            return self._right[shares[0].searchsorted(drawn, "right")]
        return (drawn[:, None] < shares[luck & _CLASS]).sum(axis=1)

    def foreseen(self, group: DraftGroup) -> tuple[Ints, int] | None:
        seen = self._seen.get(group)
        if seen is None:
            seen = self._seen[group] = _Foresight()
        place = group.step - seen.step
        if seen.changes != group.changes or seen.rows != group.even_rows or not 0 <= place < len(seen.sums):
            if not self._look_ahead(seen, group):
                return None
            place = 0
        return seen.gained[place], seen.sums[place]

    def _look_ahead(self, seen: _Foresight, group: DraftGroup) -> bool:
        """Fills `seen` from where the members of `group` stand, if they have stayed for a while and few enough do."""
        rows, size = group.even_rows, len(group.sequences)
        if seen.changes != group.changes or seen.rows != rows or group.step != seen.step + len(seen.sums):
            seen.changes, seen.rows, seen.calls, seen.width = group.changes, rows, 0, 0
        seen.step, seen.sums = group.step + 1, []
        seen.calls += 1
        width = min(_TABLE_SIZE // max(size, 1), _MAX_WIDTH)
        if seen.calls <= _STEADY_STEPS or not rows or width < 8 * rows or self._share_found != 1:
            return False
        left = seen.width - int((seen.at - seen.first).max()) if seen.width else 0
        if left < 2 * rows:
            left = width
            self._tabulate(seen, group, width)
        steps = np.empty((left // rows, size), np.int64)
        seen.gained = list(steps)
        for gained in seen.gained:
            seen.table.take(seen.at, out=gained, mode="clip")
            seen.at += gained
        seen.step, seen.sums = group.step, np.add.reduce(steps, axis=1).tolist()
        return True

    def _tabulate(self, seen: _Foresight, group: DraftGroup, width: int) -> None:
        """Fills the table of `seen` with the next `width` positions of each member of `group`."""
        start, size = _mixable(group.luck, group.context), width * len(group.sequences)
        drawn, shifted = seen.memory(size)
        drawn, shifted = drawn.reshape(-1, width), shifted.reshape(-1, width)
        _mix(np.add(start[:, None], _STEPS[:width], drawn), shifted)
        of = self._shares if len(self._shares) == 1 else self._shares[group.luck & _CLASS]
        right = (drawn < of[:, :1]).view(np.int8)
        for share in of.T[1:]:
            right += (drawn < share[:, None]).view(np.int8)
        np.minimum(right, seen.rows - 1, out=right)
        seen.table = seen.memory(size)[0].view(np.int64)
        np.add(right.ravel(), _ONE, out=seen.table)
        seen.width, seen.first = width, np.arange(0, size, width)
        seen.at = seen.first.copy()

    def proposed(
        self, group: DraftGroup, gained: Ints, seqs: list[Sequence]
    ) -> tuple[Ints, dict[Sequence, int]] | None:
        if self._share_found == 1:
            return None
        keys = np.array([self.key(seq) for seq in seqs], np.int64)
        first = self._proposed(keys, np.array([seq.num_tokens + 1 for seq in seqs], np.int64))
        return self._proposed(group.luck, group.computed + gained + 1), dict(zip(seqs, first.tolist(), strict=True))

    def _proposed(self, luck: Ints, tokens: Ints) -> Ints:
        some = _draw(luck, tokens + _FOUND) < _threshold(np.array(self._share_found))
        return np.where(some, self._shares.shape[1], 0)


@dataclass(slots=True)
class DraftCounts:
    """What a model made of drafts: of `decodes` those `drafted`, which had any, and of these in how many the first,
    second, ... draft was `right`, with those before it."""

    right: list[int]
    decodes: int = 0
    drafted: int = 0

    def note(self, drafts: int, accepted: int) -> None:
        """Counts a decode that verified `drafts`, of which the first `accepted` were right."""
        self.decodes += 1
        if drafts:
            self.drafted += 1
            for position in range(accepted):
                self.right[position] += 1

    def __add__(self, other: DraftCounts) -> DraftCounts:
        """The counts of both."""
        right = [ours + theirs for ours, theirs in zip(self.right, other.right, strict=True)]
        return DraftCounts(right, self.decodes + other.decodes, self.drafted + other.drafted)

    @property
    def tokens_per_decode(self) -> float:
        """The token of its own that each decode gained, and the drafts accepted, mean over all; 1 without a decode."""
        return 1 + sum(self.right) / max(self.decodes, 1)

    @property
    def law(self) -> str:
        """The knobs of a speculative_config that state these counts for a simulation."""
        shares = ", ".join(f"{count / max(self.drafted, 1):.3g}" for count in self.right)
        return f"acceptance: [{shares}], found: {self.drafted / max(self.decodes, 1):.3g}"


class _Foresight:
    """What the members of a group gain in its next steps, for as long as it has made `changes` changes and computes
    `rows` rows of each.

    `gained` and `sums` have an element a step, from the group's `step` on. They are looked up in `table`, which has
    `width` positions of each member, the first at `first`; the step behind the last one begins `at`. `calls`: how often
    there was no step left.
    """

    __slots__ = ("_memory", "at", "calls", "changes", "first", "gained", "rows", "step", "sums", "table", "width")

    def __init__(self) -> None:
        self.changes = self.rows = self.step = self.calls = self.width = 0
        self.gained: list[Ints] = []
        self.sums: list[int] = []
        self.table = self.at = self.first = np.zeros(0, np.int64)
        self._memory: NDArray[np.uint64] | None = None

    def memory(self, size: int) -> NDArray[np.uint64]:
        """Two uint64 arrays of `size` elements, always the same memory: allocating it anew costs more than filling
        it."""
        if self._memory is None:
            self._memory = np.empty((2, _TABLE_SIZE), np.uint64)
        return self._memory[:, :size]


def outcome(luck: DraftLuck, group: DraftGroup) -> tuple[Verified, list[Sequence]]:
    """Verification result of the rows asked of `group`, and the members whose last token is among them."""
    seen = luck.foreseen(group)
    if seen is None:
        gained = luck.accepted(group, group.drafts_asked) + _ONE
        num_gained = int(np.add.reduce(gained))
    else:
        gained, num_gained = seen
    most = group.even_rows or MAX_GAIN
    if group.nearest_end <= most:
        room = group.ends - group.context
        group.nearest_end = int(np.minimum.reduce(room, initial=_FAR))
        over = (room <= gained).nonzero()[0]
        if len(over):
            group.nearest_end = 0  # who stays may be near, and the next step may have fewer rows
            accepted = gained - _ONE
            accepted[room <= 0] = 0  # ended by a step in flight: nothing comes any more
            gained = np.minimum(accepted + _ONE, room.clip(0))
            ended = [group.sequences[place] for place in over.tolist() if room[place] > 0]
            return Verified(gained, accepted), ended
    group.nearest_end -= most
    return Verified(gained, num_gained=num_gained), []


def _draw(luck: Ints, at: Ints) -> NDArray[np.uint64]:
    """Numbers below 2**64, an element for each of `luck` at the position `at`."""
    return _mix(_mixable(luck, at))


def _mixable(luck: Ints, at: Ints) -> NDArray[np.uint64]:
    """What `_mix` makes a draw of, for each of `luck` at the position `at`; it grows by _STEP with the position."""
    x = at.view(np.uint64) * _STEP
    x += luck.view(np.uint64)
    return x


def _threshold(share: NDArray[np.float64]) -> NDArray[np.uint64]:
    return np.minimum(share * 2.0**53, 2.0**53 - 1).astype(np.uint64) << np.uint64(11)


def _mix(x: NDArray[np.uint64], shifted: NDArray[np.uint64] | None = None) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014) without its last shift, in place: the upper bits are random.

    `shifted`: an array like `x`, to be overwritten.
    """
    shifted = np.right_shift(x, _SHIFT_30, shifted)
    np.bitwise_xor(x, shifted, x)
    np.multiply(x, _MIX_1, x)
    np.right_shift(x, _SHIFT_27, shifted)
    np.bitwise_xor(x, shifted, x)
    return np.multiply(x, _MIX_2, x)
