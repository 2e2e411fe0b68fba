"""The tables hold what was written, under the names of the schema."""

from __future__ import annotations

import struct
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from batchsim.kernel.batch import Batch
from batchsim.kernel.journal import Journal
from batchsim.kernel.packed_rows import row_format
from batchsim.kernel.record import (
    BLOCKED,
    MISSING,
    OUTCOME_NAMES,
    REQUEST_COLUMNS,
    REQUEST_DTYPE,
    STATE_COLUMNS,
    STATE_DTYPE,
    STATE_NAMES,
    STEP_COLUMNS,
    STEP_DTYPE,
    UNFINISHED,
    Recorder,
    Records,
    pack_decodes,
    pack_step,
    pack_two,
)
from batchsim.kernel.types import Arrival, Request
from batchsim.serve.disk_spool import DiskSpool


@pytest.mark.parametrize(
    ("columns", "dtype"),
    [(STEP_COLUMNS, STEP_DTYPE), (STATE_COLUMNS, STATE_DTYPE), (REQUEST_COLUMNS, REQUEST_DTYPE)],
)
def test_the_arrays_have_the_columns_of_the_schema(
    columns: tuple[tuple[str, str], ...], dtype: np.dtype[np.void]
) -> None:
    """Names in order, 8 or 4 bytes each, nothing between them."""
    assert dtype.names == tuple(name for name, _ in columns)
    assert dtype.itemsize == sum({"q": 8, "i": 4}[kind] for _, kind in columns)


def test_the_row_of_a_step_of_decodes_is_that_of_any_step() -> None:
    """What it is not given is 0."""
    row = pack_step(1, 2, 3, 0, 0, 4, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 6, 7, 8, 0, 0, 0, 0, 0)
    assert pack_decodes(1, 2, 3, pack_two(4, 5), 6, pack_two(7, 8)) == row


def test_rows_come_back_as_written() -> None:
    """Every column of every table keeps its own value."""
    recorder = Recorder()
    recorder.step_rows += pack_step(*range(1, len(STEP_COLUMNS) + 1))
    recorder.request(*range(101, 101 + len(REQUEST_COLUMNS)))
    recorder.state(5, 7, BLOCKED, "no_slot", 3)
    recorder.state(6, 7, BLOCKED)
    assert recorder.num_steps == 1
    records = recorder.records()
    assert records.steps[0].item() == tuple(range(1, len(STEP_COLUMNS) + 1))
    assert records.requests[0].item() == tuple(range(101, 101 + len(REQUEST_COLUMNS)))
    assert [row.item() for row in records.states] == [(5, 7, BLOCKED, 1, 3), (6, 7, BLOCKED, 0, MISSING)]
    assert records.texts == ("", "no_slot")


def test_a_step_that_landed_gets_its_times() -> None:
    """Of three rows the last but one: when it was launched, began and how long it took; nothing else changes."""
    recorder = Recorder()
    rows = [[100 * n + i for i in range(len(STEP_COLUMNS))] for n in range(3)]
    for row in rows:
        recorder.step_rows += pack_step(*row)
        recorder.lanes.launched(row[0], row[0] + 5)
    recorder.landed(2, 107, 108, 9)
    rows[1][:2] = 108, 9
    assert [list(row.item()) for row in recorder.records().steps] == rows
    assert list(recorder.lanes.open) == [(0, 5), (100, 107), (200, 205)]
    recorder.drop_last_steps(2)
    assert [list(row.item()) for row in recorder.records().steps] == rows[:1]
    assert list(recorder.lanes.open) == [(0, 5)]


def test_requests_are_sorted_by_id() -> None:
    """The order in which requests ended does not show; no second table is made for that."""
    recorder = Recorder()
    for id in (3, 1, 2):
        recorder.request(id, *[10 * id] * (len(REQUEST_COLUMNS) - 1))
    requests = recorder.records().requests
    assert requests["request_id"].tolist() == [1, 2, 3]
    assert requests["num_retries"].tolist() == [10, 20, 30]
    assert np.shares_memory(requests, recorder.records().requests)


def test_texts_are_stored_once() -> None:
    """The same string has the same code; the empty one is 0."""
    recorder = Recorder()
    assert [recorder.text(text) for text in ("", "chat", "code", "chat")] == [0, 1, 2, 1]


def test_an_empty_run_has_empty_tables() -> None:
    """Nothing recorded gives tables with columns and no rows."""
    records = Recorder().records()
    assert [len(table) for table in (records.requests, records.steps, records.states)] == [0, 0, 0]
    assert records.requests.dtype == REQUEST_DTYPE


