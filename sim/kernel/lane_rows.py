"""The host's part of each step of an engine that schedules ahead of results, in the rows of the table `lanes`."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from batchsim.kernel.packed_rows import row_format
from batchsim.kernel.types import MISSING

LANE_COLUMNS = (
    ("called_ns", "q"),  # the scheduler was asked
    ("launched_ns", "q"),  # the host was through with it; the device took it up at the step's start
    ("processed_ns", "q"),  # the results were processed and tokens went out
    ("wasted_tokens", "q"),  # computed of requests that had ended by then
)
_LANE, LANE_DTYPE = row_format(LANE_COLUMNS)
pack_lane = _LANE.pack
_LANE_BYTES = LANE_DTYPE.itemsize
_pack_repeated = struct.Struct("<12q").pack


class LaneRows:
    """A row for each step, in their order: `rows` of those processed, packed by `pack_lane`; `open` has the first two
    columns of those in flight. Those `repeated` are missing from `rows` until `written` replaces it."""

    __slots__ = ("_repeated", "open", "rows")

    def __init__(self) -> None:
        self.rows = bytearray()
        self.open: deque[tuple[int, int]] = deque()
        self._repeated = bytearray()  # arguments of `repeated` for rows that are yet to be written

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

    def repeated(
        self,
        count: int,
        called_ns: int,
        launch_ns: int,
        process_ns: int,
        latest_process_ns: int,
        wasted_tokens: tuple[int, int],
        last_calls_ns: tuple[int, int],
    ) -> None:
        """As `processed`, then `launched`, `count` times, at least once: the scheduler is asked for the next step once
        the results of the oldest of two in flight have been processed.

        It is asked first at `called_ns`, and at `last_calls_ns` the last two times. A launch takes `launch_ns`, and the
        results of each of these steps `process_ns`; of the two in flight before, the latest one's take
        `latest_process_ns`, and `wasted_tokens` are theirs. All times in the rows follow from when steps began, and are
        written when the rows are read: that costs less."""
        opened, (wasted, next_wasted) = self.open, wasted_tokens
        oldest, latest = opened
        self._repeated += _pack_repeated(
            len(self.rows) // _LANE_BYTES, count, called_ns, launch_ns, process_ns, latest_process_ns,
            wasted, next_wasted, oldest[0], oldest[1], latest[0], latest[1],
        )  # fmt: skip
        before_ns, now_ns = last_calls_ns
        opened[0] = latest if count == 1 else (before_ns, before_ns + launch_ns)
        opened[1] = now_ns, now_ns + launch_ns

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows, and of the notes on rows yet to be written."""
        return len(self.rows) + len(self._repeated)

    def cut(self) -> None:
        """Writes the rows of the steps in flight, whose results will never be processed."""
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
        if not self._repeated:
            return self.rows
        noted = np.frombuffer(self._repeated, "<i8").reshape(-1, 12).T
        # `before`: how many were in `rows` as these were noted.
        before, count, called_ns, launch_ns, process_ns, latest_process_ns, *opened = noted
        ends = np.cumsum(count)
        first, steps = before + ends - count, np.arange(ends[-1]) + np.repeat(before, count)
        own = np.frombuffer(self.rows, LANE_DTYPE)
        self.rows, self._repeated = bytearray((len(own) + len(steps)) * _LANE_BYTES), bytearray()
        lanes = np.frombuffer(self.rows, LANE_DTYPE)
        is_own = np.ones(len(lanes), bool)
        is_own[steps] = False
        lanes[is_own] = own
        more = count > 1
        second, begun_ns = first[more] + 1, starts_ns()
        called, launched, processed, wasted = (lanes[name] for name, _ in LANE_COLUMNS)
        # With the results of a step in, that behind the next one is asked for.
        processed[steps] = begun_ns[steps + 1] + np.repeat(process_ns, count)
        processed[first] = called_ns
        processed[second] = begun_ns[second + 1] + latest_process_ns[more]
        called[steps] = processed[np.maximum(steps - 2, 0)]  # of the first two there is none here, and it is noted
        launched[steps] = called[steps] + np.repeat(launch_ns, count)
        wasted[first], wasted[second] = opened[0], opened[1][more]
        called[first], launched[first] = opened[2], opened[3]
        called[second], launched[second] = opened[4][more], opened[5][more]
        return self.rows
