"""Copies between a GPU and its host that the scheduler makes itself, by hand."""

from __future__ import annotations

from batchsim.kernel.batch import Batch, StepResult
from batchsim.kernel.engine_loop import OVERLAP
from batchsim.kernel.host_copies import HostCopies
from batchsim.kernel.host_link import LayerLoad, OffloadLink
from batchsim.kernel.in_flight import StepsInFlight
from batchsim.kernel.record import STORE_FLUSH, TIER_STORE, Recorder


def copies(busy_until_ns: int = 0) -> tuple[HostCopies, Recorder]:
    """Links of 5 ns and 2 ns a page out, 3 ns in; the device computes until then."""
    made, recorder, in_flight = HostCopies(OffloadLink(5, 2), OffloadLink(0, 3), 4), Recorder(), StepsInFlight(OVERLAP)
    if busy_until_ns:
        in_flight.launch(Batch(None, [], 0), StepResult(busy_until_ns, []), 0, 0)
    made.attach(recorder, in_flight)
    return made, recorder


def states(recorder: Recorder, what: int) -> list[tuple[int, int, int]]:
    """(ns, request, tokens or ns) of each remark, the run being over."""
    rows = recorder.records().states
    found = rows[rows["state"] == what]
    return [(int(row["time_ns"]), int(row["request_id"]), int(row["blocker"])) for row in found]


def test_what_was_gathered_is_one_copy_behind_the_steps_in_flight() -> None:
    """Two parts, 3 pages, from 100 on, when the device is through: 5 + 3 x 2 ns."""
    made, recorder = copies(100)
    assert made.submit(40) is None
    made.gather((7, 16, 1))
    made.gather((8, 32, 2))
    assert made.is_busy and made.next_end_ns is None
    assert made.submit(40) == 0
    assert made.next_end_ns == 111
    assert made.called(110) == ([], [])
    assert made.called(111) == ([0], [])
    assert not made.is_busy
    assert states(recorder, TIER_STORE) == [(40, 7, 16), (40, 8, 32)]


def test_copies_out_follow_each_other_and_copies_in_go_beside_them() -> None:
    """Stores end at 7 and 14; a load of 2 pages from 1 on, at 7."""
    made, _ = copies()
    for _ in range(2):
        made.gather((0, 16, 1))
        made.submit(0)
    load = made.load([], 2)
    assert load.beside(1, 1) == 7
    assert made.called(7) == ([0], [load])
    assert made.called(14) == ([1], [])


def test_the_host_stands_still_until_what_leaves_is_written_back() -> None:
    """Two nodes one after the other, from 100 on: until 107 and 114. A launch that would be at 43 is 74 ns later."""
    made, recorder = copies(100)
    made.called(40)
    assert made.write_back([(7, 16, 1), (8, 16, 1)], 40) == 114
    assert made.before_launch(43, 100) == 43 + 74
    assert states(recorder, STORE_FLUSH) == [(100, 7, 7), (107, 8, 7)]
    made.called(120)
    assert made.before_launch(123, 0) == 123


def test_a_wait_for_locked_pages_is_noted_once_it_is_over() -> None:
    """From 10, where no step is made, until the next call; not while a step is in flight."""
    made, recorder = copies()
    made.gather((7, 16, 1))
    made.submit(10)
    made.wait(10)
    made.called(14)
    made.called(17)
    assert states(recorder, STORE_FLUSH) == [(10, 7, 4)]
    busy, other = copies(100)
    busy.gather((7, 16, 1))
    busy.submit(10)
    busy.wait(10)
    busy.called(107)
    assert states(other, STORE_FLUSH) == []


def test_each_layer_waits_for_its_part() -> None:
    """4 layers beside a step of 40 ns, from 0 on. 8 pages of 3 ns: the first layer waits for 6 ns, the others for
    nothing. 30 pages: the last layer, of 10 ns, begins with the end, at 90. No pages: no wait."""
    for pages, end_ns in ((8, 46), (30, 100), (0, 40)):
        load = LayerLoad([], pages, OffloadLink(0, 3), 4)
        assert load.beside(0, 40) == end_ns
        assert load.wait_ns == end_ns - 40
        assert load.end_ns == 3 * pages
