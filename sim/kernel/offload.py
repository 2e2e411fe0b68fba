"""Copies of KV between an engine's GPU and the memory of its host, as the engine's worker makes them.

Each direction is a link that makes one transfer after another. What was computed is stored from the launch of the next
step on; loads begin as the step of the call that asked for them is launched, behind its work on the device. A step
that would overwrite blocks which are not stored yet waits for that: these stores are flushed.
Source: vllm/v1/kv_offload/cpu/gpu_worker.py, vllm/distributed/kv_transfer/kv_connector/v1/offloading/worker.py of the
0.33.0 wheel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from batchsim.base.units import MAX_TIME_NS
from batchsim.kernel.host_link import OffloadLink
from batchsim.kernel.in_flight import StepsInFlight
from batchsim.kernel.kv_transfer import KvConnector, Noticed
from batchsim.kernel.record import STORE_FLUSH, TIER_LOAD, TIER_STORE, WAITING, Recorder
from batchsim.kernel.types import Request, Sequence

LOAD_QUEUE, LOAD, LOADED = "kv_load_queue", "kv_load", "kv_loaded"
"""Why a request waits that loads KV: for steps and loads before it, for its KV, and for the engine to notice and go
on."""


@dataclass(slots=True, eq=False)
class OffloadJob:
    """One transfer of `num_chunks` whole chunks, for `num_tokens` tokens of `seq`. `blocks`: those on the GPU that a
    store reads. Times in ns, None before it is submitted. `written` counts the states of a load that are on record."""

    number: int
    seq: Sequence
    is_load: bool
    num_chunks: int
    blocks: list[int]
    num_tokens: int
    began_ns: int = 0
    start_ns: int | None = None
    end_ns: int | None = None
    written: int = 0


@dataclass(slots=True)
class JobsNoticed(Noticed):
    """As `Noticed`; also the `jobs` seen to be over, by number, and those `submitted` at that launch."""

    jobs: list[OffloadJob] = field(default_factory=list[OffloadJob])
    submitted: list[OffloadJob] = field(default_factory=list[OffloadJob])


class OffloadConnector(KvConnector):
    """What passes between a scheduler that offloads KV and its worker.

    Of the scheduler's latest call: `loads`, `stores`, and of these and of earlier ones the `flushed`, for which the
    launch waits. `jobs` are all that the scheduler does not know to be over, `jobs_noticed` is `noticed`, of which
    jobs are known. `scheduled_ns` is when the host was ready to launch the latest step. `recorder`: where transfers and
    waits for them are written, if anywhere.
    """

    def __init__(self, storing: OffloadLink, loading: OffloadLink) -> None:
        super().__init__(NoPeers())
        self.leaps = "quiet"
        self.noticed = self.jobs_noticed = JobsNoticed()
        self.jobs: dict[int, OffloadJob] = {}
        self.loads: list[OffloadJob] = []
        self.stores: list[OffloadJob] = []
        self.flushed: list[OffloadJob] = []
        self.scheduled_ns = 0
        self.recorder: Recorder | None = None
        self._storing = storing
        self._loading = loading
        self._queued: list[OffloadJob] = []  # stores of the calls before
        self._submitted: list[OffloadJob] = []  # at the launch at hand
        self._running: list[OffloadJob] = []  # submitted, not seen to be over
        self._made = 0
        self._nothing = JobsNoticed()

    @property
    def is_busy(self) -> bool:
        return bool(self.jobs) or super().is_busy

    def attach(self, recorder: Recorder, in_flight: StepsInFlight) -> None:
        """Makes this the connector of the engine whose records and steps in flight these are."""
        self.recorder = recorder

    def quiet_until_ns(self) -> int:
        if self.loads or self.stores or self._queued or len(self._running) < len(self.jobs):
            return 0
        until_ns = MAX_TIME_NS
        for job in self._running:
            times_ns = (job.began_ns, job.start_ns, job.end_ns)
            next_ns = times_ns[job.written] if job.is_load and job.written < len(times_ns) else job.end_ns
            if next_ns is not None and next_ns < until_ns:
                until_ns = next_ns
        return until_ns

    def new_call(self) -> None:
        """The scheduler is called."""
        self.loads, self.stores, self.flushed = [], [], []

    def new_job(
        self, seq: Sequence, num_chunks: int, *, is_load: bool, blocks: list[int], num_tokens: int
    ) -> OffloadJob:
        """A job that the scheduler's call asks for."""
        job = self.jobs[self._made] = OffloadJob(self._made, seq, is_load, num_chunks, blocks, num_tokens)
        self._made += 1
        (self.loads if is_load else self.stores).append(job)
        return job

    def before_launch(self, now_ns: int, computed_ns: int) -> int:
        self.scheduled_ns = now_ns
        if not (self._queued or self.stores or self.flushed):
            return now_ns
        queued = self._queued
        if self.flushed:
            queued = [*queued, *[job for job in self.stores if job in self.flushed]]
        if queued:
            self._submit(self._storing, queued, now_ns, computed_ns)
        self._queued = [job for job in self.stores if job.start_ns is None]
        if not self.flushed:
            return now_ns
        if self.recorder is not None:
            self._write_flush(self.recorder, max(now_ns, computed_ns))
        return max(now_ns, max(map(_end_of, self.flushed)))

    def launched(self, now_ns: int, computed_ns: int = 0) -> None:
        if not (self._running or self.loads or self._submitted):
            self._reports.append(self._nothing)
            return
        if self.loads:
            self._submit(self._loading, self.loads, now_ns, computed_ns)
        over, left = list[OffloadJob](), list[OffloadJob]()
        for job in self._running:
            if job.is_load:
                self._write(job, now_ns)
            (over if _end_of(job) <= now_ns else left).append(job)
        self._running = left
        if not (over or self._submitted):
            self._reports.append(self._nothing)
            return
        over.sort(key=_number_of)
        loaded = [job.seq for job in over if job.is_load]
        self._report(JobsNoticed(loaded, jobs=over, submitted=self._submitted))
        self._submitted = []

    def give_up(self, seq: Sequence, now_ns: int) -> None:
        """Ends the record of loads of `seq`, which has ended; the transfers go on."""
        for job in self._running:
            if job.seq is seq and job.is_load:
                self._write(job, now_ns)
                job.written = 3

    def _submit(self, link: OffloadLink, jobs: list[OffloadJob], now_ns: int, computed_ns: int) -> None:
        """Submits `jobs` at `now_ns`; they begin once the device has computed what they read or write."""
        jobs = [job for job in jobs if job.start_ns is None]  # a stopped scheduler is not called before each launch
        for job in jobs:
            job.began_ns = now_ns
            job.start_ns, job.end_ns = link.take(job.num_chunks, max(now_ns, computed_ns))
            if self.recorder is not None:
                remark = TIER_LOAD if job.is_load else TIER_STORE
                self.recorder.state(now_ns, job.seq.request.id, remark, "host", job.num_tokens)
        self._submitted += jobs
        self._running += jobs

    def _write(self, job: OffloadJob, now_ns: int) -> None:
        """Writes the states that the request of `job`, a load, has come to by now."""
        if self.recorder is None or not job.is_load:
            return
        stages = (LOAD_QUEUE, job.began_ns), (LOAD, job.start_ns), (LOADED, job.end_ns)
        for reason, at_ns in stages[job.written :]:
            if at_ns is None or at_ns > now_ns:
                return
            job.written += 1
            self.recorder.state(at_ns, job.seq.request.id, WAITING, reason)

    def _write_flush(self, recorder: Recorder, idle_ns: int) -> None:
        """Writes for how long each of the flushed stores, one after the other, keeps the device idle, which has nothing
        to compute from `idle_ns` on."""
        for job in sorted(self.flushed, key=_end_of):
            end_ns = _end_of(job)
            if end_ns > idle_ns:
                recorder.state(idle_ns, job.seq.request.id, STORE_FLUSH, "", end_ns - idle_ns)
                idle_ns = end_ns

    def processed(self) -> JobsNoticed:
        noticed = self._reports.popleft()
        assert isinstance(noticed, JobsNoticed)
        self.noticed = self.jobs_noticed = noticed
        self._untold -= not noticed.is_empty
        for job in noticed.jobs:
            del self.jobs[job.number]
        return noticed


def _end_of(job: OffloadJob) -> int:
    assert job.end_ns is not None, "it is submitted"
    return job.end_ns


def _number_of(job: OffloadJob) -> int:
    return job.number


NewOffload = Callable[[], OffloadConnector]
"""Makes the connector of an engine that offloads KV."""


class NoPeers:
    """The link of an engine that passes KV to no other."""

    def pulls(self, request: Request) -> bool:
        return False

    def keeps(self, request: Request) -> bool:
        return False

    def begin(self, seq: Sequence, num_blocks: int, now_ns: int) -> None:
        raise AssertionError("pulls nothing")

    def keep(self, seq: Sequence, num_blocks: int, now_ns: int) -> None:
        raise AssertionError("keeps nothing")

    def over(self, now_ns: int) -> Noticed:
        return Noticed()
