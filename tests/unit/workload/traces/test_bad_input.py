"""Bad traces and bad trace settings: one clear line each, with the place and the value."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from batchsim.base.errors import TraceError
from batchsim.workload.traces.read_trace import read_trace
from batchsim.workload.traces.trace_config import Columns, RateScale, TraceConfig

HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
GOOD = "0,10,1\n"
MAPPED = {"columns": Columns(arrival="t", prompt="in", output="out"), "time_unit": "ms"}


def refusal(folder: Path, data: str | bytes, **fields: Any) -> str:
    """The one-line error that reading `data` ends in."""
    path = folder / "bad.trace"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(TraceError) as error:
        read_trace(TraceConfig(str(path), **fields), folder)
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    assert len(message) < 400 + len(str(path))
    return message.removeprefix(str(path))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("1,-5,1", ":3: num_prefill_tokens '-5' is negative"),
        ("1,5,nan", ":3: num_decode_tokens 'nan' is not a number of tokens"),
        ("1,5,inf", ":3: num_decode_tokens 'inf' is not a number of tokens"),
        ("1,5.5,1", ":3: num_prefill_tokens '5.5' is not a whole number of tokens"),
        ("1,1_000,1", ":3: num_prefill_tokens '1_000' is not a number of tokens"),
        ("1,٣,1", ":3: num_prefill_tokens '٣' is not a number of tokens"),
        ("1,99999999999,1", ":3: num_prefill_tokens '99999999999' is above 2,147,483,647 tokens"),
        ("1,1e999999999,1", "is above 2,147,483,647 tokens"),
        ("1,5,", ":3: num_decode_tokens is missing"),
        ("1,5", ":3: 2 fields where the header has 3"),
        ("1,5,1,9", ":3: 4 fields where the header has 3"),
        ("-1,5,1", ":3: arrived_at '-1' is negative"),
        ("nan,5,1", ":3: arrived_at 'nan' is not a number"),
        (",5,1", ":3: arrived_at is missing"),
        ("soon,5,1", ":3: arrived_at 'soon' is not a number"),
        ("2023-11-16 18:17:03,5,1", "is not a number; write time_unit: iso"),
        ("1e18,5,1", ":3: arrived_at '1e18' is over 292 years if in s: look at the time unit"),
        ('1,"5,1', ":3: not CSV (unexpected end of data)"),
        ("1," + "5" * 200_000 + ",1", ":3: not CSV (field larger than field limit (131072))"),
    ],
)
def test_broken_csv_row_has_its_line(tmp_path: Path, row: str, expected: str) -> None:
    """A broken row is an error with file, line and value."""
    assert expected in refusal(tmp_path, HEADER + GOOD + row + "\n")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{not json}", ":2: not JSON (Expecting property name"),
        ("[1, 2]", ":2: not a JSON object"),
        ("null", ":2: not a JSON object"),
        ('{"t": 1, "in": 2}', ":2: 'out' is missing"),
        ('{"t": 1, "in": 2, "in": 300, "out": 1}', ":2: 'in' is given twice"),
        ('{"t": 1, "in": true, "out": 1}', ":2: in True is not a number of tokens"),
        ('{"t": 1, "in": NaN, "out": 1}', ":2: in NaN is not a number of tokens"),
        ('{"t": 1, "in": null, "out": 1}', ":2: in is missing"),
        ('{"t": 1, "in": [1], "out": 1}', ":2: in [1] is not a number of tokens"),
        ('{"t": -1, "in": 1, "out": 1}', ":2: t -1 is negative"),
        ('{"t": Infinity, "in": 1, "out": 1}', ":2: t Infinity is not a number"),
        ('{"t": 1, "in": ' + "9" * 5000 + ', "out": 1}', "999... is above 2,147,483,647 tokens"),
        ('{"t": -' + "9" * 5000 + ', "in": 1, "out": 1}', "999... is negative"),
        ("[" * 100_000, ":2: not JSON of a trace (nested too deep)"),
    ],
)
def test_broken_json_line_has_its_line(tmp_path: Path, line: str, expected: str) -> None:
    """A broken line of JSON is an error with file, line and reason."""
    good = '{"t": 0, "in": 5, "out": 1}\n'
    assert expected in refusal(tmp_path, good + line + "\n", **MAPPED)


@pytest.mark.parametrize("form", ["{}\n", "[{}]"], ids=["lines", "array"])
def test_a_number_of_thousands_of_digits_is_told_by_its_row(form: str, tmp_path: Path) -> None:
    """In the first record, by which the format is recognised, in an array too: the column, the number's beginning."""
    row = '{"timestamp": 0, "input_length": ' + "5" * 5000 + ', "output_length": 1, "hash_ids": [1]}'
    message = refusal(tmp_path, form.format(row))
    assert "1: input_length 555" in message and "5... is above 2,147,483,647 tokens" in message


