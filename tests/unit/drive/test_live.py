"""The wall-clock driver's parts that need no wall clock."""

from __future__ import annotations

from collections.abc import Iterator

from batchsim.drive.live import Traffic, VirtualClock, WallClock, live
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.types import Arrival, Request
from tests.support.engine import Requests, arrival, engine, outcomes, vllm


class Chain(Requests):
    """Every answer makes the client send the next request after `think_ns`, up to `total`."""

    def __init__(self, *arrivals: Arrival, think_ns: int, total: int) -> None:
        super().__init__(*arrivals)
        self.think_ns, self.next_id, self.total = think_ns, len(arrivals), total

    def responded(self, request: Request, now_ns: int) -> Arrival | None:
        super().responded(request, now_ns)
        if self.next_id == self.total:
            return None
        self.next_id += 1
        return arrival(self.next_id - 1, now_ns + self.think_ns)


def test_a_virtual_clock_never_goes_back() -> None:
    """It jumps to where it is told to sleep, and stays where that has passed."""
    clock = VirtualClock()
    clock.sleep_until(50)
    clock.sleep_until(20)
    assert clock.now_ns() == 50


def test_a_wall_clock_sleeps_no_shorter_than_asked() -> None:
    """It starts at its construction, and returns at once for a time that has passed."""
    clock = WallClock()
    before_ns = clock.now_ns()
    clock.sleep_until(before_ns)
    clock.sleep_until(before_ns + 10_000)
    assert clock.now_ns() >= before_ns + 10_000 >= 10_000


def test_traffic_reads_known_arrivals_one_ahead() -> None:
    """A long trace is never read further than its next arrival."""
    pulled: list[int] = []

    class Lazy(Requests):
        def arrivals(self) -> Iterator[Arrival]:
            for made in super().arrivals():
                pulled.append(made.request.id)
                yield made

    traffic = Traffic(Lazy(arrival(0, 5), arrival(1, 5), arrival(2, 9)))
    core = engine(vllm(CountingKV(100, 4)))
    assert (pulled, traffic.next_ns) == ([0], 5)
    traffic.submit_due(core, 4)
    assert not core.has_work
    traffic.submit_due(core, 5)
    assert (pulled, traffic.next_ns) == ([0, 1, 2], 9)
    traffic.submit_due(core, 9)
    assert traffic.next_ns is None


def test_answers_bring_the_next_requests() -> None:
    """A closed loop goes on until its clients send no more; the run ends with the last answer."""
    core = engine(vllm(CountingKV(100, 4)))
    workload = Chain(arrival(0, 0), think_ns=7, total=3)
    end_ns = live(core, workload, VirtualClock()).end_ns
    assert workload.answered == [(0, 30), (1, 67), (2, 104)]
    assert end_ns == 104
    assert [o.scheduled_ns for o in outcomes(core.recorder.records())] == [0, 37, 74]
