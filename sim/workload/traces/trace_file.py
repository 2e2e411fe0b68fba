"""Opens a trace file of any container (CSV, JSON lines, JSON array, Parquet; text also gzipped) and yields its rows."""

from __future__ import annotations

import csv
import errno
import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, Literal

from batchsim.base.errors import TraceError
from batchsim.base.files import TABLE_BYTES, TRACE_BYTES, open_file, unique_keys
from batchsim.workload.traces.own_reader import own_records
from batchsim.workload.traces.trace_config import TraceConfig
from batchsim.workload.traces.values import shown

_NAMES_SHOWN = 12  # of a file's columns in an error
_CHUNK_BYTES = 1 << 20
_BATCH_ROWS = 65_536  # of Parquet in memory at a time
_LINE_LETTERS = 1 << 24  # of a row of text at most; a row of 100,000 hash_ids has a million

# Decimal keeps "0.1" exact; NaN and Infinity, which Python's JSON allows, become what the value readers refuse.
_READ: dict[str, Any] = {"parse_float": Decimal, "parse_constant": Decimal}
_JSON = json.JSONDecoder(**_READ, object_pairs_hook=unique_keys)


def _whole(digits: str) -> int | Decimal:
    """The integer of a JSON number; a Decimal where it has more digits than `int` takes, for its reader to refuse."""
    return int(digits) if len(digits) < 1000 else Decimal(digits)


_JSON_DIGITS = json.JSONDecoder(**_READ, parse_int=_whole, object_pairs_hook=unique_keys)  # slower: number by number

Row = tuple[int, Any]
Decode = Callable[[Any], Sequence[object]]


@dataclass(frozen=True)
class TraceSource:
    """A file, its container and the names of its columns (of the first record's keys for JSON).

    `first` is the first JSON record, {} for other containers or where it is no object. `reader` is the user's own that
    reads a container of kind `own`.
    """

    path: Path
    container: Literal["CSV", "JSON lines", "JSON array", "Parquet", "own"]
    names: tuple[str, ...]
    first: dict[str, object]
    reader: str = ""

    def where(self, number: int) -> str:
        """The place of row `number` as `rows` counts: `file:line`, or the item of an array or a table."""
        kind = {"JSON array": " item ", "Parquet": " row ", "own": " row "}.get(self.container, ":")
        return f"{self.path}{kind}{number}"

    def listing(self) -> str:
        """The column names for an error message."""
        names = ", ".join(shown(name) for name in self.names[:_NAMES_SHOWN])
        return names + (f" and {len(self.names) - _NAMES_SHOWN} more" if len(self.names) > _NAMES_SHOWN else "")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns the failures of reading a file into TraceError."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: damaged gzip data ({error}). Fetch the file again.") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}.") from None


def open_source(config: TraceConfig, base: Path) -> TraceSource:
    """The file of `config`, `base` being the folder of relative paths, with its hash checked.

    TraceError where it is missing, has another hash, is empty or is no table.
    """
    path = base / os.path.expanduser(config.path)
    with reading(path):
        if not path.exists():
            fetch = f"Fetch {config.fetch}" if config.fetch else "Correct trace.path"
            digest = f" (SHA-256 {config.sha256.lower()})" if config.sha256 else ""
            place = f" and put it at {config.path} in this folder, or in that of --traces" if config.fetch else ""
            raise TraceError(f"{path}: no such file. {fetch}{digest}{place}.")
        if path.is_dir():
            raise TraceError(f"{path}: not a file. trace.path names one file.")
        if config.sha256 is not None:
            _check_sha256(path, config)
        if config.reader is not None:
            return TraceSource(path, "own", (), {}, config.reader)
        return _peek(path)


