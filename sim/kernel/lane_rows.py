"""The host's part of each step of an engine that schedules ahead of results, in the rows of the table `lanes`."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from batchsim.kernel.packed_rows import MISSING, row_format

LANE_COLUMNS = (
    ("called_ns", "q"),  # the scheduler was asked
    ("launched_ns", "q"),  # the host was through with it; the device took it up at the step's start
    ("processed_ns", "q"),  # the results were processed and tokens went out
    ("wasted_tokens", "q"),  # computed of requests that had ended by then
)
_LANE, LANE_DTYPE = row_format(LANE_COLUMNS)
pack_lane = _LANE.pack
_ALIKE = struct.Struct("<4q")


class LaneRows:
    """A row for each step, in their order: `rows` of those processed, packed by `pack_lane`, but that those of `alike`
    are zeros until they are `written`; `open` has the first two columns of those in flight."""

    __slots__ = ("_alike", "open", "rows")

    def __init__(self) -> None:
        self.rows = bytearray()
        self.open: deque[tuple[int, int]] = deque()
        self._alike = bytearray()  # which of `rows` are yet to be written: the first, how many, and the ns of `alike`

    def launched(self, called_ns: int, launched_ns: int) -> None:
        """Notes the host's part of the next step."""
        self.open.append((called_ns, launched_ns))

    def landed(self, back: int, launched_ns: int) -> None:
        """Corrects when the step `back` from the last one was launched."""
        self.open[-back] = self.open[-back][0], launched_ns

    def processed(self, now_ns: int, wasted_tokens: int) -> None:
        """Writes the row of the oldest step in flight, which is processed at `now_ns`."""
        called_ns, launched_ns = self.open.popleft()
        self.rows += pack_lane(called_ns, launched_ns, now_ns, wasted_tokens)

    def alike(self, count: int, launch_ns: int, process_ns: int) -> None:
        """As `processed`, of `count` steps in a row: each was asked for `process_ns` after the one before it had begun,
        launched `launch_ns` later, and processed `process_ns` after the one behind it had begun.

        This follows from when steps began, and is written when the rows are read: then it costs next to nothing."""
        self._alike += _ALIKE.pack(len(self.rows) // _LANE.size, count, launch_ns, process_ns)
        self.rows += bytes(count * _LANE.size)

    def cut(self) -> None:
        """Writes the rows of the steps in flight, which nobody will process."""
        self.rows += self.open_rows()
        self.open.clear()

    def open_rows(self) -> bytes:
        """The rows of the steps in flight."""
        return b"".join(pack_lane(called_ns, launched_ns, MISSING, 0) for called_ns, launched_ns in self.open)

    def drop_last(self, count: int) -> None:
        """Forgets the last `count` steps in flight."""
        for _ in range(count):
            self.open.pop()

    def written(self, starts_ns: Callable[[], NDArray[np.int64]]) -> bytearray:
        """`rows`, all of them written; `starts_ns` says when the steps began, that of the first row being the first."""
        if self._alike:
            first, count, launch_ns, process_ns = np.frombuffer(self._alike, "<i8").reshape(-1, 4).T
            steps = np.arange(count.sum()) + np.repeat(first - np.cumsum(count) + count, count)
            begun_ns, process_ns = starts_ns(), np.repeat(process_ns, count)
            lanes = np.frombuffer(self.rows, LANE_DTYPE)
            lanes["called_ns"][steps] = called_ns = begun_ns[steps - 1] + process_ns
            lanes["launched_ns"][steps] = called_ns + np.repeat(launch_ns, count)
            lanes["processed_ns"][steps] = begun_ns[steps + 1] + process_ns
            self._alike = bytearray()
        return self.rows
