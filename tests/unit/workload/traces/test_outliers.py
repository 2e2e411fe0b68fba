"""One wild time in a trace: told by its row, dropped where asked, and never counted second by second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from batchsim.base.errors import TraceError
from batchsim.base.units import NS_PER_S, YEAR_NS
from batchsim.report.pictures.trace_picture import draw_arrivals
from batchsim.workload.traces.arrival_stats import index_of_dispersion
from batchsim.workload.traces.read_trace import read_trace
from batchsim.workload.traces.trace_config import Columns, TraceConfig

EPOCH_S = 1_700_000_000
WILD = {"zero": (0, "53.9 years before"), "late": (5_000_000_000, "105 years after")}


def log(folder: Path, *stamps: object, **fields: Any) -> TraceConfig:
    """A trace with a row at each time; line 2 is the first."""
    path = folder / "t.csv"
    path.write_text("t,in,out\n" + "".join(f"{stamp},10,5\n" for stamp in stamps))
    stated = {"columns": Columns(arrival="t", prompt="in", output="out"), "time_unit": "s"}
    return TraceConfig(str(path), **(stated | fields))


def refusal(config: TraceConfig) -> str:
    with pytest.raises(TraceError) as refused:
        read_trace(config, Path())
    return str(refused.value)


@pytest.mark.parametrize(("wild", "how_far"), WILD.values(), ids=WILD)
def test_a_time_years_from_the_others_is_refused_by_its_row(tmp_path: Path, wild: int, how_far: str) -> None:
    """The row in the middle of the file is named, whichever side of the others its time is on."""
    stamps = [EPOCH_S + i for i in range(50)]
    message = refusal(log(tmp_path, *stamps[:20], wild, *stamps[20:]))
    assert message.startswith(f"{tmp_path}/t.csv:22: its time lies {how_far} those of most rows. Correct it")
    assert "on_broken: drop" in message and "\n" not in message


@pytest.mark.parametrize(("wild", "how_far"), WILD.values(), ids=WILD)
def test_outliers_are_dropped_where_broken_rows_are(tmp_path: Path, wild: int, how_far: str) -> None:
    """`on_broken: drop` leaves the row out, counts it and names it; the others are as if it had never been there."""
    rows = read_trace(log(tmp_path, EPOCH_S, wild, EPOCH_S + 9, on_broken="drop"), Path())
    assert rows.arrival_ns is not None and rows.arrival_ns.tolist() == [0, 9 * NS_PER_S]
    (note,) = [note for note in rows.notes if "for their times" in note]
    assert note.startswith("1 of 3 rows dropped for their times: ") and f"t.csv:3: its time lies {how_far}" in note


def test_a_tolerant_reader_is_told_first(tmp_path: Path) -> None:
    """What only looks at a trace gets all rows, and the odd one as the first note."""
    rows = read_trace(log(tmp_path, EPOCH_S, 0, EPOCH_S + 9), Path(), tolerant=True)
    assert len(rows) == 3 and "t.csv:3: its time lies 53.9 years before" in rows.notes[0]


def test_times_that_64_bits_cannot_subtract_are_refused_by_all(tmp_path: Path) -> None:
    """From 1700 to 2200 is no difference of 64 bits; also a tolerant reader names the row."""
    stamps = [f"2200-01-01 00:00:0{i}" for i in range(3)]
    config = log(tmp_path, *stamps, "1700-01-01 00:00:00", time_unit="iso")
    with pytest.raises(TraceError, match=r"t\.csv:5: its time lies 500 years before"):
        read_trace(config, Path(), tolerant=True)


def test_several_apart_are_counted_and_the_first_in_the_file_is_named(tmp_path: Path) -> None:
    """Two zeros and a late one are three; the late one stands first."""
    message = refusal(log(tmp_path, EPOCH_S, 9_000_000_000, *[EPOCH_S + i for i in range(9)], 0, 0))
    assert "t.csv:3: its time lies 231 years after those of most rows; 2 more lie a year or more" in message


def test_trace_time_may_cut_it_off_and_need_not(tmp_path: Path) -> None:
    """A window without the odd row is read; one that holds it is refused."""
    stamps = (0, EPOCH_S, EPOCH_S + 9)
    kept = read_trace(log(tmp_path, *stamps, time=(NS_PER_S, 2 * EPOCH_S * NS_PER_S)), Path())
    assert len(kept) == 2
    assert "t.csv:2: its time lies" in refusal(log(tmp_path, *stamps, time=(0, 2 * EPOCH_S * NS_PER_S)))


def test_less_than_a_year_is_a_pause(tmp_path: Path) -> None:
    """A gap of a day less than a year is left alone, one of a year is not."""
    year_s = YEAR_NS // NS_PER_S
    assert len(read_trace(log(tmp_path, 0, 1, year_s), Path())) == 3
    assert "t.csv:4: its time lies 31,536,000 s after" in refusal(log(tmp_path, 0, 1, year_s + 1))


def test_dispersion_is_counted_by_the_windows_that_hold_something() -> None:
    """2^62 windows, of which two hold requests, are no 2^62 counters: n requests in one window have an index of n."""
    arrival_ns = np.array([0, 0, 0, 2**62], np.int64)
    assert index_of_dispersion(arrival_ns, 1) == pytest.approx(3)


def test_dispersion_is_that_of_whole_windows() -> None:
    """Variance over mean of the counts 2, 0, 1; what comes after the last whole window does not count."""
    arrival_ns = np.array([0, 9, 20, 30, 35], np.int64)
    assert index_of_dispersion(arrival_ns, 10) == pytest.approx(np.var([2, 0, 1]) / np.mean([2, 0, 1]))


@pytest.mark.parametrize("years", [1, 146])
def test_a_picture_of_years_has_no_more_windows_than_one_of_hours(years: int) -> None:
    """Windows grow with the span, in whole days."""
    ax = Figure().subplots()
    draw_arrivals(ax, np.array([0, 5 * NS_PER_S, years * YEAR_NS], np.int64))
    assert 300 < len(ax.patches[0].get_data().values) <= 400
