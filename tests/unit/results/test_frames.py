"""Tables: columns, nulls, categories, and Parquet files that are the same bytes for the same records."""

from __future__ import annotations

import io

import pandas as pd
import pyarrow.parquet as pq
import pytest

from batchsim.kernel.lane_rows import LANE_COLUMNS
from batchsim.kernel.record import MISSING, REQUEST_COLUMNS, STATE_COLUMNS, STEP_COLUMNS, Records
from batchsim.results.frames import COLUMN_DOCS, frames, pack_tables, to_frame, to_records
from tests.support.metrics_helpers import arrival, records_of, run


def _records() -> Records:
    """Preempted, cancelled and finished requests."""
    arrivals = [arrival(i, 700 * i, 9, 15) for i in range(8)]
    return run([*arrivals, arrival(8, 6000, 30, 9, cancel_ns=6100)], num_blocks=12).records


def test_every_column_is_documented():
    """COLUMN_DOCS names the recorded columns, replica first, in order."""
    recorded = {"requests": REQUEST_COLUMNS, "steps": STEP_COLUMNS, "states": STATE_COLUMNS}
    for name, columns in recorded.items():
        expected = ["replica", *(column for column, _ in columns)]
        assert list(COLUMN_DOCS[name]) == expected == list(frames(_records())[name].columns)


def test_codes_are_decoded_and_missing_is_null():
    """Outcomes, states and reasons read as words; a time that was never reached is <NA>, in an integer column."""
    tables = frames(_records())
    requests, states = tables["requests"], tables["states"]
    lost = requests[requests["request_id"] == 8].iloc[0]
    assert (lost["outcome"], lost["reason"], lost["replica"]) == ("cancelled", "client_cancel", 0)
    assert lost["delivered_ns"] is pd.NA and requests["delivered_ns"].dtype == pd.Int64Dtype()
    assert requests["ended_ns"].dtype == "int64"
    preempted = states[states["state"] == "preempted"]
    assert set(preempted["reason"]) == {"kv_blocks"} and preempted["blocker"].notna().all()
    assert states.loc[states["state"] == "prefill", "blocker"].isna().all()


def test_a_priority_of_minus_one_is_a_priority():
    """Only times and blockers can be missing; -1 elsewhere is a value."""
    assert frames(records_of([{"priority": MISSING}]))["requests"]["priority"].tolist() == [-1]


def test_same_records_same_bytes():
    """Two runs of the same requests give identical files, and no others."""
    first, second = pack_tables(_records()), pack_tables(_records())
    assert first == second and set(first) == {"requests.parquet", "steps.parquet", "states.parquet"}


def test_an_engine_that_is_ahead_leaves_the_host_s_part_of_its_steps():
    """In a file of its own, and read back; a step that a cut run never processed has no such time."""
    lanes = [(0, 2, 8, 1), (2, 4, MISSING, 0)]
    records = records_of([{}], [{"start_ns": 2, "duration_ns": 4}, {"start_ns": 6, "duration_ns": 1}], lanes=lanes)
    packed = pack_tables(records)
    assert set(packed) == {"requests.parquet", "steps.parquet", "states.parquet", "lanes.parquet"}
    tables = {name.partition(".")[0]: to_frame(data) for name, data in packed.items()}
    assert list(tables["lanes"]) == list(COLUMN_DOCS["lanes"]) == ["replica", *(name for name, _ in LANE_COLUMNS)]
    assert tables["lanes"]["processed_ns"].tolist() == [8, pd.NA] and set(tables["lanes"]["replica"]) == {0}
    assert to_records(**tables).lanes.tolist() == lanes
    assert "lanes" not in frames(_records())


@pytest.mark.parametrize("empty", [False, True])
def test_tables_come_back_equal(empty):
    """Reading gives the frames that were written, categories and nulls included; an empty run gives empty tables."""
    records = records_of([]) if empty else _records()
    packed = pack_tables(records)
    for name, frame in frames(records).items():
        table = to_frame(packed[f"{name}.parquet"])
        pd.testing.assert_frame_equal(table, frame, check_categorical=not empty)


def test_files_carry_their_documentation():
    """A column's description travels with the file."""
    schema = pq.read_schema(io.BytesIO(pack_tables(_records())["steps.parquet"]))
    assert schema.field("free_blocks").metadata == {b"description": b"KV blocks free while the step ran"}
