"""Rows of records on disk while a server runs, so that its memory does not grow with what it has answered."""

from __future__ import annotations

import tempfile
import weakref


class DiskSpool:
    """A `batchsim.kernel.record.Spool` in an unnamed temporary file, which is gone with its last reader.

    Its methods raise OSError where the disk is full.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="batchsim-")  # noqa: SIM115  closed with what reads it
        self._pieces: dict[str, list[tuple[int, int]]] = {}  # of each table: where in the file, and its size
        self._size = 0
        weakref.finalize(self, self._file.close)

    def put(self, table: str, rows: bytes | bytearray) -> None:
        """Adds rows behind those of `table` that are there."""
        if not rows:
            return
        self._file.seek(self._size)
        self._file.write(rows)
        self._pieces.setdefault(table, []).append((self._size, len(rows)))
        self._size += len(rows)

    def rows(self, table: str, first_byte: int = 0) -> bytearray:
        """The rows of `table` that are there, from `first_byte` on."""
        rows = bytearray()
        for at, size in self._pieces.get(table, []):
            if first_byte < size:
                self._file.seek(at + first_byte)
                rows += self._file.read(size - first_byte)
            first_byte = max(first_byte - size, 0)
        return rows
