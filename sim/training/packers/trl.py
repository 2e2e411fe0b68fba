"""TRL 1.16.0 (`trl/data_utils.py`): rows of at most `seq_length` tokens, made of each map batch of examples apart."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from batchsim.base.ranges import PositiveInt
from batchsim.training.packers.bins import PackerConfig, Piece, chunks, cut_stream, tokens


@dataclass(frozen=True)
class _Trl(PackerConfig):
    seq_length: PositiveInt | None = None
    """Tokens of a row; `max_length` of SFTConfig. Null: the scenario's capacity."""
    map_batch_size: PositiveInt = 1000
    """Examples that are packed together: those of a batch of `datasets.map`."""
    follows: ClassVar = "TRL 1.16.0"
    makes: ClassVar = "pieces"
    capacity_option: ClassVar = "seq_length"
    takes_longer: ClassVar = True
    shuffled: ClassVar = True


@dataclass(frozen=True)
class Bfd(_Trl):
    """Best fit decreasing; of longer examples the first `seq_length` tokens are kept, the others are discarded."""

    kind: Literal["trl.bfd"] = "trl.bfd"
    rule: ClassVar = "best fit decreasing in map batches, longer examples truncated"

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> list[list[Piece]]:
        capacity, rows = tokens(self.seq_length), list[list[Piece]]()
        for batch in chunks(order, self.map_batch_size):
            rows += best_fit_decreasing([(i, 0, min(lengths[i], capacity)) for i in batch], capacity)
        return rows


@dataclass(frozen=True)
class BfdSplit(_Trl):
    """Best fit decreasing of pieces: a longer example is cut into pieces of `seq_length` tokens first, and its rest."""

    kind: Literal["trl.bfd_split"] = "trl.bfd_split"
    rule: ClassVar = "best fit decreasing in map batches, longer examples cut into pieces"

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> list[list[Piece]]:
        capacity, rows = tokens(self.seq_length), list[list[Piece]]()
        for batch in chunks(order, self.map_batch_size):
            pieces = [(i, at, min(capacity, lengths[i] - at)) for i in batch for at in range(0, lengths[i], capacity)]
            rows += best_fit_decreasing(pieces, capacity)
        return rows


@dataclass(frozen=True)
class Wrapped(_Trl):
    """Each map batch is one stream of tokens that is cut every `seq_length`: no boundary is kept."""

    kind: Literal["trl.wrapped"] = "trl.wrapped"
    rule: ClassVar = "concatenated in map batches and cut, whatever the boundaries"
    mask: ClassVar = "cross"
    pads: ClassVar = "longest"

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> list[list[Piece]]:
        batches = chunks(order, self.map_batch_size)
        return [row for batch in batches for row in cut_stream(lengths, batch, tokens(self.seq_length))]


def best_fit_decreasing(pieces: Sequence[Piece], capacity: int) -> list[list[Piece]]:
    """The longest piece first, each into the bin of the smallest space that holds it; of several bins of that space
    into the one that has had it longest. Empty pieces are dropped."""
    rows: list[list[Piece]] = []
    spaces: list[int] = []  # those that a bin has, ascending
    bins: dict[int, deque[int]] = {}
    for piece in sorted((piece for piece in pieces if piece[2]), key=lambda piece: -piece[2]):
        at = bisect_left(spaces, piece[2])
        if at == len(spaces):
            row, space = len(rows), capacity
            rows.append([])
        else:
            space = spaces[at]
            row = bins[space].popleft()
            if not bins[space]:
                del spaces[at], bins[space]
        rows[row].append(piece)
        if left := space - piece[2]:
            if left not in bins:
                bins[left] = deque()
                insort(spaces, left)
            bins[left].append(row)
    return rows