def test_a_number_too_large_for_its_column_is_not_cut() -> None:
    """A column of 4 bytes refuses what it cannot hold instead of wrapping around."""
    with pytest.raises(struct.error):
        pack_step(*[1 << 40] * len(STEP_COLUMNS))


def test_every_code_has_a_name() -> None:
    """States and outcomes are named, each name once."""
    assert len(set(STATE_NAMES.values())) == len(STATE_NAMES) == 8
    assert list(OUTCOME_NAMES.values()) == ["finished", "rejected", "cancelled", "unfinished", "handed_over", "pruned"]


def test_a_packed_row_is_a_row_of_the_array() -> None:
    """8 bytes little-endian for q, 4 for i: what the packer writes, numpy reads under the same names."""
    packer, dtype = row_format((("time", "q"), ("count", "i")))
    assert packer.pack(1, -2) == b"\1" + bytes(7) + b"\xfe\xff\xff\xff"
    (row,) = np.frombuffer(packer.pack(1 << 40, -2), dtype)
    assert (row["time"], row["count"]) == (1 << 40, -2)


def test_tables_come_back_from_their_arrays() -> None:
    """All but `replicas`; nothing in them needs pickling, and texts keep their letters."""
    recorder = Recorder()
    recorder.step_rows += pack_step(*range(len(STEP_COLUMNS)))
    recorder.request(*range(len(REQUEST_COLUMNS)))
    recorder.state(5, 7, BLOCKED, "naïve")
    recorder.lanes.launched(1, 2)
    recorder.details["never_fits"] = "6 KV blocks"
    records = recorder.records()
    arrays = records.arrays()
    assert set(arrays) == {"requests", "steps", "states", "lanes", "words"}
    assert not any(array.dtype.hasobject for array in arrays.values())
    assert "naïve" in str(arrays["words"])
    again = Records.from_arrays(arrays)
    for table in ("requests", "steps", "states", "lanes"):
        assert np.array_equal(getattr(again, table), getattr(records, table))
    del arrays["lanes"]
    assert not len(Records.from_arrays(arrays).lanes), "as of older files"
    assert (again.texts, again.details) == (("", "naïve"), {"never_fits": "6 KV blocks"})


@pytest.mark.parametrize("table", ["requests", "steps", "states", "lanes"])
def test_tables_of_another_version_are_refused(table: str) -> None:
    """A table with other columns is named."""
    arrays = Recorder().records().arrays()
    with pytest.raises(ValueError, match=f"the columns of {table} are those of another version"):
        Records.from_arrays({**arrays, table: np.zeros(1)})


@pytest.mark.parametrize("sent_ns", [None, 3])
def test_one_that_reached_no_engine_has_its_request_and_no_times(sent_ns: int | None) -> None:
    """It was sent and arrived when it ended, unless the client sent it before; the router's times are kept."""
    recorder = Recorder()
    request = Request(4, 5, 8, 9, priority=2, request_class="chat", tenant="a")
    arrival = Arrival(request, 9, sent_ns=sent_ns, router_ns=11, failover_ns=12, num_retries=13)
    recorder.unserved(arrival, 20, UNFINISHED, "time_limit")
    records = recorder.records()
    (row,) = records.requests
    given = {
        "request_id": 4,
        "request_class": 1,
        "tenant": 2,
        "priority": 2,
        "prompt_tokens": 8,
        "max_output_tokens": 9,
    }
    given |= {"sent_ns": 20 if sent_ns is None else 3, "arrival_ns": 20, "ended_ns": 20, "outcome": UNFINISHED}
    given |= {"reason": 3, "router_ns": 11, "failover_ns": 12, "num_retries": 13}
    missing = ("scheduled_ns", "first_token_ns", "last_token_ns", "first_delivery_ns", "delivered_ns")
    expected = dict.fromkeys(REQUEST_DTYPE.names or (), 0) | given | dict.fromkeys(missing, MISSING)
    assert {name: int(row[name]) for name in expected} == expected
    assert records.texts == ("", "chat", "a", "time_limit")


def test_a_step_cut_short_ends_when_it_was_cut() -> None:
    """Of two steps the last one alone, and nothing of it but its duration; nobody processes it."""
    recorder = Recorder()
    for start_ns in (100, 110):
        recorder.step_rows += pack_step(start_ns, 10, *range(2, len(STEP_COLUMNS)))
        recorder.lanes.launched(start_ns - 2, start_ns - 1)
    recorder.lanes.processed(111, 3)
    recorder.cut_last_steps(1, 113)
    assert recorder.records().lanes.tolist() == [(98, 99, 111, 3), (108, 109, MISSING, 0)]
    recorder.lanes.launched(120, 121)
    recorder.lanes.processed(130, 0)
    assert recorder.records().lanes[2].item() == (120, 121, 130, 0), "of the engine that came after"
    assert (len(recorder), recorder.num_steps) == (0, 2)
    steps = recorder.records().steps
    assert steps[0].item() == (100, 10, *range(2, len(STEP_COLUMNS)))
    assert steps[1].item() == (110, 3, *range(2, len(STEP_COLUMNS)))