def test_a_key_given_twice_in_the_first_record_is_told_too(tmp_path: Path) -> None:
    """Of a format that is recognised by that record as well, and of an array."""
    row = '{"timestamp": 0, "timestamp": 5, "input_length": 5, "output_length": 1, "hash_ids": [1]}'
    assert ":1: 'timestamp' is given twice" in refusal(tmp_path, row + "\n")
    assert "'timestamp' is given twice" in refusal(tmp_path, f"[{row}]")


@pytest.mark.parametrize(
    ("stamp", "expected"),
    [
        ("2023-02-30 00:00:00", "'2023-02-30' is no day of the calendar"),
        ("2023-02-03", "is not an ISO date and time"),
        ("2023-02-03 24:00:00", "is not an ISO date and time"),
        ("2023-02-03 00:00:00.1234567890", "is not an ISO date and time"),
        ("2023-02-03 00:00:00Z", "has a time zone, unlike those before it"),
        ("9999-02-03 00:00:00", "is over 292 years from 1970"),
        ("", "TIMESTAMP is missing"),
    ],
)
def test_broken_stamp_has_its_line(tmp_path: Path, stamp: str, expected: str) -> None:
    """A date that is none, too fine, or in another zone convention is an error with its line."""
    text = f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-02-03 00:00:00,1,1\n{stamp},1,1\n"
    message = refusal(tmp_path, text)
    assert message.startswith(":3: ")
    assert expected in message


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", ": empty"),
        (b"\n \n", ": empty"),
        (b"\xef\xbb\xbf", ": empty"),
        (HEADER.encode(), ": a header and no rows"),
        (b"a,b,c\n1,2,3\n", ": no known format: CSV with the columns 'a', 'b', 'c'"),
        (b"just a text\n", "no known format"),
        (b"[]", "first record is not a JSON object"),
        (b"[1, 2]", "first record is not a JSON object"),
        (b"[{]", ":1: not JSON"),
        (b"{broken\n", "first record is not a JSON object"),
        (HEADER.encode("utf-16"), ": holds zero bytes"),
        (b"PAR1 not really", ": damaged Parquet"),
        (gzip.compress(b"x" * 10_000, mtime=0)[:-9], ": damaged gzip data"),
        (b"\x1f\x8bnonsense", ": damaged gzip data"),
        (b"arrived_at,num_prefill_tokens,num_decode_tokens,arrived_at\n1,1,1,1\n", "stands there twice"),
        ((HEADER + "0,0,0\n").encode(), "no usable row of 1: 1 with 0 prompt and 0 output tokens, 0 broken"),
    ],
)
def test_unreadable_file(tmp_path: Path, data: bytes, expected: str) -> None:
    """A file that is empty, damaged or of no known kind is one line with what was found."""
    assert expected in refusal(tmp_path, data)


