"""Copies of KV between the memory of a host and a disk below it, beside those between GPU and host.

Each direction is a link of its own that makes one copy after another, and neither waits for the GPU's links. The
scheduler asks for a copy at the time of its call, and looks at its calls what is over.
Source: vllm/v1/kv_offload/tiering/fs/manager.py and thread_pool.py of the 0.32.0 wheel.
Simplifies: copies that its 32 threads make at once, sharing the disk, are made one after the other; all chunks of one
are there as it ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchsim.kernel.host_link import OffloadLink
from batchsim.kernel.offload import OffloadConnector
from batchsim.kernel.record import TIER_LOAD, TIER_STORE

DISK = "disk"
"""What rows of copies from and to the disk are named by."""


@dataclass(slots=True, eq=False)
class DiskJob:
    """One copy to the host if `is_load`, else to the disk, from `start_ns` to `end_ns`."""

    number: int
    is_load: bool
    start_ns: int
    end_ns: int


class TieringConnector(OffloadConnector):
    """An `OffloadConnector` whose host has a disk below it, with the links `writing` to and `reading` from it.

    `disk_jobs` are the copies that are not over; `has_news`: its next call hears what
    is there, or notices what is over.
    """

    def __init__(self, storing: OffloadLink, loading: OffloadLink, writing: OffloadLink, reading: OffloadLink) -> None:
        super().__init__(storing, loading)
        self.disk_jobs: list[DiskJob] = []
        self.has_news = False
        self._writing = writing
        self._reading = reading
        self._disk_made = 0

    @property
    def is_busy(self) -> bool:
        return bool(self.jobs) or bool(self.disk_jobs) or self.has_news or bool(self.kept or self.abandoned)

    def quiet_until_ns(self) -> int:
        if self.has_news:
            return 0
        until_ns = super().quiet_until_ns()
        for job in self.disk_jobs:
            until_ns = min(until_ns, job.end_ns)
        return until_ns

    def copy(self, request_id: int, num_chunks: int, num_tokens: int, now_ns: int, *, is_load: bool) -> DiskJob:
        """Asks at `now_ns` for a copy of `num_chunks` with `num_tokens` of a request; none takes no time."""
        times_ns = (now_ns, now_ns)
        if num_chunks:
            times_ns = (self._reading if is_load else self._writing).take(num_chunks, now_ns)
            if self.recorder is not None:
                self.recorder.state(now_ns, request_id, TIER_LOAD if is_load else TIER_STORE, DISK, num_tokens)
        job = DiskJob(self._disk_made, is_load, *times_ns)
        self._disk_made += 1
        self.disk_jobs.append(job)
        return job

    def disk_over(self, now_ns: int) -> list[DiskJob]:
        """The copies that are over at `now_ns`, each once: those to the disk first, in order."""
        over = [job for job in self.disk_jobs if job.end_ns <= now_ns]
        if over:
            self.disk_jobs = [job for job in self.disk_jobs if job.end_ns > now_ns]
            over.sort(key=_order_of)
        return over


def _order_of(job: DiskJob) -> tuple[bool, int]:
    return job.is_load, job.number
