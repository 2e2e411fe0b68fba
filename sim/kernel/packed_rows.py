"""Many rows of a table by column, each column as narrow as it can be, unpacked as far as it is read."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK_ROWS = 4096
Chunk = dict[str, NDArray[Any]]


def row_format(columns: tuple[tuple[str, str], ...]) -> tuple[struct.Struct, np.dtype]:
    """The packer of a row and the matching numpy dtype, little-endian and unpadded."""
    kinds = {"q": "<i8", "i": "<i4"}
    return struct.Struct("<" + "".join(kind for _, kind in columns)), np.dtype([(n, kinds[k]) for n, k in columns])


def columns(rows: NDArray[np.void]) -> Chunk:
    """A copy of the rows by column. One piece of memory for all, filled in blocks that a CPU's cache holds."""
    columns: Chunk = {}
    memory, at, dtype = np.empty(len(rows) * rows.dtype.itemsize, np.uint8), 0, rows.dtype
    for name in sorted(dtype.names or (), key=lambda name: -dtype[name].itemsize):  # so that all are aligned
        size = len(rows) * dtype[name].itemsize
        columns[name] = memory[at : at + size].view(dtype[name])
        at += size
    for first in range(0, len(rows), _BLOCK_ROWS):
        block = rows[first : first + _BLOCK_ROWS]
        for name, column in columns.items():
            column[first : first + _BLOCK_ROWS] = block[name]
    return {name: columns[name] for name in dtype.names or ()}


def packed(rows: NDArray[np.void]) -> tuple[int, Chunk]:
    """A chunk of rows: how many, and a copy of each of their columns of integers, in the narrowest type that holds it,
    one element if all are the same."""
    return len(rows), {name: _narrow(column) for name, column in columns(rows).items()}


def _narrow(column: NDArray[Any]) -> NDArray[Any]:
    low, high = int(column.min()), int(column.max())
    if low == high:
        return column[:1].copy()
    return column.astype(np.result_type(np.min_scalar_type(low), np.min_scalar_type(high)))


class PackedRows:
    """Rows in about a third of their memory: `chunks` of them, as `packed`, one after the other. The `last` rows are as
    they are."""

    __slots__ = ("_chunks", "_last")

    def __init__(self, chunks: list[tuple[int, Chunk]], last: NDArray[np.void]) -> None:
        self._chunks = chunks
        self._last = last

    def __len__(self) -> int:
        return sum(count for count, _ in self._chunks) + len(self._last)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return self._last.dtype.names or ()

    def column(self, name: str) -> NDArray[Any]:
        """One column, unpacked. KeyError for one that there is not."""
        if name not in self.names:
            raise KeyError(name)
        values = np.empty(len(self), self._last.dtype[name])
        self._fill(name, values)
        return values

    def rows(self) -> NDArray[np.void]:
        """The rows themselves, unpacked."""
        values = np.empty(len(self), self._last.dtype)
        for name in self.names:
            self._fill(name, values[name])
        return values

    def pieces(self, num_rows: int) -> Iterator[tuple[int, PackedRows]]:
        """All rows in pieces of whole chunks, of about `num_rows` and no fewer but in the last: the number of the first
        row, and the piece."""
        none, first, piece = self._last[:0], 0, list[tuple[int, Chunk]]()
        for at, chunk in zip(accumulate([count for count, _ in self._chunks], initial=0), self._chunks, strict=False):
            if at - first >= num_rows:
                yield first, PackedRows(piece, none)
                first, piece = at, []
            piece.append(chunk)
        yield first, PackedRows(piece, self._last)

    def _fill(self, name: str, column: NDArray[Any]) -> None:
        at = 0
        for count, chunk in self._chunks:
            column[at : at + count] = chunk[name]
            at += count
        column[at:] = self._last[name]


class LazyColumns(Mapping[str, NDArray[Any]]):
    """The columns of packed rows by name, each unpacked as it is first read, and kept."""

    __slots__ = ("_columns", "_rows")

    def __init__(self, rows: PackedRows) -> None:
        self._rows = rows
        self._columns: Chunk = {}

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._columns:
            self._columns[name] = self._rows.column(name)
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows.names)

    def __len__(self) -> int:
        return len(self._rows.names)