def test_not_a_file(tmp_path: Path) -> None:
    """A folder, an unknown user's home and a path too long are refused by name."""
    with pytest.raises(TraceError, match="not a file"):
        read_trace(TraceConfig(str(tmp_path)), tmp_path)
    with pytest.raises(TraceError, match="no such file"):
        read_trace(TraceConfig("~nobody-of-that-name/x.csv"), tmp_path)
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(TraceConfig("x" * 5000), tmp_path)


def test_columns_that_are_not_there(tmp_path: Path) -> None:
    """A column that the format or the mapping needs is named beside those the file has."""
    message = refusal(tmp_path, HEADER + GOOD, format="azure")
    assert ": no column 'TIMESTAMP', which format azure needs; it has 'arrived_at'," in message
    assert ": no column 't'; it has 'arrived_at'," in refusal(tmp_path, HEADER + GOOD, **MAPPED)


def test_slices_that_hold_nothing(tmp_path: Path) -> None:
    """A slice beyond the end is an error that says where the trace ends; so is a time slice without times."""
    text = HEADER + GOOD + "1,10,1\n"
    assert "no row from row 7 on" in refusal(tmp_path, text, rows=(7, 9))
    message = refusal(tmp_path, text, time=(10**10, 10**11))
    assert "no row in time [10 s, 100 s]; the trace lasts 1 s" in message
    lengths = "num_prefill_tokens,num_decode_tokens\n1,1\n"
    assert "has no arrival times" in refusal(tmp_path, lengths, time=(0, 10))
    assert "has no arrival times" in refusal(tmp_path, lengths, jitter=10)


def test_broken_rows_are_dropped_and_counted_on_request(tmp_path: Path) -> None:
    """With on_broken: drop the good rows stay; the count and the first broken line are in the notes."""
    path = tmp_path / "t.csv"
    path.write_text(HEADER + GOOD + "x,1,1\n1,5,2\n2,y,1\n")
    rows = read_trace(TraceConfig(str(path), on_broken="drop"), tmp_path)
    assert rows.prompt_tokens.tolist() == [10, 5]
    note = f"2 of 4 rows dropped as broken, the first {path}:3: arrived_at 'x' is not a number"
    assert note in rows.notes
    path.write_text(HEADER + "x,1,1\n")
    with pytest.raises(TraceError, match=r"no usable row of 1: 0 with 0 tokens, 1 broken, the first .*:2: arrived_at"):
        read_trace(TraceConfig(str(path), on_broken="drop"), tmp_path)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"path": ""}, "trace.path is empty"),
        ({"format": "mapping"}, "format mapping needs columns"),
        ({"columns": Columns(prompt="a", output="b"), "format": "azure"}, "cannot go with format azure"),
        ({"columns": Columns(prompt="a", output="b", arrival="c")}, "columns.arrival 'c' has no unit"),
        ({"columns": Columns(prompt="a", output="b"), "time_unit": "s"}, "time_unit s goes with no column"),
        ({"rows": (5, 5)}, "trace.rows [5, 5] holds nothing"),
        ({"time": (9, 5)}, "trace.time [9, 5] ns holds nothing"),
        ({"rows": (0, 5), "time": (0, 5)}, "both rows and time"),
        ({"sha256": "abc"}, "'abc' is not a SHA-256"),
    ],
)
def test_bad_settings(fields: dict[str, Any], expected: str) -> None:
    """Settings that contradict each other or hold nothing are refused before any file is opened."""
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        TraceConfig(**{"path": "x.csv", **fields})
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("factor", "by", "expected"),
    [
        (1.5, "overlay", "copies come whole"),
        (2, "thin", "thinning cannot add requests"),
    ],
)
def test_bad_rate_scales(factor: float, by: Any, expected: str) -> None:
    """A factor that its way of scaling cannot do is refused with another way."""
    with pytest.raises(ValueError, match=expected):
        RateScale(factor, by)


def test_one_column_for_two() -> None:
    """Two of arrival, prompt and output in the same column are refused."""
    with pytest.raises(ValueError, match="name one column twice"):
        Columns(prompt="n", output="n")