class _Unpacked(io.RawIOBase):
    """The uncompressed bytes of a gzipped file. OSError beyond TRACE_BYTES: a short file can unpack to any number."""

    def __init__(self, packed: BinaryIO) -> None:
        self._packed, self._file = packed, gzip.GzipFile(fileobj=packed)
        self._left = TRACE_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read1(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise OSError(errno.EFBIG, f"has more than {TRACE_BYTES:,} bytes when it is unpacked")
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        self._packed.close()
        super().close()


def _open(path: Path) -> BinaryIO:
    """The uncompressed bytes of `path`; gzip is recognised by its magic number, not by the name."""
    file = open_file(path)
    magic = file.read(2)
    file.seek(0)
    return io.BufferedReader(_Unpacked(file), _CHUNK_BYTES) if magic == b"\x1f\x8b" else file


def _text(path: Path, newline: str | None) -> io.TextIOWrapper:
    """The text without BOM. Bytes that are not UTF-8 survive as escapes: only the columns read must be clean."""
    return io.TextIOWrapper(_open(path), encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def _lines(path: Path, stream: io.TextIOWrapper) -> Iterator[str]:
    """The lines of a text. TraceError for one that no row can be as long as, before it is read."""
    number = 0
    while line := stream.readline(_LINE_LETTERS):
        number += 1
        if len(line) == _LINE_LETTERS:
            raise TraceError(
                f"{path}:{number}: has {_LINE_LETTERS:,} letters or more, which is no row. Break the file into lines."
            )
        yield line


def _check_sha256(path: Path, config: TraceConfig) -> None:
    digest = hashlib.sha256()
    with _open(path) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    want = (config.sha256 or "").lower()
    if digest.hexdigest() != want:
        fetch = f"Fetch {config.fetch}" if config.fetch else "Fetch the right file"
        raise TraceError(f"{path}: SHA-256 is {digest.hexdigest()}, expected {want}. {fetch} or correct trace.sha256.")


def _peek(path: Path) -> TraceSource:
    with _open(path) as stream:
        head = stream.read(4096)
    if head.startswith(b"PAR1"):
        return TraceSource(path, "Parquet", _parquet_names(path), {})
    if b"\0" in head:
        raise TraceError(f"{path}: holds zero bytes: not CSV, JSON or Parquet in UTF-8. Convert it to one of them.")
    with _text(path, None) as stream:
        line = stream.readline(_LINE_LETTERS)  # a JSON array may be one line, however long
        while line and not line.strip():
            line = stream.readline(_LINE_LETTERS)
        line = line.strip()
    if not line:
        raise TraceError(f"{path}: empty. A trace needs at least one row.")
    if line.startswith("["):
        items = _array(path)
        first = items[0] if items and isinstance(items[0], dict) else {}
        return TraceSource(path, "JSON array", tuple(first), first)
    if line.startswith("{"):
        first = _first_record(line)
        return TraceSource(path, "JSON lines", tuple(first), first)
    with _text(path, "") as stream:
        header = next(_csv_rows(path, stream))[1]
    return TraceSource(path, "CSV", tuple(name.strip() for name in header), {})


def _first_record(line: str) -> dict[str, object]:
    try:
        record = json.loads(line, **_READ, parse_int=_whole)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}  # reading the rows reports what is wrong, with its line


def rows(source: TraceSource, columns: Sequence[str]) -> tuple[Iterator[Row], Decode]:
    """The rows as `(number, raw)` and the function that takes a raw row's values of `columns`.

    The function raises ValueError on a broken row. Numbers count lines of text, from 1, or items. Use within `reading`.
    """
    if source.container == "Parquet":
        return _parquet_rows(source, columns), tuple
    if source.container == "CSV":
        return _csv_data(source), _csv_decode(source, columns)
    pick = itemgetter(*columns)

    def decode(raw: object) -> Sequence[object]:
        if isinstance(raw, ValueError):
            raise raw
        record = record_of(raw)
        try:
            return pick(record)
        except KeyError as missing:
            raise ValueError(_why_missing(record, str(missing.args[0]))) from None

    if source.container == "own":
        return own_records(source.reader, source.path), decode
    if source.container == "JSON array":
        return iter(enumerate(_array(source.path), 1)), decode
    return _json_lines(source.path), decode


def _decode(text: str) -> Any:
    """The JSON value in `text`. Raises as `json` does, and where a key is given twice."""
    try:
        return _JSON.decode(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return _JSON_DIGITS.decode(text)


def record_of(raw: object) -> dict[str, object]:
    """The JSON object of a row as `rows` yields it. ValueError where it is none."""
    return raw if isinstance(raw, dict) else _object(raw)


def _object(raw: object) -> dict[str, object]:
    try:
        record = _decode(raw.strip()) if isinstance(raw, str) else raw
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise ValueError("not JSON of a trace (nested too deep)") from None
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    return record


def _why_missing(record: dict[str, object], name: str) -> str:
    if "delay" in record and "timestamp" not in record:
        return "a later turn of a session, timed by its delay after the turn before; sessions are not replayed"
    if "text_input" in record:
        return "gives its prompt as text (text_input), not as a number of tokens"
    return f"{shown(name)} is missing"


def _json_lines(path: Path) -> Iterator[Row]:
    with _text(path, None) as stream:
        for number, line in enumerate(_lines(path, stream), 1):
            if not line.isspace():
                yield number, line


def _array(path: Path) -> list[object]:
    with _text(path, None) as stream:
        try:
            text = stream.read(TABLE_BYTES)
            if len(text) == TABLE_BYTES:
                raise TraceError(f"{path}: has {TABLE_BYTES:,} letters or more in one array. Write JSON lines instead.")
            return _decode(text.strip())
        except json.JSONDecodeError as error:
            raise TraceError(
                f"{path}:{error.lineno}: not JSON ({error.msg} at column {error.colno}). Correct it."
            ) from None
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}: not JSON ({error}). Correct it.") from None


def _csv_rows(path: Path, stream: io.TextIOWrapper) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(_lines(path, stream), strict=True)
    try:
        for row in reader:
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        raise TraceError(f"{path}:{reader.line_num}: not CSV ({error}). Correct the line.") from None


def _csv_data(source: TraceSource) -> Iterator[Row]:
    with _text(source.path, "") as stream:
        lines = _csv_rows(source.path, stream)
        next(lines)
        yield from lines


def _csv_decode(source: TraceSource, columns: Sequence[str]) -> Decode:
    width = len(source.names)
    pick = itemgetter(*(source.names.index(name) for name in columns))

    def decode(row: list[str]) -> Sequence[object]:
        if len(row) != width:
            raise ValueError(f"{len(row)} fields where the header has {width}")
        return pick(row)

    return decode


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """The open file; its library is imported here alone, and its many kinds of failure become TraceError."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise TraceError(f"{path}: reading Parquet needs pyarrow. pip install pyarrow, or convert to CSV.") from None
    try:
        with open_file(path) as opened, pyarrow.parquet.ParquetFile(opened) as file:
            yield file
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: damaged Parquet ({' '.join(str(error).split())[:80]}). Write it anew.") from None


def _parquet_names(path: Path) -> tuple[str, ...]:
    with _parquet(path) as file:
        return tuple(file.schema_arrow.names)


def _parquet_rows(source: TraceSource, columns: Sequence[str]) -> Iterator[Row]:
    with _parquet(source.path) as file:
        number = 0
        for batch in file.iter_batches(_BATCH_ROWS, columns=list(columns)):
            for row in zip(*(_parquet_values(batch.column(name)) for name in columns), strict=True):
                number += 1
                yield number, row


def _parquet_values(column: Any) -> list[object]:
    """The values of a column; timestamps as ISO text: exact, and for the same reader as in other files."""
    import pyarrow

    if pyarrow.types.is_timestamp(column.type):
        column = column.cast(pyarrow.timestamp("ns", "UTC" if column.type.tz else None)).cast(pyarrow.string())
    return column.to_pylist()