def _full(recorder: Recorder, number: int) -> None:
    """Writes a row of each table, of a step that has begun, after the one before it has been processed."""
    recorder.lanes.launched(number, number + 1)
    recorder.step_rows += pack_step(*range(number, number + len(STEP_COLUMNS)))
    if number:
        recorder.lanes.processed(number + 2, number)
    recorder.state(number, 7, BLOCKED, f"why {number % 3}")
    recorder.request(1000 - number, *range(1, len(REQUEST_COLUMNS)))


def test_what_was_spilled_is_read_as_if_it_had_stayed() -> None:
    """Tables, counts and rows from any number on are equal, with steps in flight and packed ones; the memory is not."""
    spool = DiskSpool()
    kept, spilling = Recorder(), Recorder()
    for number in range(40):
        for recorder in (kept, spilling):
            _full(recorder, number)
        if number % 8 == 4:
            spilling.pack_steps()
        if number % 10 == 9:
            spilling.spill(spool, 1)
            assert spilling.num_bytes == STEP_DTYPE.itemsize
        spilling.amend(1, "free_blocks", 5)
        kept.amend(1, "free_blocks", 5)
        assert (len(spilling), spilling.num_steps) == (len(kept), kept.num_steps) == (number + 1,) * 2
    _full(kept, 40)
    _full(spilling, 40)
    for first in (0, 1, 15, 39, 40, 41):
        assert spilling.requests_from(first).tolist() == kept.requests_from(first).tolist()
        assert spilling.steps_from(first).tolist() == kept.steps_from(first).tolist()
    for _ in range(2):  # reading changes nothing
        found, expected = spilling.records(), kept.records()
        for name in ("requests", "steps", "states", "lanes"):
            assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
        assert (found.texts, found.details) == (expected.texts, expected.details)


def test_a_step_in_flight_has_a_row_of_its_host_without_an_end() -> None:
    """Before it is processed."""
    recorder = Recorder()
    recorder.lanes.launched(1, 2)
    recorder.lanes.launched(3, 4)
    open_rows = [(1, 2, MISSING, 0), (3, 4, MISSING, 0)]
    assert recorder.records().lanes.tolist() == open_rows
    recorder.lanes.processed(5, 6)
    assert recorder.records().lanes.tolist() == [(1, 2, 5, 6), open_rows[1]]


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_the_hosts_part_of_repeated_steps_is_as_noted_one_by_one(count: int, packs: bool) -> None:
    """`count` steps, a spill, one step, two more, packed or not: with two in flight the scheduler is asked when the
    results of the oldest are processed, the first time 5 ns after the latest had begun, then 3 (6) after each."""
    starts_ns = [100 * number + number**2 for number in range(count + 6)]
    repeated, one_by_one, spools = Recorder(), Recorder(), (DiskSpool(), DiskSpool())

    def begin(number: int) -> None:
        for recorder in (repeated, one_by_one):
            recorder.step_rows += pack_step(starts_ns[number], 7, *range(2, len(STEP_COLUMNS)))

    def launch(now_ns: int) -> None:
        for recorder in (repeated, one_by_one):
            recorder.lanes.launched(now_ns, now_ns + 2)

    def leap(first: int, count: int, process_ns: int) -> None:
        called_ns, calls_ns, wasted = starts_ns[first - 2] + 5, list[int](), (4, 7)
        for number in range(count):
            calls_ns.append(called_ns)
            one_by_one.lanes.processed(called_ns, wasted[number] if number < 2 else 0)
            one_by_one.lanes.launched(called_ns, called_ns + 2)
            begin(first + number)
            called_ns = starts_ns[first + number] + (process_ns if number else 5)
        repeated.lanes.repeated(count, calls_ns[0], 2, process_ns, 5, wasted, (calls_ns[-2:][0], calls_ns[-1]))

    for number in range(2):
        begin(number)
        launch(starts_ns[number] - 10)
    leap(2, count, 3)
    for recorder, spool in zip((repeated, one_by_one), spools, strict=True):
        if packs:
            recorder.pack_steps()
        recorder.spill(spool, 2)
        recorder.lanes.processed(starts_ns[count + 1] + 50, 1)
    begin(count + 2)
    launch(starts_ns[count + 2] - 20)
    leap(count + 3, 2, 6)
    if packs:
        repeated.pack_steps()
    for _ in range(2):  # reading changes nothing
        assert repeated.records().lanes.tolist() == one_by_one.records().lanes.tolist()
    assert len(repeated.records().lanes) == count + 5


