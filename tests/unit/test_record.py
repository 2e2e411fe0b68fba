"""The tables hold what was written, under the names of the schema."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from sim.record import (
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
    Recorder,
    pack_step,
)


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


def test_requests_are_sorted_by_id() -> None:
    """The order in which requests ended does not show."""
    recorder = Recorder()
    for id in (3, 1, 2):
        recorder.request(id, *[0] * (len(REQUEST_COLUMNS) - 1))
    assert recorder.records().requests["request_id"].tolist() == [1, 2, 3]


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
    assert len(set(STATE_NAMES.values())) == len(STATE_NAMES) == 7
    assert list(OUTCOME_NAMES.values()) == ["finished", "rejected", "cancelled", "unfinished"]
