"""Columns of a log beside arrival and lengths: class, tenant, session, status, measured latencies."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from batchsim.base.ranges import INT32_MAX
from batchsim.workload.traces.trace_config import DURATIONS, MAX_ITEMS, Columns, TraceConfig
from batchsim.workload.traces.trace_rows import Ints
from batchsim.workload.traces.values import clock_reader, refused, shown

NOT_TOLD = -1
"""In a column of durations or of sessions: the row does not say."""
MAX_CLASSES = 1000  # of a log: each has rows in every table
_TEXT_LETTERS = 256
_SUCCESS = {"", "ok", "success", "succeeded", "completed", "complete", "finished", "200", "true", "stop", "length"}
_SUCCESS |= {"unset", "status_code_ok", "status_code_unset", "1"}

Reader = Callable[[object], int]


@dataclass
class Labels:
    """The labels of a log's rows while it is read. `failed` counts the rows left out, by their status."""

    readers: dict[str, Reader] = field(default_factory=dict[str, Reader])
    numbers: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    values: dict[str, array[int]] = field(default_factory=dict[str, "array[int]"])
    failed: Counter[str] = field(default_factory=Counter[str])
    drop_failed: bool = True

    @classmethod
    def of(cls, columns: Columns, config: TraceConfig, duration_unit: str | None = None) -> Labels:
        """Readers of the columns that `columns` names; `duration_unit` is the format's."""
        labels = cls(drop_failed=config.failed == "drop")
        unit = config.duration_unit or duration_unit or config.time_unit or "s"
        for role, name in columns.labels.items():
            if role in DURATIONS:
                reader = _or_not_told(clock_reader(name, unit), zero=role == "delay")
            elif role in ("priority", "turn"):
                reader = _whole_reader(name)
            elif role == "items":
                reader = _count_reader(name)
            elif role == "structured":
                reader = _flag_reader(name)
            elif role == "parent":
                reader = _parents_reader(name, labels.numbers.setdefault(role, {}))
            else:
                reader = _text_reader(name, labels.numbers.setdefault(role, {}), needed=role == "request_class")
            labels.readers[role] = reader
            labels.values[role] = array("q")
        return labels

    def read(self, values: Sequence[object]) -> tuple[int, ...] | None:
        """The labels of a row; None of one that failed and is left out. ValueError for a value that is none."""
        codes = tuple(reader(value) for reader, value in zip(self.readers.values(), values, strict=True))
        if self.drop_failed and (status := self._failed(codes)):
            self.failed[status] += 1
            return None
        return codes

    def _failed(self, codes: Sequence[int]) -> str:
        """The status of a row that failed, "" of others."""
        if "status" not in self.readers:
            return ""
        code = codes[list(self.readers).index("status")]
        status = "" if code == NOT_TOLD else list(self.numbers["status"])[code]
        return "" if status.lower() in _SUCCESS else status

    def failure(self, codes: Sequence[int]) -> str:
        """How a row that failed ended, to be said after what else is wrong with it; "" of others."""
        status = self._failed(codes)
        return f" ({shown(status)})" if status else ""

    def keep(self, codes: Sequence[int]) -> None:
        """Adds the labels of a row that is used."""
        for column, value in zip(self.values.values(), codes, strict=True):
            column.append(value)

    def columns(self) -> dict[str, Ints]:
        """The labels of the rows kept, by role."""
        return {role: np.array(column, np.int64) for role, column in self.values.items()}

    def texts(self) -> dict[str, tuple[str, ...]]:
        """The texts that the columns of texts index, by role."""
        return {role: tuple(numbers) for role, numbers in self.numbers.items()}

    def notes(self, seen: int) -> list[str]:
        """A line on the rows that failed."""
        if not self.failed:
            return []
        by_status = ", ".join(f"{count:,} {shown(status)}" for status, count in self.failed.most_common(5))
        more = f" and {len(self.failed) - 5} more" if len(self.failed) > 5 else ""
        return [f"{self.failed.total():,} of {seen:,} rows dropped: they failed ({by_status}{more})"]


def _or_not_told(clock: Reader, *, zero: bool) -> Reader:
    """`clock`, with NOT_TOLD for a value that is empty, or 0 unless `zero` is a time like others."""

    def read(value: object) -> int:
        if value is None or value == "":
            return NOT_TOLD
        time_ns = clock(value)
        return time_ns if time_ns or zero else NOT_TOLD

    return read


def _parents_reader(name: str, numbers: dict[str, int]) -> Reader:
    """A reader of one id, or of a list of ids; a list is kept as its JSON text. NOT_TOLD for none."""

    def read(value: object) -> int:
        text = value.strip() if isinstance(value, str) else value
        if isinstance(text, str) and text.startswith("["):
            try:
                text = json.loads(text)
            except ValueError:
                raise ValueError(f"{name} {shown(value)} is no list of ids") from None
        many = text if isinstance(text, list) else [text]
        if not all(type(each) in (str, int, type(None)) for each in many):
            raise ValueError(f"{name} {shown(value)} is no id and no list of ids")
        ids = [str(each).strip() for each in many if each is not None and str(each).strip() not in ("", "-1")]
        return numbers.setdefault(json.dumps(ids), len(numbers)) if ids else NOT_TOLD

    return read


def _whole_reader(name: str) -> Reader:
    def read(value: object) -> int:
        if isinstance(value, str) and value.strip().lstrip("+-").isdecimal() and len(value) < 20:
            value = int(value)
        if type(value) is not int:
            raise refused(name, value, "is not a whole number")
        if not -INT32_MAX <= value <= INT32_MAX:
            raise ValueError(f"{name} {value} is beyond ±{INT32_MAX:,}")
        return value

    return read


def _count_reader(name: str) -> Reader:
    whole = _whole_reader(name)

    def read(value: object) -> int:
        if not 0 <= (count := whole(value)) <= MAX_ITEMS:
            raise ValueError(f"{name} {count} is not from 0 to {MAX_ITEMS:,} items")
        return count

    return read


def _flag_reader(name: str) -> Reader:
    """A reader of 1 and true, of 0, false and nothing, as 1 and 0."""

    def read(value: object) -> int:
        text = "" if value is None else str(value).strip().lower()
        if text not in ("", "0", "1", "false", "true"):
            raise ValueError(f"{name} {shown(value)} is neither 1 or true nor 0, false or empty")
        return int(text in ("1", "true"))

    return read


def _text_reader(name: str, numbers: dict[str, int], *, needed: bool) -> Reader:
    """A reader that numbers the texts of a column by their first appearance; NOT_TOLD where empty, unless `needed`."""

    def read(value: object) -> int:
        text = value.strip() if isinstance(value, str) else "" if value is None else str(value)
        if isinstance(value, dict | list | float):
            raise ValueError(f"{name} {shown(value)} is no text")
        if not text:
            if needed:
                raise ValueError(f"{name} is missing")
            return NOT_TOLD
        number = numbers.get(text)
        if number is None:
            if len(text) > _TEXT_LETTERS or not text.isprintable():
                raise ValueError(f"{name} {shown(text)} is no name: at most {_TEXT_LETTERS} printable letters")
            if needed and len(numbers) == MAX_CLASSES:
                raise ValueError(f"{name} {shown(text)} is one class more than {MAX_CLASSES:,}; is it an id?")
            number = numbers[text] = len(numbers)
        return number

    return read