def test_pieces_of_records_bring_the_lanes_of_their_own_steps() -> None:
    """Those of the steps repeated from the piece before too."""
    recorder = Recorder()
    for number in range(90):
        recorder.step_rows += pack_step(10 * number, 7, *range(2, len(STEP_COLUMNS)))
        recorder.lanes.launched(10 * number - 3, 10 * number - 1)
        recorder.lanes.processed(10 * number + 9, 0)
        if number % 20 == 19:
            recorder.pack_steps()
    pieces = list(recorder.records().pieces(15, 2))
    assert [behind for behind, _ in pieces] == [0, *[2] * (len(pieces) - 1)] and len(pieces) > 2
    for _, piece in pieces:
        assert (piece.lanes["called_ns"] == piece.step_rows["start_ns"] - 3).all()
        assert len(piece.lanes) == len(piece.step_rows)
    assert sum(len(piece.lanes) - behind for behind, piece in pieces) == 90


def test_steps_that_are_packed_are_read_as_they_were_written() -> None:
    """Rows and columns, whatever the width of a value, and the last rows can still be cut."""
    rows = [
        (start_ns, 2**40 - start_ns, -start_ns, 7, *(start_ns % 300 * n for n in range(len(STEP_COLUMNS) - 4)))
        for start_ns in range(0, 2_000, 2)
    ]
    recorder = Recorder()
    for number, row in enumerate(rows):
        recorder.step_rows += pack_step(*row)
        if number % 300 == 299:
            recorder.pack_steps()
    recorder.cut_last_steps(1, rows[-1][0] + 1)
    rows[-1] = (rows[-1][0], 1, *rows[-1][2:])
    assert recorder.num_steps == len(rows) and len(recorder.step_rows) < len(rows) * STEP_DTYPE.itemsize
    records = recorder.records()
    assert records.num_steps == len(rows) and records.steps.tolist() == rows and records.steps is records.steps
    for at, (name, column) in enumerate(records.step_columns.items()):
        assert column.dtype == STEP_DTYPE[name] and column.tolist() == [row[at] for row in rows]


def test_many_steps_take_little_memory_while_they_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond so many bytes of rows the journal packs half of them, before it writes the next."""
    monkeypatch.setattr("batchsim.kernel.journal.PACK_BYTES", 10 * STEP_DTYPE.itemsize)
    recorder, scheduler = Recorder(), SimpleNamespace(kv=SimpleNamespace(num_free=1), num_waiting=0, num_running=0)
    journal = Journal(recorder, 0)
    for start_ns in range(100):
        journal.step(cast(Any, scheduler), Batch(None, [], 0), start_ns, 1, 0, 0)
        assert len(recorder.step_rows) <= 11 * STEP_DTYPE.itemsize
    assert recorder.records().steps["start_ns"].tolist() == list(range(100))


@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097, 9000])
def test_columns_hold_what_the_rows_hold(count: int) -> None:
    """In the rows' order of columns, each in one piece, whole and parts of blocks alike; made once of steps."""
    steps = np.zeros(count, STEP_DTYPE)
    for number, name in enumerate(STEP_DTYPE.names or ()):
        steps[name] = np.arange(count) * (number + 1) + number
    records = replace(Recorder().records(), step_rows=steps)
    found = records.step_columns
    assert list(found) == list(STEP_DTYPE.names or ()) and found is records.step_columns
    for name, column in found.items():
        assert column.dtype == STEP_DTYPE[name] and column.flags.c_contiguous and column.flags.aligned
        assert column.tolist() == steps[name].tolist()


def test_steps_from_a_number_on_are_the_same_packed_or_not() -> None:
    """Whoever asks again for the steps since gets each row once."""
    recorder = Recorder()
    for i in range(20):
        recorder.step_rows += pack_step(*(10 * i, 10, *[i] * 22))
    before = recorder.steps_from(3).tolist()
    recorder.pack_steps()
    assert recorder.steps_from(3).tolist() == before and len(before) == 17
    assert recorder.steps_from(15).tolist() == before[12:]


def test_rows_of_requests_can_be_read_while_more_come() -> None:
    """`requests_from` has the rows from one on, in the order of ending, and recording goes on after it."""
    recorder = Recorder()
    width = len(REQUEST_DTYPE.names or ())
    for number in (7, 3, 5):
        recorder.request(number, *[0] * (width - 1))
    assert recorder.requests_from(1)["request_id"].tolist() == [3, 5]
    recorder.request(1, *[0] * (width - 1))
    assert recorder.requests_from(3)["request_id"].tolist() == [1]
    assert len(recorder.requests_from(4)) == 0
